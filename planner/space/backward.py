"""What the backward pass of a block keeps, and what it computes again.

Without remat an op keeps what its cotangent reads. Weights (stored parameters, and what fused ops and views make of
them) are never kept: an op that reads one keeps its other operands and takes the weight again, cast and gather
included. Ops in a region that the user wrapped in ``jax.checkpoint`` keep what enters the region, and run again.

Under full remat a block keeps its inputs and runs again as far as the backward pass needs it: an op whose result
nothing reads (the last product of a block) does not, nor do the casts of its operands.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from costmodel.graph import ModelGraph, Op, Tensor
from costmodel.sharding import Spec, Strategy, local_fraction, split_factor


@dataclass(frozen=True)
class Again:
    """What a block does a second time for its backward pass.

    Attributes:
        reads: each (op, operand) that is taken again.
        runs: op that runs again, and does not only have its operands again -> how many times: twice where the block's
            second run makes what a region behind it starts from, and the op's own region runs again as well.
    """

    reads: frozenset[tuple[str, str]]
    runs: Mapping[str, int]


@dataclass(frozen=True)
class Kept:
    """What an op keeps: operands and results by name (shared with other ops that keep them), and whether what it makes
    for the backward pass alone (`Op.keeps`)."""

    names: frozenset[str] = frozenset()
    own: bool = False


def kept_by(ops: Sequence[Op], tensors: Mapping[str, Tensor], derived: frozenset[str]) -> dict[str, Kept]:
    """What each op of a block keeps without remat, by op name."""
    scopes = {name: op.scope for op in ops for name in op.outputs}
    found = {}
    for op in ops:
        weights = {n for n in op.inputs if n and (tensors[n].role == "param" or n in derived)}
        others = frozenset(n for n in op.inputs if n) - weights
        if not derived.isdisjoint(op.outputs):
            kept = Kept()
        elif op.scope >= 0:
            outside = frozenset(n for n in others if scopes.get(n, -1) != op.scope)
            kept = Kept(outside | frozenset(op.outputs if op.stored else ()))
        elif weights:
            again = _makes(op)
            kept = Kept(others if again else others & frozenset(op.saves))
        else:
            kept = Kept(frozenset(op.saves), own=True)
        found[op.name] = kept
    return found


def kept_bytes(
    ops: Sequence[Op],
    strategies: Sequence[Strategy],
    kept: Mapping[str, Kept],
    tensors: Mapping[str, Tensor],
    specs: Mapping[str, Spec],
    mesh: tuple[int, ...],
) -> dict[tuple[str, Spec], float]:
    """Bytes on one device that ops of one group keep, by tensor and spec; what an op makes itself under its `own_name`.

    Args:
        specs: spec of every tensor that the group reads or makes.
    """
    found: dict[tuple[str, Spec], float] = {}
    for op, strategy in zip(ops, strategies, strict=True):
        for name in kept[op.name].names:
            found[name, specs[name]] = tensors[name].bytes / split_factor(specs[name], mesh)
        for basis, size, fixed in op.keeps if kept[op.name].own else ():
            share = 1 / split_factor(specs[basis], mesh) if basis else local_fraction(op, strategy, mesh)
            name = own_name(op, fixed)
            found[name, strategy] = found.get((name, strategy), 0.0) + size * share
    return found


PASSING = frozenset(
    {"add", "sub", "reshape", "transpose", "squeeze", "expand_dims", "broadcast_in_dim", "copy", "optimization_barrier"}
)
"""Primitives whose result's cotangent is, but for its shape, that of an operand of the same size."""


@dataclass(frozen=True)
class Handed:
    """What an op's weight gradient reads: operands by name, and cotangents of results, by the name of the tensor that
    has the same one farthest downstream."""

    names: frozenset[str] = frozenset()
    cotangents: tuple[tuple[str, str], ...] = ()  # (result, tensor with the same cotangent)


def handed_by(
    ops: Sequence[Op], tensors: Mapping[str, Tensor], derived: frozenset[str], outputs: Iterable[str]
) -> dict[str, Handed]:
    """What each op of a block keeps between B and W, where a schedule splits backwards, by op name; only ops with a
    weight gradient.

    Args:
        outputs: of the block; their cotangents come from other blocks as well.
    """
    readers = Counter(name for op in ops for name in op.inputs if name)
    same, leaves = {}, frozenset(outputs)
    for op in reversed(ops):
        if op.primitive in PASSING and len(op.outputs) == 1:
            (made,) = op.outputs
            for name in op.inputs:
                alike = name and tensors[name].needs_grad and tensors[name].bytes == tensors[made].bytes
                if alike and readers[name] == 1 and name not in leaves:
                    same[name] = same.get(made, made)
    kept = kept_by(ops, tensors, derived)
    found = {}
    for op in ops:
        weights = [n for n in op.inputs if n and tensors[n].needs_grad and (tensors[n].role == "param" or n in derived)]
        if weights and derived.isdisjoint(op.outputs):
            results = [name for name in op.outputs if tensors[name].needs_grad]
            inside = kept[op.name].names if op.scope < 0 else frozenset(op.saves) - frozenset(weights)
            found[op.name] = Handed(inside, tuple((name, same.get(name, name)) for name in results))
    return found


def own_name(op: Op, fixed: bool = False) -> str:
    """What `kept_bytes` calls an op's own residuals, those that never change apart."""
    return f"{op.name}({'fixed' if fixed else ''})"


def cotangent_name(name: str) -> str:
    """What a tensor's cotangent is called among what is kept."""
    return f"{name}'"


def kept_once(graph: ModelGraph, key: str) -> frozenset[str]:
    """What all layers of a scan keep together (by the names of `kept_bytes`): inputs that are the same value for each,
    and what is made of those alone."""
    if key not in graph.layered:
        return frozenset()
    cls = graph.classes[key]
    pairs = [(a, b) for a, b in zip(graph.blocks, graph.blocks[1:], strict=False) if a.class_key == b.class_key == key]
    equal = {
        name
        for i, name in enumerate(cls.inputs)
        if all(a.inputs[i] == b.inputs[i] and a.inputs[i].index is None for a, b in pairs)
    }
    for op in cls.ops:
        equal.add(own_name(op, fixed=True))
        if all(name in equal for name in op.inputs if name):
            equal.update((*op.outputs, own_name(op)))
    return frozenset(equal)


def done_again(ops: Sequence[Op], tensors: Mapping[str, Tensor], derived: frozenset[str], *, full: bool) -> Again:
    """What of a block is done again for the backward pass.

    A region that the user wrapped runs again from what enters it and what its policy keeps. Under full remat the block
    runs again from its inputs as far as to what its regions start from, and these then run again by themselves: as JAX
    lowers it, and XLA compiles it for GPUs. (For CPUs it joins some of these runs.)

    Args:
        derived: tensors made of parameters alone.
        full: whether the block is run under full remat.
    """
    makers = {name: op for op in ops for name in op.outputs}
    reads, running = set[tuple[str, str]](), dict[str, int]()
    inside: set[str] = set()  # tensors that a region's second run computes again
    needed: set[str] = set()  # those that the block's does, and what is made of parameters alone
    for op in reversed(ops):
        in_region = op.scope >= 0
        kept = full and op.stored and not set(op.saves).isdisjoint(op.outputs)
        outer = not needed.isdisjoint(op.outputs) or (_makes(op) if full and not in_region else kept)
        inner = in_region and (not inside.isdisjoint(op.outputs) or _makes(op))
        if times := inner + (outer and full):
            running[op.name] = times
        for name in filter(None, op.inputs):
            weight = tensors[name].role == "param" or name in derived
            if in_region and (inner or name in op.saves):
                reads.add((op.name, name))
                made = makers.get(name)
                if made is not None and made.scope == op.scope and not made.stored:
                    inside.add(name)
                elif full or name in derived:
                    needed.add(name)
            if (full or weight) and (outer or (not in_region and (name in op.saves or (weight and _makes(op))))):
                reads.add((op.name, name))
                if full or name in derived:
                    needed.add(name)
    return Again(frozenset(reads), running)


def _makes(op: Op) -> bool:
    """Whether the backward pass reads something that the op makes of its operands, and that no policy keeps."""
    own = any(not fixed for _, _, fixed in op.keeps)
    return own or (not op.stored and not set(op.saves).isdisjoint(op.outputs))


def takes_again(ops: Iterable[Op], name: str, again: Again) -> bool:
    """Whether some of these ops (a group) take a tensor again."""
    return any((op.name, name) in again.reads for op in ops)


def gives_cotangent(ops: Iterable[Op], name: str, tensors: Mapping[str, Tensor]) -> bool:
    """Whether a tensor gets a cotangent from some of these ops (a group): not from a comparison, or the maximum that a
    softmax subtracts."""
    return any(name in op.inputs and any(o and tensors[o].needs_grad for o in op.outputs) for op in ops)
