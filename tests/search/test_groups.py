"""Strategies of groups: none is lost that no other equals, and splits survive where some must be dropped."""

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import pytest

from costmodel.graph import Op, Tensor
from costmodel.sharding import REPLICATED, VARYING, axis_choices, operand_spec, result_spec
from planner.frontend.flat import flatten
from planner.frontend.joint import make_ops
from planner.frontend.ops import op_from_equation, rule_for
from planner.space import assignments
from planner.space.assignments import AXIS_LIMIT, AxisAssignment, axis_assignments
from planner.space.groups import Group, group_strategies

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


def traced(
    function: Callable[..., object], shapes: dict[str, tuple[int, ...]], gradients: frozenset[str] = frozenset()
) -> tuple[Group, dict[str, Tensor]]:
    """All ops of a function as one group. A cotangent reaches `gradients` and what is made from them."""
    closed = jax.make_jaxpr(function)(*(jnp.zeros(shape) for shape in shapes.values()))
    program = flatten(closed, list(shapes))
    made_ops = make_ops(program, lambda e: op_from_equation(e, rule_for(e.primitive.name), lambda value: False))
    ops = tuple(made_ops.values())
    tensors = {n: Tensor(n, shape, "float32", 4, "activation", n in gradients) for n, shape in shapes.items()}
    for op in ops:
        for name, dims in zip(op.outputs, op.out_dims, strict=True):
            shape = tuple(math.prod(op.factors[f].size for f in parts) for parts in dims)
            reached = any(n and tensors[n].needs_grad for n in op.inputs)
            tensors[name] = Tensor(name, shape, "float32", 4, "activation", reached)
    made = [name for op in ops for name in op.outputs]
    reads = tuple(dict.fromkeys(n for op in ops for n in op.inputs if n and n not in made))
    used = {n for op in ops for n in op.inputs}
    return Group(ops, reads, tuple(made), tuple(n for n in made if n not in used)), tensors


def moved_bytes(op: Op, tensors: dict[str, Tensor]) -> int:
    return sum(tensors[name].bytes for name in {*op.inputs, *op.outputs} if name)


def enumerated(group: Group, size: int, tensors: dict[str, Tensor]) -> dict[tuple[int, ...], int]:
    """Every interface of the group by trying all strategies of all ops, with the most bytes that it can split.

    Codes of reads, then of exports. Read without a gradient, replicated and varying look alike.
    """
    found: dict[tuple[int, ...], int] = {}

    def go_on(at: int, state: dict[str, int], split: int) -> None:
        if at == len(group.ops):
            seen = interface(group, [state[n] for n in group.reads], [state[n] for n in group.exports], tensors)
            found[seen] = max(found.get(seen, 0), split)
            return
        op = group.ops[at]
        for code in axis_choices(op, size):
            new = dict(state)
            for i, name in enumerate(op.inputs):
                need = operand_spec(op, i, (code,))[0] if name else REPLICATED
                have = new.setdefault(name, need)
                if have != need and (have, need, tensors[name].needs_grad) != (REPLICATED, VARYING, False):
                    break
            else:
                new |= {n: result_spec(op, i, (code,))[0] for i, n in enumerate(op.outputs)}
                go_on(at + 1, new, split + (moved_bytes(op, tensors) if code >= 0 else 0))

    go_on(0, {}, 0)
    return found


def interface(group: Group, needs: list[int], gives: list[int], tensors: dict[str, Tensor]) -> tuple[int, ...]:
    free = {n for n in group.reads if not tensors[n].needs_grad}
    alike = [REPLICATED if c == VARYING and n in free else c for n, c in zip(group.reads, needs, strict=True)]
    return (*alike, *gives)


def split_bytes(group: Group, one: AxisAssignment, tensors: dict[str, Tensor]) -> int:
    return sum(moved_bytes(op, tensors) for op, code in zip(group.ops, one.ops, strict=True) if code >= 0)


def masked(scores):
    """A mask of constants beside scaled scores, as two parts that meet at the select."""
    rows, columns = jax.lax.broadcasted_iota(jnp.int32, (8, 8), 0), jax.lax.broadcasted_iota(jnp.int32, (8, 8), 1)
    return jax.lax.select(jax.lax.broadcast_in_dim(rows >= columns, (8, 8, 8), (1, 2)), scores * 0.5, -scores)


def two_exports(x, bias):
    wide = jax.lax.broadcast_in_dim(bias, (8, 16), (1,))
    return x * wide, jnp.tanh(x + wide)


def sums_of_products(*pairs):
    return sum(a * b for a, b in zip(pairs[::2], pairs[1::2], strict=True))


def outer(a, b):
    """Small operands of a large result; `a` is read again at the end."""
    return jax.lax.broadcast_in_dim(a * 2.0, (8, 8, 4), (0,)) * b + jax.lax.broadcast_in_dim(a, (8, 8, 4), (1,))


def constants_of_use_elsewhere(x, *columns):
    """Small constants that are added along the first dim and exported too: replicated or varying, which multiplies."""
    scaled = [column * 2.0 for column in columns]
    for column in scaled:
        x = x + jax.lax.broadcast_in_dim(column, (8, 8, 4), (0,))
    return x, *(column + 1.0 for column in scaled)


PAIRS = {f"{side}{i}": (8, 16) for i in range(3) for side in "ab"}
GROUPS = {
    "mask": (masked, {"scores": (8, 8, 8)}, frozenset({"scores"})),
    "two exports": (two_exports, {"x": (8, 16), "bias": (16,)}, frozenset({"x", "bias"})),
    "two exports of a constant bias": (two_exports, {"x": (8, 16), "bias": (16,)}, frozenset({"x"})),
    "sums of products": (sums_of_products, PAIRS, frozenset(PAIRS)),
    "constants of use elsewhere": (
        constants_of_use_elsewhere,
        {"x": (8, 8, 4), **{f"c{i}": (8,) for i in range(2)}},
        frozenset({"x"}),
    ),
    "outer": (outer, {"a": (8,), "b": (8, 8, 4)}, frozenset()),
}


@pytest.fixture(params=GROUPS)
def small(request) -> tuple[Group, dict[str, Tensor]]:
    return traced(*GROUPS[request.param])


def test_every_interface_has_the_assignment_that_splits_most(small):
    group, tensors = small
    wanted = enumerated(group, 4, tensors)
    assert 1 < len(wanted) <= AXIS_LIMIT
    found = axis_assignments(group, 4, tensors)
    shown = {interface(group, list(o.needs), list(o.gives), tensors): split_bytes(group, o, tensors) for o in found}
    assert shown == wanted and len(shown) == len(found)


@pytest.mark.parametrize("name", ["mask", "sums of products", "constants of use elsewhere"])
def test_what_is_kept_of_too_many_has_the_best_with_each_split_of_the_largest(name, monkeypatch):
    """Of the largest export and the largest read, along each dim."""
    group, tensors = traced(*GROUPS[name])
    wanted = enumerated(group, 4, tensors)
    monkeypatch.setattr(assignments, "AXIS_LIMIT", 5)
    monkeypatch.setattr(assignments, "PART_LIMIT", 12)
    found = axis_assignments(group, 4, tensors)
    assert len(found) == 5 < len(wanted) and set(found[0].ops) == {REPLICATED}
    names = [*group.reads, *group.exports]
    for side in (group.reads, group.exports):
        at = names.index(min(side, key=lambda n: (-tensors[n].bytes, n)))
        for dim in range(len(tensors[names[at]].shape)):
            best = max((split for seen, split in wanted.items() if seen[at] == dim), default=0)
            kept = [o for o in found if (*o.needs, *o.gives)[at] == dim]
            assert max((split_bytes(group, o, tensors) for o in kept), default=0) == best, (names[at], dim)


def test_a_group_with_thousands_of_interfaces_keeps_its_splits():
    """Each product may take its pending sum from either side: 2 to the number of products ways."""
    shapes = {f"{side}{i}": (16, 32, 8) for i in range(12) for side in "ab"}
    group, tensors = traced(sums_of_products, shapes, frozenset(shapes))
    found = axis_assignments(group, 8, tensors)
    assert len(found) == AXIS_LIMIT
    for dim in range(3):
        (whole,) = (o for o in found if set(o.gives) == {dim})
        assert set(whole.needs) == {dim} and min(whole.ops) >= 0
