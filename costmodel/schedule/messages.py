"""Schedules with their sends and receives written out, such as ``0F0 0SEND_F0`` and ``1RECV_F0 1F0``.

A schedule implies its messages: an activation is sent as soon as its F has ended and received just before the next
stage's F, a gradient likewise from B to B. Between virtual stages of one actor there are none. Written out, a message
names the stage whose actor sends or receives it, ``F`` for an activation or ``B`` for a gradient, and its microbatch:

    0SEND_F3  stage 0 sends the activation of microbatch 3 to stage 1, which has 1RECV_F3,
    1SEND_B3  stage 1 sends its gradient back to stage 0, which has 0RECV_B3.

A send never holds up its actor; a receive holds it up until the message is there.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, cast

from costmodel.errors import InputError
from costmodel.schedule.actions import (
    Action,
    Actor,
    ActorActions,
    Schedule,
    format_actions,
    parse_action,
    parse_schedule,
)

_MESSAGE = re.compile(r"(0|[1-9][0-9]{0,8})(SEND|RECV)_([FB])(0|[1-9][0-9]{0,8})")


class Message(NamedTuple):
    """One end of a transfer.

    Args:
        stage: (virtual) stage of the actor that has this end.
        end: ``SEND`` or ``RECV``.
        kind: F for an activation, on its way to the next stage, or B for a gradient, on its way to the one before.
        microbatch: 0-based.
    """

    stage: int
    end: Literal["SEND", "RECV"]
    kind: Literal["F", "B"]
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.end}_{self.kind}{self.microbatch}"


Step = Action | Message


@dataclass(frozen=True, slots=True, kw_only=True)
class ActorSteps:
    """What one actor runs, sends and receives, strictly in this order."""

    actor: Actor
    steps: tuple[Step, ...]


def with_messages(schedule: Schedule) -> tuple[ActorSteps, ...]:
    """Writes out the messages that a schedule implies: each send right after its action, each receive right before.

    Args:
        schedule: complete, as `validate_schedule` checks.
    """
    owners = _owners(schedule)
    rows = []
    for index, row in enumerate(schedule.actions):
        steps: list[Step] = []
        for action in row.actions:
            if action.kind == "W":
                steps.append(action)
                continue
            step = 1 if action.kind == "F" else -1
            stage, kind, k = action.stage, action.kind, action.microbatch
            if owners.get((stage - step, k), index) != index:
                steps.append(Message(stage, "RECV", kind, k))
            steps.append(action)
            if owners.get((stage + step, k), index) != index:
                steps.append(Message(stage, "SEND", kind, k))
        rows.append(ActorSteps(actor=row.actor, steps=tuple(steps)))
    return tuple(rows)


def without_messages(rows: Sequence[ActorSteps], name: str, microbatches: int) -> Schedule:
    """Checks written-out messages and leaves them implied.

    Args:
        rows: each actor's steps; its actions form a complete schedule.
        name: of the schedule.
        microbatches: of the schedule.

    Raises:
        InputError: MP139 if a message is missing, doubled, on another actor, sent before its action or received after
            it, or if receives deadlock.
    """
    actions = tuple(
        ActorActions(
            stage=row.actor.stage,
            group=row.actor.group,
            actions=tuple(step for step in row.steps if isinstance(step, Action)),
        )
        for row in rows
    )
    schedule = Schedule(name=name, microbatches=microbatches, actions=actions)
    implied = with_messages(schedule)
    for row, expected in zip(rows, implied):
        _check_messages(row, expected)
    _check_receives(rows)
    return schedule


def format_with_messages(schedule: Schedule) -> str:
    """The text of a schedule with its messages written out; the inverse of `parse_any_schedule`."""
    lines = [f"schedule {schedule.name} microbatches {schedule.microbatches}"]
    for row in with_messages(schedule):
        lines.append(f"{row.actor.stage}.{row.actor.group}: {' '.join(map(str, row.steps))}".rstrip())
    return "\n".join(lines) + "\n"


def parse_step(token: str, *, where: str = "") -> Step:
    """Reads an action or one end of a message.

    Raises:
        InputError: MP140 as `parse_action`.

    Example:
        >>> parse_step("1RECV_F0")
        Message(stage=1, end='RECV', kind='F', microbatch=0)
    """
    match = _MESSAGE.fullmatch(token)
    if match is None:
        return parse_action(token, where=where)
    end, kind = cast(Literal["SEND", "RECV"], match[2]), cast(Literal["F", "B"], match[3])
    return Message(int(match[1]), end, kind, int(match[4]))


def parse_any_schedule(text: str) -> Schedule:
    """Reads the text of a schedule, its messages implied or written out.

    Raises:
        InputError: as `parse_schedule`, and as `without_messages` where the text has any message.
    """
    if "SEND" not in text and "RECV" not in text:
        return parse_schedule(text)
    lines = text.splitlines()
    plain, steps = [], []
    for number, line in enumerate(lines, 1):
        head, colon, rest = line.partition(":")
        if not colon:
            plain.append(line)
            continue
        read = tuple(parse_step(token, where=f"line {number}, step {at}") for at, token in enumerate(rest.split(), 1))
        steps.append(read)
        plain.append(f"{head}: {format_actions(step for step in read if isinstance(step, Action))}")
    schedule = parse_schedule("\n".join(plain))
    rows = [ActorSteps(actor=row.actor, steps=own) for row, own in zip(schedule.actions, steps)]
    return without_messages(rows, schedule.name, schedule.microbatches)


def _owners(schedule: Schedule) -> dict[tuple[int, int], int]:
    """The index of the actor that runs each (stage, microbatch)."""
    return {
        (action.stage, action.microbatch): index
        for index, row in enumerate(schedule.actions)
        for action in row.actions
        if action.kind == "F"
    }


def _check_messages(row: ActorSteps, expected: ActorSteps) -> None:
    """The messages of one actor are those that its actions imply, each on the right side of its action."""
    places: dict[Step, int] = {}
    for at, step in enumerate(row.steps):
        if step in places:
            raise _bad(row, at, f"{step} is there twice")
        places[step] = at
    wanted = {step for step in expected.steps if isinstance(step, Message)}
    for at, step in enumerate(row.steps):
        if not isinstance(step, Message):
            continue
        if step not in wanted:
            raise _bad(row, at, f"{step} is not among the messages that the actions of {row.actor} imply")
        action = places[Action(step.stage, step.kind, step.microbatch)]
        if (step.end == "SEND") != (action < at):
            side = "before" if step.end == "SEND" else "after"
            raise _bad(row, at, f"{step} comes {side} {row.steps[action]} (step {action})")
    for step in expected.steps:
        if step not in places:
            raise _bad(row, len(row.steps), f"{step} is missing")


def _check_receives(rows: Sequence[ActorSteps]) -> None:
    """Runs all actors; a receive waits for its send."""
    sent: set[Message] = set()
    at = [0] * len(rows)
    moved = True
    while moved:
        moved = False
        for index, row in enumerate(rows):
            while at[index] < len(row.steps):
                step = row.steps[at[index]]
                if isinstance(step, Message):
                    if step.end == "SEND":
                        sent.add(step)
                    elif _other_end(step) not in sent:
                        break
                at[index] += 1
                moved = True
    for index, row in enumerate(rows):
        if at[index] < len(row.steps):
            raise _bad(row, at[index], f"deadlock: {row.steps[at[index]]} waits for a send that never comes")


def _other_end(receive: Message) -> Message:
    step = -1 if receive.kind == "F" else 1
    return Message(receive.stage + step, "SEND", receive.kind, receive.microbatch)


def _bad(row: ActorSteps, at: int, what: str) -> InputError:
    around = " ".join(map(str, row.steps[max(0, at - 3) : at]))
    here = str(row.steps[at]) if at < len(row.steps) else "?"
    after = " ".join(map(str, row.steps[at + 1 : at + 3]))
    return InputError(
        "MP139",
        f"{row.actor}, step {at}: {what}: {f'{around} >{here}< {after}'.strip()}",
        "leave messages out to have them implied, or write each send after its action and each receive before",
    )
