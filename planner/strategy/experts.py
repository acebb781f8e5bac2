"""Which parameters of a model are experts, and along which dims of its tensors they lie.

An expert's parameters are stacked along a dim that products with activations loop over on both sides, each expert on
tokens of its own (``bech,ehf->ebcf``). Where every expert runs on every token (``bsh,ehf->bsef``) no product says so,
and a parameter under the name of `experts` is taken to have its experts along the first dim of a layer's item.
"""

import re
from collections import Counter, defaultdict

from costmodel.graph import BlockClass, ModelGraph, Op
from costmodel.kernels import is_matmul
from costmodel.sharding import major_factor

_NAMED = re.compile(r"(^|/)experts?/")
Place = tuple[str, int]  # tensor, dim


def expert_dims(graph: ModelGraph) -> dict[str, dict[str, frozenset[int]]]:
    """Block class -> tensor -> dims that experts lie along; empty for a model without experts."""
    found: dict[str, dict[str, frozenset[int]]] = {}
    for key, cls in graph.classes.items():
        starts = _parameters(graph, key)
        dims: dict[str, set[int]] = defaultdict(set)
        for name, dim in _connected(cls, starts):
            dims[name].add(dim)
        if starts:
            found[key] = {name: frozenset(own) for name, own in dims.items()}
    return found


def expert_counts(graph: ModelGraph) -> Counter[int]:
    """Numbers of experts, each with how many parameters have them."""
    counts: Counter[int] = Counter()
    for key, cls in graph.classes.items():
        counts.update(cls.tensors[name].shape[dim] for name, dim in _parameters(graph, key))
    return counts


def _parameters(graph: ModelGraph, key: str) -> set[Place]:
    """Parameters of a class with the dim of their experts."""
    cls = graph.classes[key]
    looped = {place for op in cls.ops if is_matmul(op) for place in _looped(op)}
    block = next(block for block in graph.blocks if block.class_key == key)
    found = set()
    for name, source in zip(cls.inputs, block.inputs, strict=True):
        tensor = cls.tensors[name]
        if tensor.role != "param" or len(tensor.shape) < 2:
            continue
        if _NAMED.search(source.value):
            found.add((name, 0))
        found |= {(name, dim) for dim in range(len(tensor.shape)) if _read(cls, (name, dim)) & looped}
    return found


def _read(cls: BlockClass, place: Place) -> set[Place]:
    """A dim of a parameter, and those of what is made of it alone (casts, transposes) that are the same."""
    found = {place}
    for op in cls.ops:
        if is_matmul(op) or len([n for n in op.inputs if n]) != 1:
            continue
        factors = {major_factor(op, op.in_dims[0], d) for name, d in found if name == op.inputs[0]} - {-1}
        for name, dims in zip(op.outputs, op.out_dims, strict=True):
            found |= {(name, d) for d in range(len(dims)) if major_factor(op, dims, d) in factors}
    return found


def _looped(op: Op) -> set[Place]:
    """Dims of a product's second operand that its first one and the result have too, and of the first likewise."""
    sets = [{major_factor(op, dims, d): d for d in range(len(dims))} for dims in (*op.in_dims[:2], op.out_dims[0])]
    both = (sets[0].keys() & sets[1].keys() & sets[2].keys()) - {-1}
    return {(name, dims[factor]) for name, dims in zip(op.inputs[:2], sets[:2], strict=True) for factor in both}


def _connected(cls: BlockClass, starts: set[Place]) -> set[Place]:
    """All dims of a class's tensors that its ops loop over together with some of `starts`."""
    found, before = set(starts), set[Place]()
    while found != before:
        before = set(found)
        for op in cls.ops:
            places = [
                (name, d, major_factor(op, dims, d))
                for names, every in ((op.inputs, op.in_dims), (op.outputs, op.out_dims))
                for name, dims in zip(names, every, strict=True)
                if name
                for d in range(len(dims))
            ]
            factors = {factor for name, d, factor in places if (name, d) in found} - {-1}
            found |= {(name, d) for name, d, factor in places if factor in factors}
    return found
