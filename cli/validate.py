"""`meshplan validate`: every plan against every cluster, for people and for CI."""

import os
from typing import TYPE_CHECKING

import click

from cli.exitcodes import FINDINGS, OK, USAGE
from cli.failures import JSON_WANTED
from cli.fake_devices import look_for_no_accelerator
from cli.options import COUNT, DURATION, is_given, model_option, note_json, output_option, require_effect
from cli.output import emit
from costmodel.errors import InputError

if TYPE_CHECKING:
    from costmodel.cluster import Cluster
    from planner.check.formats import CheckResult
    from planner.frontend.task import TrainingTask
    from planner.planfile.schema import Finding, Plan

FORMATS = ("text", "json", "junit", "sarif", "github")


@click.command("validate", short_help="Check plans against clusters, without devices.")
@click.argument("plans", metavar="PLAN...", nargs=-1, required=True)
@click.option("--cluster", "clusters", metavar="FILE", multiple=True, required=True, help="Cluster file; repeatable.")
@model_option("Compare with the training function as it is now (imports JAX)")
@click.option(
    "--compile", "compiling", is_flag=True, help="Compile the plan for its device kinds, which need not be attached."
)
@click.option(
    "--compile-timeout", type=DURATION, default="10m", show_default=True, help="Wall time of one program's compilation."
)
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
    compiling: bool,
    compile_timeout: float,
    seq: int | None,
    form: str,
    as_json: bool,
    output: str | None,
) -> int:
    """Check plans against clusters, without devices.

    Every PLAN file is checked against every cluster. Exits with 1 if there is an error finding, with 2 if a plan file
    cannot be read (which is reported as a finding too, so that the others are still checked).

    With --compile every program of a plan is compiled for its own device kinds, in processes with limits, and compared
    with what was planned. Without --model the model is the built-in one that the plan names.
    """
    from planner.check.formats import FORMATS as LEGAL
    from planner.check.formats import render

    if as_json and form != "json" and is_given(context, "form"):
        raise click.UsageError(f"--json and --format {form} were both given: give one of them")
    require_effect("compile_timeout", compiling, "nothing is compiled without --compile")
    require_effect("seq", compiling or model is not None, "the model is captured with --model or --compile alone")
    form = "json" if as_json else form
    context.meta[JSON_WANTED] = form == "json"
    import planner

    targets = [(path, planner.load_cluster(path)) for path in clusters]
    unreadable = False
    results: list[CheckResult] = []
    for path in plans:
        try:
            results += _check(path, targets, model, seq, compile_timeout if compiling else None)
        except InputError as error:
            unreadable = True
            results += [_bad_input(path, name, error) for name, _ in targets]
    emit(render(results, LEGAL[FORMATS.index(form)]), output)
    if unreadable:
        return USAGE
    return OK if all(result.passed for result in results) else FINDINGS


def _check(
    path: str,
    targets: "list[tuple[str, Cluster]]",
    model: str | None,
    sequence: int | None,
    compile_timeout_s: float | None,
) -> "list[CheckResult]":
    from planner.check.codes import COMPILE_RULES, MODEL_RULES
    from planner.check.formats import CheckResult
    from planner.check.rules import check_plan
    from planner.plan_files import read_bytes
    from planner.planfile.codec import decode
    from planner.planfile.lines import find_lines

    data = read_bytes(path)
    plan = decode(data, source=path)
    drifted, task = (), None
    if compile_timeout_s is not None and model is None:
        model = _named_model(path, plan)
    if model is not None:
        look_for_no_accelerator()
        import planner
        from planner import api

        task = planner.load_task(model, sequence or plan.model.sequence)
        drifted = api.model_findings(plan, task)
    results = []
    skipped = () if model is not None else MODEL_RULES
    for name, cluster in targets:
        findings, unchecked = (*drifted, *check_plan(plan, cluster)), skipped
        if task is not None and compile_timeout_s is not None and not any(f.severity == "error" for f in findings):
            findings += _compiled(plan, cluster, task, compile_timeout_s)
        else:  # a plan that does not belong to the cluster or the model is not compiled
            unchecked += COMPILE_RULES
        lines = find_lines(data.decode("utf-8-sig"), tuple(finding.where for finding in findings))
        results.append(CheckResult(plan=path, cluster=name, findings=findings, lines=lines, skipped=unchecked))
    return results


def _named_model(path: str, plan: "Plan") -> str:
    """What the plan's model was given as, where --compile has no --model."""
    if plan.model.spec is None:
        message = f"{path} does not say what its model is, so that nothing can be compiled"
        raise InputError("MP100", message, "give --model path.py:function, the training function that was planned")
    return plan.model.spec


def _compiled(plan: "Plan", cluster: "Cluster", task: "TrainingTask", timeout_s: float) -> "tuple[Finding, ...]":
    """What compilers say."""
    from cli.output import progress
    from planner.compile_findings import compile_findings
    from profiles.compiled.oracle import Limits, default_oracle

    oracle = default_oracle(os.environ, limits=Limits(time_s=timeout_s))
    with progress() as report:
        return compile_findings(plan, cluster, task, oracle, report)


def _bad_input(path: str, cluster: str, error: InputError) -> "CheckResult":
    from planner.check.codes import RULES
    from planner.check.formats import CheckResult
    from planner.planfile.schema import Finding

    skipped = tuple(rule.code for rule in RULES)
    finding = Finding(code=error.code, severity="error", message=error.message, hint=error.hint)
    return CheckResult(plan=path, cluster=cluster, findings=(finding,), lines=(1,), skipped=skipped)
