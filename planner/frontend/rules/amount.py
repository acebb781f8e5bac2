"""What the programs inside an equation take: FLOPs, which of them are matrix products, kernels, bytes moved.

A program inside is priced like a block: fused neighbours share their traffic, and all of them count as one kernel.
Programs inside programs count with all their trips.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from costmodel.graph import Inside, Op, Role, Tensor, matmul_flops
from costmodel.traffic import Traffic, has_backward
from planner.frontend import jax_compat as jc
from planner.frontend.flat import Equation, Value
from planner.frontend.joint import Joined
from planner.space.backward import done_again


@dataclass(frozen=True, slots=True)
class Amount:
    """FLOPs in all, and what else a direction takes."""

    flops: float = 0.0
    inside: Inside = field(default_factory=Inside)

    def __add__(self, other: "Amount") -> "Amount":
        return Amount(self.flops + other.flops, self.inside + other.inside)

    def times(self, trips: float) -> "Amount":
        """The same, run so many times."""
        return Amount(self.flops * trips, self.inside.times(trips))


def forward_amount(joined: Joined) -> Amount:
    """What running a program once takes."""
    tensors = _tensors(joined)
    traffic = _traffic(joined, tensors)
    total, fused = Amount(), False
    for op in joined.ops.values():
        total += _forward(op, tensors, traffic)
        fused |= op.fuses and op.work != "view"
    return total + Amount(0.0, Inside(launches=float(fused)))


def backward_amount(joined: Joined) -> Amount:
    """What the backward pass of a program takes, running again what it needs of what the user wrapped in
    ``jax.checkpoint``; whatever a policy keeps of that."""
    tensors = _tensors(joined)
    traffic = _traffic(joined, tensors)
    again = done_again(tuple(joined.ops.values()), tensors, frozenset(), full=False).runs
    total, fused = Amount(), False
    for op in joined.ops.values():
        if op.name in again:
            total += _forward(op, tensors, traffic)
        if not has_backward(op, tensors):
            continue
        if op.inside_backward is not None:
            total += Amount(op.backward_flops, op.inside_backward)
            continue
        products = dict.fromkeys(matmul_flops(op, _operand_dtype(op, tensors)), op.backward_flops)
        kernels = max(1.0, round(op.backward_flops / op.flops)) if products and op.flops else 1.0
        total += Amount(op.backward_flops, _one(op, products, kernels, traffic.backward(op, (), ())))
        fused |= op.fuses and op.work != "view"
    return total + Amount(0.0, Inside(launches=float(fused)))


def guessed_trips(eqn: Equation, programs: Mapping[str, Joined]) -> Iterator[str]:
    """Lines of the loops in an equation, itself included, whose trip count is data."""
    if eqn.primitive.name == "while":
        yield eqn.source
    for joined in programs.values():
        for op in joined.ops.values():
            yield from op.guessed_trips


def _forward(op: Op, tensors: Mapping[str, Tensor], traffic: Traffic) -> Amount:
    if op.inside is not None:
        return Amount(op.flops, op.inside)
    products = matmul_flops(op, _operand_dtype(op, tensors))
    return Amount(op.flops, _one(op, products, 1.0, sum(traffic.of(op, (), ()))))


def _one(op: Op, products: Mapping[str, float], kernels: float, memory_bytes: float) -> Inside:
    """What one op takes beside its FLOPs; views are free."""
    if op.work == "view":
        return Inside()
    launches = 0.0 if op.fuses else kernels
    return Inside(matmul_flops=tuple(products.items()), launches=launches, memory_bytes=memory_bytes)


def _operand_dtype(op: Op, tensors: Mapping[str, Tensor]) -> str:
    return tensors[op.inputs[0]].dtype if op.inputs and op.inputs[0] else tensors[op.outputs[0]].dtype


def _tensors(joined: Joined) -> dict[str, Tensor]:
    """Every value of a program; what comes from outside, and what it captured, lies in memory."""
    program = joined.program
    made = [v for e in program.equations for v in e.outputs]
    outside = [*program.inputs, *program.constants]
    roles: tuple[tuple[Role, list[Value]], ...] = (("activation", made), ("const", outside))
    return {
        v.name: Tensor(v.name, v.shape, str(v.aval.dtype), jc.itemsize(v.aval.dtype), role, v.name in joined.moved)
        for role, values in roles
        for v in values
    }


def _traffic(joined: Joined, tensors: Mapping[str, Tensor]) -> Traffic:
    outputs = frozenset(o.name for o in joined.program.outputs if isinstance(o, Value))
    return Traffic.of_block(tuple(joined.ops.values()), tensors, outputs)
