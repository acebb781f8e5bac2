"""Slack: how much delay the link at each border between stages absorbs, for a given schedule with given times.

Let M(d) be the end of the step if every message over a link, both ways, arrives d later. It is the longest path through
the schedule, and a path that crosses the link n times grows by n·d: M is convex and piecewise linear in d. A link joins
the actors of two stages; where these run several virtual stages it is at several borders, b of them, and has one slack.
Two questions:

    free_s      largest d with M(d) = M(0): the step is not a bit longer;
    absorbs_s   largest d with M(d) ≤ M(0) + 2·b·d: a microbatch crosses each border once each way, so filling and
                draining the pipeline may cost 2·b·d once, but no more. Beyond it every so many microbatches pay again.
                                                                                                                (K1)

For stages alike and m microbatches, `absorbs_s` is what the slow-link law gives for the period, (Δ - 1)·T/2 for fused
backwards and ((Δ - 1)·T + W)/2 in the order B, W, F, or up to a few T/m more, since a step ends. Both are found
exactly, by Newton steps along critical paths, from the right: K1 first, which is the weaker of the two.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import inf

from costmodel.simulation.changes import Problem
from costmodel.simulation.costs import Costs, costs_of
from costmodel.simulation.ending import endings_of
from costmodel.simulation.program import Program, flatten
from costmodel.simulation.records import UpdateWait
from costmodel.simulation.strict import run_strict

_ROUNDING = 1e-9
_MOST_STEPS = 60


@dataclass(frozen=True, slots=True, kw_only=True)
class BorderSlack:
    """What the link at the border between the (virtual) stages `stage` and `stage` + 1 absorbs.

    Args:
        free_s: one-way delay beyond the planned one that leaves the step as it is.
        absorbs_s: one-way delay beyond the planned one that leaves the period as it is; infinite where no delay,
            however long, costs more than (K1) allows.
    """

    stage: int
    free_s: float
    absorbs_s: float


def border_slacks(problem: Problem) -> tuple[BorderSlack, ...]:
    """The slack at every border that messages cross, of each link by itself while the others are as planned.

    Raises:
        InputError: as `simulate`.
    """
    program = flatten(problem.schedule)
    costs = costs_of(program, problem.times, problem.sends)
    paths = _Paths(program, costs, problem.waits or {})
    homes = problem.schedule.homes
    links: dict[tuple[int, ...], list[int]] = {}
    for border in sorted({b for b in paths.borders if b >= 0}):
        links.setdefault(tuple(sorted((homes[border], homes[border + 1]))), []).append(border)
    found = {border: paths.slack(frozenset(own)) for own in links.values() for border in own}
    return tuple(
        BorderSlack(stage=border, free_s=found[border][0], absorbs_s=found[border][1]) for border in sorted(found)
    )


class _Paths:
    """The step under delays, and how often its critical path crosses some borders."""

    def __init__(self, program: Program, costs: Costs, waits: Mapping[int, UpdateWait]):
        self.program, self.costs, self.waits = program, costs, waits
        self.borders = [-1] * len(costs.link_of)  # of each route
        self.makers: dict[int, tuple[int, int]] = {}  # slot -> (actor, step) that fills it
        self.before: list[list[int]] = []  # for each action that sends, the step of the one before on its link
        cells, microbatches = program.cells, program.schedule.microbatches
        for actor, (needs, fills, routes) in enumerate(zip(program.needs, program.fills, costs.routes)):
            last: dict[int, int] = {}
            own = [-1] * len(needs)
            for step, (need, fill, route) in enumerate(zip(needs, fills, routes)):
                if fill >= 0:
                    self.makers[fill] = (actor, step)
                if route:
                    kind, cell = divmod(need, cells)
                    self.borders[route] = cell // microbatches - kind
                    own[step] = last.get(costs.link_of[route], -1)
                    last[costs.link_of[route]] = step
            self.before.append(own)
        self.start_s, _ = self.run(frozenset(), 0.0)

    def slack(self, borders: frozenset[int]) -> tuple[float, float]:
        """free_s and absorbs_s of the link at these borders."""
        scale_s = max(self.start_s, 1e-30)
        far_s = 2.0 * scale_s
        absorbs_s = self._largest_s(borders, 2 * len(borders), far_s)
        free_s = self._largest_s(borders, 0, min(absorbs_s, far_s))
        free_s, absorbs_s = (d if d > _ROUNDING * scale_s else 0.0 for d in (free_s, absorbs_s))
        return free_s, absorbs_s if absorbs_s < far_s else inf

    def _largest_s(self, borders: frozenset[int], slope: int, delay_s: float) -> float:
        """Largest d ≤ `delay_s` with M(d) ≤ M(0) + slope·d: where a critical path's line meets that line."""
        for _ in range(_MOST_STEPS):
            makespan_s, crossings = self.run(borders, delay_s)
            if makespan_s <= self.start_s * (1.0 + _ROUNDING) + slope * delay_s or crossings <= slope:
                return delay_s
            # the path takes makespan - crossings·(delay - d) at another delay d
            delay_s = max(0.0, (self.start_s - makespan_s + crossings * delay_s) / (crossings - slope))
        return delay_s

    def run(self, borders: frozenset[int], delay_s: float) -> tuple[float, int]:
        """The end of the step with a delay on some borders, and how often a critical path crosses these."""
        costs, rows = self.costs, self.program.schedule.actions
        late = [
            latency_s + (delay_s if own in borders else 0.0) for latency_s, own in zip(costs.latency_s, self.borders)
        ]
        slow = replace(costs, latency_s=late)
        starts_s = run_strict(self.program, slow)
        ends_s = [own[-1] + took[-1] if own else 0.0 for own, took in zip(starts_s, costs.durations_s)]
        endings = endings_of(self.program, slow, ends_s, self.waits)
        at = max(range(len(rows)), key=lambda index: endings[index].update_end_s)
        makespan_s = endings[at].update_end_s
        if endings[at].update_start_s > endings[at].exchange_end_s:
            joined = [index for index, row in enumerate(rows) if row.stage in self.waits[rows[at].stage].stages]
            at = max(joined, key=lambda index: endings[index].exchange_end_s)
        groups = [index for index, row in enumerate(rows) if row.stage == rows[at].stage]
        at = max(groups, key=lambda index: endings[index].reduce_end_s)
        return makespan_s, self._crossings(slow, starts_s, at, borders)

    def _crossings(self, costs: Costs, starts_s: list[list[float]], actor: int, borders: frozenset[int]) -> int:
        """Goes back from an actor's last action, each time to what it waited for."""
        needs, step, found = self.program.needs, len(starts_s[actor]) - 1, 0
        durations_s = costs.durations_s
        while step >= 0:
            start_s = starts_s[actor][step]
            if step and starts_s[actor][step - 1] + durations_s[actor][step - 1] >= start_s:
                step -= 1
                continue
            maker = self.makers.get(needs[actor][step])
            if maker is None or start_s <= 0.0:
                break
            actor, step = maker
            route = costs.routes[actor][step]
            found += self.borders[route] in borders
            if route:  # the message may have waited for those before it on its link
                sent_s = start_s - costs.latency_s[route] - costs.wire_s[route]
                while (earlier := self.before[actor][step]) >= 0:
                    end_s = starts_s[actor][step] + durations_s[actor][step]
                    if end_s >= sent_s * (1.0 - 1e-12):
                        break
                    step, route = earlier, costs.routes[actor][earlier]
                    sent_s -= costs.wire_s[route]
        return found
