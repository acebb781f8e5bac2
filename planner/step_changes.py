"""Changes to a plan's step as users write them: ``stage2``, ``stage2/group0``, ``stage2.B``, ``link1-2``.

Numbers are those of the plan's (virtual) stages, as `explain` and a simulated step print them. A change is to devices,
or to the link between them: it holds for all stages that are there.
"""

import re
from dataclasses import dataclass

from costmodel.errors import InputError
from costmodel.simulation.changes import PARTS, Problem, delay_link, fail_group, scale_link, scale_stage
from costmodel.units import format_seconds
from planner.device_stages import device_stages, homes_of, link_label, places, stage_label
from planner.planfile.schema import Plan

_STAGE = re.compile(r"stage(\d{1,6})(?:/([^./]+(?:\.[^./]+)*?))?(?:\.([A-Za-z]+))?")
_LINK = re.compile(r"(?:link)?(\d{1,6})-(\d{1,6})")
_GROUP = re.compile(r"group(\d{1,6})")


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """A link between two stages, or a stage, one of its groups, or a part of its time. Stages are those of the plan."""

    stage: int
    group: int | None = None
    part: str | None = None
    link: tuple[int, int] | None = None


def parse_place(plan: Plan, text: str) -> Place:
    """Reads ``stage2``, ``stage2/group0``, ``stage2/NAME``, ``stage2.B``, ``stage2/group0.B``, ``link1-2`` or ``1-2``.

    Raises:
        InputError: MP190 if it cannot be read or names what the plan does not have.
    """
    link = _LINK.fullmatch(text)
    if link is not None:
        lower, upper = sorted((int(link[1]), int(link[2])))
        if upper >= len(plan.stages):
            raise _no_such(plan, f"link {lower}-{upper}")
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
    """The problem in which a place takes `factor` times as long, and words for that. All stages on the devices of a
    stage change with it, and all messages between the devices of two stages.

    Raises:
        InputError: MP190 if there is no such place, or W of a schedule that has none; MP193 for a bad factor.
    """
    place = parse_place(plan, text)
    if place.link is not None:
        changed = scale_link(problem, _ends(plan, problem, place.link), factor)
        return changed, f"{_link_words(plan, place.link)} takes {factor:g}x as long"
    if place.part == "W" and not problem.schedule.splits_backward:
        raise InputError(
            "MP190",
            f"{text!r}: schedule {problem.schedule.name} runs no W by itself, it is part of its B",
            f"change {text.removesuffix('.W')}.B, or simulate a schedule that splits backwards, as zb-h1 does",
        )
    home = homes_of(plan)[place.stage]
    changed = scale_stage(problem, home, factor, group=place.group, part=place.part)
    if place.part == "B" and not problem.schedule.splits_backward:  # its B is the whole backward
        changed = scale_stage(changed, home, factor, group=place.group, part="W")
    of = f"{place.part} of " if place.part else ""
    return changed, f"{of}{_stage_words(plan, place.stage, place.group)} takes {factor:g}x as long"


def delayed(plan: Plan, problem: Problem, text: str, delay_s: float) -> tuple[Problem, str]:
    """The problem in which messages between the devices of two stages arrive later, and words for that.

    Raises:
        InputError: MP190 if there is no such link; MP193 for a bad delay.
    """
    place = parse_place(plan, text)
    if place.link is None:
        raise InputError("MP190", f"{text!r} is no link", "write 1-2 for the link between stages 1 and 2")
    changed = delay_link(problem, _ends(plan, problem, place.link), delay_s)
    return changed, f"messages of {_link_words(plan, place.link)} arrive {format_seconds(delay_s)} later"


def failed(plan: Plan, problem: Problem, text: str) -> tuple[Problem, str]:
    """The problem without one group, its microbatches rerouted to the others of its stage, and words for that. The
    group fails in all stages that its devices run.

    Raises:
        InputError: MP190 if there is no such group; MP194 if its stage has no other.
    """
    place = parse_place(plan, text)
    count = 0 if place.link else len(plan.stages[place.stage].groups)
    if place.link or place.part or (place.group is None and count > 1):
        raise InputError("MP190", f"{text!r} is no group", "write stage1/group0")
    group = place.group or 0
    if count == 1:
        raise InputError(
            "MP194",
            f"{_stage_words(plan, place.stage, group)} has no peers to take over its microbatches: its stage has no "
            "other group",
            "only a stage with several groups goes on without one of them; plan again without the failed devices",
        )
    changed = fail_group(problem, homes_of(plan)[place.stage], group)
    return changed, f"{_stage_words(plan, place.stage, group)} failed"


def _ends(plan: Plan, problem: Problem, link: tuple[int, int]) -> tuple[int, int]:
    """Stages of the actors at a link's ends.

    Raises:
        InputError: MP190 if they are one, or nothing is sent between them.
    """
    homes = homes_of(plan)
    ends = tuple(sorted(homes[stage] for stage in link))
    if ends[0] == ends[1] and link[0] != link[1]:
        message = f"there is no link {link[0]}-{link[1]}: both stages are on the same devices"
        raise InputError("MP190", message, "; ".join(places(plan)))
    runs = problem.schedule.homes
    used = {tuple(sorted(runs.get(actor.stage, actor.stage) for actor in edge)) for edge in problem.sends or {}}
    if ends not in used:
        raise _no_such(plan, f"link {link[0]}-{link[1]}")
    return ends


def _stage_words(plan: Plan, stage: int, group: int | None) -> str:
    words = f"stage {stage_label(device_stages(plan), homes_of(plan)[stage])}"
    return words + ("" if group is None else f" group {group}")


def _link_words(plan: Plan, link: tuple[int, int]) -> str:
    homes = homes_of(plan)
    return f"link {link_label(device_stages(plan), (homes[link[0]], homes[link[1]]))}"


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
    return InputError("MP190", f"there is no {what}", "; ".join(places(plan)))
