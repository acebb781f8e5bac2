"""The fullest moment of a microbatch on a stage.

Blocks run backward from the last to the first; the layers of a scan are one run. While run r is at it, there are

* P1 what runs up to r kept: those behind it have let go theirs. In a pipeline the residuals are arguments of the
  backward program and stay until its end;
* P2 gradients of the parameters that runs from r on read, or what they will be made of (`Waiting`); in a step that is
  one program from the first scan's backward pass on the stacks of all others too, as zeros;
* P3 what is live inside one block of r (`Decision.live_bytes`). The last block of a step that is one program runs
  backward as soon as it has run forward: what it keeps is live, and not kept.

Before that, while the layers of a scan run forward, there are their stacks and what is live inside one layer (P4), and
after it all gradients, the one made last, and what reduce-scatter makes of one leaf (P5): with ZeRO-2 gradients arise
whole, and where a microbatch's gradient is not added to others ZeRO-1's are scattered as soon as ZeRO-2's.

XLA's CPU compiler reuses less: there everything kept and all gradients lie beside the largest live block.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from costmodel.graph import ModelGraph, Run, Source
from costmodel.sharding import Spec
from planner.space.decision import Decision
from planner.space.liveness import Waiting
from planner.space.parameters import arising_bytes, scattered_bytes, state_bytes


@dataclass(frozen=True)
class Moment:
    """The fullest moment, in bytes on one device.

    Attributes:
        kept_bytes: what a microbatch keeps in all, at the end of its forward pass.
        peak_bytes: of all that lies there at the moment beside parameters, optimizer state and inputs.
    """

    kept_bytes: float
    peak_bytes: float

    def items(self, gradients: float, arising: float, *, accumulates: bool) -> tuple[float, float, float, float]:
        """The peak as gradients, arising gradients, what was kept and transients. What is not there at the moment is
        taken off what arises, then off what was kept, then off gradients.

        Args:
            gradients: bytes of all accumulators, or of all gradients where they are not added to others.
            arising: bytes of all gradients that arise beside them.
            accumulates: whether accumulators are there from the start.
        """
        rest = self.peak_bytes - gradients - self.kept_bytes
        if rest >= 0.0:
            return gradients, min(arising, rest), self.kept_bytes, max(0.0, rest - arising)
        kept = max(0.0, self.kept_bytes + rest)
        rest = min(0.0, self.kept_bytes + rest)
        return gradients if accumulates else gradients + rest, 0.0, kept, 0.0


@dataclass(frozen=True)
class RunBytes:
    """What there is on a device for a run of blocks, gradients aside.

    Attributes:
        kept_bytes: what it and the runs before it keep (P1).
        live_bytes: inside one of its blocks that runs backward (P3); forward_bytes: inside a layer that runs forward
            (P4), 0 for a block by itself.
        waiting: for its weight gradients, in a step that is one program; None where they are made at once.
    """

    kept_bytes: float
    live_bytes: float
    forward_bytes: float = 0.0
    waiting: Waiting | None = None


@dataclass(frozen=True)
class PassBytes:
    """What a microbatch has on a device of a stage beside gradients: the same whatever state is split.

    Attributes:
        parts: the stage's runs, and `runs` the bytes of each.
        alone: whether they are all of a step that is one program.
    """

    parts: tuple[Run, ...]
    runs: tuple[RunBytes, ...]
    alone: bool


@dataclass
class Gradients:
    """Gradients of the parameters of which a run is the last reader, in bytes.

    Attributes:
        accumulated: accumulators, or gradients that are not added to others.
        arising: what a microbatch makes beside these.
        own: what a microbatch makes: that, or gradients that are not added to others themselves.
        scattered: the most that the reduce-scatter of one leaf makes.
    """

    accumulated: float = 0.0
    arising: float = 0.0
    own: float = 0.0
    scattered: float = 0.0


def fullest_moment(graph: ModelGraph, decision: Decision, start: int, stop: int, *, alone: bool) -> Moment:
    """The fullest moment of a microbatch on a stage of blocks ``start..stop-1``.

    Args:
        alone: whether they are all of a step that is one program.
    """
    passes = pass_bytes(graph, decision, start, stop, alone=alone)
    gradients = gradients_of(graph, decision, passes.parts)
    return fullest(passes, gradients, accumulates=decision.setting.accumulates, fuses=decision.space.fuses)


def fullest(passes: PassBytes, gradients: Sequence[Gradients], *, accumulates: bool, fuses: bool) -> Moment:
    """The fullest moment of a microbatch.

    Args:
        gradients: of each run.
        accumulates: whether they are added to those of other microbatches.
        fuses: whether the compiler fuses and reuses memory; the CPU's hardly does.
    """
    parts, rows, alone = passes.parts, passes.runs, passes.alone
    kept = rows[-1].kept_bytes
    accumulated = sum(one.accumulated for one in gradients)
    if not fuses:
        live = max(row.live_bytes for row in rows)
        return Moment(kept, kept + live + accumulated + sum(one.arising for one in gradients))
    stacks = list(accumulate((one.own * run.layered for one, run in zip(gradients, parts, strict=True)), initial=0.0))
    done = late = worst = 0.0
    scans = False  # whether some scan's backward pass has begun
    for i in reversed(range(len(parts))):
        run, row, own = parts[i], rows[i], gradients[i].own
        at_once = _runs_at_once(parts, i, alone=alone)
        there = (rows[i - at_once].kept_bytes if i >= at_once else 0.0) if alone else kept
        now, after = (
            (own, own) if row.waiting is None else (row.waiting.during_bytes(own), row.waiting.after_bytes(own))
        )
        scans = scans or (alone and run.layered)
        worst = max(worst, there + done + (stacks[i] if scans else 0.0) + now + row.live_bytes)
        if alone and run.layered:
            worst = max(worst, row.kept_bytes + row.forward_bytes)
        done, late = done + after, max(late, own - after)
    worst = max(worst, done + late + max(one.scattered for one in gradients))
    return Moment(kept, worst + (accumulated if accumulates else 0.0))


def _runs_at_once(parts: Sequence[Run], at: int, *, alone: bool) -> bool:
    """Whether a run's backward pass follows its forward pass: of the last block of a step that is one program."""
    return alone and at == len(parts) - 1 and not parts[at].layered


def pass_bytes(graph: ModelGraph, decision: Decision, start: int, stop: int, *, alone: bool) -> PassBytes:
    """What a microbatch has on a device beside gradients; arguments as of `fullest_moment`."""
    full, parts = decision.setting.remat == "full", graph.runs(start, stop)
    most = saved_by_run(graph, decision.kept, decision, parts)
    kept = most
    if alone:
        kept = [min(most[-1], size) for size in saved_by_run(graph, decision.lying, decision, parts)]
    rows = []
    for i, (run, size) in enumerate(zip(parts, kept, strict=True)):
        rerun = full or _runs_at_once(parts, i, alone=alone)
        row = RunBytes(size, decision.live_bytes(run.key, rerun=rerun, alone=alone))
        if decision.space.fuses and alone:
            forward = decision.forward_bytes(run.key) if run.layered else 0.0
            row = replace(row, forward_bytes=forward, waiting=None if run.layered else decision.waiting(run.key))
        rows.append(row)
    return PassBytes(parts, tuple(rows), alone)


def saved_bytes(
    graph: ModelGraph,
    kept: Mapping[str, Mapping[tuple[str, Spec], float]],
    decision: Decision,
    start: int,
    stop: int,
) -> float:
    """Bytes that a device of the stage keeps for one microbatch from its F to its B; arguments as of `saved_by_run`."""
    return saved_by_run(graph, kept, decision, graph.runs(start, stop))[-1]


def saved_by_run(
    graph: ModelGraph,
    kept: Mapping[str, Mapping[tuple[str, Spec], float]],
    decision: Decision,
    parts: Sequence[Run],
) -> list[float]:
    """Bytes that a device keeps for one microbatch from its F to its B, by the end of each run.

    What all layers of a run keep together counts once for the run. A value that several blocks outside of runs keep in
    one spec is one array.

    Args:
        kept: `Decision.kept`, or another of its tables, such as that from B to W: block class -> tensor and spec ->
            bytes.
    """
    total, found = 0.0, list[float]()
    shared: dict[tuple[Source, Spec], float] = {}
    for run in parts:
        if run.layered:
            once, count = decision.space.once[run.key], run.stop - run.start
            total += sum(size * (1 if name in once else count) for (name, _), size in kept[run.key].items())
        else:
            cls, block = graph.classes[run.key], graph.blocks[run.start]
            crossing = dict(zip((*cls.inputs, *cls.outputs), (*block.inputs, *block.outputs), strict=True))
            for (name, spec), size in kept[run.key].items():
                total += size
                if name in crossing:
                    total -= shared.get((crossing[name], spec), 0.0)
                    shared[crossing[name], spec] = size
        found.append(total)
    return found


def gradients_of(graph: ModelGraph, decision: Decision, parts: Sequence[Run]) -> list[Gradients]:
    """Gradients of each run."""
    mesh, added = decision.space.mesh, decision.setting.accumulates
    seen: set[str] = set()
    found = [Gradients() for _ in parts]
    for i in reversed(range(len(parts))):
        for name, (elements, _) in graph.held_elements(parts[i].start, parts[i].stop).items():
            if name in seen and not parts[i].layered:
                continue
            seen.add(name)
            facts, storage = graph.params[name], decision.storage[name]
            accumulated = state_bytes(facts, elements, storage, mesh)[1]
            arising = arising_bytes(facts, elements, storage, mesh, accumulates=added, fuses=decision.space.fuses)
            found[i].accumulated += accumulated
            found[i].arising += arising
            found[i].own += arising if added or arising else accumulated
            found[i].scattered = max(found[i].scattered, scattered_bytes(facts, elements, storage, mesh))
    return found


__all__ = [
    "Gradients",
    "Moment",
    "PassBytes",
    "fullest",
    "fullest_moment",
    "gradients_of",
    "pass_bytes",
    "saved_bytes",
]
