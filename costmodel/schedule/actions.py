"""Schedules as data: what each actor runs, in which order, with a text form such as ``2F0``.

An action is one forward (F), backward (B) or weight-gradient (W) of one microbatch on one stage. A schedule without any
W has *fused* backwards: its B computes activation and weight gradients. A schedule with W has *split* backwards: every
(stage, microbatch) has all three.

An actor is a stage group, known as (stage, group). Normally it runs actions of its own stage only. Under a schedule
with virtual stages (interleaved, zb-v) `Action.stage` counts virtual stages and an actor runs several of them.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, NamedTuple, cast

from costmodel.errors import InputError

ActionKind = Literal["F", "B", "W"]

_TOKEN = re.compile(r"(0|[1-9][0-9]{0,8})([FBW])(0|[1-9][0-9]{0,8})")
_HEADER = re.compile(r"schedule (\S+) microbatches ([1-9][0-9]{0,8})")
_ROW = re.compile(r"(0|[1-9][0-9]{0,8})\.(0|[1-9][0-9]{0,8}):(.*)")


class Actor(NamedTuple):
    """A stage group: the devices of one kind that run one stage for a share of its microbatches."""

    stage: int
    group: int

    def __str__(self) -> str:
        return f"stage {self.stage} group {self.group}"


@dataclass(frozen=True, slots=True)
class Action:
    """One unit of work.

    Args:
        stage: virtual stage, 0-based; equal to the actor's stage unless the schedule has virtual stages.
        kind: F forward, B activation gradient (and weight gradient, if the schedule has no W), W weight gradient.
        microbatch: 0-based.
    """

    stage: int
    kind: ActionKind
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.microbatch}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ActorActions:
    """What one actor runs, strictly in this order."""

    stage: int
    group: int
    actions: tuple[Action, ...]

    @property
    def actor(self) -> Actor:
        return Actor(self.stage, self.group)

    @property
    def warm_up(self) -> int:
        """Forwards before the first backward."""
        return next((at for at, action in enumerate(self.actions) if action.kind != "F"), len(self.actions))


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """The action list of every actor. `validate_schedule` says whether the lists belong together.

    Raises:
        InputError: MP142 if an actor is named twice or none is named, MP143 if `microbatches` is below 1.
    """

    name: str
    microbatches: int
    actions: tuple[ActorActions, ...]

    def __post_init__(self) -> None:
        require_positive("microbatches", self.microbatches)
        actors = self.actors
        if not actors:
            raise InputError("MP142", f"schedule {self.name!r} has no actor", "give each stage at least one group")
        for index, actor in enumerate(actors):
            if actor in actors[:index]:
                raise InputError("MP142", f"schedule {self.name!r} names {actor} twice", "join its two action lists")

    @property
    def actors(self) -> tuple[Actor, ...]:
        return tuple(row.actor for row in self.actions)

    @property
    def stages(self) -> int:
        """Number of (virtual) stages: one more than the highest that any action names."""
        return 1 + max((action.stage for row in self.actions for action in row.actions), default=-1)

    @property
    def homes(self) -> dict[int, int]:
        """For each (virtual) stage the stage of the actors that run it."""
        return {action.stage: row.stage for row in self.actions for action in row.actions}

    @property
    def splits_backward(self) -> bool:
        """Whether weight gradients are actions of their own (any W); otherwise each B is the whole backward."""
        return any(action.kind == "W" for row in self.actions for action in row.actions)


def require_positive(what: str, count: int) -> None:
    """Raises MP143 unless `count` is a whole number of at least 1."""
    if not 1 <= count < float("inf") or count != int(count):
        raise InputError("MP143", f"{what} is {count}, it must be a whole number of at least 1")


def format_actions(actions: Iterable[Action]) -> str:
    """`format_actions((Action(0, "F", 0), Action(0, "B", 0)))` is ``'0F0 0B0'``."""
    return " ".join(map(str, actions))


def parse_action(token: str, *, where: str = "") -> Action:
    """Reads ``2F0`` as stage 2, forward, microbatch 0.

    Args:
        token: the text of one action, without blanks.
        where: position to name in the error, such as ``"action 3"``.

    Raises:
        InputError: MP140 with the token, the position and what is wrong with it.
    """
    match = _TOKEN.fullmatch(token)
    if match is None:
        place = f"{where}: " if where else ""
        raise InputError(
            "MP140",
            f"{place}{token!r} is not an action: {_complaint(token)}",
            "write <stage><F, B or W><microbatch>, such as 2F0 for stage 2, forward, microbatch 0",
        )
    return Action(int(match[1]), cast(ActionKind, match[2]), int(match[3]))


def parse_actions(text: str, *, where: str = "") -> tuple[Action, ...]:
    """Reads actions separated by blanks; the inverse of `format_actions`. Positions in errors count from 1."""
    prefix = f"{where}, " if where else ""
    return tuple(parse_action(token, where=f"{prefix}action {at}") for at, token in enumerate(text.split(), 1))


def format_schedule(schedule: Schedule) -> str:
    """One header line and one line an actor, ``stage.group: actions``; the inverse of `parse_schedule`."""
    header = f"schedule {schedule.name} microbatches {schedule.microbatches}"
    rows = (f"{row.stage}.{row.group}: {format_actions(row.actions)}".rstrip() for row in schedule.actions)
    return "\n".join((header, *rows)) + "\n"


def parse_schedule(text: str) -> Schedule:
    """Reads the text form of a schedule. Blank lines are skipped.

    Raises:
        InputError: MP140 for a bad action, MP141 for a bad line, MP142 for an actor named twice or no actor.

    Example:
        >>> parse_schedule("schedule gpipe microbatches 1\\n0.0: 0F0 0B0").actions[0].actions[1]
        Action(stage=0, kind='B', microbatch=0)
    """
    lines = [(number, line.strip()) for number, line in enumerate(text.splitlines(), 1) if line.strip()]
    header = _HEADER.fullmatch(lines[0][1]) if lines else None
    if header is None:
        got = f"line {lines[0][0]} is {lines[0][1]!r}" if lines else "the text is empty"
        raise InputError("MP141", f"not a schedule: {got}", "begin with: schedule <name> microbatches <count>")
    rows = []
    for number, line in lines[1:]:
        match = _ROW.fullmatch(line)
        if match is None:
            hint = "write <stage>.<group>: <actions>, such as 0.0: 0F0 0B0"
            raise InputError("MP141", f"line {number}: {line!r} names no actor", hint)
        actions = parse_actions(match[3], where=f"line {number}")
        rows.append(ActorActions(stage=int(match[1]), group=int(match[2]), actions=actions))
    return Schedule(name=header[1], microbatches=int(header[2]), actions=tuple(rows))


def _complaint(token: str) -> str:
    letters = [char for char in token if not (char.isascii() and char.isdigit())]
    if not letters:
        return "it names no kind"
    if len(letters) > 1:
        return f"it has {len(letters)} characters that are not digits, expected one"
    if letters[0] not in "FBW":
        return f"the kind is {letters[0]!r}, expected F, B or W"
    stage, _, microbatch = token.partition(letters[0])
    for what, digits in (("stage", stage), ("microbatch", microbatch)):
        if not digits:
            return f"the {what} is missing"
        if digits != str(int(digits)):
            return f"the {what} {digits} has leading zeros"
        if len(digits) > 9:
            return f"the {what} {digits} is larger than 999999999"
    return "expected <stage><kind><microbatch>"
