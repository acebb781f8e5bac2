"""`meshplan profile`: measure the attached devices, and work with profiles."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from cli.fake_devices import request_cpu_devices
from cli.options import COUNT, DURATION, is_given, json_option, model_option, output_option, require_effect
from cli.output import note, progress
from cli.profile_calibrate import calibrate
from cli.profile_files import coverage, import_table, merge, show

if TYPE_CHECKING:
    from profiles.runner import DeviceFacts
    from profiles.schema import Profile


@click.group("profile", short_help="Measure the attached devices.", invoke_without_command=True)
@click.option("--devices", type=COUNT, help="How many of the attached devices to use. Default: all.")
@output_option("the profile", "Write the profile to FILE. Default: the user's cache.")
@click.option("--budget", type=DURATION, default="2m", show_default=True, help="Time to spend: 90s, 2m, 1h.")
@model_option("Measure the ops of this model too")
@click.option("--seq", type=COUNT, help="Sequence length of the model.")
@click.option(
    "--microbatch",
    "microbatches",
    type=COUNT,
    multiple=True,
    default=(1,),
    show_default=True,
    help="Microbatch at which to measure the model's ops; repeatable.",
)
@click.option("--blocks", is_flag=True, help="Measure the model's blocks too: forward, backward, weights, update.")
@click.option("--dry-run", is_flag=True, help="Say what would be measured and about how long it takes.")
@click.option("--resume", metavar="FILE", help="Go on with this profile: measure only what it does not have.")
@click.option("--fresh", is_flag=True, help="Measure all again, whatever an interrupted run left.")
@click.option("--fake-devices", type=COUNT, help="Use this many CPU devices that share this machine.")
@json_option
@click.pass_context
def command(ctx: click.Context, **options: Any) -> None:
    """Measure the attached devices: rates, collectives, copies, shapes and usable memory.

    `meshplan plan` finds the profile of a device kind in the user's cache; one that was written elsewhere is given to
    it by --profile. A run that is stopped goes on where it was when the same command is given again.
    """
    if ctx.invoked_subcommand is None:
        _measure(**options)
        return
    given = [param.opts[0] for param in command.params if param.name is not None and is_given(ctx, param.name)]
    if given:
        message = f"{', '.join(given)} before {ctx.invoked_subcommand!r}: of measuring, which {ctx.invoked_subcommand} "
        raise click.UsageError(f"{message}does not; options of {ctx.invoked_subcommand} stand behind it")


command.add_command(calibrate)
command.add_command(coverage)
command.add_command(import_table)
command.add_command(merge)
command.add_command(show)


def _measure(
    devices: int | None,
    output: str | None,
    budget: float,
    model: str | None,
    seq: int | None,
    microbatches: tuple[int, ...],
    blocks: bool,
    dry_run: bool,
    resume: str | None,
    fresh: bool,
    fake_devices: int | None,
    as_json: bool,
) -> None:
    if blocks and model is None:
        raise click.UsageError("--blocks needs --model: they are a model's")
    require_effect("seq", model is not None, "without --model no model is captured")
    require_effect("microbatches", model is not None, "without --model no model's ops are measured")
    if resume is not None and fresh:
        raise click.UsageError("--resume goes on with a profile, --fresh with none: give one of them")
    if fake_devices is not None and request_cpu_devices(fake_devices, only=True):
        note(f"{fake_devices} CPU devices that share this machine are used")
    from planner.report.profile import render_profile
    from profiles.collect import profile_devices
    from profiles.partial import partial_path, remove_partial, write_partial
    from profiles.store import encode_profile, read_profile, write_profile
    from profiles.worker import WorkerRunner

    given = read_profile(resume) if resume is not None else None
    programs = _programs(model, seq, microbatches, blocks)

    def known(facts: "DeviceFacts") -> "Profile | None":
        return given if given is not None or fresh else _left(_target(output, facts.kind.name))

    runner = WorkerRunner(devices)
    if dry_run:
        _outlook(runner, programs, known, budget, as_json)
        return
    saved: list[Path] = []

    def checkpoint(profile: "Profile") -> None:
        target = _target(output, profile.device_kind)
        write_partial(target, profile)
        saved[:] = [target]

    try:
        with progress() as report:
            profile = profile_devices(
                budget_s=budget, progress=report, programs=programs, known=known, checkpoint=checkpoint, runner=runner
            )
    except BaseException:
        if saved:
            note(f"what was measured is in {partial_path(saved[0])}: the same command goes on from there")
        raise
    path = _target(output, profile.device_kind)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_profile(path, profile)
    remove_partial(path)
    note(f"wrote {path}")
    click.echo(encode_profile(profile).decode() if as_json else render_profile(profile), nl=False)


def _target(output: str | None, kind: str) -> Path:
    """Where the profile of a device kind goes."""
    from profiles.store import cache_directory, cached_path

    return Path(output) if output is not None else cached_path(kind, cache_directory(os.environ))


def _left(target: Path) -> "Profile | None":
    """What an interrupted run left."""
    from profiles.partial import partial_path, read_partial
    from profiles.records import records_of

    found = read_partial(target)
    if found is not None:
        count = sum(1 for _ in records_of(found))
        note(f"going on from {partial_path(target)}: {count} measurements are there (--fresh measures all again)")
    return found


def _programs(
    model: str | None, seq: int | None, microbatches: tuple[int, ...], blocks: bool
) -> "Callable[[DeviceFacts], tuple[Any, ...]]":
    """What exports a model's ops and blocks for the devices. The model is captured now, on this process's CPU: the
    devices are the worker's."""
    if model is None:
        return lambda facts: ()
    import jax

    import planner
    from planner.frontend.block_programs import block_programs
    from planner.frontend.capture import capture
    from planner.frontend.op_programs import op_programs

    jax.config.update("jax_platforms", "cpu")
    task = planner.load_task(model, seq)
    captures = [capture(task, size) for size in sorted(set(microbatches))]

    def programs(facts: "DeviceFacts") -> tuple[Any, ...]:
        platforms = (facts.export_platform,)
        whole = block_programs(captures, platforms=platforms) if blocks else ()
        return (*op_programs(captures, platforms=platforms), *whole)

    return programs


def _outlook(
    runner: Any,
    programs: "Callable[[DeviceFacts], tuple[Any, ...]]",
    known: "Callable[[DeviceFacts], Profile | None]",
    budget: float,
    as_json: bool,
) -> None:
    """Says what a run would measure and how long it takes."""
    from planner.report.profile import describe_outlook, render_outlook
    from profiles.collect import planned_jobs
    from profiles.records import records_of
    from profiles.resume import outlook, require_same_devices

    try:
        facts = runner.start(None)
        before = known(facts)
        if before is not None:
            require_same_devices(before, facts)
        there = sum(1 for _ in records_of(before)) if before is not None else 0
        found = outlook(facts, planned_jobs(facts, programs(facts), before), there)
    finally:
        runner.close()
    where = f"{facts.count} x {facts.kind.name}"
    if as_json:
        click.echo(json.dumps(describe_outlook(found, where, budget), indent=1))
    else:
        click.echo(render_outlook(found, where, budget), nl=False)
