"""Which parameters of a model are experts, and along which dims of its tensors they lie.

A block with experts chooses among them: it has a router, which sorts scores or picks the largest, one score an expert.
Two kinds of parameters have a dim of as many items as a router chooses among that lies along its experts:

* Matrix products loop over it on both sides, each expert on tokens of its own (``bech,ehf->ebcf``).
* The parameter is under the name of `experts`, a layer's item has three dims or more, and the first is not summed over
  by the products that read it (``bsh,ehf->bsef``: every expert runs on every token, which no product shows), or is
  summed over together with one that is not (``bsef,efh->bsh``: the experts' results are added up). Its router may be in
  another block.

What else looks like it has none: the matrices of a list of experts (one each), a product that is block-diagonal by
heads, a grouped convolution.
"""

import re
from collections import Counter, defaultdict
from collections.abc import Iterable

from costmodel.graph import BlockClass, Dims, ModelGraph, Op
from costmodel.kernels import is_matmul
from costmodel.sharding import major_factor

_NAMED = re.compile(r"(^|/)experts?/")
_CHOOSES = frozenset({"top_k", "approx_top_k", "argmax", "sort"})  # argsort is a sort
Place = tuple[str, int]  # tensor, dim


def expert_dims(graph: ModelGraph) -> dict[str, dict[str, frozenset[int]]]:
    """Block class -> tensor -> dims that experts lie along; empty for a model without experts."""
    found: dict[str, dict[str, frozenset[int]]] = {}
    for key, starts in _parameters(graph).items():
        dims: dict[str, set[int]] = defaultdict(set)
        for name, dim in _connected(graph.classes[key], starts):
            dims[name].add(dim)
        found[key] = {name: frozenset(own) for name, own in dims.items()}
    return found


def expert_counts(graph: ModelGraph) -> Counter[int]:
    """Numbers of experts, each with how many parameters have them."""
    counts: Counter[int] = Counter()
    for key, places in _parameters(graph).items():
        counts.update(graph.classes[key].tensors[name].shape[dim] for name, dim in places)
    return counts


def _parameters(graph: ModelGraph) -> dict[str, set[Place]]:
    """Block class -> its parameters with the dim of their experts, where it has any."""
    chosen = {key: _chosen_among(cls) for key, cls in graph.classes.items()}
    anywhere = frozenset[int]().union(*chosen.values())
    if not anywhere:
        return {}
    paths: dict[str, tuple[str, ...]] = {}
    for block in graph.blocks:
        paths.setdefault(block.class_key, tuple(source.value for source in block.inputs))
    every = {key: _class_parameters(cls, paths[key], chosen[key], anywhere) for key, cls in graph.classes.items()}
    return {key: places for key, places in every.items() if places}


def _class_parameters(
    cls: BlockClass, paths: tuple[str, ...], here: frozenset[int], anywhere: frozenset[int]
) -> set[Place]:
    """Parameters of a class with the dim of their experts.

    Args:
        paths: names of what a block of the class reads, as `BlockClass.inputs`.
        here, anywhere: `_chosen_among` of the class, and of all classes of the model.
    """
    params = {
        name: path
        for name, path in zip(cls.inputs, paths, strict=True)
        if cls.tensors[name].role == "param" and len(cls.tensors[name].shape) > 1
    }
    made_of = _made_of(cls, params)

    def of_parameters(places: Iterable[Place]) -> set[Place]:
        return {origin for place in places for origin in made_of.get(place, ())}

    products = [op for op in cls.ops if op.work == "matmul"]
    looped, summed, read = (
        of_parameters(place for op in products for place in select(op)) for select in (_looped, _summed, _operand_dims)
    )
    found = {(name, d) for name, d in looped if cls.tensors[name].shape[d] in here}
    stacked = {
        (name, 0)
        for name, path in params.items()
        if _NAMED.search(path) and len(cls.tensors[name].shape) > 2 and cls.tensors[name].shape[0] in anywhere
    }
    found |= (stacked & read) - summed
    with_others = stacked & summed
    return found | (with_others & _connected(cls, found)) if with_others else found


def _chosen_among(cls: BlockClass) -> frozenset[int]:
    """Sizes of what the routers of a class choose from: one dim of it is a score an expert (another may be tokens, of
    which an expert chooses some)."""
    return frozenset(
        size for op in cls.ops if op.primitive in _CHOOSES and op.inputs[0] for size in cls.tensors[op.inputs[0]].shape
    )


def _made_of(cls: BlockClass, params: Iterable[str]) -> dict[Place, set[Place]]:
    """Dims of parameters, and of what is made of one parameter alone (casts, transposes), with the dim of the parameter
    that each is."""
    found = {(name, d): {(name, d)} for name in params for d in range(len(cls.tensors[name].shape))}
    for op in cls.ops:
        names = [name for name in op.inputs if name]
        if is_matmul(op) or len(names) != 1 or not op.inputs[0]:
            continue
        origins: dict[int, set[Place]] = defaultdict(set)
        for d, factor in _factors(op, op.in_dims[0]):
            origins[factor] |= found.get((names[0], d), set())
        for name, dims in zip(op.outputs, op.out_dims, strict=True):
            found.update({(name, d): origins[factor] for d, factor in _factors(op, dims) if origins.get(factor)})
    return found


def _factors(op: Op, dims: Dims) -> list[tuple[int, int]]:
    """(dim, its major factor) of a tensor's dims that have more than one item."""
    factors = ((d, major_factor(op, dims, d)) for d in range(len(dims)))
    return [(d, factor) for d, factor in factors if factor >= 0]


def _operand_dims(op: Op) -> set[Place]:
    return {(name, d) for name, dims in zip(op.inputs[:2], op.in_dims[:2], strict=True) for d in range(len(dims))}


def _looped(op: Op) -> set[Place]:
    """Dims of a product's operands that the other operand and the result have too."""
    return _shared(op, in_result=True)


def _summed(op: Op) -> set[Place]:
    """Dims of a product's operands that the other operand has too, and the result lacks."""
    return _shared(op, in_result=False)


def _shared(op: Op, *, in_result: bool) -> set[Place]:
    one, other, result = ({f: d for d, f in _factors(op, dims)} for dims in (*op.in_dims[:2], op.out_dims[0]))
    both = {factor for factor in one.keys() & other.keys() if (factor in result) == in_result}
    return {(name, dims[f]) for name, dims in zip(op.inputs[:2], (one, other), strict=True) for f in both}


def _scores(cls: BlockClass) -> set[Place]:
    """Dims of what a class's routers choose from, and of what that is made of, the routers' parameters included."""
    found: set[Place] = set()
    for op in reversed(cls.ops):
        made = {
            factor
            for name, dims in zip(op.outputs, op.out_dims, strict=True)
            for d, factor in _factors(op, dims)
            if (name, d) in found
        }
        for name, dims in zip(op.inputs, op.in_dims, strict=True):
            found |= {(name, d) for d, factor in _factors(op, dims) if factor in made or op.primitive in _CHOOSES}
    return found


def _connected(cls: BlockClass, starts: set[Place]) -> set[Place]:
    """All dims of a class's tensors that its ops loop over together with some of `starts`, but for `_scores`: every
    device chooses among all experts, whichever it holds. Each place, and each loop of an op, is visited once."""
    scores = _scores(cls)
    loops: dict[tuple[int, int], list[Place]] = defaultdict(list)  # by op and factor
    loops_of: dict[Place, list[tuple[int, int]]] = defaultdict(list)
    for i, op in enumerate(cls.ops):
        for names, every in ((op.inputs, op.in_dims), (op.outputs, op.out_dims)):
            for name, dims in zip(names, every, strict=True):
                for d, factor in _factors(op, dims) if name else ():
                    loops[i, factor].append((name, d))
                    loops_of[name, d].append((i, factor))
    found, waiting = set(starts), list(starts)
    while waiting:
        for loop in loops_of[waiting.pop()]:
            new = {place for place in loops.pop(loop, ()) if place not in found and place not in scores}
            found |= new
            waiting += new
    return found
