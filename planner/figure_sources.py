"""Where a plan's figures come from: the weakest source of all that its prices really used."""

from collections.abc import Iterator
from typing import cast as typed

from costmodel.collectives import CollectiveKind
from costmodel.compute import roofline_provenance
from costmodel.graph import ModelGraph
from costmodel.provenance import Provenance, weakest
from costmodel.schedule.actions import Actor
from planner.search.layout import GroupChoice, Layout, StageChoice
from planner.search.score import Score, exchange_seconds, tied_parameters


def figure_sources(score: Score) -> dict[str, Provenance]:
    """Source of the step's compute (of each kind, where there are several), communication, memory and time.

    A plan that communicates nothing has no source of communication.
    """
    layout = score.layout
    kinds: dict[str, list[Provenance]] = {}
    for stage in layout.stages:
        for group in stage.groups:
            own = kinds.setdefault(group.decision.space.pricing.kind.name, [])
            own += _compute(layout.graph, stage, group)
    of_kind = {name: weakest(*found) for name, found in kinds.items()}
    parts: list[Provenance] = [*_inside_groups(score), *_between_groups(layout)]
    sources = {"compute": weakest(*of_kind.values())}
    if len(of_kind) > 1:
        sources |= {f"compute on {name}": source for name, source in of_kind.items()}
    if parts:
        sources["communication"] = weakest(*parts)
    step = weakest(*(sources[name] for name in ("compute", "communication") if name in sources))
    return {**sources, "memory": "assumed", "step_time": step}


def _compute(graph: ModelGraph, stage: StageChoice, group: GroupChoice) -> list[Provenance]:
    """Of the ops of a stage that take time, and of the update."""
    decision = group.decision
    space, found = decision.space, set[Provenance]()
    for key in dict.fromkeys(block.class_key for block in graph.blocks[stage.start : stage.stop]):
        for op in graph.classes[key].ops:
            cost = space.op_cost(key, op, decision.op_strategies[key][op.name])
            if cost.forward_s + cost.backward_s > 0.0:
                found.add(cost.provenance)
    return [*sorted(found), roofline_provenance("float32", space.pricing.kind, is_matmul=False)]


def _inside_groups(score: Score) -> Iterator[Provenance]:
    """Of the collectives that groups run."""
    layout = score.layout
    for s, stage in enumerate(layout.stages):
        for g, group in enumerate(stage.groups):
            casts, pool = group.decision.space.pricing.casts, layout.cluster.group(group.devices[0].group)
            counts = score.groups[Actor(s, g)].cost.collectives
            for kind, axis in sorted({(kind, axis) for (_, kind, axis), count in counts.items() if count > 0}):
                measured = casts.provenance(typed(CollectiveKind, kind), axis)
                if measured is not None:
                    yield measured
                    continue
                yield from (tier.achieved_provenance for tier in pool.intra)
                if casts.links[axis].tree_latency_s is not None and pool.inter is not None:
                    yield pool.inter.achieved_provenance


def _between_groups(layout: Layout) -> Iterator[Provenance]:
    """Of what stages hand to each other, and groups of a stage."""
    source_of = layout.transfers.provenance
    for one, other in zip(layout.stages, layout.stages[1:], strict=False):
        yield from (source_of(a.devices, b.devices) for a in one.groups for b in other.groups)
    for s, stage in enumerate(layout.stages):
        if exchange_seconds(layout, s) > 0.0:
            yield from (source_of(group.devices, stage.groups[0].devices) for group in stage.groups[1:])
    for owner, *others in tied_parameters(layout).values():
        home = layout.stages[owner].groups[0].devices
        yield from (source_of(layout.stages[s].groups[0].devices, home) for s in others)
