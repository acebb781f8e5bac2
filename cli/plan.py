"""`meshplan plan`: search, write the plan file, show one screen of it."""

from typing import TYPE_CHECKING

import click

from cli.exitcodes import FINDINGS, OK
from cli.fake_devices import look_for_no_accelerator
from cli.options import COUNT, json_option, model_option, output_option
from cli.output import note, progress, save
from planner.arguments import SCHEDULES

if TYPE_CHECKING:
    from costmodel.cluster import Cluster


@click.command("plan", short_help="Search the best plan of a model for a cluster.")
@model_option("What to train", required=True)
@click.option("--seq", type=COUNT, help="Sequence length instead of the model's own.")
@click.option("--cluster", metavar="FILE", help="Cluster file. Default: the attached devices.")
@click.option("--global-batch", type=COUNT, required=True, help="Examples in one step.")
@click.option(
    "--profile", metavar="FILE", help="Profile to take costs from. Default: the cached one of the device kind."
)
@output_option("the plan", "Write the plan file.")
@json_option
@click.option("--max-microbatch", type=COUNT, help="Largest microbatch to consider, in examples.")
@click.option("--microbatch", type=COUNT, help="Pin the microbatch size, in examples.")
@click.option(
    "--schedule",
    type=click.Choice(SCHEDULES),
    help="Pipeline schedule; auto: the best of all and of those made for the plan. Default: the best of the usual.",
)
@click.option("--chunks", type=COUNT, help="Slices of each sequence under sequence-chunks. Default: 4.")
@click.option("--stages", type=COUNT, help="Pin the number of pipeline stages.")
@click.option(
    "--strategy",
    metavar="TEXT",
    help="Plan this configuration: dp=8,tp=4,pp=2,microbatch=1; the rest is solved.",
)
@click.option("--name", help="Name of the plan. Default: made of model and cluster.")
@click.option("--no-baselines", is_flag=True, help="Skip the hand-written configurations to compare with.")
def command(
    model: str,
    seq: int | None,
    cluster: str | None,
    global_batch: int,
    profile: str | None,
    output: str | None,
    as_json: bool,
    max_microbatch: int | None,
    microbatch: int | None,
    schedule: str | None,
    chunks: int | None,
    stages: int | None,
    strategy: str | None,
    name: str | None,
    no_baselines: bool,
) -> int:
    """Search the best plan of a model for a cluster.

    Writes the plan file to -o FILE and shows one screen of it; with --json the plan document goes to stdout instead.
    """
    if cluster is not None:
        look_for_no_accelerator()
    import planner
    from planner.planfile.codec import encode

    if cluster is not None:
        target = planner.load_cluster(cluster)
    else:
        from profiles.devices import attached_cluster

        target = attached_cluster()
        note(f"no --cluster: planning for the {target.device_count} attached devices")
    if profile is None:
        profile = _cached_profile(target)
    with progress() as report:
        plan = planner.plan(
            model,
            cluster=target,
            global_batch=global_batch,
            profile=profile,
            max_microbatch=max_microbatch,
            microbatch=microbatch,
            schedule=schedule,
            chunks=chunks,
            stages=stages,
            strategy=strategy,
            baselines=not no_baselines,
            name=name,
            sequence=seq,
            progress=report,
        )
    for finding in plan.findings:
        if finding.code == "MP179":  # a profile given in vain
            note(f"{finding.message}; {finding.hint}")
    document = encode(plan)
    if output is not None:
        save(document, output)
    if as_json:
        click.echo(document.decode(), nl=False)
    else:
        click.echo(planner.explain(plan).summary)
        if output is None:
            note("the plan was not written: -o FILE writes it")
    return FINDINGS if any(finding.severity == "error" for finding in plan.findings) else OK


def _cached_profile(cluster: "Cluster") -> str | None:
    """The cached profile of one of the cluster's device kinds; says which, or that there is none."""
    import os

    from profiles.store import cache_directory, find_profile

    for kind in cluster.kinds:
        found = find_profile(kind.name, cache_directory(os.environ))
        if found is not None:
            note(f"profile of {kind.name} from {found}; other kinds are priced from their datasheet figures")
            return str(found)
    note("no profile: prices come from datasheet figures (`meshplan profile` measures attached devices)")
    return None
