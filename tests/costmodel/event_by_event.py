"""The contended simulation written down plainly: an event for all that begins or ends, handled in order of time, then
of kinds and actors. Slow; what the loops of `costmodel.simulation` are compared with."""

from heapq import heappop, heappush

from costmodel.simulation.contended import Contention, Run, _resources
from costmodel.simulation.costs import Costs
from costmodel.simulation.program import Program, inconsistent

_BESIDE, _BEGIN, _END = 0, 1, 2  # kinds of events, in the order in which those of one time are handled


class EventByEvent:
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
