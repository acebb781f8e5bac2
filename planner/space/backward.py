"""What the backward pass of a block computes again, and so which casts run again.

Without remat only weights are taken again (stored parameters and what fused ops and views make of them): by the ops
whose cotangents read them. Under full remat the block runs again as far as the backward pass needs it: an op whose
result nothing saves (the last product of a block) does not, nor do the casts of its operands.
"""

from collections.abc import Iterable, Sequence

from costmodel.graph import Op, Tensor

Again = frozenset[tuple[str, str]]  # (op, tensor that it reads again)


def read_again(ops: Sequence[Op], tensors: dict[str, Tensor], derived: frozenset[str], *, full: bool) -> Again:
    """Every (op, operand) of a block that is taken again for the backward pass.

    Args:
        derived: tensors made of parameters alone.
        full: whether the block is run under full remat.
    """
    found: set[tuple[str, str]] = set()
    needed: set[str] = set()  # tensors that are computed again
    for op in reversed(ops):
        runs = not needed.isdisjoint(op.outputs) or (full and not set(op.saves).isdisjoint(op.outputs))
        for name in op.inputs:
            if not name or not (full or tensors[name].role == "param" or name in derived):
                continue
            if runs or name in op.saves:
                found.add((op.name, name))
                if full or name in derived:
                    needed.add(name)
    return frozenset(found)


def takes_again(ops: Iterable[Op], name: str, again: Again) -> bool:
    """Whether some of these ops (a group) take a tensor again."""
    return any((op.name, name) in again for op in ops)
