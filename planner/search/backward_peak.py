"""The fullest moment of a microbatch on a stage.

Blocks run backward from the last to the first; the layers of a scan are one run. While run r is at it, there are

* P1 what runs up to r kept: those behind it have let go theirs. In a pipeline the residuals are arguments of the
  backward program and stay until its end;
* P2 gradients of the parameters that runs from r on read, or what they will be made of (`BlockLiveness.waiting_bytes`);
  in a step that is one program from the first scan's backward pass on the stacks of all others too, as zeros;
* P3 what is live inside one block of r (`Decision.live_bytes`). The last block of a step that is one program runs
  backward as soon as it has run forward: what it keeps is live, and not kept.

Before that, while the layers of a scan run forward, there are their stacks and what is live inside one layer (P4), and
after it all gradients, the one made last, and what reduce-scatter makes of one leaf (P5): with ZeRO-2 gradients arise
whole, and where a microbatch's gradient is not added to others ZeRO-1's are scattered as soon as ZeRO-2's.

XLA's CPU compiler reuses less: there everything kept and all gradients lie beside the largest live block.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

from costmodel.graph import ModelGraph
from costmodel.sharding import Spec
from planner.space.backward import is_layered
from planner.space.decision import Decision
from planner.space.parameters import arising_bytes, scattered_bytes, state_bytes


@dataclass(frozen=True)
class Run:
    """Blocks ``start..stop-1``: equal layers of a scan, or one block."""

    key: str
    start: int
    stop: int
    layered: bool


def runs(graph: ModelGraph, start: int, stop: int) -> list[Run]:
    """The runs of a range of blocks, in order."""
    found: list[Run] = []
    for at in range(start, stop):
        key = graph.blocks[at].class_key
        layered = is_layered(graph, key)
        if found and layered and found[-1].key == key:
            found[-1] = Run(key, found[-1].start, at + 1, True)
        else:
            found.append(Run(key, at, at + 1, layered))
    return found


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


def fullest_moment(graph: ModelGraph, decision: Decision, start: int, stop: int, *, alone: bool) -> Moment:
    """The fullest moment of a microbatch on a stage of blocks ``start..stop-1``.

    Args:
        alone: whether they are all of a step that is one program.
    """
    full, added = decision.setting.remat == "full", decision.setting.accumulates
    parts = runs(graph, start, stop)
    table = decision.lying if alone else decision.kept
    most = saved_bytes(graph, decision.kept, decision, start, stop)
    kept = [min(most, saved_bytes(graph, table, decision, start, run.stop)) for run in parts]  # by the end of a run
    gradients = _gradients(graph, decision, parts)
    accumulated = sum(one.accumulated for one in gradients)
    if not decision.space.fuses:
        live = max(decision.live_bytes(run.key, rerun=full) for run in parts)
        return Moment(kept[-1], kept[-1] + live + accumulated + sum(one.arising for one in gradients))
    done = late = worst = 0.0
    for i in reversed(range(len(parts))):
        run, own = parts[i], gradients[i].own
        at_once = alone and i == len(parts) - 1 and not run.layered
        there = (kept[i - at_once] if i >= at_once else 0.0) if alone else kept[-1]
        now, after = (own, own) if run.layered or not alone else decision.waiting_bytes(run.key, own)
        stacks = 0.0
        if alone and any(one.layered for one in parts[i:]):
            stacks = sum(gradients[j].own for j in range(i) if parts[j].layered)
        live = decision.live_bytes(run.key, rerun=full or at_once, alone=alone)
        worst = max(worst, there + done + stacks + now + live)
        if alone and run.layered:
            worst = max(worst, kept[i] + decision.forward_bytes(run.key))
        done, late = done + after, max(late, own - after)
    worst = max(worst, done + late + max(one.scattered for one in gradients))
    return Moment(kept[-1], worst + (accumulated if added else 0.0))


def saved_bytes(
    graph: ModelGraph,
    kept: Mapping[str, Mapping[tuple[str, Spec], float]],
    decision: Decision,
    start: int,
    stop: int,
) -> float:
    """Bytes that a device of the stage keeps for one microbatch from its F to its B.

    What all layers of a run keep together counts once for the run. A value that several blocks outside of runs keep in
    one spec is one array.

    Args:
        kept: `Decision.kept`, or another of its tables, such as that from B to W: block class -> tensor and spec ->
            bytes.
    """
    total, shared = 0.0, {}
    for key, same in groupby(graph.blocks[start:stop], key=lambda block: block.class_key):
        cls, blocks = graph.classes[key], list(same)
        if is_layered(graph, key):
            once = decision.space.once[key]
            total += sum(size * (1 if name in once else len(blocks)) for (name, _), size in kept[key].items())
            continue
        for block in blocks:
            crossing = dict(zip((*cls.inputs, *cls.outputs), (*block.inputs, *block.outputs), strict=True))
            for (name, spec), size in kept[key].items():
                if name in crossing:
                    shared[crossing[name], spec] = size
                else:
                    total += size
    return total + sum(shared.values())


@dataclass
class _Gradients:
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


def _gradients(graph: ModelGraph, decision: Decision, parts: Sequence[Run]) -> list[_Gradients]:
    mesh, added = decision.space.mesh, decision.setting.accumulates
    seen: set[str] = set()
    found = [_Gradients() for _ in parts]
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


__all__ = ["Moment", "Run", "fullest_moment", "runs", "saved_bytes"]
