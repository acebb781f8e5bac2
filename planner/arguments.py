"""What the functions of the Python API may be given: each argument is checked before anything is done with it (MP163).

Records are told by their class, files by `str` or `pathlib.Path`. Every check returns what it was given, or what was
read from the file, and says otherwise what was given, what is legal and how the call looks.
"""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from costmodel.cluster import Cluster
from costmodel.errors import InputError
from costmodel.schedule.registry import FAMILIES
from planner.plan_files import read_plan
from planner.planfile.schema import Plan

if TYPE_CHECKING:
    from planner.frontend.task import TrainingTask
    from profiles.schema import Profile

LARGEST, LARGEST_BATCH = (1 << 63) - 1, 100_000_000
"""Of a count, and of a global batch, all divisors of which are looked at."""

SCHEDULES = ("auto", *FAMILIES)
"""What can be asked for."""

CHUNKS = 4
"""Slices of each sequence, where sequence-chunks is asked for and their number is not said."""


def require_alone(name: str, others: Mapping[str, object]) -> None:
    """Raises InputError (MP163) where another argument would fix what `name` fixes."""
    for other, value in others.items():
        if value is not None:
            raise InputError("MP163", f"{name} and {other} were both given", f"{name} says it all: leave {other} out")


def require_chunks(schedule: str | None, chunks: object) -> int | None:
    """Slices of each sequence under sequence-chunks; None under any other schedule."""
    if schedule == "sequence-chunks":
        return CHUNKS if chunks is None else require_count("chunks", chunks)
    if chunks is not None:
        message = f"chunks={chunks} was given with schedule {schedule or 'None'}, which runs whole microbatches"
        raise InputError("MP163", message, 'chunks goes with schedule="sequence-chunks" (--schedule sequence-chunks)')
    return None


def require_plan(value: object, call: str) -> Plan:
    """A plan, or the plan of a file."""
    if isinstance(value, Plan):
        return value
    if _is_path(value):
        return read_plan(value)  # type: ignore[arg-type]
    raise _wrong("plan", value, "a Plan or the path of a plan file", call)


def require_task(value: object, call: str) -> "TrainingTask":
    """A training task."""
    from planner.frontend.task import TrainingTask

    if isinstance(value, TrainingTask):
        return value
    hint = call
    if isinstance(value, str):
        hint = f"planner.load_task({value!r}) is the task of that name"
    elif callable(value):
        name = getattr(value, "__name__", "it")
        hint = f"call the function that returns it, {name}(), or wrap a loss: planner.TrainingTask({name}, params=...)"
    raise _wrong("task", value, "a planner.TrainingTask", hint)


def require_model(value: object, call: str) -> "TrainingTask | str":
    """A training task, or a text that names one."""
    text = _as_text(value)
    return require_task(value, call) if text is None else text


def require_spec(value: object, call: str) -> str:
    """The text that names a model."""
    text = _as_text(value)
    if text is not None:
        return text
    legal = "the text that names a model: a built-in name, dimensions, a config.json, or path.py:function"
    raise _wrong("spec", value, legal, call)


def require_cluster(value: object, call: str) -> Cluster:
    """A cluster, or the cluster of a file."""
    if isinstance(value, Cluster):
        return value
    if _is_path(value):
        from profiles.cluster_files import load_cluster

        return load_cluster(value)  # type: ignore[arg-type]
    raise _wrong("cluster", value, "a Cluster or the path of a cluster file", call)


def require_profile(value: object, call: str) -> "Profile | None":
    """A profile, that of a file, or None."""
    from profiles.schema import Profile
    from profiles.store import read_profile

    if value is None or isinstance(value, Profile):
        return value
    if _is_path(value):
        return read_profile(value)  # type: ignore[arg-type]
    raise _wrong("profile", value, "a Profile, the path of a profile file, or None", call)


def require_count(name: str, value: object, *, most: int = LARGEST) -> int:
    """A whole number of at least 1, of Python or an array library."""
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise _wrong(name, value, "a whole number of at least 1", f"{name}=8, say")
    count = value.__index__()  # type: ignore[attr-defined]
    if not 1 <= count <= most:
        limit = "at least 1" if count < 1 else f"at most {most:,}"
        raise InputError("MP163", f"{name}={count}; it must be {limit}", f"{name}=8, say")
    return count


def optional_count(name: str, value: object) -> int | None:
    """A count, or None."""
    return None if value is None else require_count(name, value)


def require_choice(name: str, value: object, legal: tuple[str, ...]) -> str:
    """One of some words."""
    if isinstance(value, str) and value in legal:
        return value
    raise InputError("MP163", f"{name}={value!r} is not one of {', '.join(map(repr, legal))}", f"{name}={legal[0]!r}")


def require_text(name: str, value: object) -> str | None:
    """A text, or None."""
    if value is None or isinstance(value, str):
        return value
    raise _wrong(name, value, "a str or None", "leave it out for the default")


def require_microbatch(microbatch: int | None, global_batch: int) -> None:
    """A pinned microbatch size divides the global batch."""
    if microbatch is not None and global_batch % microbatch:
        from planner.search.joint import microbatch_sizes

        near = sorted(microbatch_sizes(global_batch), key=lambda size: (abs(size - microbatch), size))[:4]
        message = f"microbatch={microbatch} does not divide global_batch={global_batch}"
        raise InputError("MP163", message, f"the nearest sizes that do are {', '.join(map(str, sorted(near)))}")


def require_no_sequence(sequence: int | None) -> None:
    """A sequence length is of a model's name; a task has its own (MP124)."""
    if sequence is not None:
        message = f"sequence={sequence} was given with a task, whose sequence length is that of its batch"
        raise InputError("MP124", message, "make the task for this length, or give the model's name in its place")


def require_pins(value: Any, call: str) -> Any:
    """Stage pins, or None."""
    from planner.search.pinned import StagePin

    if value is None:
        return None
    if isinstance(value, tuple | list) and value and all(isinstance(pin, StagePin) for pin in value):
        return tuple(value)
    raise _wrong("pins", value, "a tuple of planner.search.pinned.StagePin, one a stage", call)


def _as_text(value: object) -> str | None:
    """A text, or a path as text; None for anything else."""
    return value if isinstance(value, str) else str(value) if isinstance(value, os.PathLike) else None


def _is_path(value: object) -> bool:
    return isinstance(value, str | Path | os.PathLike)


def _wrong(name: str, value: object, legal: str, hint: str) -> InputError:
    shown = repr(value) if isinstance(value, str | int | float | bool | None) else ""
    name_of = type(value).__name__
    article = "an" if name_of[0].lower() in "aeiou" else "a"
    kind = "None" if value is None else f"{article} {name_of}" + (f", {shown}" if shown else "")
    return InputError("MP163", f"{name} is {kind}; it must be {legal}", hint)
