"""`meshplan validate`: every plan against every cluster, for people and for CI."""

from typing import TYPE_CHECKING

import click

from cli.exitcodes import FINDINGS, OK, USAGE
from cli.failures import JSON_WANTED
from cli.options import COUNT, model_option, note_json, output_option
from cli.output import emit
from costmodel.errors import InputError

if TYPE_CHECKING:
    from costmodel.cluster import Cluster
    from planner.check.formats import CheckResult

FORMATS = ("text", "json", "junit", "sarif", "github")


@click.command("validate", short_help="Check plans against clusters, without devices.")
@click.argument("plans", metavar="PLAN...", nargs=-1, required=True)
@click.option("--cluster", "clusters", metavar="FILE", multiple=True, required=True, help="Cluster file; repeatable.")
@model_option("Compare with the training function as it is now (imports JAX)")
@click.option("--seq", type=COUNT, help="Sequence length. Default: the plan's.")
@click.option("--format", "form", type=click.Choice(FORMATS), default="text", show_default=True, help="Form of output.")
@click.option(
    "--json", "as_json", is_flag=True, is_eager=True, callback=note_json, help="Same as --format json; errors too."
)
@output_option("the findings")
@click.pass_context
def command(
    context: click.Context,
    plans: tuple[str, ...],
    clusters: tuple[str, ...],
    model: str | None,
    seq: int | None,
    form: str,
    as_json: bool,
    output: str | None,
) -> int:
    """Check plans against clusters, without devices.

    Every PLAN file is checked against every cluster. Exits with 1 if there is an error finding, with 2 if a plan file
    cannot be read (which is reported as a finding too, so that the others are still checked).
    """
    from planner.check.formats import FORMATS as LEGAL
    from planner.check.formats import render

    form = "json" if as_json else form
    context.meta[JSON_WANTED] = form == "json"
    import planner

    targets = [(path, planner.load_cluster(path)) for path in clusters]
    unreadable = False
    results: list[CheckResult] = []
    for path in plans:
        try:
            results += _check(path, targets, model, seq)
        except InputError as error:
            unreadable = True
            results += [_bad_input(path, name, error) for name, _ in targets]
    emit(render(results, LEGAL[FORMATS.index(form)]), output)
    if unreadable:
        return USAGE
    return OK if all(result.passed for result in results) else FINDINGS


def _check(
    path: str, targets: "list[tuple[str, Cluster]]", model: str | None, sequence: int | None
) -> "list[CheckResult]":
    from planner.check.codes import MODEL_RULES
    from planner.check.formats import CheckResult
    from planner.check.rules import check_plan
    from planner.plan_files import read_bytes
    from planner.planfile.codec import decode
    from planner.planfile.lines import find_lines

    data = read_bytes(path)
    plan = decode(data, source=path)
    drifted = ()
    if model is not None:
        import planner
        from planner import api

        drifted = api.model_findings(plan, planner.load_task(model, sequence or plan.model.sequence))
    results = []
    skipped = () if model is not None else MODEL_RULES
    for name, cluster in targets:
        findings = (*drifted, *check_plan(plan, cluster))
        lines = find_lines(data.decode("utf-8-sig"), tuple(finding.where for finding in findings))
        results.append(CheckResult(plan=path, cluster=name, findings=findings, lines=lines, skipped=skipped))
    return results


def _bad_input(path: str, cluster: str, error: InputError) -> "CheckResult":
    from planner.check.codes import RULES
    from planner.check.formats import CheckResult
    from planner.planfile.schema import Finding

    skipped = tuple(rule.code for rule in RULES)
    finding = Finding(code=error.code, severity="error", message=error.message, hint=error.hint)
    return CheckResult(plan=path, cluster=cluster, findings=(finding,), lines=(1,), skipped=skipped)
