"""The fullest moment of a microbatch's backward pass on a stage.

Blocks run backward from the last to the first; the layers of a scan are one run. While run r is at it, there are

* P1 what runs up to r kept: those behind it have let go theirs. In a pipeline the residuals are arguments of the
  backward program and stay until its end;
* P2 gradients of the parameters that runs from r on read;
* P3 what is live inside one block of r (`Decision.live_bytes`). The last block of a step that is one program runs
  backward as soon as it has run forward: what it keeps is live, and not kept.

XLA's CPU compiler reuses less: there everything kept and all gradients lie beside the largest live block.

The fullest moment's bytes beyond what is kept, accumulated and arises in all is the stage's transient. Where it has
less than these (what the last blocks kept is gone when the gradients of the first ones arise) the difference is taken
off what arises.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from costmodel.graph import ModelGraph
from costmodel.sharding import Spec
from planner.space.backward import is_layered
from planner.space.decision import Decision
from planner.space.parameters import arising_bytes, state_bytes


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
        beyond_bytes: what the moment has beyond that and all gradients; below 0 where not all of these are there.
    """

    kept_bytes: float
    beyond_bytes: float

    def beside(self, arising: float) -> tuple[float, float]:
        """Arising gradients and transients as far as they lie beside what is kept.

        Args:
            arising: bytes of all gradients that arise.
        """
        return max(0.0, arising + min(0.0, self.beyond_bytes)), max(0.0, self.beyond_bytes)


def fullest_moment(graph: ModelGraph, decision: Decision, start: int, stop: int, *, alone: bool) -> Moment:
    """The fullest moment of the backward pass of blocks ``start..stop-1``.

    Args:
        alone: whether they are all of a step that is one program.
    """
    full, parts = decision.setting.remat == "full", runs(graph, start, stop)
    table = decision.lying if alone else decision.kept
    most = saved_bytes(graph, decision.kept, decision, start, stop)
    kept = [min(most, saved_bytes(graph, table, decision, start, run.stop)) for run in parts]  # by the end of a run
    gradients = _gradient_bytes(graph, decision, parts)
    if not decision.space.fuses:
        return Moment(kept[-1], max(decision.live_bytes(run.key, rerun=full) for run in parts))
    worst = 0.0
    for i, run in enumerate(parts):
        at_once = alone and i == len(parts) - 1 and not run.layered
        there = kept[i - at_once] if i >= at_once else 0.0
        live = decision.live_bytes(run.key, rerun=full or at_once)
        worst = max(worst, (there if alone else kept[-1]) + sum(gradients[i:]) + live)
    return Moment(kept[-1], worst - kept[-1] - sum(gradients))


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
    before = ""
    for block in graph.blocks[start:stop]:
        key, cls = block.class_key, graph.classes[block.class_key]
        layered, once = is_layered(graph, key), decision.space.once[key]
        crossing = dict(zip((*cls.inputs, *cls.outputs), (*block.inputs, *block.outputs), strict=True))
        for (name, spec), size in kept[key].items():
            if name in once and layered and key == before:
                continue
            if not layered and name in crossing:
                shared[crossing[name], spec] = size
            else:
                total += size
        before = key
    return total + sum(shared.values())


def _gradient_bytes(graph: ModelGraph, decision: Decision, parts: Sequence[Run]) -> list[float]:
    """By run, gradients that first come to be there; an accumulator that was there before is none of them."""
    mesh, added = decision.space.mesh, decision.setting.accumulates
    seen: set[str] = set()
    found = [0.0] * len(parts)
    for i in reversed(range(len(parts))):
        for name, (elements, _) in held_elements(graph, parts[i].start, parts[i].stop).items():
            if name in seen and not parts[i].layered:
                continue
            seen.add(name)
            facts, storage = graph.params[name], decision.storage[name]
            found[i] += arising_bytes(facts, elements, storage, mesh, accumulates=added)
            if not added:
                found[i] += state_bytes(facts, elements, storage, mesh)[1]
    return found


def held_elements(graph: ModelGraph, start: int, stop: int) -> dict[str, tuple[int, bool]]:
    """Parameters that a range of blocks reads: how many of their elements, and whether it reads the leaf as a whole."""
    held: dict[str, set[int | None]] = {}
    for block in graph.blocks[start:stop]:
        for source in block.inputs:
            if source.value in graph.params:
                held.setdefault(source.value, set()).add(source.index)
    found = {}
    for name, items in held.items():
        shape, whole = graph.params[name].shape, None in items
        found[name] = (graph.params[name].elements if whole else math.prod(shape[1:]) * len(items), whole)
    return found


__all__ = ["Moment", "Run", "fullest_moment", "held_elements", "runs", "saved_bytes"]
