"""The simulation in which messages share resources and compute slows down beside communication.

A message occupies its own link and every shared resource on its way, such as the network card (NIC) of its node, from
when all of them are free, first come first served, for its whole time. While an actor sends, receives or reduces, its
actions take `compute_slowdown` times as long. Part of the reduction of gradients may run beside the last action.

Ends of actions are handled in order of time, then of actors (`costmodel.simulation.events`). With private links, and
where nothing slows compute down, that is `run_strict` to the last bit.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from math import inf
from typing import NamedTuple, TypeVar

from costmodel.errors import InputError
from costmodel.schedule.actions import Actor
from costmodel.simulation.compiled import loop_for
from costmodel.simulation.costs import STAYS, Costs
from costmodel.simulation.events import Work
from costmodel.simulation.program import Program, inconsistent

_Number = TypeVar("_Number", int, float)


@dataclass(frozen=True, slots=True, kw_only=True)
class Contention:
    """What actors have in common.

    Args:
        shared: by (sender, receiver), names of resources that a message occupies beside its own link.
        compute_slowdown: actions take this many times as long while their actor sends, receives or reduces; at least 1.
        early_reduction: share of the reduction of gradients that runs beside the actor's last action, from 0 to 1; the
            rest comes after it.
    """

    shared: Mapping[tuple[Actor, Actor], tuple[str, ...]] = field(default_factory=dict)
    compute_slowdown: float = 1.0
    early_reduction: float = 0.0

    def __post_init__(self) -> None:
        if not 1.0 <= self.compute_slowdown < inf:
            message = f"the slowdown of compute is {self.compute_slowdown}, it must be at least 1 and finite"
            raise InputError("MP192", message, "write 1.1 for compute that takes 10% longer beside communication")
        if not 0.0 <= self.early_reduction <= 1.0:
            message = f"the early share of the reduction is {self.early_reduction}, it must be from 0 to 1"
            raise InputError("MP192", message, "write 0.5 (or 50%) for half of it")


class Run(NamedTuple):
    """What happened. Lists of lists are by actor, then by step; `reductions` are (start, end) by actor."""

    starts_s: list[list[float]]
    ends_s: list[list[float]]
    wires_s: list[list[float]]  # when the output of each action began to occupy its link; 0 if it has none
    reductions: list[tuple[float, float]]


def run_contended(program: Program, costs: Costs, contention: Contention) -> Run:
    """Runs the program.

    Raises:
        InputError: MP148 if the schedule deadlocks.
    """
    work, early = work_of(program, costs, contention), contention.early_reduction
    *found, complete = loop_for(len(work.needs))(work)
    if not complete:
        raise inconsistent(program.schedule)
    starts_s, ends_s, wires_s = (
        [flat[begin + 1 : end] for begin, end in pairwise(work.first)] for flat in found
    )  # but for the beginnings
    own_s = _reductions_s(costs)
    reductions = []
    for own_starts_s, own_ends_s, reduce_s in zip(starts_s, ends_s, own_s):
        end_s = own_ends_s[-1] if own_ends_s else 0.0
        beside = early if own_ends_s else 0.0
        start_s = own_starts_s[-1] if beside and reduce_s else end_s
        reductions.append((start_s, max(start_s + beside * reduce_s, end_s) + (1.0 - beside) * reduce_s))
    return Run(starts_s, ends_s, wires_s, reductions)


def work_of(program: Program, costs: Costs, contention: Contention) -> Work:
    """What the loop runs."""
    resources, count = _resources(program, costs, contention)
    return Work(
        first=list(accumulate((1 + len(own) for own in program.needs), initial=0)),
        needs=_flat(program.needs, 0),
        fills=_flat(program.fills, -1),
        durations_s=_flat(costs.durations_s, 0.0),
        routes=_flat(costs.routes, STAYS),
        over=[resources[link] for link in costs.link_of],
        wire_s=costs.wire_s,
        latency_s=costs.latency_s,
        takers=[costs.ends[link][1] for link in costs.link_of],
        early_s=[contention.early_reduction * time_s for time_s in _reductions_s(costs)],
        slow=contention.compute_slowdown,
        resources=count,
        microbatches=program.schedule.microbatches,
        cells=program.cells,
    )


def _reductions_s(costs: Costs) -> list[float]:
    """How long each actor reduces gradients."""
    return [sum(stage.reduce_s for stage in stages.values()) for stages in costs.stages]


def _flat(rows: list[list[_Number]], beginning: _Number) -> list[_Number]:
    """The rows after one another, each with what stands for the actor's beginning in front."""
    found: list[_Number] = []
    for row in rows:
        found.append(beginning)
        found.extend(row)
    return found


def _resources(program: Program, costs: Costs, contention: Contention) -> tuple[list[list[int]], int]:
    """For each link the numbers of the resources that its messages occupy, and how many resources there are. What is
    never free later than another of them, as its messages all occupy that one too, is left out."""
    actors = program.schedule.actors
    names: dict[str, int] = {}
    routes: list[list[int]] = []
    count = len(costs.ends)
    users: dict[int, set[int]] = {}
    for link, (source, target) in enumerate(costs.ends):
        over = contention.shared.get((actors[source], actors[target]), ()) if link else ()
        routes.append([link, *(names.setdefault(name, count + len(names)) for name in dict.fromkeys(over))])
        for resource in routes[-1]:
            users.setdefault(resource, set()).add(link)
    for own in routes:
        for resource in own[:]:
            others = [other for other in own if other != resource]
            if any(users[resource] <= users[other] for other in others):
                own.remove(resource)
    return routes, count + len(names)
