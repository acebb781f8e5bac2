"""What the optimizer's update takes on a device at once, of gradients and what is made of them.

When the last backward pass is done, what it kept, its transients and its gradient are gone. Then come

* M1 reduction: the accumulated gradients and, where they are summed over devices, the reduced ones beside them;
* M2 update: the gradients as the update takes them. On the group that updates these are also those of the stage's other
  groups, and of later stages that read its parameters.

Parameters and optimizer state are updated in place, but XLA's CPU compiler copies the state that it writes over while
it still reads it (for GPUs the update of a leaf is one kernel). In a plan of one stage the copies take the place of
gradients that are done with; in a pipeline gradients are arguments of the update's programs and stay. Where the state
belongs to no parameter (that of all of them in one vector), the gradient lies there as such a vector too.
"""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from costmodel.graph import ModelGraph
from planner.space.decision import Decision
from planner.space.parameters import reduced_bytes, state_bytes

if TYPE_CHECKING:
    from planner.search.layout import Layout


@dataclass
class _Update:
    """What the update of a stage's parameters has on one device, in bytes.

    Attributes:
        accumulated: gradients as they are added up; reduced: as the update takes them, by parameter in `sizes`.
        made: of reduced ones, what a reduction makes beside the accumulated ones.
        state: optimizer state that is copied while it is written over.
    """

    accumulated: float = 0.0
    made: float = 0.0
    state: float = 0.0
    sizes: dict[str, float] = field(default_factory=dict)

    @property
    def reduced(self) -> float:
        return sum(self.sizes.values())


def _update(graph: ModelGraph, decision: Decision, start: int, stop: int) -> _Update:
    mesh, found = decision.space.mesh, _Update()
    for name, (elements, _) in graph.held_elements(start, stop).items():
        facts, storage, node = graph.params[name], decision.storage[name], decision.parameter_nodes[name]
        found.sizes[name] = reduced_bytes(facts, elements, storage, mesh)
        _, gradient, optimizer = state_bytes(facts, elements, storage, mesh)
        found.accumulated += gradient
        found.state += optimizer if decision.space.pricing.kind.platform == "cpu" else 0.0
        kinds = {(phase, kind) for phase, kind, _ in decision.gradient_collectives(node)}
        if kinds & {("once", "all_reduce"), ("once", "reduce_scatter")}:
            found.made += found.sizes[name]
    return found


def update_peak_bytes(layout: "Layout", stage: int, group: int) -> float:
    """Bytes on one device, parameters and optimizer state aside."""
    choice, graph = layout.stages[stage], layout.graph
    decision = choice.groups[group].decision
    if len(layout.stages) == len(choice.groups) == 1:
        return one_program_update_bytes(graph, decision)
    own = _update(graph, decision, choice.start, choice.stop)
    if group > 0:
        return max(own.accumulated + own.made, own.reduced)
    later = _of_later_stages(layout, stage, own.sizes)
    joined = own.reduced * len(choice.groups) + later + _vector_bytes(graph)
    return max(own.accumulated + own.made, joined + own.state)


def one_program_update_bytes(graph: ModelGraph, decision: Decision) -> float:
    """The same where a step of the whole model is one program."""
    own = _update(graph, decision, 0, len(graph.blocks))
    return max(own.accumulated + own.made, own.reduced + _vector_bytes(graph), own.state)


def _of_later_stages(layout: "Layout", stage: int, sizes: dict[str, float]) -> float:
    """Gradients of tied parameters; each group of a later stage sends its own."""
    graph, total = layout.graph, 0.0
    earlier = {n for s in layout.stages[:stage] for n in graph.held_elements(s.start, s.stop)}
    for other in layout.stages[stage + 1 :]:
        for name, (_, whole) in graph.held_elements(other.start, other.stop).items():
            if whole and name in sizes and name not in earlier:
                total += len(other.groups) * sizes[name]
    return total


def _vector_bytes(graph: ModelGraph) -> float:
    """The gradient as one vector, where the optimizer's state is not by parameter."""
    params = [p for p in graph.params.values() if p.trained]
    by_parameter = sum(p.elements * p.optimizer_bytes_per_element + p.optimizer_whole_bytes for p in params)
    if graph.optimizer_bytes <= by_parameter:
        return 0.0
    return float(sum(p.elements * p.gradient_itemsize for p in params))


__all__ = ["one_program_update_bytes", "update_peak_bytes"]
