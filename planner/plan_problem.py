"""What a simulation needs, from a plan file alone: schedule, times, sends, memory, and which network cards are shared.

A plan has times of each of its (virtual) stages. Another schedule may run other stages on the same devices:

* as many: the plan's own, perhaps on other devices, if all devices are alike;
* one on each set of devices: the plan's stages there are *joined*, their times and memory added;
* several on each set of devices, from a plan with one: each is *split* into equal parts.

Where a plan does not say what weight gradients take, a schedule that runs them by themselves gives them `WEIGHT_SHARE`
of the backward: an assumption.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace

from costmodel.errors import InputError
from costmodel.schedule.actions import Actor, Schedule
from costmodel.simulate import SendTimes, StageTimes
from costmodel.simulation.changes import Problem
from costmodel.simulation.ending import waits_at_homes
from costmodel.simulation.memory import HeldBytes
from planner.check.placement import groups_of, leads_on
from planner.check.timetable import schedule_of, waits_of
from planner.device_stages import device_stages, homes_of
from planner.other_schedules import as_planned, other_schedule
from planner.planfile.schema import MemoryPlan, Plan, TimePlan, Transfer

WEIGHT_SHARE = 0.5
ROUNDING = 1e-9


def problem_of(plan: Plan, schedule: str | None = None) -> Problem:
    """The plan's own schedule, or one by name, with the plan's times.

    Raises:
        InputError: MP140 to MP143 or MP615 if the schedule cannot be read or is not that of the plan's groups; MP146
            for a name that there is not, or that needs more than the plan says; MP195 if it cuts microbatches; MP196 if
            it needs stages that the plan has no times of; MP616 if a transfer does not lead to the next stage; MP617 if
            an update waits for a stage that the plan does not have.
    """
    _check_transfers(plan)
    actions = schedule_of(plan) if schedule in (None, plan.schedule.name) else other_schedule(plan, schedule)
    homes = actions.homes if as_planned(plan, actions) else homes_of(plan)
    waits = waits_at_homes(homes, waits_of(plan))
    return Problem(schedule=actions, times=_times(plan, actions), sends=_sends(plan, actions), waits=waits)


def _check_transfers(plan: Plan) -> None:
    """Raises InputError MP616 for a transfer that does not lead from a stage of the plan to the next."""
    count = len(plan.stages)
    for at, transfer in enumerate(plan.transfers):
        if not leads_on(transfer, count):
            message = f"transfers[{at}] leads from stage {transfer.from_stage} to stage {transfer.to_stage} of "
            raise InputError("MP616", f"{message}{count} stages", "a transfer leads from a stage to the next one")


def assumes_weights(plan: Plan, schedule: Schedule) -> bool:
    """Whether a schedule runs weight gradients by themselves of which the plan has no time."""
    every = (record.time for _, _, record in groups_of(plan))
    return schedule.splits_backward and any(time.backward_s > 0.0 and not time.weight_s for time in every)


@dataclass(frozen=True, slots=True)
class _Part:
    """What of the plan a (virtual) stage of a schedule is: the stages together, divided by `share`."""

    stages: tuple[int, ...]
    share: int = 1


def _parts(plan: Plan, schedule: Schedule) -> dict[Actor, _Part]:
    """By (virtual stage, group).

    Raises:
        InputError: MP615 for an actor that the plan does not have.
    """
    homes, found = device_stages(plan), {}
    for row in schedule.actions:
        virtual = sorted({action.stage for action in row.actions}) or [row.stage]
        parts = dict.fromkeys(virtual, _Part(homes.get(row.stage, ()), len(virtual)))
        if as_planned(plan, schedule):
            parts = {stage: _Part((stage,)) for stage in virtual}
        every = {row.stage} | {own for part in parts.values() for own in part.stages}
        if row.stage not in homes or any(not 0 <= row.group < len(plan.stages[own].groups) for own in every):
            raise InputError("MP615", f"the schedule names {row.actor}, which the plan does not have")
        found |= {Actor(stage, row.group): part for stage, part in parts.items()}
    return found


def held_of(plan: Plan, schedule: Schedule) -> dict[Actor, HeldBytes]:
    """Memory of each actor of the schedule."""
    found = {}
    known = {(stage, group): record.memory for stage, group, record in groups_of(plan)}
    alone = len(known) == 1
    parts = _parts(plan, schedule)
    for row in schedule.actions:
        virtual = sorted({action.stage for action in row.actions}) or [row.stage]
        own = {stage: parts[Actor(stage, row.group)] for stage in virtual}
        every = [known[s, row.group] for s in dict.fromkeys(s for part in own.values() for s in part.stages)]
        shared = [memory.transient_bytes + memory.reserve_bytes for memory in every]  # one action at a time
        always = sum(memory.total_bytes - memory.saved_bytes for memory in every)

        def kept(at: int, own: Mapping[int, _Part] = own, group: int = row.group) -> dict[int, int]:
            return {
                stage: sum(_kept_bytes(known[s, group], alone)[at] for s in part.stages) // part.share
                for stage, part in own.items()
            }

        found[row.actor] = HeldBytes(
            always_bytes=always - (sum(shared) - max(shared)),
            saved_bytes=kept(0),
            until_weights_bytes=kept(1),
            made_bytes=kept(2),
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
    nodes = {
        (home, group): _nodes(record.devices)
        for home, own in device_stages(plan).items()
        for group, record in enumerate(plan.stages[own[0]].groups)
    }
    found = {}
    for source in schedule.actors:
        for target in schedule.actors:
            leaves = [node for node in nodes[source] if node not in nodes[target]]
            enters = [node for node in nodes[target] if node not in nodes[source]]
            if source != target and leaves and enters:
                found[source, target] = tuple([f"{node} out" for node in leaves] + [f"{node} in" for node in enters])
    return found


def _nodes(devices: Sequence[str]) -> list[str]:
    """``group/node`` of each device ``group/node/index``, each once."""
    return list(dict.fromkeys(device.rsplit("/", 1)[0] for device in devices))


def _times(plan: Plan, schedule: Schedule) -> dict[Actor, StageTimes]:
    known = {(stage, group): record.time for stage, group, record in groups_of(plan)}
    times = {}
    for place, part in _parts(plan, schedule).items():
        every = [_stage_times(known[stage, place.group], schedule.splits_backward) for stage in part.stages]
        if len(every) == part.share == 1:
            times[place] = every[0]
            continue
        names = [field.name for field in fields(StageTimes) if field.name.endswith("_s")]
        times[place] = StageTimes(**{name: sum(getattr(time, name) for time in every) / part.share for name in names})
    return times


def _stage_times(time: TimePlan, split: bool) -> StageTimes:
    weight_s = (time.weight_s or WEIGHT_SHARE * time.backward_s) if split else 0.0
    if time.backward_s < weight_s <= time.backward_s * (1.0 + ROUNDING):  # all of it is weight gradients
        weight_s = time.backward_s
    return StageTimes(
        forward_s=time.forward_s,
        backward_s=time.backward_s - weight_s,
        weight_s=weight_s,
        reduce_s=time.gradient_reduction_s,
        exchange_s=time.exchange_s,
        update_s=time.optimizer_s,
        forward_factors=time.chunk_forward,
        backward_factors=time.chunk_backward,
    )


def _sends(plan: Plan, schedule: Schedule) -> dict[tuple[Actor, Actor], SendTimes]:
    """Between groups of consecutive (virtual) stages: the plan's own figures for a border that it has, of the same
    devices; else those of the slowest transfer between these devices, its bytes those of the border where these are
    known, its rate in each direction that of whatever the plan sends in that direction. Where the plan has none between
    them either, its slowest transfer stands in."""
    actors: dict[int, list[Actor]] = {}
    for row in schedule.actions:
        for stage in sorted({action.stage for action in row.actions}):
            actors.setdefault(stage, []).append(row.actor)
    known = _Transfers(plan)
    sends = {}
    for stage in range(schedule.stages - 1):
        border = stage if as_planned(plan, schedule) else None
        for source in actors.get(stage, []):
            for target in actors.get(stage + 1, []):
                if source != target:
                    sends[Actor(stage, source.group), Actor(stage + 1, target.group)] = known.send(
                        border, source, target
                    )
    return sends


class _Transfers:
    """What messages take by the devices that they go between."""

    def __init__(self, plan: Plan):
        homes = homes_of(plan)
        self.by_border = {transfer.from_stage: transfer for transfer in plan.transfers}
        self.between: dict[tuple[int, int], list[Transfer]] = {}
        for transfer in plan.transfers:
            ends = homes.get(transfer.from_stage, -1), homes.get(transfer.to_stage, -1)
            self.between.setdefault(ends, []).append(transfer)
        self.homes = homes

    def send(self, border: int | None, source: Actor, target: Actor) -> SendTimes:
        """What a message of a border of the plan (None: of a border that the plan does not have) takes between two
        actors."""
        there, back = (source.stage, target.stage), (target.stage, source.stage)
        own = self.by_border.get(border) if border is not None else None
        if own is not None and (self.homes[own.from_stage], self.homes[own.to_stage]) == there:
            return _link(own, source.group, target.group)
        found = [
            _priced(own or known, known, _link(known, source.group, target.group))
            for known in self.between.get(there, ())
        ]
        if there != back:
            found += [
                _priced(own or known, known, _link(known, target.group, source.group), turned=True)
                for known in self.between.get(back, ())
            ]
        if not found:
            found = [
                _priced(own or known, known, send)
                for known in self.by_border.values()
                for send in _links(known).values()
            ]
        return max(found, key=_slowness, default=_FREE)


def _slowness(send: SendTimes) -> float:
    return send.activation_s + send.gradient_s + send.latency_s


def _priced(message: Transfer, known: Transfer, send: SendTimes, *, turned: bool = False) -> SendTimes:
    """What the bytes of `message` take at the rates of `send`, which is of the transfer `known`.

    Args:
        turned: whether `message` leads from the devices that `known` leads to: its activations go where the gradients
            of `known` go, and its gradients where the activations go.
    """
    ahead, back = (send.activation_s, known.bytes), (send.gradient_s, known.gradient_bytes)
    if turned:
        ahead, back = back, ahead
    return replace(
        send,
        activation_s=_at_rate(message.bytes, ahead, back),
        gradient_s=_at_rate(message.gradient_bytes, back, ahead),
    )


def _at_rate(size_bytes: int, way: tuple[float, int], other: tuple[float, int]) -> float:
    """Seconds of so many bytes where (seconds, bytes) went the same way; where no bytes did, at the rate of the other
    way."""
    time_s, known_bytes = way if way[1] else other
    return time_s * (size_bytes / known_bytes) if known_bytes else way[0]


def _link(transfer: Transfer, source: int, target: int) -> SendTimes:
    links = _links(transfer)
    return links.get((source, target), links.get(_ANY, _FREE))


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
