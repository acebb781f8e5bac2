"""`meshplan profile`: measure the attached devices."""

import os
from pathlib import Path

import click

from cli.fake_devices import request_cpu_devices
from cli.options import COUNT, DURATION, json_option, model_option, output_option
from cli.output import note, progress


@click.command("profile", short_help="Measure the attached devices.")
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
@click.option("--fake-devices", type=COUNT, help="Use this many CPU devices that share this machine.")
@json_option
def command(
    devices: int | None,
    output: str | None,
    budget: float,
    model: str | None,
    seq: int | None,
    microbatches: tuple[int, ...],
    fake_devices: int | None,
    as_json: bool,
) -> None:
    """Measure the attached devices: rates, collectives, copies and usable memory.

    `meshplan plan` finds the profile of a device kind in the user's cache; one that was written elsewhere is given to
    it by --profile.
    """
    if fake_devices is not None and request_cpu_devices(fake_devices, only=True):
        note(f"{fake_devices} CPU devices that share this machine are used")
    from planner.report.profile import render_profile
    from profiles.collect import profile_devices
    from profiles.store import cache_directory, encode_profile, save_in_cache, write_profile

    programs = ()
    if model is not None:
        import planner
        from planner.frontend.capture import capture
        from planner.frontend.op_programs import op_programs

        task = planner.load_task(model, seq)
        programs = op_programs([capture(task, size) for size in sorted(set(microbatches))])
    with progress() as report:
        profile = profile_devices(devices=devices, budget_s=budget, progress=report, programs=programs)
    if output is None:
        path = save_in_cache(profile, cache_directory(os.environ))
    else:
        path = Path(output)
        write_profile(path, profile)
    note(f"wrote {path}")
    click.echo(encode_profile(profile).decode() if as_json else render_profile(profile), nl=False)
