"""`meshplan estimate`: what given configurations would take."""

import json
import os
from typing import TYPE_CHECKING, Any

import click

from cli.exitcodes import FINDINGS, OK
from cli.fake_devices import look_for_no_accelerator
from cli.options import COUNT, DURATION, json_option, model_option, output_option
from cli.output import emit, emit_report, note, progress

if TYPE_CHECKING:
    from costmodel.cluster import Cluster
    from planner.compile_check import CompiledGroup

_EXAMPLE = "dp=8,tp=8,pp=4,microbatch=1,remat=full,zero=1,sp=on"


@click.command("estimate", short_help="What a given configuration would take: step time, memory, throughput.")
@model_option("What to train", required=True)
@click.option("--seq", type=COUNT, help="Sequence length instead of the model's own.")
@click.option("--cluster", metavar="FILE", help="Cluster file. Default: the attached devices.")
@click.option("--global-batch", type=COUNT, required=True, help="Examples in one step.")
@click.option(
    "--strategy",
    "strategies",
    metavar="TEXT",
    multiple=True,
    required=True,
    help=f"The configuration, such as {_EXAMPLE}; repeat to compare.",
)
@click.option("--profile", metavar="FILE", help="Profile to take costs from.")
@click.option("--layer-model", metavar="NAME", help="Whose layer times to take, where the profile has several models'.")
@click.option(
    "--stack",
    metavar="NAME",
    help="Software stack: a shipped one (--list-stacks) or a document of constants. Default: meshplan's own programs.",
)
@click.option(
    "--list-stacks",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=lambda ctx, param, value: _list(ctx, value),
    help="Name the shipped stacks and what they were fitted on.",
)
@click.option(
    "--compile",
    "compiling",
    is_flag=True,
    help="Ask the compilers of the device kinds, which need not be attached.",
)
@click.option(
    "--compile-timeout", type=DURATION, default="10m", show_default=True, help="Wall time of one program's compilation."
)
@json_option
@output_option("the report")
def command(
    model: str,
    seq: int | None,
    cluster: str | None,
    global_batch: int,
    strategies: tuple[str, ...],
    profile: str | None,
    layer_model: str | None,
    stack: str | None,
    compiling: bool,
    compile_timeout: float,
    as_json: bool,
    output: str | None,
) -> int:
    """What given configurations would take, from the planner's own costs: step time with its error bar, memory of each
    stage, throughput. Exits with 1 if none of them fits its devices.

    With --compile each strategy is planned and its programs are compiled for their own device kinds: memory and
    collectives are then also the compiler's.
    """
    look_for_no_accelerator()
    import planner
    from planner.report.estimate import HEADINGS, document, render_comparison, render_estimate

    if cluster is not None:
        target = planner.load_cluster(cluster)
    else:
        from profiles.devices import attached_cluster

        target = attached_cluster()
        note(f"no --cluster: estimating for the {target.device_count} attached devices")
    estimator = planner.Estimator(
        model=model, cluster=target, profile=profile, stack=stack, sequence=seq, layer_model=layer_model
    )
    found = estimator.many(strategies, global_batch)
    compiled = [
        _compiled(model, target, global_batch, strategy, profile, seq, compile_timeout) if compiling else ()
        for strategy in strategies
    ]
    if as_json:
        documents: Any = [document(one, groups) for one, groups in zip(found, compiled, strict=True)]
        emit(json.dumps(documents[0] if len(documents) == 1 else documents, indent=1) + "\n", output)
    else:
        text = render_estimate(found[0], compiled[0]) if len(found) == 1 else render_comparison(found, compiled)
        emit_report(text, output, HEADINGS)
    return OK if any(one.fits for one in found) else FINDINGS


def _compiled(
    model: str,
    cluster: "Cluster",
    global_batch: int,
    strategy: str,
    profile: str | None,
    seq: int | None,
    timeout_s: float,
) -> "tuple[CompiledGroup, ...]":
    """What compilers say of the plan that a strategy names."""
    import planner
    from planner.compile_check import compile_groups
    from profiles.compiled.oracle import Limits, default_oracle

    task = planner.load_task(model, seq)
    oracle = default_oracle(os.environ, limits=Limits(time_s=timeout_s))
    with progress() as report:
        plan = planner.plan(
            task,
            cluster=cluster,
            global_batch=global_batch,
            strategy=strategy,
            profile=profile,
            baselines=False,
            progress=report,
        )
        kinds = {group.device.name: group.device for group in cluster.groups}
        return compile_groups(plan, task, kinds=kinds, oracle=oracle, progress=report)


def _list(ctx: click.Context, wanted: bool) -> None:
    if not wanted or ctx.resilient_parsing:
        return
    from profiles.constants import shipped_stacks

    for name, stack in shipped_stacks().items():
        click.echo(f"{name}: {stack.fitted_on or 'assumed constants'}")
    ctx.exit()
