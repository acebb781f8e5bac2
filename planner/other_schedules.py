"""Another schedule than a plan's own, on the devices of its stages, where the plan has times for it."""

from collections.abc import Sequence

from costmodel.errors import InputError
from costmodel.schedule.actions import Schedule
from costmodel.schedule.registry import schedule_family
from costmodel.schedule.schedules import NAMES, WITH_CHUNKS, by_name
from planner.device_stages import device_stages, homes_of
from planner.planfile.schema import GroupPlan, Plan


def other_schedule(plan: Plan, name: str) -> Schedule:
    """The schedule of a name on the devices of the plan's stages.

    Raises:
        InputError: MP146 for a name that there is not, or that needs more than the plan says; MP195 if it cuts
            microbatches; MP196 if it needs stages that the plan has no times of; MP615 if the plan's schedule numbers
            its actors in another way than by 0, 1, ...
    """
    if plan.schedule.chunks > 1:
        raise InputError(
            "MP195",
            f"the plan has times of {plan.schedule.chunks} chunks of each sequence, schedule {name} runs whole ones",
            f"plan with --schedule {name}",
        )
    parts = device_stages(plan)
    if list(parts) != list(range(len(parts))):
        numbers = ", ".join(map(str, parts))
        raise InputError("MP615", f"the plan's schedule numbers its actors' stages {numbers}, not from 0 on")
    chunks = {len(own) for own in parts.values()}
    family = schedule_family(name, NAMES if chunks == {1} else (*NAMES, *WITH_CHUNKS))
    if family.chunks != 1 and chunks != {1} and (len(chunks) > 1 or family.chunks not in ("chunks", "layers", *chunks)):
        wanted = f"{family.chunks} stages" if isinstance(family.chunks, int) else "equally many stages"
        raise InputError(
            "MP196",
            f"schedule {name} runs {wanted} on each set of devices, the plan has times of "
            f"{' or '.join(map(str, sorted(chunks)))} there",
            f"1f1b, gpipe and zb-h1 join the stages of each set of devices; or plan with --schedule {name}",
        )
    groups = [plan.stages[own[0]].groups for own in parts.values()]
    shares = [tuple(group.microbatches for group in own) for own in groups]
    actions = by_name(name, len(parts), plan.microbatches, shares, None if chunks == {1} else max(chunks))
    if actions.microbatches != plan.microbatches:
        raise InputError(
            "MP195",
            f"schedule {name} runs {actions.microbatches} units, the plan has times of {plan.microbatches} "
            "microbatches",
            f"a plan's times say nothing about parts of a microbatch; use one of {', '.join(NAMES)}",
        )
    if as_planned(plan, actions):
        _require_alike(plan, actions)
    return actions


def _require_alike(plan: Plan, schedule: Schedule) -> None:
    """Raises MP196 where a stage would run on devices that are not like those that the plan has times of it for."""
    homes = homes_of(plan)
    for row in schedule.actions:
        for stage in sorted({action.stage for action in row.actions}):
            there, here = (plan.stages[s].groups for s in (row.stage, stage))
            if homes[stage] != row.stage and [_like(g) for g in there] != [_like(g) for g in here]:
                raise InputError(
                    "MP196",
                    f"schedule {schedule.name} runs stage {stage} on the devices of stage {row.stage} "
                    f"({_words(there)}), the plan has times of it on others ({_words(here)})",
                    f"plan with --schedule {schedule.name}, or simulate one that leaves stages where they are",
                )


def _like(group: GroupPlan) -> tuple[object, ...]:
    """What times of a stage depend on of the devices that run it."""
    return group.kind, len(group.devices), tuple((axis.name, axis.size) for axis in group.mesh), group.microbatches


def _words(groups: Sequence[GroupPlan]) -> str:
    return ", ".join(f"{len(group.devices)} x {group.kind}" for group in groups)


def as_planned(plan: Plan, schedule: Schedule) -> bool:
    """Whether the plan has a record of each (virtual) stage of a schedule."""
    return schedule.stages == len(plan.stages)


def is_moved(plan: Plan, schedule: Schedule) -> bool:
    """Whether a schedule runs the plan's stages on other devices than the plan does."""
    homes = homes_of(plan)
    return as_planned(plan, schedule) and any(homes[stage] != home for stage, home in schedule.homes.items())
