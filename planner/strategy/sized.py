"""A model's graph at a microbatch size that it was not captured at: the one on the line through two that were.

Only sizes differ. Of what depends on them no more than shapes and bytes follow, which is what memory is counted in;
FLOPs and what ops touch stay those of the first capture (`planner.strategy.work` has those of every size).
"""

import math
from dataclasses import replace

from costmodel.graph import BlockClass, ModelGraph, Op, Tensor


def sized_graph(one: ModelGraph, other: ModelGraph, microbatch: int) -> ModelGraph:
    """The graph for microbatches of so many examples.

    Args:
        one, other: the same model captured at two sizes. Names and block classes are those of `one`.

    Raises:
        ValueError: the two differ in more than sizes.
    """
    if microbatch == one.microbatch:
        return one
    if len(one.blocks) != len(other.blocks) or len(one.classes) != len(other.classes):
        raise ValueError("the model has other blocks at another microbatch size")
    line = _Line(one.microbatch, other.microbatch, microbatch)
    classes = {
        key: line.block_class(a, b)
        for (key, a), b in zip(one.classes.items(), other.classes.values(), strict=True)
    }  # fmt: skip
    return replace(one, microbatch=microbatch, classes=classes, values=line.tensors(one.values, other.values))


def same_ops(one: ModelGraph, other: ModelGraph) -> bool:
    """Whether two captures of a model have the same blocks of the same ops."""

    def ops(graph: ModelGraph) -> list[list[tuple[str, str]]]:
        classes = {key: [(op.name, op.primitive) for op in cls.ops] for key, cls in graph.classes.items()}
        return [classes[block.class_key] for block in graph.blocks]

    return one is other or ops(one) == ops(other)


class _Line:
    """Whole numbers on the line through two captures, rounded up where the line has none."""

    def __init__(self, one: int, other: int, at: int):
        self.numerator, self.denominator = at - one, other - one

    def number(self, a: int, b: int) -> int:
        return a if a == b else max(1, math.ceil(a + (b - a) * self.numerator / self.denominator))

    def tensor(self, a: Tensor, b: Tensor) -> Tensor:
        if a.shape == b.shape:
            return a
        return replace(a, shape=tuple(self.number(m, n) for m, n in zip(a.shape, b.shape, strict=True)))

    def tensors(self, ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> dict[str, Tensor]:
        pairs = zip(ours.items(), theirs.values(), strict=True)
        return {name: self.tensor(a, b) for (name, a), b in pairs}

    def op(self, a: Op, b: Op) -> Op:
        if a.keeps == b.keeps:
            return a
        both = zip(a.keeps, b.keeps, strict=True)
        return replace(a, keeps=tuple((basis, self.number(m, n), fixed) for (basis, m, fixed), (_, n, _) in both))

    def block_class(self, a: BlockClass, b: BlockClass) -> BlockClass:
        ops = tuple(self.op(own, their) for own, their in zip(a.ops, b.ops, strict=True))
        return replace(a, ops=ops, tensors=self.tensors(a.tensors, b.tensors))


__all__ = ["same_ops", "sized_graph"]
