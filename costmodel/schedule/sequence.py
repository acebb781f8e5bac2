"""Sequence-chunk pipelines: the unit that flows through the stages is a slice of one long sequence.

Sequence n in c chunks is units n·c to n·c + c - 1. Under causal attention chunk j reads the keys and values of the
chunks before it, so that forwards run in order, backwards in reverse (chunk c - 1 first, as its gradient reaches the
keys and values of all others), and chunk j costs more than chunk j - 1. In a schedule a unit is called a microbatch.

Order: 1F1B over units, with each sequence's backwards reversed. A stage can begin with backwards only when it has the
last chunk of a sequence: stage i holds c + p - 1 - i units, which is that share of a whole sequence's activations.
"""

from collections.abc import Sequence

from costmodel.errors import InputError
from costmodel.schedule.actions import Action, ActorActions, Schedule, require_positive
from costmodel.schedule.generate import Shares, checked_shares, dealt
from costmodel.schedule.validate import dependency_order


def sequence_chunks(stages: int, microbatches: int, chunks: int = 4, shares: Shares | None = None) -> Schedule:
    """1F1B over slices of sequences.

    Args:
        stages: number of stages p.
        microbatches: number of sequences.
        chunks: slices c of each. The schedule has `microbatches · chunks` units. With 1 this is 1F1B.
        shares: per stage and group the sequences that it runs, all chunks of each; by default each stage has one group.

    Raises:
        InputError: MP143 for a count below 1, MP144 if the groups of a stage do not partition the sequences.
    """
    require_positive("chunks", chunks)
    checked = checked_shares(stages, microbatches, shares)
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
    schedule = Schedule(name="sequence-chunks", microbatches=units, actions=tuple(rows))
    return dealt(schedule, [[units_of(own, chunks) for own in groups] for groups in checked])


def units_of(sequences: Sequence[int], chunks: int) -> tuple[int, ...]:
    """The units that some sequences are."""
    return tuple(n * chunks + j for n in sequences for j in range(chunks))


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


def sequence_times_s(
    schedule: Schedule, forward_s: Sequence[Sequence[float]], backward_s: Sequence[Sequence[float]], send_s: float = 0.0
) -> tuple[tuple[float, ...], ...]:
    """When each action of a sequence-chunk schedule ends.

    Args:
        schedule: as `sequence_chunks` makes it, or another order of its units.
        forward_s, backward_s: per stage, the time of each chunk, such as `causal_times_s` gives.
        send_s: one-way delay of every link.

    Returns:
        Per actor, in the order of its actions, seconds from the start of the step.

    Raises:
        InputError: MP143 if times are not given for every stage, or for different numbers of chunks; MP148 if the
            schedule deadlocks.
    """
    stages = schedule.stages
    chunks = {len(times) for times in (*forward_s, *backward_s)}
    if len(forward_s) != stages or len(backward_s) != stages or len(chunks) != 1:
        raise InputError("MP143", f"times are given for {len(forward_s)} stages and {sorted(chunks)} chunks")
    (count,) = chunks
    order = dependency_order(schedule, stages)
    if order.stuck:
        raise InputError("MP148", f"schedule {schedule.name!r} deadlocks", "validate_schedule says where")
    ends: dict[Action, float] = {}
    actors: list[list[float]] = [[] for _ in schedule.actions]
    for index, action in order.order:
        stage, unit = action.stage, action.microbatch
        step = 1 if action.kind == "F" else -1
        took_s = (forward_s if action.kind == "F" else backward_s)[stage][unit % count]
        begin_s = actors[index][-1] if actors[index] else 0.0
        if (before := Action(stage - step, action.kind, unit)) in ends:
            begin_s = max(begin_s, ends[before] + send_s)
        ends[action] = begin_s + took_s
        actors[index].append(begin_s + took_s)
    return tuple(map(tuple, actors))


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
