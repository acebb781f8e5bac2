"""Memory of each actor over the step: what is always there, and what microbatches in flight hold.

An activation is held from the start of its F to the end of its B; in a schedule that splits backwards, what W needs is
held from there to the end of W: as much, less (a part goes with the B), or more (what B recomputed).
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from costmodel.errors import InputError
from costmodel.schedule.actions import Actor
from costmodel.simulation.result import Simulation


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldBytes:
    """What an actor holds on each of its devices.

    Args:
        always_bytes: parameters, gradients, optimizer state, buffers, and what a microbatch needs while it runs.
        saved_bytes: by (virtual) stage, what one microbatch keeps for its B.
        until_weights_bytes: the same for its W, in a schedule that has any; a stage that is not there keeps as much as
            for its B.
        made_bytes: what of that B makes, which is there from its start, beside what is kept for B; 0 if not there.
        limit_bytes: what the device has; None if unknown.
    """

    always_bytes: int
    saved_bytes: Mapping[int, int]
    until_weights_bytes: Mapping[int, int] = field(default_factory=dict)
    made_bytes: Mapping[int, int] = field(default_factory=dict)
    limit_bytes: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryCurve:
    """Bytes on each device of an actor: `bytes[i]` from `times_s[i]` until the next time. Times increase, the first is
    0; `peak_bytes` is the largest value."""

    actor: Actor
    times_s: tuple[float, ...]
    bytes: tuple[int, ...]
    peak_bytes: int
    limit_bytes: int | None


def memory_over_time(simulation: Simulation, held: Mapping[Actor, HeldBytes]) -> tuple[MemoryCurve, ...]:
    """The curve of each actor, in the schedule's order.

    Args:
        simulation: with its timeline.
        held: by actor.

    Raises:
        InputError: MP145 if an actor is missing in `held`.
    """
    curves = []
    split = simulation.program.split
    for row, starts_s, ends_s in zip(simulation.schedule.actions, simulation.starts_s, simulation.ends_s):
        if row.actor not in held:
            raise InputError("MP145", f"no memory for {row.actor}, {len(held)} others are given")
        item = held[row.actor]
        later = {stage: item.until_weights_bytes.get(stage, size) for stage, size in item.saved_bytes.items()}
        later = later if split else dict.fromkeys(later, 0)
        changes: dict[float, int] = {0.0: 0}
        for action, start_s, end_s in zip(row.actions, starts_s, ends_s):
            saved, kept = item.saved_bytes[action.stage], later[action.stage]
            made = item.made_bytes.get(action.stage, 0) if split else 0
            if action.kind == "F":
                changes[start_s] = changes.get(start_s, 0) + saved
            elif action.kind == "B":
                changes[start_s] = changes.get(start_s, 0) + made
                changes[end_s] = changes.get(end_s, 0) + kept - saved - made
            else:
                changes[end_s] = changes.get(end_s, 0) - kept
        times_s, sizes, now = [], [], item.always_bytes
        for time_s in sorted(changes):
            if changes[time_s] or not times_s:
                now += changes[time_s]
                times_s.append(time_s)
                sizes.append(now)
        curves.append(
            MemoryCurve(
                actor=row.actor,
                times_s=tuple(times_s),
                bytes=tuple(sizes),
                peak_bytes=max(sizes),
                limit_bytes=item.limit_bytes,
            )
        )
    return tuple(curves)
