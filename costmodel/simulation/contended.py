"""The simulation in which messages share resources and compute slows down beside communication.

A message occupies its own link and every shared resource on its way, such as the network card (NIC) of its node, from
when all of them are free, first come first served, for its whole time. While an actor sends, receives or reduces, its
actions take `compute_slowdown` times as long. Part of the reduction of gradients may run beside the last action.

Ends of actions are handled in order of time, then of actors: by `shared` where nothing slows compute down, which with
private links is `run_strict` to the last bit, else by `slowed`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import inf
from typing import NamedTuple

from costmodel.errors import InputError
from costmodel.schedule.actions import Actor
from costmodel.simulation.costs import Costs
from costmodel.simulation.program import Program
from costmodel.simulation.shared import run_shared
from costmodel.simulation.slowed import run_slowed


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
    resources, slow = _resources(program, costs, contention), contention.compute_slowdown
    early = contention.early_reduction
    own_s = [sum(stage.reduce_s for stage in stages.values()) for stages in costs.stages]
    if slow == 1.0:
        starts_s, ends_s, wires_s = run_shared(program, costs, *resources)
    else:
        starts_s, ends_s, wires_s = run_slowed(program, costs, *resources, slow, [early * time_s for time_s in own_s])
    reductions = []
    for own_starts_s, own_ends_s, reduce_s in zip(starts_s, ends_s, own_s):
        end_s = own_ends_s[-1] if own_ends_s else 0.0
        beside = early if own_ends_s else 0.0
        start_s = own_starts_s[-1] if beside and reduce_s else end_s
        reductions.append((start_s, max(start_s + beside * reduce_s, end_s) + (1.0 - beside) * reduce_s))
    return Run(starts_s, ends_s, wires_s, reductions)


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
