"""`meshplan simulate`: a plan's step action by action, as it is or with something slower, late or gone."""

import json
import re
from typing import Any

import click

from cli.exitcodes import FINDINGS, OK
from cli.options import check_place, json_option, output_option, require_effect
from cli.output import emit, emit_report, save
from costmodel.schedule.schedules import NAMES, WITH_CHUNKS

_TIME = re.compile(r"(\d+(?:\.\d*)?(?:e-?\d+)?)\s*(ns|us|ms|s)")
_SECONDS = {"ns": 1e-9, "us": 1e-6, "ms": 1e-3, "s": 1.0}


class Share(click.ParamType):
    """0.05 from ``5%`` or ``0.05``."""

    name = "share"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        text = str(value).strip()
        try:
            return float(text[:-1]) / 100 if text.endswith("%") else float(text)
        except ValueError:
            self.fail(f"{value!r} is no share: write 5% or 0.05", param, ctx)


class Factor(click.ParamType):
    """1.5 from ``1.5x`` or ``1.5``."""

    name = "factor"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        try:
            return float(str(value).strip().removesuffix("x"))
        except ValueError:
            self.fail(f"{value!r} is no factor: write 1.5x", param, ctx)


class At(click.ParamType):
    """A place and a value: ``stage2=1.5x`` or ``1-2=3ms``."""

    def __init__(self, value: click.ParamType, name: str, example: str):
        self.value, self.name, self.example = value, name, example

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[str, float]:
        if isinstance(value, tuple):
            return value
        place, equals, rest = str(value).partition("=")
        if not equals or not place.strip():
            self.fail(f"{value!r} does not say what by how much: write {self.example}", param, ctx)
        return place.strip(), self.value.convert(rest, param, ctx)


class Delay(click.ParamType):
    """Seconds from ``3ms``."""

    name = "time"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        match = _TIME.fullmatch(str(value).strip())
        if match is None:
            self.fail(f"{value!r} is no time: write 3ms, 20us or 0.1s", param, ctx)
        return float(match[1]) * _SECONDS[match[2]]


@click.command("simulate", short_help="Simulate a plan's step: timeline, memory, what if something is slow or fails.")
@click.argument("plan_file", metavar="PLAN")
@click.option(
    "--schedule",
    metavar="NAME",
    help=f"Run another schedule on the same devices: {', '.join(NAMES)}; also {', '.join(WITH_CHUNKS)} of a plan with "
    "several stages on each set of devices.",
)
@click.option(
    "--slow",
    type=At(Factor(), "place=factor", "stage2=1.5x"),
    multiple=True,
    help="What takes how much longer: stage2=1.5x, stage2/group0=2x, stage2.B=0.7x (faster), link1-2=2x; repeatable. "
    "Numbers are those of explain; a change holds for all stages on the same devices.",
)
@click.option(
    "--delay",
    type=At(Delay(), "link=time", "1-2=3ms"),
    multiple=True,
    help="Messages of a link arrive later: 1-2=3ms; repeatable.",
)
@click.option(
    "--fail", metavar="GROUP", multiple=True, help="A group fails, its peers take over: stage1/group0; repeatable."
)
@click.option("--jitter", type=Share(), default=0.0, help="Every time is up to this share longer or shorter: 5%.")
@click.option("--seed", type=int, default=0, show_default=True, help="Seed of the jitter.")
@click.option("--share-nics", is_flag=True, help="Each node has one network card that its messages share.")
@click.option(
    "--comm-slowdown", type=Factor(), default=1.0, help="Compute takes this much longer beside communication: 1.1x."
)
@click.option(
    "--early-reduction", type=Share(), default=0.0, help="Share of gradient reduction beside the last backward: 50%."
)
@click.option(
    "--what-ifs", type=click.IntRange(0, 50), default=6, show_default=True, help="How many improvements to show."
)
@click.option(
    "--trace", metavar="FILE", callback=check_place, help="Write the timeline for ui.perfetto.dev or chrome://tracing."
)
@click.option("--html", metavar="FILE", callback=check_place, help="Write a page with the timeline and memory curves.")
@json_option
@output_option("the report")
def command(
    plan_file: str,
    schedule: str | None,
    slow: tuple[tuple[str, float], ...],
    delay: tuple[tuple[str, float], ...],
    fail: tuple[str, ...],
    jitter: float,
    seed: int,
    share_nics: bool,
    comm_slowdown: float,
    early_reduction: float,
    what_ifs: int,
    trace: str | None,
    html: str | None,
    as_json: bool,
    output: str | None,
) -> int:
    """Simulate a plan's step: timeline, memory, what if something is slow or fails.

    PLAN is a plan file. Neither JAX nor devices are needed. Exits with 1 if a stage would need more memory than its
    devices have.
    """
    import planner
    from planner.report.step_text import HEADINGS

    for name, given in (("--slow", [place for place, _ in slow]), ("--delay", [place for place, _ in delay])):
        if len(set(given)) < len(given):
            raise click.UsageError(f"{name} names one place twice: {', '.join(given)}")
    require_effect("seed", jitter != 0.0, "it is the seed of --jitter, such as --jitter 5%")
    step = planner.simulate(
        planner.load_plan(plan_file),
        schedule=schedule,
        slow=dict(slow),
        delay_s=dict(delay),
        fail=fail,
        jitter=jitter,
        seed=seed,
        share_nics=share_nics,
        compute_slowdown=comm_slowdown,
        early_reduction=early_reduction,
        most_what_ifs=what_ifs,
    )
    if trace is not None:
        save(step.trace, trace)
    if html is not None:
        save(step.html, html)
    if as_json:
        emit(json.dumps(step.to_plain(), indent=1) + "\n", output)
    else:
        emit_report(step.text, output, HEADINGS)
    return OK if step.fits else FINDINGS
