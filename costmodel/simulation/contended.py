"""The simulation in which messages share resources and compute slows down beside communication, event by event.

A message occupies its own link and every shared resource on its way, such as the network card (NIC) of its node, from
when all of them are free, first come first served, for its whole time. While an actor sends, receives or reduces, its
actions take `compute_slowdown` times as long. Part of the reduction of gradients may run beside the last action.

Events are handled in order of time, then of kinds and actors. Where nothing slows compute down, `shared` does the same
in less time. With private links it is that of `run_strict`, to the last bit.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from heapq import heappop, heappush
from math import inf
from typing import NamedTuple

from costmodel.errors import InputError
from costmodel.schedule.actions import Actor
from costmodel.simulation.costs import Costs
from costmodel.simulation.program import Program, inconsistent
from costmodel.simulation.shared import run_shared

_BESIDE, _BEGIN, _END = 0, 1, 2  # kinds of events, in the order in which those of one time are handled


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
    if contention.compute_slowdown != 1.0:
        return _Events(program, costs, contention).run()
    starts_s, ends_s, wires_s = run_shared(program, costs, *_resources(program, costs, contention))
    reductions = []
    for own_starts_s, own_ends_s, stages in zip(starts_s, ends_s, costs.stages):
        reduce_s, end_s = sum(stage.reduce_s for stage in stages.values()), own_ends_s[-1] if own_ends_s else 0.0
        early = contention.early_reduction if own_ends_s else 0.0
        start_s = own_starts_s[-1] if early and reduce_s else end_s
        reductions.append((start_s, max(start_s + early * reduce_s, end_s) + (1.0 - early) * reduce_s))
    return Run(starts_s, ends_s, wires_s, reductions)


class _Events:
    """The state of a run: what each actor does, when each resource is free, and what happens next."""

    def __init__(self, program: Program, costs: Costs, contention: Contention):
        count = len(program.needs)
        cells, microbatches = program.cells, program.schedule.microbatches
        self.program, self.costs = program, costs
        self.slow, self.early = contention.compute_slowdown, contention.early_reduction
        self.resources, resources = _resources(program, costs, contention)
        self.free_s = [0.0] * resources
        self.at_s = [0.0] * microbatches + [-1.0] * (2 * cells - microbatches) + [0.0] * cells
        self.waiting: dict[int, int] = {}
        self.steps = [0] * count
        self.starts_s: list[list[float]] = [[] for _ in range(count)]
        self.ends_s: list[list[float]] = [[] for _ in range(count)]
        self.wires_s = [[0.0] * len(own) for own in program.needs]
        self.reductions = [(0.0, 0.0)] * count
        self.reduce_s = [sum(stage.reduce_s for stage in stages.values()) for stages in costs.stages]
        self.beside = [0] * count  # transfers and reductions that run beside each actor's compute
        self.left_s = [-1.0] * count  # of the running action at full speed; below 0 if there is none
        self.since_s = [0.0] * count  # when `left_s` was true
        self.versions = [0] * count  # of the running action's end: ends that were put off are ignored
        self.events: list[tuple[float, int, int, int]] = []

    def run(self) -> Run:
        for actor, own in enumerate(self.program.needs):
            if own:
                self.look(actor, 0.0)
            else:
                self.reductions[actor] = (0.0, self.reduce_s[actor])
        events = self.events
        while events:
            now_s, kind, actor, number = heappop(events)
            if kind == _END:
                if number == self.versions[actor]:
                    self.end(actor, now_s)
            elif kind == _BEGIN:
                self.begin(actor, now_s)
            else:
                self.change(actor, now_s, number)
        if self.waiting:
            raise inconsistent(self.program.schedule)
        return Run(self.starts_s, self.ends_s, self.wires_s, self.reductions)

    def look(self, actor: int, now_s: float) -> None:
        """Lets the actor begin its next action when its input is there."""
        slot = self.program.needs[actor][self.steps[actor]]
        ready_s = self.at_s[slot]
        if ready_s < 0.0:
            self.waiting[slot] = actor
        else:
            self.begin_at(actor, max(now_s, ready_s))

    def begin_at(self, actor: int, start_s: float) -> None:
        """Begins an action now or later; where nothing slows it down, its end is known at once."""
        if self.slow == 1.0:
            self.begin(actor, start_s)
        else:
            heappush(self.events, (start_s, _BEGIN, actor, 0))

    def begin(self, actor: int, now_s: float) -> None:
        step = self.steps[actor]
        self.starts_s[actor].append(now_s)
        self.left_s[actor], self.since_s[actor] = self.costs.durations_s[actor][step], now_s
        if step + 1 == len(self.program.needs[actor]) and self.early and self.reduce_s[actor]:
            early_s = self.early * self.reduce_s[actor]
            self.reductions[actor] = (now_s, now_s + early_s)
            self.occupy(actor, now_s, now_s, now_s + early_s)
        self.plan_end(actor, now_s)

    def plan_end(self, actor: int, now_s: float) -> None:
        self.versions[actor] += 1
        rate = self.slow if self.beside[actor] else 1.0
        heappush(self.events, (now_s + self.left_s[actor] * rate, _END, actor, self.versions[actor]))

    def change(self, actor: int, now_s: float, number: int) -> None:
        """More (`number` 1) or less (-1) runs beside the actor."""
        before = self.beside[actor]
        self.beside[actor] = before + number
        if bool(before) == bool(before + number) or self.left_s[actor] < 0.0:
            return
        done_s = (now_s - self.since_s[actor]) / (self.slow if before else 1.0)
        self.left_s[actor], self.since_s[actor] = max(self.left_s[actor] - done_s, 0.0), now_s
        self.plan_end(actor, now_s)

    def occupy(self, actor: int, now_s: float, start_s: float, end_s: float) -> None:
        """Has something run beside the actor from `start_s` to `end_s`."""
        if self.slow == 1.0 or end_s <= start_s:
            return
        if start_s <= now_s:
            self.change(actor, now_s, 1)
        else:
            heappush(self.events, (start_s, _BESIDE, actor, 1))
        heappush(self.events, (end_s, _BESIDE, actor, -1))

    def end(self, actor: int, now_s: float) -> None:
        step = self.steps[actor]
        self.ends_s[actor].append(now_s)
        self.left_s[actor] = -1.0
        self.steps[actor] = step + 1
        fill = self.program.fills[actor][step]
        if fill >= 0:
            self.send(actor, step, fill, now_s)
        if step + 1 < len(self.program.needs[actor]):
            self.look(actor, now_s)
            return
        start_s, early_s = self.reductions[actor] if self.early and self.reduce_s[actor] else (now_s, now_s)
        rest_s = (1.0 - self.early) * self.reduce_s[actor]
        self.reductions[actor] = (start_s, max(early_s, now_s) + rest_s)

    def send(self, actor: int, step: int, fill: int, now_s: float) -> None:
        route = self.costs.routes[actor][step]
        arrival_s = now_s
        if route:
            link = self.costs.link_of[route]
            start_s = now_s
            for resource in self.resources[link]:
                start_s = max(start_s, self.free_s[resource])
            end_s = start_s + self.costs.wire_s[route]
            for resource in self.resources[link]:
                self.free_s[resource] = end_s
            self.wires_s[actor][step] = start_s
            for side in self.costs.ends[link]:
                self.occupy(side, now_s, start_s, end_s)
            arrival_s = end_s + self.costs.latency_s[route]
        self.at_s[fill] = arrival_s
        if fill in self.waiting:
            self.begin_at(self.waiting.pop(fill), arrival_s)


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
