"""`meshplan profile show`, `merge`, `import` and `coverage`: profiles that are files."""

import json
from pathlib import Path

import click

from cli.options import COUNT, json_option, model_option, output_option
from cli.output import emit, note


@click.command("show", short_help="Show a profile.")
@click.argument("profile_file", metavar="FILE")
@json_option
@output_option("the report")
def show(profile_file: str, as_json: bool, output: str | None) -> None:
    """Show a profile: rates, lines, shapes, blocks, what was not steady and what is missing."""
    from planner.report.profile import render_profile
    from profiles.store import encode_profile, read_profile

    profile = read_profile(profile_file)
    emit(encode_profile(profile).decode() if as_json else render_profile(profile), output)


@click.command("merge", short_help="Join profiles of one kind of device.")
@click.argument("profile_files", metavar="FILE...", nargs=-1, required=True)
@output_option("the merged profile", "Write the merged profile to FILE. Required.")
@json_option
def merge(profile_files: tuple[str, ...], output: str | None, as_json: bool) -> None:
    """Join profiles of one kind of device, from several machines or runs.

    What several have measured is taken from the steadiest of them; where they disagree by over a fifth, that is said.
    """
    from profiles.merge import merge_profiles
    from profiles.records import records_of
    from profiles.store import read_profile, write_profile

    if output is None:
        raise click.UsageError("-o FILE is missing: where the merged profile goes")
    parts = [(name, read_profile(name)) for name in profile_files]
    merged = merge_profiles(parts)
    write_profile(output, merged.profile)
    count = sum(1 for _ in records_of(merged.profile))
    if as_json:
        entry = {"file": output, "measurements": count, "conflicts": list(merged.conflicts)}
        click.echo(json.dumps(entry, indent=1))
        return
    note(f"wrote {output}")
    lines = [f"{count} measurements of {merged.profile.device_kind} from {len(parts)} profiles", *merged.conflicts]
    click.echo("\n- ".join(lines))


@click.command("import", short_help="Make a profile of a table of layer times.")
@click.argument("table", metavar="CSV")
@click.option(
    "--model", "model", metavar="NAME", required=True, help="The model whose rows are taken, as in the table."
)
@click.option("--device", metavar="KIND", required=True, help="The device kind, as in the catalogue.")
@click.option("--gpu", metavar="NAME", help="What the table calls the device, where it has several.")
@click.option(
    "--column",
    "columns",
    metavar="WHAT=NAME",
    multiple=True,
    help="Name of a column: microbatch, tp, layer, forward_s, backward_s, both_s, update_s, model or gpu; repeatable.",
)
@output_option("the profile", "Write the profile to FILE. Required.")
@json_option
def import_table(
    table: str,
    model: str,
    device: str,
    gpu: str | None,
    columns: tuple[str, ...],
    output: str | None,
    as_json: bool,
) -> None:
    """Make a profile of a CSV table of layer times by microbatch and tensor parallel degree.

    Columns are model, gpu, micro_batch_seqs, tp, layer, forward_s, backward_s and update_s, or as --column says
    (--column forward_s=fwd_ms: names that end in _ms and _us are in that unit).
    """
    from planner.report.profile import render_profile
    from profiles.catalogue import device_kind
    from profiles.import_layers import import_layers
    from profiles.store import encode_profile, write_profile
    from profiles.tables import read_table

    if output is None:
        raise click.UsageError("-o FILE is missing: where the profile goes")
    pairs = dict(_pair(one) for one in columns)
    profile = import_layers(
        read_table(table), source=Path(table).name, model=model, kind=device_kind(device), gpu=gpu, columns=pairs
    )
    write_profile(output, profile)
    note(f"wrote {output}")
    click.echo(encode_profile(profile).decode() if as_json else render_profile(profile), nl=False)


def _pair(text: str) -> tuple[str, str]:
    name, equals, column = text.partition("=")
    if not (name and equals and column):
        raise click.UsageError(f"--column {text!r} is not WHAT=NAME, such as forward_s=fwd_ms")
    return name, column


@click.command("coverage", short_help="Say what a model needs and a profile lacks.")
@click.argument("profile_file", metavar="FILE")
@model_option("The model", required=True)
@click.option("--seq", type=COUNT, help="Sequence length of the model.")
@click.option("--microbatch", type=COUNT, default=1, show_default=True, help="Microbatch of interest.")
@json_option
@output_option("the report")
def coverage(
    profile_file: str, model: str, seq: int | None, microbatch: int, as_json: bool, output: str | None
) -> None:
    """Say which ops and blocks of a model a profile has, which it lacks, and their share of the time."""
    from planner.report.coverage import describe_coverage, render_coverage
    from profiles.store import read_profile

    profile = read_profile(profile_file)
    import planner
    from planner.frontend.capture import capture
    from planner.frontend.graph import model_graph
    from planner.profile_facts import model_coverage

    found = model_coverage(profile, model_graph(capture(planner.load_task(model, seq), microbatch)))
    emit(json.dumps(describe_coverage(found), indent=1) if as_json else render_coverage(found), output)
