"""A simulated step as SVG: stage groups down, time to the right, memory under each group's actions.

A step of few actions is drawn action by action. A large one is drawn twice: as a whole, with the share of time that
each kind of action takes in each of `BINS` intervals as a stacked area, and in windows of the beginning, the middle
and the end, action by action. So a picture has a few thousand shapes however large the step is.
"""

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from html import escape
from math import ceil, floor, log10

from costmodel.schedule.actions import Actor
from costmodel.simulate import Simulation, TimelineEntry
from costmodel.simulation.memory import MemoryCurve
from costmodel.units import format_bytes, format_seconds
from planner.simulation import StepSimulation

MOST_SHAPES = 2500  # actions drawn one by one in a picture
MOST_LINES = 600  # messages drawn in a picture
BINS = 250  # of an aggregated picture, also of memory curves
TIPS = 25  # places with a tooltip in a row of an aggregated picture
WIDTH, LEFT, RIGHT, TOP = 1000, 120, 150, 22
LEAST_WIDTH = 12  # of an average action in a window, in pixels

WORDS = {"F": "forward", "B": "backward", "W": "weight gradient"}
CLASSES = {"F": "f", "B": "b", "W": "w"}


def draws_each(step: StepSimulation) -> bool:
    """Whether the whole step is drawn action by action."""
    return _count(step.step) <= MOST_SHAPES


def whole(step: StepSimulation) -> str:
    """The whole step with memory curves."""
    return _Picture(step, 0.0, step.makespan_s, with_memory=True).svg(aggregate=not draws_each(step))


def windows(step: StepSimulation) -> Iterator[tuple[str, str]]:
    """(title, picture) of the beginning, the middle and the end of a step that is too large to be drawn at once."""
    total_s, actions = sum(use.busy_s for use in step.step.actors), _count(step.step)
    mean_s = total_s / max(actions, 1)
    length_s = min(mean_s * WIDTH / LEAST_WIDTH, mean_s * MOST_SHAPES / len(step.groups), step.makespan_s)
    for title, start_s in (
        ("The beginning", 0.0),
        ("The middle", (step.step.pipeline_s - length_s) / 2),
        ("The end", step.makespan_s - length_s),
    ):
        words = f"{title}: {format_seconds(start_s)} to {format_seconds(start_s + length_s)}"
        yield words, _Picture(step, start_s, start_s + length_s, with_memory=False).svg(aggregate=False)


def _count(simulation: Simulation) -> int:
    return sum(len(row.actions) for row in simulation.schedule.actions)


class _Picture:
    """One picture of the time from `start_s` to `end_s`."""

    def __init__(self, step: StepSimulation, start_s: float, end_s: float, with_memory: bool):
        self.step, self.start_s, self.end_s, self.with_memory = step, start_s, end_s, with_memory
        self.scale = WIDTH / (end_s - start_s)
        many = len(step.groups) > 24
        self.bar = 11 if many else 18
        self.lane = (8 if many else 18) if with_memory else 0
        self.row = self.bar + self.lane + (3 if many else 7)
        self.rows = {use.actor: at for at, use in enumerate(step.step.actors)}
        self.height = TOP + self.row * len(self.rows) + 4
        self.most_held = max((curve.peak_bytes - min(curve.bytes) for curve in step.memory), default=0)

    def svg(self, *, aggregate: bool) -> str:
        parts = [*self.axis(), *self.labels()]
        if self.with_memory and self.most_held:
            for curve in self.step.memory:
                parts += self.memory(curve)
        if aggregate:
            for actor in self.rows:
                parts += self.shares(actor)
            parts += self.path_line()
        else:
            parts += self.messages()
            parts += self.actions()
        parts += self.endings()
        size = f'width="{LEFT + WIDTH + RIGHT}" height="{self.height}"'
        box = f'viewBox="0 0 {LEFT + WIDTH + RIGHT} {self.height}"'
        return f'<svg xmlns="http://www.w3.org/2000/svg" role="img" {size} {box}>{"".join(parts)}</svg>'

    def x(self, time_s: float) -> float:
        return LEFT + (time_s - self.start_s) * self.scale

    def y(self, actor: Actor) -> int:
        return TOP + self.rows[actor] * self.row

    def label(self, actor: Actor) -> str:
        return escape(self.step.groups[self.rows[actor]].label)

    def axis(self) -> Iterator[str]:
        for time_s in ticks(self.start_s, self.end_s):
            x = self.x(time_s)
            yield f'<path class="grid" d="M{x:.1f} {TOP - 5}V{self.height}"/>'
            yield f'<text x="{x:.1f}" y="{TOP - 9}" text-anchor="middle">{format_seconds(time_s)}</text>'

    def labels(self) -> Iterator[str]:
        for row, use in zip(self.step.groups, self.step.step.actors, strict=True):
            y = self.y(use.actor)
            tip = f"{row.label}: busy {format_seconds(row.busy_s)}, bubble {format_seconds(row.bubble_s)} "
            tip += f"({row.bubble_share:.1%}), at most {row.in_flight} in flight"
            name = row.label if len(row.label) <= 18 else f"{row.label[:17]}…"
            yield f'<text x="{LEFT - 6}" y="{y + self.bar - 2 - (self.bar > 12) * 3}" text-anchor="end">'
            yield f"{escape(name)}<title>{escape(tip)}</title></text>"
            yield f'<path class="rule" d="M{LEFT} {y + self.bar}h{WIDTH}"/>'

    def visible(self, actor: Actor) -> list[TimelineEntry]:
        at, simulation = self.rows[actor], self.step.step
        starts_s, ends_s = simulation.starts_s[at], simulation.ends_s[at]
        first, last = bisect_left(ends_s, self.start_s), bisect_left(starts_s, self.end_s)
        actions = simulation.schedule.actions[at].actions
        return [TimelineEntry(actor, actions[i], starts_s[i], ends_s[i]) for i in range(first, last)]

    def actions(self) -> Iterator[str]:
        critical = {segment.action for segment in self.step.chain if segment.part in CLASSES}
        more = self.step.step.schedule.stages - len(self.step.plan.stages)
        for actor, at in self.rows.items():
            y = self.y(actor)
            chunks = sorted({action.stage for action in self.step.step.schedule.actions[at].actions})
            for _, action, start_s, end_s in self.visible(actor):
                x, stop = max(self.x(start_s), LEFT), min(self.x(end_s), LEFT + WIDTH)
                width = max(stop - x, 0.5)
                names = CLASSES[action.kind] + " c" * (action in critical) + " v" * (chunks.index(action.stage) % 2)
                yield f'<rect class="{names}" x="{x:.1f}" y="{y}" width="{width:.1f}" height="{self.bar}">'
                where = self.step.groups[at].label
                if more >= 0:
                    where = f"{'virtual ' * (more > 0)}stage {action.stage}"
                yield f"<title>{WORDS[action.kind]} of {escape(where)}, microbatch {action.microbatch}, "
                yield _span(start_s, end_s)
                yield f"{', on the critical path' if action in critical else ''}</title></rect>"
                text = str(action.microbatch)
                if width > 6 * len(text) + 3:
                    yield f'<text class="in" x="{x + 2.5:.1f}" y="{y + self.bar * 0.72:.1f}">{text}</text>'

    def messages(self) -> Iterator[str]:
        shown = [m for m in self.step.step.messages if m.arrival_s > self.start_s and m.ready_s < self.end_s]
        if len(shown) > MOST_LINES:
            return
        for message in shown:
            ends = [(message.ready_s, message.source), (message.arrival_s, message.target)]
            middle = self.bar / 2
            points = [f"{self.x(time_s):.1f} {self.y(actor) + middle:.1f}" for time_s, actor in ends]
            yield f'<path class="m" d="M{points[0]}L{points[1]}"/>'

    def shares(self, actor: Actor) -> Iterator[str]:
        """The stacked area of one group, and places with tooltips."""
        bin_s = (self.end_s - self.start_s) / BINS
        kinds = {kind: [0.0] * BINS for kind in WORDS}
        for _, action, start_s, end_s in self.visible(actor):
            _spread(kinds[action.kind], (start_s - self.start_s) / bin_s, (end_s - self.start_s) / bin_s)
        base = [0.0] * BINS
        bottom = self.y(actor) + self.bar
        for kind, values in kinds.items():
            if any(values):
                top = [low + value for low, value in zip(base, values, strict=True)]
                yield f'<path class="{CLASSES[kind]}" d="{_area(base, top, bottom, self.bar)}"/>'
                base = top
        wide = BINS // TIPS
        for at in range(0, BINS, wide):
            parts = [(WORDS[kind], sum(values[at : at + wide]) / wide) for kind, values in kinds.items()]
            shown = [f"{word} {share:.0%}" for word, share in parts if share > 0.005]
            shown.append(f"waiting {max(1 - sum(share for _, share in parts), 0.0):.0%}")
            start_s = self.start_s + at * bin_s
            yield f'<rect class="tip" x="{LEFT + at * WIDTH / BINS:.1f}" y="{bottom - self.bar}" '
            yield f'width="{wide * WIDTH / BINS:.1f}" height="{self.bar}"><title>{self.label(actor)}, '
            yield f"{_span(start_s, start_s + wide * bin_s)}: {', '.join(shown)}</title></rect>"

    def path_line(self) -> Iterator[str]:
        """The critical path as a line from group to group."""
        points: list[str] = []
        for segment in self.step.chain:
            y = self.y(segment.target or segment.actor) + self.bar / 2
            for point in (f"{self.x(segment.start_s):.1f} {y:.1f}", f"{self.x(segment.end_s):.1f} {y:.1f}"):
                if not points or points[-1] != point:
                    points.append(point)
        if points:
            yield f'<path class="path" d="M{"L".join(points)}"/>'

    def endings(self) -> Iterator[str]:
        for use, ending in zip(self.step.step.actors, self.step.step.endings, strict=True):
            spans = (
                ("o", "reduction of gradients", max(ending.reduce_start_s, use.last_end_s), ending.reduce_end_s),
                ("o", "exchange of gradients", ending.exchange_start_s, ending.exchange_end_s),
                ("u", "update", ending.update_start_s, ending.update_end_s),
            )
            for name, words, start_s, end_s in spans:
                if end_s > start_s and end_s > self.start_s and start_s < self.end_s:
                    x = max(self.x(start_s), LEFT)
                    width = max(min(self.x(end_s), LEFT + WIDTH) - x, 0.5)
                    box = f'x="{x:.1f}" y="{self.y(use.actor)}" width="{width:.1f}" height="{self.bar}"'
                    yield f'<rect class="{name}" {box}><title>{words}, {_span(start_s, end_s)}</title></rect>'

    def memory(self, curve: MemoryCurve) -> Iterator[str]:
        """Activations that the group holds, over time, on one scale for all groups; and its peak in all."""
        always, bin_s = min(curve.bytes), (self.end_s - self.start_s) / BINS
        tops = [0.0] * BINS
        for time_s, until_s, size in zip(curve.times_s, (*curve.times_s[1:], self.end_s), curve.bytes, strict=True):
            first = max(floor((time_s - self.start_s) / bin_s + 1e-9), 0)
            for at in range(first, min(max(ceil((until_s - self.start_s) / bin_s - 1e-9), first + 1), BINS)):
                tops[at] = max(tops[at], (size - always) / self.most_held)
        bottom, peak = self.y(curve.actor) + self.bar + self.lane, format_bytes(curve.peak_bytes)
        tip = f"{self.label(curve.actor)}: at most {peak} a device, {format_bytes(curve.peak_bytes - always)} of it "
        tip += f"activations; the device has {format_bytes(curve.limit_bytes)}" if curve.limit_bytes else "activations"
        area = _area([0.0] * BINS, tops, bottom, self.lane - 1)
        yield f'<path class="mem" d="{area}"><title>{tip}</title></path>'
        name = ""
        if curve.limit_bytes is not None and curve.peak_bytes > curve.limit_bytes:
            name, peak = ' class="over"', f"{peak} > {format_bytes(curve.limit_bytes)}"
            held = max(curve.limit_bytes - always, 0) / self.most_held
            yield f'<path class="limit" d="M{LEFT} {bottom - (self.lane - 1) * held:.1f}h{WIDTH}"/>'
        yield f'<text{name} x="{LEFT + WIDTH + 6}" y="{bottom - 1}">{peak}<title>{tip}</title></text>'


def ticks(start_s: float, end_s: float, about: int = 8) -> list[float]:
    """Round times between two times: multiples of 1, 2 or 5 times a power of ten, at most `about` and one more."""
    length_s = end_s - start_s
    power = 10.0 ** floor(log10(length_s / about))
    step_s = next(power * factor for factor in (1, 2, 5, 10) if length_s / (power * factor) <= about)
    first = ceil(start_s / step_s - 1e-9)
    return [at * step_s for at in range(first, floor(end_s / step_s + 1e-9) + 1)]


def _span(start_s: float, end_s: float) -> str:
    return f"{format_seconds(start_s)} to {format_seconds(end_s)}"


def _spread(values: list[float], start: float, end: float) -> None:
    """Adds to each bin the part of it that lies between `start` and `end`, counted in bins."""
    start, end = max(start, 0.0), min(end, float(len(values)))
    at = int(start)
    while start < end:
        stop = min(at + 1.0, end)
        values[at] += stop - start
        start, at = stop, at + 1


def _area(low: Sequence[float], high: Sequence[float], bottom: float, height: float) -> str:
    """Path of the area between two step functions over the bins, in units of `height` above `bottom`."""
    wide = WIDTH / BINS

    def side(values: Sequence[float], order: range) -> list[str]:
        points: list[str] = []
        for at in order:
            y = f"{bottom - height * min(values[at], 1.0):.1f}"
            if not points or points[-1] != f"V{y}":  # equal neighbours are one step
                if points:
                    points.append(f"H{LEFT + (at + (order.step < 0)) * wide:.1f}")
                points.append(f"V{y}")
        return points

    there = side(high, range(len(high)))
    back = side(low, range(len(low) - 1, -1, -1))
    merged = "".join(p for i, p in enumerate(there) if not (p.startswith("V") and i and there[i - 1] == p))
    return f"M{LEFT} {bottom}{merged}H{LEFT + WIDTH}{''.join(back)}H{LEFT}Z"
