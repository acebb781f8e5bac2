"""Changes to a plan's step as users write them: ``stage2``, ``stage2/group0``, ``stage2.B``, ``link1-2``."""

import re
from dataclasses import dataclass

from costmodel.errors import InputError
from costmodel.simulation.changes import PARTS, Problem, delay_link, fail_group, scale_link, scale_stage
from costmodel.units import format_seconds
from planner.planfile.schema import Plan

_STAGE = re.compile(r"stage(\d{1,6})(?:/([^./]+(?:\.[^./]+)*?))?(?:\.([A-Za-z]+))?")
_LINK = re.compile(r"(?:link)?(\d{1,6})-(\d{1,6})")
_GROUP = re.compile(r"group(\d{1,6})")


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """A link between two stages, or a stage, one of its groups, or a part of its time."""

    stage: int
    group: int | None = None
    part: str | None = None
    link: tuple[int, int] | None = None

    def __str__(self) -> str:
        if self.link is not None:
            return f"link {self.link[0]}-{self.link[1]}"
        of = f"{self.part} of " if self.part else ""
        return f"{of}stage {self.stage}" + ("" if self.group is None else f" group {self.group}")


def parse_place(plan: Plan, text: str) -> Place:
    """Reads ``stage2``, ``stage2/group0``, ``stage2/NAME``, ``stage2.B``, ``stage2/group0.B``, ``link1-2`` or ``1-2``.

    Raises:
        InputError: MP190 if it cannot be read or names what the plan does not have.
    """
    link = _LINK.fullmatch(text)
    if link is not None:
        lower, upper = sorted((int(link[1]), int(link[2])))
        return Place(stage=lower, link=(lower, upper))
    match = _STAGE.fullmatch(text)
    if match is None or (match[3] is not None and match[3] not in PARTS):
        raise InputError(
            "MP190",
            f"{text!r} is no stage, group, part or link",
            f"write stage2, stage2/group0, stage2.B (parts: {', '.join(PARTS)}) or link1-2",
        )
    stage = int(match[1])
    if stage >= len(plan.stages):
        raise _no_such(plan, f"stage {stage}")
    return Place(stage=stage, group=_group(plan, stage, match[2]) if match[2] else None, part=match[3])


def slowed(plan: Plan, problem: Problem, text: str, factor: float) -> tuple[Problem, str]:
    """The problem in which a place takes `factor` times as long, and words for that."""
    place = parse_place(plan, text)
    words = f"{place} takes {factor:g}x as long"
    if place.link is not None:
        return scale_link(problem, place.link, factor), words
    changed = scale_stage(problem, place.stage, factor, group=place.group, part=place.part)
    if place.part == "B" and not problem.schedule.splits_backward:  # its B is the whole backward
        changed = scale_stage(changed, place.stage, factor, group=place.group, part="W")
    return changed, words


def delayed(plan: Plan, problem: Problem, text: str, delay_s: float) -> tuple[Problem, str]:
    """The problem in which messages of a link arrive later, and words for that."""
    place = parse_place(plan, text)
    if place.link is None:
        raise InputError("MP190", f"{text!r} is no link", "write 1-2 for the link between stages 1 and 2")
    return delay_link(problem, place.link, delay_s), f"messages of {place} arrive {format_seconds(delay_s)} later"


def failed(plan: Plan, problem: Problem, text: str) -> tuple[Problem, str]:
    """The problem without one group, its microbatches rerouted to the others of its stage, and words for that."""
    place = parse_place(plan, text)
    count = 0 if place.link else len(plan.stages[place.stage].groups)
    if place.link or place.part or (place.group is None and count > 1):
        raise InputError("MP190", f"{text!r} is no group", "write stage1/group0")
    return fail_group(problem, place.stage, place.group or 0), f"stage {place.stage} group {place.group or 0} failed"


def _group(plan: Plan, stage: int, text: str) -> int:
    """Index of a group by ``group0`` or by its name."""
    groups = plan.stages[stage].groups
    names = [group.name for group in groups]
    if text in names:
        return names.index(text)
    number = _GROUP.fullmatch(text)
    if number is None or int(number[1]) >= len(groups):
        known = ", ".join(f"group{at} ({name})" for at, name in enumerate(names))
        raise InputError("MP190", f"stage {stage} has no group {text!r}", f"its groups are {known}")
    return int(number[1])


def _no_such(plan: Plan, what: str) -> InputError:
    return InputError("MP190", f"there is no {what}", f"the plan's stages are 0 to {len(plan.stages) - 1}")
