"""What a simulation needs, from a plan file alone: schedule, times, sends, memory, and which network cards are shared.

A plan has times per stage, of virtual stages too where it was made for them. Under another schedule with several
virtual stages on a stage each takes an equal part. Where a plan does not say what weight gradients take, a schedule
that runs them by themselves gives them `WEIGHT_SHARE` of the backward: an assumption.
"""

from collections.abc import Sequence

from costmodel.errors import InputError
from costmodel.schedule.actions import Actor, Schedule
from costmodel.schedule.schedules import by_name
from costmodel.simulate import SendTimes, StageTimes
from costmodel.simulation.changes import Problem
from costmodel.simulation.ending import waits_of_actors
from costmodel.simulation.memory import HeldBytes
from planner.check.placement import groups_of
from planner.check.timetable import schedule_of, waits_of
from planner.planfile.schema import MemoryPlan, Plan, Transfer

WEIGHT_SHARE = 0.5


def problem_of(plan: Plan, schedule: str | None = None) -> Problem:
    """The plan's own schedule, or one by name, with the plan's times.

    Raises:
        InputError: MP140 to MP143 or MP615 if the schedule cannot be read or is not that of the plan's groups; MP146
            for an unknown name; MP195 if it cuts microbatches; MP617 if an update waits for a stage that the plan does
            not have.
    """
    if schedule is None:
        actions = schedule_of(plan)
    else:
        shares = [tuple(group.microbatches for group in stage.groups) for stage in plan.stages]
        actions = by_name(schedule, len(plan.stages), plan.microbatches, shares)
        if actions.microbatches != plan.microbatches:
            raise InputError(
                "MP195",
                f"schedule {schedule} runs {actions.microbatches} units, the plan has times of {plan.microbatches} "
                "microbatches",
                "a plan's times say nothing about parts of a microbatch",
            )
    waits = waits_of_actors(actions, waits_of(plan)) if _planned(plan, actions) else waits_of(plan)
    return Problem(schedule=actions, times=_times(plan, actions), sends=_sends(plan, actions), waits=waits)


def _planned(plan: Plan, schedule: Schedule) -> bool:
    """Whether the plan has a record of each (virtual) stage of a schedule."""
    return schedule.stages == len(plan.stages)


def held_of(plan: Plan, schedule: Schedule) -> dict[Actor, HeldBytes]:
    """Memory of each actor of the schedule."""
    found = {}
    known = {(stage, group): record.memory for stage, group, record in groups_of(plan)}
    alone = len(known) == 1
    for row in schedule.actions:
        virtual = sorted({action.stage for action in row.actions}) or [row.stage]
        planned = _planned(plan, schedule)
        parts = 1 if planned else len(virtual)
        each = {stage: known[stage, row.group] if planned else known[row.actor] for stage in virtual}
        every = list(each.values()) if planned else [known[row.actor]]
        kept = {stage: _kept_bytes(memory, alone) for stage, memory in each.items()}
        shared = [memory.transient_bytes + memory.reserve_bytes for memory in every]  # one action at a time
        always = sum(memory.total_bytes - memory.saved_bytes for memory in every)
        found[row.actor] = HeldBytes(
            always_bytes=always - (sum(shared) - max(shared)),
            saved_bytes={stage: saved // parts for stage, (saved, _, _) in kept.items()},
            until_weights_bytes={stage: until // parts for stage, (_, until, _) in kept.items()},
            made_bytes={stage: made // parts for stage, (_, _, made) in kept.items()},
            limit_bytes=every[0].limit_bytes or None,
        )
    return found


def _kept_bytes(memory: MemoryPlan, alone: bool) -> tuple[int, int, int]:
    """What a microbatch holds for its B and for its W, and what of the latter B makes. A step that is one program holds
    less than it keeps for B, and nothing of its own for W."""
    if alone:
        held = memory.saved_bytes // max(1, memory.in_flight)
        return held, held, 0
    saved = memory.saved_per_microbatch_bytes
    return saved, memory.until_weights_bytes or saved, memory.made_for_weights_bytes


def shared_nics(plan: Plan, schedule: Schedule) -> dict[tuple[Actor, Actor], tuple[str, ...]]:
    """For each pair of actors the network cards that its messages occupy, one for each node and direction.

    A message leaves all nodes of its sender that the receiver has no devices on, and arrives at all nodes of the
    receiver that the sender has none on. Inside a node no card is used.
    """
    nodes = {(stage, group): _nodes(record.devices) for stage, group, record in groups_of(plan)}
    found = {}
    for source in schedule.actors:
        for target in schedule.actors:
            leaves = [node for node in nodes[source] if node not in nodes[target]]
            enters = [node for node in nodes[target] if node not in nodes[source]]
            if source != target and leaves and enters:
                found[source, target] = tuple([f"{node} out" for node in leaves] + [f"{node} in" for node in enters])
    return found


def actor_label(plan: Plan, actor: Actor) -> str:
    """``stage 1``, with the group's name where the stage has several."""
    groups = plan.stages[actor.stage].groups
    return f"stage {actor.stage}" + (f" {groups[actor.group].name}" if len(groups) > 1 else "")


def _nodes(devices: Sequence[str]) -> list[str]:
    """``group/node`` of each device ``group/node/index``, each once."""
    return list(dict.fromkeys(device.rsplit("/", 1)[0] for device in devices))


def _times(plan: Plan, schedule: Schedule) -> dict[Actor, StageTimes]:
    known = {(stage, group): record.time for stage, group, record in groups_of(plan)}
    split, planned = schedule.splits_backward, _planned(plan, schedule)
    times = {}
    for row in schedule.actions:
        if row.actor not in known:
            raise InputError("MP615", f"the schedule names {row.actor}, which the plan does not have")
        virtual = sorted({action.stage for action in row.actions}) or [row.stage]
        for stage in virtual:
            time, parts = (known[stage, row.group], 1) if planned else (known[row.actor], len(virtual))
            weight_s = (time.weight_s or WEIGHT_SHARE * time.backward_s) if split else 0.0
            times[Actor(stage, row.group)] = StageTimes(
                forward_s=time.forward_s / parts,
                backward_s=(time.backward_s - weight_s) / parts,
                weight_s=weight_s / parts,
                reduce_s=time.gradient_reduction_s / parts,
                exchange_s=time.exchange_s / parts,
                update_s=time.optimizer_s / parts,
            )
    return times


def _sends(plan: Plan, schedule: Schedule) -> dict[tuple[Actor, Actor], SendTimes]:
    """Between groups of consecutive (virtual) stages, by the transfers of the stages that they are on.

    Where virtual stages lead from the last stage back to the first, the plan has no figure, and the slowest of its
    transfers stands in.
    """
    found = {transfer.from_stage: _links(transfer) for transfer in plan.transfers}
    every = [send for links in found.values() for send in links.values()]
    slowest = max(every, key=lambda send: send.activation_s + send.gradient_s + send.latency_s, default=_FREE)
    actors: dict[int, list[Actor]] = {}
    for row in schedule.actions:
        for stage in sorted({action.stage for action in row.actions}):
            actors.setdefault(stage, []).append(row.actor)
    sends = {}
    for stage in range(schedule.stages - 1):
        for source in actors.get(stage, []):
            for target in actors.get(stage + 1, []):
                if source == target:
                    continue
                send = slowest
                if _planned(plan, schedule):
                    links = found.get(stage, {})
                    send = links.get((source.group, target.group), links.get(_ANY, _FREE))
                elif abs(source.stage - target.stage) <= 1:
                    lower, upper = sorted((source, target))
                    links = found.get(lower.stage, {})
                    send = links.get((lower.group, upper.group), links.get(_ANY, _FREE))
                sends[Actor(stage, source.group), Actor(stage + 1, target.group)] = send
    return sends


_FREE = SendTimes(activation_s=0.0, gradient_s=0.0)
_ANY = (-1, -1)


def _links(transfer: Transfer) -> dict[tuple[int, int], SendTimes]:
    """Send times by (group, group of the next stage); for any pair under _ANY where the plan has but one figure."""
    if not transfer.links:
        back = transfer.gradient_bytes / transfer.bytes if transfer.bytes else 0.0
        return {_ANY: SendTimes(activation_s=transfer.time_s, gradient_s=transfer.time_s * back)}
    return {
        (link.from_group, link.to_group): SendTimes(
            activation_s=link.activation_s, gradient_s=link.gradient_s, latency_s=link.latency_s
        )
        for link in transfer.links
    }
