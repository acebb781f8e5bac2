"""Strategies under schedules that have no closed form: simulated action by action.

GPipe, 1F1B and interleaved 1F1B are priced by formulas (`compose`), which cost nothing; every other schedule of
`costmodel.schedule.registry` that needs no more than the numbers of stages and microbatches is generated and run.
"""

from collections.abc import Sequence
from functools import lru_cache

from costmodel.errors import InputError
from costmodel.schedule.actions import Actor, Schedule
from costmodel.schedule.registry import FAMILIES, make_schedule
from costmodel.schedule.validate import held_at_peak
from costmodel.simulate import SendTimes, StageTimes, simulate
from planner.strategy.blocks import Blocks, joined
from planner.strategy.strategy import Strategy

CLOSED = ("1f1b", "gpipe", "interleaved")
MOST_ACTIONS = 400_000


def has_formula(strategy: Strategy, microbatches: int) -> bool:
    """Whether a strategy's pipeline has a closed form: interleaved, from as many microbatches as stages on."""
    if strategy.schedule not in CLOSED:
        return False
    return strategy.interleave == 1 or strategy.pp == 1 or microbatches >= strategy.pp


def parts_count(strategy: Strategy) -> int:
    """Parts of the model that the stages of a strategy run.

    Raises:
        InputError: MP180 for a schedule that there is not, that needs parameters that a strategy has not, or whose
            number of parts is not `interleave`.
    """
    if strategy.schedule in CLOSED:
        return strategy.pp * strategy.interleave
    family = FAMILIES.get(strategy.schedule)
    known = (*CLOSED, *(name for name, one in FAMILIES.items() if name not in CLOSED and _plain(name, one.required)))
    if family is not None and strategy.schedule not in known:
        message = (
            f"schedule={strategy.schedule} is made for given times of stages, or cuts sequences; a strategy has none"
        )
        raise InputError(
            "MP180", message, f"`meshplan plan --schedule` makes it; here schedules are {', '.join(known)}"
        )
    if family is None:
        raise InputError("MP180", f"schedule={strategy.schedule!r}: there is none", f"schedules are {', '.join(known)}")
    chunks = family.chunks if isinstance(family.chunks, int) else max(2, strategy.interleave)
    if strategy.interleave not in (1, chunks):
        message = f"interleave={strategy.interleave}: schedule {strategy.schedule} has {chunks} parts a stage"
        raise InputError("MP180", message, f"leave it out, or interleave={chunks}")
    return strategy.pp * chunks


def _plain(name: str, required: tuple[str, ...]) -> bool:
    return not required and name != "sequence-chunks"


@lru_cache(maxsize=64)
def schedule_of(name: str, stages: int, microbatches: int, parts: int) -> Schedule:
    """The schedule's actions.

    Raises:
        InputError: MP180 for more actions than can be simulated in a moment; what the generator raises.
    """
    if 3 * parts * microbatches > MOST_ACTIONS:
        message = f"schedule {name} of {stages} stages and {microbatches} microbatches has over {MOST_ACTIONS} actions"
        raise InputError("MP180", message, "larger microbatches, or 1f1b, which has a formula")
    family = FAMILIES[name]
    more = {"chunks": parts // stages} if isinstance(family.chunks, str) else {}
    return make_schedule(name, stages, microbatches, **more)


@lru_cache(maxsize=64)
def homes(strategy: Strategy) -> tuple[int, ...]:
    """The stage of each part, in order of the model."""
    parts, p = parts_count(strategy), strategy.pp
    if strategy.schedule in CLOSED or parts == p:
        return tuple(i % p for i in range(parts))
    rows = schedule_of(strategy.schedule, p, p, parts).actions
    home = {action.stage: row.stage for row in rows for action in row.actions}
    return tuple(home[part] for part in range(parts))


def stage_blocks(parts: Sequence[Blocks], strategy: Strategy) -> list[Blocks]:
    """Blocks of each stage, all of its parts together."""
    home = homes(strategy)
    return [joined(part for part, at in zip(parts, home, strict=True) if at == stage) for stage in range(strategy.pp)]


def pipeline_s(
    strategy: Strategy,
    microbatches: int,
    forward_s: Sequence[float],
    backward_s: Sequence[float],
    weight_s: Sequence[float],
    send_s: float,
) -> float:
    """Seconds from the first forward to the last action, for times of each part; `backward_s` is the whole backward."""
    parts = len(forward_s)
    schedule = schedule_of(_generated(strategy), strategy.pp, microbatches, parts)
    split, home = schedule.splits_backward, homes(strategy)
    times = {
        Actor(part, 0): StageTimes(
            forward_s=forward_s[part],
            backward_s=backward_s[part] - (weight_s[part] if split else 0.0),
            weight_s=weight_s[part] if split else 0.0,
        )
        for part in range(parts)
    }
    sends = {
        (Actor(part, 0), Actor(part + 1, 0)): SendTimes(activation_s=send_s, gradient_s=send_s)
        for part in range(parts - 1)
        if home[part] != home[part + 1]
    }
    return simulate(schedule, times, sends, keep_timeline=False).pipeline_s


def _generated(strategy: Strategy) -> str:
    """The name of the schedule's generator: 1F1B over several parts a stage is the interleaved one."""
    return "interleaved" if strategy.schedule in CLOSED and strategy.interleave > 1 else strategy.schedule


def held_microbatches(strategy: Strategy, microbatches: int, saved_bytes: Sequence[float]) -> list[int]:
    """For each part, how many microbatches' activations its stage holds at its fullest moment."""
    schedule = schedule_of(strategy.schedule, strategy.pp, microbatches, len(saved_bytes))
    held = held_at_peak(schedule, {Actor(part, 0): size for part, size in enumerate(saved_bytes)})
    return [held.get(Actor(part, 0), 0) for part in range(len(saved_bytes))]
