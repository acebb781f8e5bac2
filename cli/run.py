"""`meshplan run`: steps of a plan on the attached devices, with random parameters and batches."""

import json
from typing import TYPE_CHECKING

import click

from cli.exitcodes import OK
from cli.fake_devices import request_cpu_devices
from cli.options import COUNT, json_option, model_option
from cli.output import note
from costmodel.errors import InputError, LoweringError, MismatchError
from costmodel.units import format_seconds

if TYPE_CHECKING:
    from costmodel.cluster import Cluster
    from planner.frontend.task import TrainingTask
    from planner.planfile.schema import Finding, Plan


@click.command("run", short_help="Run steps of a plan on the attached devices.")
@click.argument("plan_file", metavar="PLAN")
@click.option("--steps", type=COUNT, default=3, show_default=True, help="How many steps.")
@model_option("The training function. Default: what the plan was made from")
@click.option("--cluster", metavar="FILE", help="Check the plan against this cluster file first.")
@click.option("--compare", is_flag=True, help="Run the same steps on one device too, and compare.")
@click.option("--fake-devices", type=COUNT, help="Use this many CPU devices that share this machine.")
@click.option(
    "--verify/--no-verify",
    default=None,
    help="Compare the programs' collectives and kept bytes with the plan before the first step, where a difference is "
    "an error, or do not. Default: a difference is a warning.",
)
@click.option("--seed", type=int, default=0, show_default=True, help="Seed of parameters and batches.")
@json_option
def command(
    plan_file: str,
    steps: int,
    model: str | None,
    cluster: str | None,
    compare: bool,
    fake_devices: int | None,
    verify: bool | None,
    seed: int,
    as_json: bool,
) -> int:
    """Run steps of a plan on the attached devices, with random parameters and batches.

    Prints loss and time of each step, and the predicted step time beside the measured one. With --compare the same
    steps run on one device with the same microbatches; a difference beyond rounding is an error.
    """
    import planner

    plan = planner.load_plan(plan_file)
    target = planner.load_cluster(cluster) if cluster is not None else None
    if target is not None:
        _require_valid(plan, target)
    shared, said = _prepare_devices(plan, target, fake_devices)
    task = _task(plan, model)
    comparable = _check_devices(plan) and (plan.profile is not None or not shared)
    from cli.steps import compare_runs, run_steps, step_time_text, tolerance_of, verified_text

    say = note if as_json else click.echo
    trainer = planner.compile_plan(plan, task)
    if said:
        note(said)
    if verify is not False:
        try:
            note(verified_text(trainer.verify(compiled=False)))
        except LoweringError as error:  # results do not depend on it, the plan's figures do
            if verify:
                raise
            note(f"warning {error.code}: {error.message}\nhint: {error.hint}")
    ours = run_steps(trainer, task, plan, steps, seed, say)
    document = {"plan": plan.name, "comparable": comparable, **ours.to_plain(plan)}
    say(step_time_text(ours, plan, comparable))
    if compare:
        say("one device, same microbatches:")
        one_device = planner.reference(task, plan)
        reference = run_steps(one_device, task, plan, steps, seed, say)
        comparison = compare_runs(ours, reference, tolerance_of(one_device.captured))
        document["comparison"] = comparison.to_plain()
        if reference.steady_s is not None and ours.steady_s is not None:
            one, all_of_them = format_seconds(reference.steady_s), format_seconds(ours.steady_s)
            say(f"one device takes {one} a step, the plan's {device_count(plan)} take {all_of_them}")
        say(comparison.text)
        if as_json:
            click.echo(json.dumps(document, indent=1))
        comparison.require_equal()
    elif as_json:
        click.echo(json.dumps(document, indent=1))
    return OK


def device_count(plan: "Plan") -> int:
    """Devices that a plan runs on."""
    return len({device for stage in plan.stages for group in stage.groups for device in group.devices})


def _prepare_devices(plan: "Plan", cluster: "Cluster | None", fake_devices: int | None) -> tuple[bool, str]:
    """Asks for CPU devices that share this machine where the user or the plan's kinds want them; whether they do, and
    what to tell the user once the plan was checked."""
    needed = device_count(plan)
    if fake_devices is None and not (needed > 1 and _only_cpu(plan, cluster)):
        return False, ""
    count = needed if fake_devices is None else fake_devices
    if request_cpu_devices(count, only=True):
        known = "as they did for the profile" if plan.profile else "and no profile says what each has of it"
        return True, f"{count} CPU devices share this machine, {known}"
    return True, ""


def _only_cpu(plan: "Plan", cluster: "Cluster | None") -> bool:
    from profiles.catalogue import load_catalogue

    known = {kind.name: kind for kind in cluster.kinds} if cluster is not None else load_catalogue()
    kinds = {group.kind for stage in plan.stages for group in stage.groups}
    return all(known[kind].platform == "cpu" if kind in known else kind.lower() == "cpu" for kind in kinds)


def _check_devices(plan: "Plan") -> bool:
    """Whether the attached devices are of the planned kinds. Raises MismatchError MP401 if they are too few."""
    import jax

    from profiles.catalogue import kind_for_jax_name

    devices, needed = jax.devices(), device_count(plan)
    if len(devices) < needed:
        names = ", ".join(sorted({device.device_kind for device in devices}))
        hint = f"--fake-devices {needed} runs it on CPU devices that share this machine; or plan for what is attached"
        raise MismatchError("MP401", f"the plan runs on {needed} devices, {len(devices)} are attached ({names})", hint)
    attached = set()
    for device in devices:
        kind = kind_for_jax_name(device.device_kind)
        attached.add(kind.name if kind is not None else device.device_kind)
    planned = {group.kind for stage in plan.stages for group in stage.groups}
    if planned - attached:
        note(f"planned for {', '.join(sorted(planned))}, running on {', '.join(sorted(attached))}")
    return not planned - attached


def _require_valid(plan: "Plan", cluster: "Cluster") -> None:
    from planner.check.rules import check_plan

    _stop_at_error(check_plan(plan, cluster), "MP411", f"the plan does not fit cluster {cluster.name!r}")


def _task(plan: "Plan", model: str | None) -> "TrainingTask":
    import planner
    from planner.check.drift import drift

    spec = model or plan.model.spec
    if spec is None:
        message = f"the plan does not say where its model {plan.model.name!r} comes from"
        raise InputError("MP162", message, "give --model, such as --model train.py:task")
    task = planner.load_task(spec, plan.model.sequence)
    what = f"{spec} is not the model that was planned"
    _stop_at_error(drift(plan, planner.capture_record(task, plan)), "MP412", what)
    return task


def _stop_at_error(findings: "tuple[Finding, ...]", code: str, what: str) -> None:
    errors = [finding for finding in findings if finding.severity == "error"]
    for finding in errors[1:]:
        note(f"{finding.code}: {finding.message}")
    if errors:
        raise MismatchError(code, f"{what}: {errors[0].code}: {errors[0].message}", errors[0].hint)
