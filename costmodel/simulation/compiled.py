"""The loop of the contended simulation, compiled by numba where that is installed (`pip install 'meshplan[fast]'`).

What runs is `costmodel.simulation.events` itself, without fast-math: results are the same to the last bit.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from typing import Any
from warnings import warn

from costmodel.simulation.events import Work, run_events

# Actions. Measured on two cores, CPython 3.11, numba 0.68: to import numba and load the compiled loop takes 0.6 s; it
# saves 0.25 µs an action (4 stages, shared links) to 0.9 µs (64 stages, compute slowed down).
LOAD_FROM = 1_000_000
CALL_FROM = 64  # a call takes 10 µs more, what it saves on 30 (slowed down) to 50 actions (shared links)

Loop = Callable[[Work], tuple[list[float], list[float], list[float], bool]]


@dataclass(slots=True)
class _Process:
    """What this process has done so far; it decides how fast results come, never what they are."""

    interpreted: int = 0  # actions


_PROCESS = _Process()
_NOTHING = Work([0], [], [], [], [], [[0]], [0.0], [0.0], [0], [], 1.0, 0, 0, 0)


def loop_for(actions: int) -> Loop:
    """What runs so many actions: `run_events` until it has run `LOAD_FROM` in this process, then the compiled loop, but
    for the smallest programs. By then about as much was lost as it takes to load that, whatever follows."""
    if not load.cache_info().currsize:
        _PROCESS.interpreted += actions
        if _PROCESS.interpreted < LOAD_FROM:
            return run_events
    return load() if actions >= CALL_FROM else run_events


@cache
def load() -> Loop:
    """The compiled loop, now; `run_events` without numba, with a warning if that is there but cannot be imported.

    It is compiled once (3 s) and kept beside its source, or else in the user's cache directory; where neither can be
    written, each process compiles it.
    """
    if find_spec("numba") is None:
        return run_events
    try:
        import numba  # pyright: ignore[reportMissingImports] (an extra)
    except ImportError as error:
        warn(f"simulations with contention run at a fraction of their speed, without numba: {error}", RuntimeWarning, 2)
        return run_events
    kinds = (numba.typeof(_as_arrays(_NOTHING)),)
    try:
        compiled = numba.njit(cache=True)(run_events)
        compiled.compile(kinds)
    except (OSError, RuntimeError):  # the cache has no place or no room
        compiled = numba.njit(run_events)
        compiled.compile(kinds)
    return lambda work: compiled(_as_arrays(work))


def _as_arrays(work: Work) -> Work:
    """The same with arrays for lists. Routes get one length: to take a resource twice is to take it once."""
    import numpy as np

    width = max(map(len, work.over))
    over = [(own * width)[:width] for own in work.over]
    fields: dict[str, Any] = work._replace(over=over)._asdict()
    for name, value in fields.items():
        if isinstance(value, list):
            fields[name] = np.array(value, np.float64 if name.endswith("_s") else np.int64)
    return Work(**fields)
