"""Strategies of groups: splits survive where a chain has more joint assignments than are kept."""

import jax
import jax.numpy as jnp
import pytest

from costmodel.graph import Tensor
from planner.frontend.flat import flatten
from planner.frontend.joint import make_ops
from planner.frontend.ops import op_from_equation, rule_for
from planner.space.groups import AXIS_LIMIT, Group, group_strategies

OPERANDS = 30


def long_chain() -> tuple[Group, dict[str, Tensor]]:
    """An elementwise chain without a gradient, each op with one operand of its own.

    Each op may take what the op before leaves as replicated or as varying, so that assignments multiply.
    """

    def chain(h, *operands):
        for one in operands:
            h = h * one
        return h

    names = ["h", *(f"s{i}" for i in range(OPERANDS))]
    program = flatten(jax.make_jaxpr(chain)(*[jnp.zeros((8, 64))] * len(names)), names)
    ops = make_ops(program, lambda e: op_from_equation(e, rule_for(e.primitive.name), lambda value: False))
    made = [op.outputs[0] for op in ops.values()]
    tensors = {name: Tensor(name, (8, 64), "float32", 4, "activation", False) for name in (*names, *made)}
    return Group(tuple(ops.values()), tuple(names), tuple(made), (made[-1],)), tensors


@pytest.mark.parametrize("mesh", [(8,), (2, 4)])
def test_a_long_chain_keeps_its_splits(mesh):
    group, tensors = long_chain()
    assert len(group.ops) == OPERANDS
    found = group_strategies(group, mesh, tensors)
    assert len(found) == len({(one.needs, one.gives) for one in found}) <= AXIS_LIMIT ** len(mesh)
    split = {one.gives[0] for one in found}
    assert {(0,) * len(mesh), (1,) * len(mesh)} <= split
    assert any(set(one.ops) == {(0,) * len(mesh)} for one in found)  # every op of it
