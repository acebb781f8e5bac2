"""`meshplan profile calibrate`: constants fitted to a user's own measured runs."""

import json
from pathlib import Path

import click

from cli.options import COUNT, json_option, model_option, output_option
from cli.output import emit_report, note, progress


@click.command("calibrate", short_help="Fit constants to measured runs.")
@click.argument("runs", metavar="RUNS.csv")
@model_option("The model of runs that name none in a column 'model'")
@click.option("--seq", type=COUNT, help="Sequence length instead of the model's own.")
@click.option("--cluster", metavar="FILE", required=True, help="Cluster file: where the runs ran.")
@click.option(
    "--stack",
    metavar="BASE",
    help="Constants to start from: a shipped stack or a document. Default: meshplan's own programs.",
)
@output_option("the constants", "Write the constants to FILE. Required.")
@json_option
def calibrate(
    runs: str, model: str | None, seq: int | None, cluster: str, stack: str | None, output: str | None, as_json: bool
) -> None:
    """Fit a few constants of devices, links and software to at least five measured runs, for `estimate --stack FILE`.

    RUNS.csv has one run a line: fields of the strategy as columns (dp, tp, pp, microbatch, ...) or one column
    'strategy', global_batch, step_time_s, and where they differ model and seq. The error bar is that of runs that
    were held out.
    """
    import planner
    from planner.report.calibration import HEADINGS, document, render_calibration
    from profiles.constants import write_constants

    if output is None:
        raise click.UsageError("-o FILE is missing: where the constants go")
    with progress() as report:
        found = planner.calibrate(
            runs, cluster, model, stack=stack, sequence=seq, name=Path(output).stem, progress=report
        )
    write_constants(output, found.constants)
    note(f"wrote {output}")
    if as_json:
        click.echo(json.dumps(document(found), indent=1))
    else:
        emit_report(render_calibration(found), None, HEADINGS)
