"""What commands write: documents and reports to stdout or a file, progress to stderr."""

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import click

from planner.plan_files import write_bytes


class Progress(Protocol):
    """Told what is being done, how many of its steps are done, and how many there are (0: unknown)."""

    def __call__(self, what: str, done: int, total: int) -> None: ...


def emit(text: str, output: str | None) -> None:
    """Writes a document or report to the file `output`, or to stdout."""
    if output is None:
        click.echo(text, nl=not text.endswith("\n"))
    else:
        save(text, output)


def save(text: str | bytes, output: str) -> None:
    """Writes a file whole or not at all, and says so on stderr."""
    data = text if isinstance(text, bytes) else text.encode()
    write_bytes(Path(output), data)
    note(f"wrote {output}")


def emit_report(text: str, output: str | None, headings: Sequence[str] = ()) -> None:
    """As `emit`; on a terminal, lines that are headings are set in bold."""
    if output is None and sys.stdout.isatty():
        text = "\n".join(click.style(line, bold=True) if line in headings else line for line in text.split("\n"))
    emit(text, output)


def note(text: str) -> None:
    """A line for the user that is not the result."""
    click.echo(text, err=True)


@contextmanager
def progress() -> Iterator[Progress]:
    """A progress bar on a terminal; elsewhere a line on stderr when something new begins."""
    if sys.stderr.isatty():
        with _bar() as report:
            yield report
    else:
        yield _Lines()


class _Lines:
    def __init__(self) -> None:
        self.last = ""

    def __call__(self, what: str, done: int, total: int) -> None:
        if what != self.last:
            self.last = what
            note(f"{what} ..." if not total else f"{what} ({total}) ...")


@contextmanager
def _bar() -> Iterator[Progress]:
    from rich.console import Console
    from rich.progress import BarColumn, TaskID, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as RichProgress

    columns: tuple[Any, ...] = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with RichProgress(*columns, console=Console(stderr=True), transient=True) as bar:
        tasks: dict[str, TaskID] = {}

        def report(what: str, done: int, total: int) -> None:
            if what not in tasks:
                for other in tasks.values():
                    bar.update(other, visible=False)
                tasks[what] = bar.add_task(what, total=total or None)
            bar.update(tasks[what], completed=done, total=total or None)

        yield report


def keep_stdout_clean() -> None:
    """Leaves stdout to this program's own text: what native libraries print there (HiGHS does) goes to stderr.

    Only for a real process; streams that a caller has put in the place of stdout are left alone.
    """
    if sys.stdout is not sys.__stdout__:
        return
    try:
        own = os.dup(1)
        os.dup2(2, 1)
    except OSError:  # a closed stream: nothing to keep clean
        return
    sys.stdout = os.fdopen(own, "w", encoding=sys.stdout.encoding, errors=sys.stdout.errors, buffering=1)
