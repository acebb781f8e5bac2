"""A plan's memory by the devices that hold it: under a looped schedule they run several of its (virtual) stages."""

from collections.abc import Iterator
from dataclasses import dataclass

from costmodel.schedule.actions import Actor
from planner.check.timetable import actors_of
from planner.planfile.schema import MemoryPlan, Plan

MEMORY_ITEMS = (
    "parameters",
    "gradients",
    "arising",
    "optimizer",
    "inputs",
    "saved",
    "transient",
    "buffers",
    "update",
    "reserve",
)
SHARED_ITEMS = ("transient", "reserve")  # once a device, whatever number of virtual stages it runs


def device_bytes(plan: Plan) -> dict[Actor, int]:
    """Bytes on each device of an actor, by its first (stage, group). Its virtual stages run one action at a time: they
    share the reserve and the largest transient."""
    return {min(row.places): row.total_bytes for row in device_memory(plan)}


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceMemory:
    """Bytes on each device of an actor, as `device_bytes`.

    Attributes:
        places: the (stages, group) of the plan that the actor runs, in order.
        items: by `MEMORY_ITEMS`, transient and reserve those of the place that needs most of both.
        in_flight: microbatches of all places.
    """

    actor: Actor
    places: tuple[Actor, ...]
    items: dict[str, int]
    total_bytes: int
    limit_bytes: int
    in_flight: int


def device_memory(plan: Plan) -> Iterator[DeviceMemory]:
    """Memory of every actor, in order of its first place."""
    members: dict[Actor, list[Actor]] = {}
    for place, actor in actors_of(plan).items():
        members.setdefault(actor, []).append(place)
    for actor, places in sorted(members.items(), key=lambda item: min(item[1])):
        each = [plan.stages[p.stage].groups[p.group].memory for p in sorted(places)]
        fullest = max(each, key=_shared_bytes)
        yield DeviceMemory(
            actor=actor,
            places=tuple(sorted(places)),
            items={
                name: getattr(fullest, f"{name}_bytes")
                if name in SHARED_ITEMS
                else sum(getattr(m, f"{name}_bytes") for m in each)
                for name in MEMORY_ITEMS
            },
            total_bytes=sum(m.total_bytes - _shared_bytes(m) for m in each) + _shared_bytes(fullest),
            limit_bytes=min(m.limit_bytes for m in each),
            in_flight=sum(m.in_flight for m in each),
        )


def _shared_bytes(memory: MemoryPlan) -> int:
    return sum(getattr(memory, f"{name}_bytes") for name in SHARED_ITEMS)


__all__ = ["MEMORY_ITEMS", "DeviceMemory", "device_bytes", "device_memory"]
