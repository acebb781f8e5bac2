"""`meshplan profile`: measure the attached devices."""

import click

from cli.fake_devices import request_cpu_devices
from cli.options import DURATION, model_option
from cli.output import note, progress


@click.command("profile", short_help="Measure the attached devices.")
@click.option("--devices", type=click.IntRange(min=1), help="How many of the attached devices to use. Default: all.")
@click.option("-o", "--out", "output", metavar="FILE", required=True, help="Write the profile to FILE.")
@click.option("--budget", type=DURATION, default="2m", show_default=True, help="Time to spend: 90s, 2m, 1h.")
@model_option("Measure the ops of this model too")
@click.option("--seq", type=click.IntRange(min=1), help="Sequence length of the model.")
@click.option("--fake-devices", type=click.IntRange(min=1), help="Use this many CPU devices that share this machine.")
def command(
    devices: int | None, output: str, budget: float, model: str | None, seq: int | None, fake_devices: int | None
) -> None:
    """Measure the attached devices: op times, collectives, copies and usable memory."""
    if fake_devices is not None and request_cpu_devices(fake_devices, only=True):
        note(f"{fake_devices} CPU devices that share this machine are used")
    from profiles.collect import profile_devices
    from profiles.store import write_profile

    task = None
    if model is not None:
        import planner

        task = planner.load_task(model, seq)
    with progress() as report:
        profile = profile_devices(devices=devices, budget_s=budget, progress=report, model=task)
    write_profile(output, profile)
    note(f"wrote {output}")
