"""Ops of a traced function as they would be priced on one device."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import msgspec

from costmodel.estimator import OpCost, Pricing
from costmodel.graph import Op, Tensor
from costmodel.traffic import Traffic
from planner.frontend import jax_compat as jc
from planner.frontend.flat import Value, flatten
from planner.frontend.gradients import depends
from planner.frontend.ops import op_from_equation, rule_for
from profiles.catalogue import device_kind

# Whatever the shape of a product, so that programs inside others, whose shapes do not count, cost the same.
A100 = msgspec.structs.replace(device_kind("A100-SXM4-80GB"), matmul_half_depth=0.0, matmul_half_area=0.0)
BYTES_PER_S = A100.memory_bandwidth_bytes_per_s * A100.bandwidth_efficiency
LAUNCH_S = A100.launch_s


@dataclass(frozen=True)
class Priced:
    """An op with its cost and what it was priced from."""

    op: Op
    cost: OpCost
    tensors: dict[str, Tensor]


def priced(fn: Callable[..., Any], *args: Any, frozen: tuple[int, ...] = ()) -> dict[str, Priced]:
    """Ops by name; all floating arguments are parameters, those at `frozen` get no gradient."""
    program = flatten(jax.make_jaxpr(fn)(*args), [f"arg{i}" for i in range(len(args))])
    floats = [v.name for v in program.inputs if jnp.issubdtype(v.aval.dtype, jnp.inexact)]
    moved = depends(program, set(floats) - {f"arg{i}" for i in frozen})

    def moves(value: Value) -> bool:
        return value.name in moved

    ops = [op_from_equation(e, rule_for(e.primitive.name), moves) for e in program.equations]
    values = [*program.inputs, *program.constants, *(v for e in program.equations for v in e.outputs)]
    tensors = {
        v.name: Tensor(
            v.name,
            v.shape,
            str(v.aval.dtype),
            jc.itemsize(v.aval.dtype),
            "param" if v in program.inputs else "activation",
            moves(v),
        )
        for v in values
    }
    traffic = Traffic.of_block(tuple(ops), tensors, frozenset(o.name for o in program.outputs if isinstance(o, Value)))
    pricing = Pricing(kind=A100, mesh=(), axis_names=(), links=())
    return {op.name: Priced(op, pricing.op(op, (), tensors, traffic), tensors) for op in ops}


def aval(*shape: int, dtype: str = "bfloat16") -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))
