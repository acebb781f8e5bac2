"""The stages of a plan by the devices that run them.

A plan numbers its (virtual) stages, and whatever names a stage names it by that number: the rows of `explain`, the
labels of a simulated step, ``stage2`` and ``1-2`` in changes. Under a looped schedule several of them are on the same
devices, a *device stage*; the actors of a schedule are device stages. What happens to devices or to the network between
them happens to all stages there.
"""

from collections.abc import Iterator, Mapping

from costmodel.schedule.actions import Actor
from costmodel.units import format_count
from planner.check.timetable import actors_of
from planner.planfile.schema import Plan

MOST_NAMED = 3


def device_stages(plan: Plan) -> dict[int, tuple[int, ...]]:
    """Stage of actors -> the plan's stages that it runs, in order; each stage alone where none shares its devices."""
    found: dict[int, list[int]] = {}
    for place, actor in actors_of(plan).items():
        if place.stage not in (own := found.setdefault(actor.stage, [])):
            own.append(place.stage)
    return {home: tuple(own) for home, own in sorted(found.items())}


def homes_of(plan: Plan) -> dict[int, int]:
    """Stage of the plan -> stage of the actors that run it."""
    return {stage: home for home, own in device_stages(plan).items() for stage in own}


def stage_label(parts: Mapping[int, tuple[int, ...]], home: int) -> str:
    """Stages of the plan on one set of devices: ``2``, or ``0+7``, ``0+4+..+12``.

    Args:
        parts: `device_stages`.
        home: stage of actors.
    """
    own = parts[home]
    return "+".join(map(str, own)) if len(own) <= MOST_NAMED else f"{own[0]}+{own[1]}+..+{own[-1]}"


def actor_label(plan: Plan, actor: Actor) -> str:
    """``stage 1``, ``stage 0+7`` where the devices run several, with the group's name where the stage has several."""
    parts = device_stages(plan)
    groups = plan.stages[parts[actor.stage][0]].groups
    return f"stage {stage_label(parts, actor.stage)}" + (f" {groups[actor.group].name}" if len(groups) > 1 else "")


def stages_words(plan: Plan) -> str:
    """``4 stages``, ``8 stages on 4 sets of devices``."""
    homes = len(device_stages(plan))
    words = format_count(len(plan.stages), "stage", "stages")
    return words + (f" on {format_count(homes, 'set', 'sets')} of devices" if homes < len(plan.stages) else "")


def borders_between(parts: Mapping[int, tuple[int, ...]], ends: tuple[int, int]) -> tuple[tuple[int, int], ...]:
    """(stage, next stage) of the plan wherever one is on the devices `ends[0]` and the other on `ends[1]`."""
    home = {stage: at for at, own in parts.items() for stage in own}
    return tuple((s, s + 1) for s in range(len(home) - 1) if sorted((home[s], home[s + 1])) == sorted(ends))


def link_label(parts: Mapping[int, tuple[int, ...]], ends: tuple[int, int]) -> str:
    """``0-1``; ``0-1 (and 6-7)`` where messages of several borders between stages go over one link.

    Args:
        parts: `device_stages`.
        ends: stages of actors, by which other schedules may join stages that the plan does not.
    """
    names = [f"{a}-{b}" for a, b in borders_between(parts, ends)]
    names = names or ["-".join(str(parts[home][0]) for home in sorted(ends))]
    more = names[1:] if len(names) <= MOST_NAMED else [*names[1:MOST_NAMED], ".."]
    return names[0] + (f" (and {', '.join(more)})" if more else "")


def places(plan: Plan) -> Iterator[str]:
    """What the plan has, in words: its stages, which are on the same devices, and its links."""
    parts = device_stages(plan)
    last = len(plan.stages) - 1
    yield f"the plan's stages are 0 to {last}" if last else "the plan has stage 0 only"
    together = [" and ".join(map(str, own)) for own in parts.values() if len(own) > 1]
    if together:
        yield f"on the same devices are {_some(together)}"
    home = homes_of(plan)
    links = dict.fromkeys(tuple(sorted((home[s], home[s + 1]))) for s in range(last) if home[s] != home[s + 1])
    if links:
        yield f"links are {_some([link_label(parts, ends) for ends in links])}"


def _some(names: list[str]) -> str:
    shown = names if len(names) <= 2 * MOST_NAMED + 1 else [*names[: 2 * MOST_NAMED - 1], "..", names[-1]]
    return ", ".join(shown)
