"""Errors as the user sees them: one paragraph with a code on stderr, a hint, an exit code; tracebacks only if asked."""

import json
import textwrap
import traceback
from collections.abc import Sequence
from typing import Any

import click

from cli.exitcodes import INTERNAL, USAGE
from costmodel.errors import PlanError

JSON_WANTED = "meshplan.json"
"""Key in `click.Context.meta` under which the --json option is noted for errors."""

_WIDTH = 100


def show_error(code: str, message: str, hint: str) -> None:
    """Writes ``error MP101: ...`` and ``hint: ...`` to stderr; pictures after the first line keep their form."""
    first, *rest = message.split("\n")
    click.echo(_fold(f"error {code}: {first}" if code else f"error: {first}"), err=True)
    for line in rest:
        click.echo(line, err=True)
    if hint:
        click.echo(_fold(f"hint: {hint}"), err=True)


def show_plan_error(error: PlanError, context: click.Context) -> int:
    """Reports a user's error, as a document on stdout too where --json was given; returns the exit code."""
    show_error(error.code, error.message, error.hint)
    _show_document(error.code, error.message, error.hint, error.exit_code, context)
    return error.exit_code


def show_usage_error(message: str, hint: str, as_json: bool) -> None:
    """Reports a command line that is not understood."""
    show_error("MP100", message, hint)
    if as_json:
        _print_document("MP100", message, hint, USAGE)


def wants_json(args: Sequence[str]) -> bool:
    """Whether a command line asks for JSON, also where it is not understood as a whole."""
    before = args[: args.index("--")] if "--" in args else args
    pairs = zip(before, (*before[1:], ""), strict=True)
    return any(arg in ("--json", "--format=json") or (arg, after) == ("--format", "json") for arg, after in pairs)


def show_internal_error(error: Exception, context: click.Context) -> int:
    """Reports a defect with the place where it happened; returns the exit code."""
    frames = traceback.extract_tb(error.__traceback__)
    where = f" at {frames[-1].filename.rsplit('/', 1)[-1]}:{frames[-1].lineno}" if frames else ""
    message = f"internal error{where}: {type(error).__name__}: {str(error).split(chr(10))[0]}"
    hint = "this is a defect of meshplan: run `meshplan --debug ...` and report what it prints"
    show_error("", message, hint)
    _show_document("", message, hint, INTERNAL, context)
    return INTERNAL


def _show_document(code: str, message: str, hint: str, exit_code: int, context: click.Context) -> None:
    if context.meta.get(JSON_WANTED):
        _print_document(code, message, hint, exit_code)


def error_document(code: str, message: str, hint: str, exit_code: int) -> dict[str, Any]:
    """An error as it stands in documents."""
    return {"error": {"code": code, "message": message, "hint": hint, "exit_code": exit_code}}


def _print_document(code: str, message: str, hint: str, exit_code: int) -> None:
    click.echo(json.dumps(error_document(code, message, hint, exit_code), indent=1))


def _fold(text: str) -> str:
    return textwrap.fill(text, _WIDTH, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)
