"""What the step time is made of: the chain of actions, messages and end-of-step work in which each waits for the one
before, from the end of the step back to its start.

    C1  The segments' times add up to the makespan: each begins when the one before it ends.
    C2  Where an actor was busy until its input came at that very moment, the chain stays on the actor. So no segment is
        idle time: what waits, waits for a segment.
"""

from dataclasses import dataclass
from typing import NamedTuple

from costmodel.schedule.actions import Action, Actor
from costmodel.simulation.records import Ending, Message
from costmodel.simulation.result import Simulation


class Segment(NamedTuple):
    """One link of the chain.

    Attributes:
        part: F, B or W; send; latency; reduce, exchange, join (of values of several stages) or update.
        actor: who does it, of a message the sender.
        target: receiver of a message, else None.
        action: what is run, or made the message; None at the end of the step.
    """

    part: str
    actor: Actor
    target: Actor | None
    action: Action | None
    start_s: float
    end_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class PathShare:
    """What one part of one stage, or one link, has in the chain."""

    part: str
    actor: Actor
    target: Actor | None
    count: int
    time_s: float


def critical_path(simulation: Simulation) -> tuple[Segment, ...]:
    """The chain, from the start of the step to its end. Segments of no length are left out.

    Args:
        simulation: with its timeline.
    """
    return tuple(reversed([s for s in _back(simulation) if s.end_s > s.start_s]))


def path_shares(path: tuple[Segment, ...]) -> tuple[PathShare, ...]:
    """The chain by part and place, longest first."""
    sums: dict[tuple[str, Actor, Actor | None], list[float]] = {}
    for segment in path:
        sums.setdefault((segment.part, segment.actor, segment.target), []).append(segment.end_s - segment.start_s)
    found = [PathShare(part=p, actor=a, target=t, count=len(s), time_s=sum(s)) for (p, a, t), s in sums.items()]
    return tuple(sorted(found, key=lambda share: (-share.time_s, share.actor, share.part, share.target or share.actor)))


def _back(simulation: Simulation) -> list[Segment]:
    """Segments from the last to the first."""
    rows = simulation.schedule.actions
    last = max(range(len(rows)), key=lambda at: (simulation.endings[at].update_end_s, -at))
    segments, at = _ending(simulation, last)
    if not simulation.ends_s[at]:
        return segments
    arrivals = {
        (m.action.kind, m.action.stage + (1 if m.action.kind == "F" else -1), m.action.microbatch): m
        for m in simulation.messages
    }
    by_end = _by_end(simulation.messages)
    place = {action: (a, step) for a, row in enumerate(rows) for step, action in enumerate(row.actions)}
    step = len(rows[at].actions) - 1
    limit = sum(len(row.actions) for row in rows)
    while limit:
        limit -= 1
        action, start_s = rows[at].actions[step], simulation.starts_s[at][step]
        segments.append(Segment(action.kind, rows[at].actor, None, action, start_s, simulation.ends_s[at][step]))
        if start_s <= 0.0:
            break
        if step and simulation.ends_s[at][step - 1] >= start_s:  # C2
            step -= 1
            continue
        message = arrivals.get((action.kind, action.stage, action.microbatch))
        if message is not None:
            sender = _message_back(segments, message, by_end)
        else:  # made by another actor, or earlier by this one, and there at once
            stage = action.stage + {"F": -1, "B": 1, "W": 0}[action.kind]
            kind = "B" if action.kind == "W" else action.kind
            sender = Action(stage, kind, action.microbatch)
            if sender not in place:
                sender = Action(action.stage, "F", action.microbatch)
        at, step = place[sender]
    return segments


def _message_back(segments: list[Segment], message: Message, by_end: dict[float, list[Message]]) -> Action:
    """Adds the message, and those that it had to wait for; returns the action that made the first of them."""
    source, target = message.source, message.target
    segments.append(Segment("latency", source, target, message.action, message.end_s, message.arrival_s))
    while True:
        segments.append(Segment("send", message.source, message.target, message.action, message.start_s, message.end_s))
        if message.start_s <= message.ready_s:
            return message.action
        # what freed the link: on the same link if possible, else on one that shares an end or a resource with it
        found = max(
            (other for other in by_end.get(message.start_s, ()) if other is not message),
            key=lambda other: 2 * (other.source == message.source) + (other.target == message.target),
            default=None,
        )
        if found is None:
            return message.action
        message = found


def _by_end(messages: tuple[Message, ...]) -> dict[float, list[Message]]:
    found: dict[float, list[Message]] = {}
    for message in messages:
        if message.end_s > message.start_s:
            found.setdefault(message.end_s, []).append(message)
    return found


def _ending(simulation: Simulation, last: int) -> tuple[list[Segment], int]:
    """Segments of the end of the step, backwards, and the index of the actor that was waited for."""
    rows, endings = simulation.schedule.actions, simulation.endings

    def segment(part: str, at: int, start_s: float, end_s: float) -> Segment:
        return Segment(part, rows[at].actor, None, None, start_s, end_s)

    def of(at: int) -> Ending:
        return endings[at]

    segments = [segment("update", last, of(last).update_start_s, of(last).update_end_s)]
    at = last
    if of(at).update_start_s > of(at).exchange_end_s:  # it waited for the latest of the stages that it joins
        stages = simulation.waits[rows[at].stage].stages
        joined = [index for index, row in enumerate(rows) if row.stage in stages]
        at = max(joined, key=lambda index: (of(index).exchange_end_s, -index))
        segments.append(segment("join", at, of(at).exchange_end_s, of(last).update_start_s))
    segments.append(segment("exchange", at, of(at).exchange_start_s, of(at).exchange_end_s))
    groups = [index for index, row in enumerate(rows) if row.stage == rows[at].stage]
    at = max(groups, key=lambda index: (of(index).reduce_end_s, -index))
    end_s = simulation.actors[at].last_end_s
    segments.append(segment("reduce", at, max(of(at).reduce_start_s, end_s), of(at).reduce_end_s))
    return segments, at
