"""Degrees that a model has nothing for are refused: every device would do the same work."""

from collections.abc import Iterable, Sequence

from costmodel.errors import InputError
from costmodel.graph import ModelGraph
from planner.space.dims import sequence_dims
from planner.space.model_space import ModelSpace
from planner.space.nodes import ParameterNode
from planner.strategy.experts import expert_counts

_MOST_NAMED = 6


def require_matrices(space: ModelSpace, size: int) -> None:
    """Raises InputError MP181 if a tensor-parallel degree divides no dim of any matrix of the model."""
    shapes = [node.tensor.shape for node in space.nodes if isinstance(node, ParameterNode)]
    matrices = [shape for shape in shapes if len(shape) > 1] or shapes
    if any(n % size == 0 for shape in matrices for n in shape):
        return
    message = f"tp={size} divides no dim of {space.graph.name}'s matrices: all of {size} devices would do the same work"
    raise InputError("MP181", message, f"choose a tp that divides some of {_listed(n for s in matrices for n in s)}")


def require_positions(graph: ModelGraph, field: str, size: int) -> None:
    """Raises InputError MP181 if a degree divides no number of positions that the model computes on.

    Args:
        field: of the strategy that asks for it, as it is written.
    """
    lengths = sequence_lengths(graph)
    if not lengths:
        message = f"{field}: {graph.name} computes on no positions of a sequence that devices could share out"
        raise InputError("MP181", message, f"leave out {field}")
    if not any(n % size == 0 for n in lengths):
        message = f"{field}: {size} devices cannot share out {_listed(lengths)} positions in equal parts"
        raise InputError("MP181", message, "choose a degree that divides them, or pad the sequence")


def require_experts(graph: ModelGraph, size: int) -> None:
    """Raises InputError MP181 if a degree divides no number of experts of the model."""
    counts = expert_counts(graph)
    if not counts:
        message = f"ep={size}: {graph.name} has no experts that are recognised"
        hint = "name the expert parameters `experts` if there are some, as for `lax.ragged_dot`; else leave out ep"
        raise InputError("MP181", message, hint)
    if not any(count % size == 0 for count in counts):
        message = f"ep={size}: {size} devices cannot share out {_listed(counts)} experts in equal parts"
        raise InputError("MP181", message, "choose a degree that divides them")


def sequence_lengths(graph: ModelGraph) -> frozenset[int]:
    """Numbers of positions of what ops make of parameters and positions together."""
    dims, found = sequence_dims(graph), set[int]()
    for key, cls in graph.classes.items():
        for op in cls.ops:
            if not any(name and cls.tensors[name].role == "param" for name in op.inputs):
                continue
            for name in op.outputs:
                found |= {cls.tensors[name].shape[d] for d in dims[key].get(name, frozenset())}
    return frozenset(found)


def _listed(numbers: Iterable[int]) -> str:
    several: Sequence[int] = sorted(set(numbers))
    more = f" and {len(several) - _MOST_NAMED} more" if len(several) > _MOST_NAMED else ""
    return ", ".join(map(str, several[-_MOST_NAMED:])) + more
