"""Options that several commands share, each with one meaning."""

import re
from collections.abc import Callable
from typing import Any

import click
from click.core import ParameterSource

from cli.failures import JSON_WANTED

Decorator = Callable[[Callable[..., Any]], Callable[..., Any]]


def note_json(ctx: click.Context, param: click.Parameter, value: bool) -> bool:
    ctx.meta[JSON_WANTED] = value
    return value


json_option: Decorator = click.option(
    "--json",
    "as_json",
    is_flag=True,
    is_eager=True,
    callback=note_json,
    help="One JSON document on stdout; errors too.",
)


def check_place(ctx: click.Context, param: click.Parameter, value: str | None) -> str | None:
    """The place of a file to write, which must be one that can be written."""
    if value is not None and not ctx.resilient_parsing:
        from planner.plan_files import require_writable

        require_writable(value)
    return value


def require_effect(name: str, effect: bool, why: str) -> None:
    """An option of the running command that was given must change something.

    Args:
        name: of the command's parameter; effect: whether its value matters beside what else was given.
        why: when it matters, as a sentence's end.

    Raises:
        click.UsageError: it was given, and without effect.
    """
    context = click.get_current_context()
    if effect or not is_given(context, name):
        return
    option = next(param.opts[0] for param in context.command.params if param.name == name)
    raise click.UsageError(f"{option} changes nothing: {why}")


def is_given(context: click.Context, name: str) -> bool:
    """Whether the command line has a parameter, be it with its default's value."""
    return context.get_parameter_source(name) is ParameterSource.COMMANDLINE


def output_option(what: str, help_text: str | None = None) -> Decorator:
    """``-o FILE``: where `what` is written, whole or not at all. That it can be is checked before anything is done."""
    text = help_text or f"Write {what} to FILE instead of stdout."
    return click.option("-o", "--out", "output", metavar="FILE", callback=check_place, help=text)


def model_option(help_text: str, *, required: bool = False) -> Decorator:
    """``--model SPEC``."""
    forms = "a built-in name, family(key=value,...), a config.json, or path.py:function"
    return click.option("--model", "model", metavar="SPEC", required=required, help=f"{help_text}: {forms}.")


_DURATION = re.compile(r"(\d+(?:\.\d+)?)\s*(s|m|h)?")
_SECONDS = {"s": 1.0, "m": 60.0, "h": 3600.0}


class Duration(click.ParamType):
    """Seconds from ``90``, ``90s``, ``2m`` or ``1.5h``."""

    name = "duration"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        if isinstance(value, int | float):
            return float(value)
        match = _DURATION.fullmatch(str(value).strip())
        time_s = float(match[1]) * _SECONDS[match[2] or "s"] if match else 0.0
        if time_s <= 0:
            self.fail(f"{value!r} is not a duration above 0: write 90s, 2m or 1h", param, ctx)
        return time_s


class Count(click.ParamType):
    """A whole number of at least 1."""

    name = "count"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        text = str(value).strip()
        if not re.fullmatch(r"[+-]?[0-9]{1,18}", text) or int(text) < 1:
            self.fail(f"{text!r} is not a whole number of at least 1", param, ctx)
        return int(text)


DURATION, COUNT = Duration(), Count()
