"""A training task from the user's own file: ``path.py:function`` (code MP124; a missing file is MP125)."""

import inspect
import sys
import traceback
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

from costmodel.errors import InputError, PlanError
from planner.frontend.task import TrainingTask


def load_function(path: Path, function: str, *, seq: int | None = None, batch: int | None = None) -> TrainingTask:
    """Run the file, call the function, return its task.

    Args:
        path: a Python file; its folder is importable while it runs, as for a script.
        function: name of a function without required arguments that returns a `TrainingTask`.
        seq: handed to the function as ``seq=``, which it must take.
        batch: handed to the function as ``batch=`` if it takes that, else the batch dims of its task are resized.
    """
    if not path.is_file():
        raise InputError("MP125", f"{path} does not exist or is not a file", "give a path such as train.py:task")
    with _importable(path.parent):
        module = _execute(path)
        build = _function(module, path, function)
        return _call(build, path, function, seq=seq, batch=batch)


@contextmanager
def _importable(folder: Path) -> Iterator[None]:
    entry = str(folder.resolve())
    sys.path.insert(0, entry)
    try:
        yield
    finally:
        sys.path.remove(entry)


def _execute(path: Path) -> ModuleType:
    # A name of its own, so that train.py does not stand in for a package of that name; run from source, so that no
    # compiled copy is left behind or read.
    name = f"meshplan_user_{path.stem}_{zlib.crc32(str(path.resolve()).encode()):08x}"
    module = ModuleType(name)
    module.__file__ = str(path)
    sys.modules[name] = module  # dataclasses and pickling look the module up
    try:
        exec(compile(path.read_bytes(), str(path), "exec"), module.__dict__)
    except PlanError as error:
        del sys.modules[name]
        raise _own(path, error) from error
    except Exception as error:
        del sys.modules[name]
        hint = f"run `python {path}` to see the whole trace"
        raise _failure(path, "running the file", error, hint) from error
    return module


def _function(module: ModuleType, path: Path, function: str) -> Callable[..., Any]:
    found = getattr(module, function, None)
    if not callable(found):
        own = [n for n, f in vars(module).items() if inspect.isfunction(f) and f.__module__ == module.__name__]
        message = f"{path} has no function {function!r}"
        if isinstance(found, TrainingTask):
            message += ": that is a TrainingTask already"
            raise InputError("MP124", message, f"return it from one: `def task(): return {function}`")
        hint = f"it defines {', '.join(own)}" if own else "define `def task() -> TrainingTask` in it"
        raise InputError("MP124", message, hint)
    return found


def _call(build: Callable[..., Any], path: Path, function: str, *, seq: int | None, batch: int | None) -> TrainingTask:
    taken = inspect.signature(build).parameters
    if seq is not None and "seq" not in taken:
        raise InputError(
            "MP124", f"{path}:{function} takes no seq, so seq={seq} cannot be set", f"write `def {function}(seq=...)`"
        )
    arguments = {name: value for name, value in (("seq", seq), ("batch", batch)) if value is not None and name in taken}
    required = [
        name
        for name, parameter in taken.items()
        if parameter.default is parameter.empty
        and parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
        and name not in arguments
    ]
    if required:
        raise InputError(
            "MP124",
            f"{path}:{function} needs arguments that are not given: {', '.join(required)}",
            "give them defaults, or wrap the function in one without arguments",
        )
    try:
        task = build(**arguments)
    except PlanError as error:
        raise _own(path, error) from error
    except Exception as error:
        hint = f"call {function}() in a Python session to see the whole trace"
        raise _failure(path, f"calling {function}", error, hint) from error
    if not isinstance(task, TrainingTask):
        raise InputError(
            "MP124",
            f"{path}:{function} returned {type(task).__name__}, not a TrainingTask",
            "return planner.TrainingTask(loss_fn=..., params=..., batch=..., optimizer=...)",
        )
    if batch is not None and "batch" not in arguments:
        task = replace(task, batch=task.with_batch_size(batch))
    return task


def _own(path: Path, error: PlanError) -> PlanError:
    """An error that says itself what is wrong, with the line of the user's file that made it."""
    return type(error)(error.code, f"{_place(path, error)}: {error.message}", error.hint)


def _place(path: Path, error: Exception) -> str:
    """The file, and the last line of it that the error passed through."""
    if isinstance(error, SyntaxError) and error.filename == str(path):
        line = error.lineno
    else:
        frames = traceback.extract_tb(error.__traceback__)
        line = next((frame.lineno for frame in reversed(frames) if frame.filename == str(path)), None)
    return f"{path}:{line}" if line is not None else str(path)


def _failure(path: Path, doing: str, error: Exception, hint: str) -> InputError:
    """The error with the last line of the user's file that it passed through."""
    where = _place(path, error)
    text = str(error) or "no message"
    return InputError("MP124", f"{doing} failed at {where}: {type(error).__name__}: {text}", hint)
