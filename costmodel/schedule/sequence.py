"""Sequence-chunk pipelines: the unit that flows through the stages is a slice of one long sequence.

Sequence n in c chunks is units n·c to n·c + c - 1. Under causal attention chunk j reads the keys and values of the
chunks before it, so that forwards run in order, backwards in reverse (chunk c - 1 first, as its gradient reaches the
keys and values of all others), and chunk j costs more than chunk j - 1. In a schedule a unit is called a microbatch.

Order: 1F1B over units, with each sequence's backwards reversed. A stage can begin with backwards only when it has the
last chunk of a sequence: stage i holds c + p - 1 - i units, which is that share of a whole sequence's activations.
"""

from costmodel.errors import InputError
from costmodel.schedule.actions import Action, ActorActions, Schedule, require_positive


def sequence_chunks(stages: int, microbatches: int, chunks: int = 4) -> Schedule:
    """1F1B over slices of sequences.

    Args:
        stages: number of stages p.
        microbatches: number of sequences.
        chunks: slices c of each. The schedule has `microbatches · chunks` units. With 1 this is 1F1B.

    Raises:
        InputError: MP143 for a count below 1.
    """
    require_positive("stages", stages)
    require_positive("microbatches", microbatches)
    require_positive("chunks", chunks)
    units = microbatches * chunks
    rows = []
    for stage in range(stages):
        warm_up = min(chunks + stages - 1 - stage, units)
        actions = [Action(stage, "F", unit) for unit in range(warm_up)]
        for at in range(units):
            sequence, chunk = divmod(at, chunks)
            actions.append(Action(stage, "B", sequence * chunks + chunks - 1 - chunk))
            if warm_up + at < units:
                actions.append(Action(stage, "F", warm_up + at))
        rows.append(ActorActions(stage=stage, group=0, actions=tuple(actions)))
    return Schedule(name="sequence-chunks", microbatches=units, actions=tuple(rows))


def causal_times_s(chunks: int, first_s: float, growth_s: float) -> tuple[float, ...]:
    """Time of each chunk: `first_s` for what does not depend on the past, and `growth_s` more for each chunk before it.

    Raises:
        InputError: MP143 for less than 1 chunk, MP147 for a time that is negative or not finite.

    Example:
        >>> causal_times_s(3, 2.0, 0.5)
        (2.0, 2.5, 3.0)
    """
    require_positive("chunks", chunks)
    for name, time_s in (("first_s", first_s), ("growth_s", growth_s)):
        if not 0.0 <= time_s < float("inf"):
            raise InputError("MP147", f"{name} is {time_s}, it must be finite and not negative")
    return tuple(first_s + growth_s * chunk for chunk in range(chunks))


def keeps_causal_order(schedule: Schedule, chunks: int) -> bool:
    """Whether every actor runs the chunks of each sequence forward in order and backward in reverse.

    Args:
        schedule: its microbatches are units as `sequence_chunks` numbers them.
        chunks: slices of each sequence.
    """
    for row in schedule.actions:
        last: dict[tuple[int, str, int], int] = {}
        for action in row.actions:
            sequence, chunk = divmod(action.microbatch, chunks)
            key = (action.stage, action.kind, sequence)
            step = 1 if action.kind == "F" else -1
            expected = last[key] + step if key in last else (0 if action.kind == "F" else chunks - 1)
            if chunk != expected:
                return False
            last[key] = chunk
    return True
