"""Matrix products: dense (`dot_general`) and ragged over groups (`ragged_dot_general`, mixtures of experts)."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jax import lax

from costmodel.graph import Combine, Dims
from planner.frontend import jax_compat as jc
from planner.frontend.flat import Equation
from planner.frontend.rules.base import Factorisation, Placement, Rule, register
from planner.frontend.rules.factors import FactorList, is_inexact

PRODUCT_RESIDUALS = ((1,), (0,))
CUTS_GROUPS = "a shard of the ragged dim would cut groups"
BY_BATCH = "group sizes differ by batch"


def product_linear(eqn: Equation) -> tuple[tuple[int, ...], ...]:
    """Linear in either operand; but integer summands wrap around, and a wider result would keep what they lost."""
    same = all(operand.aval.dtype == eqn.outputs[0].aval.dtype for operand in eqn.inputs[:2])
    return ((0,), (1,)) if same or all(map(is_inexact, eqn.inputs[:2])) else ()


def multiply_adds(eqn: Equation, count: float) -> float:
    """Floating point operations of `count` multiply-adds; one complex multiply-add is four real ones."""
    complex_product = jnp.issubdtype(eqn.outputs[0].aval.dtype, jnp.complexfloating)
    return (8.0 if complex_product else 2.0) * count


@dataclass(frozen=True)
class _Product:
    """Dims of a product's operands and result, named by what the loops over them are."""

    factors: FactorList
    lhs: Dims
    rhs: Dims
    out: Dims


def _product(
    lhs: Sequence[int], rhs: Sequence[int], numbers: Any, fixed: dict[str, str], groups: Sequence[int]
) -> _Product:
    """One factor for every batch, contracted and free dim.

    Args:
        fixed: why dims do not split, by the word in front of their number (``row``) or the whole name (``row1``).
        groups: dims of `rhs` that the caller gives factors to.
    """
    (lhs_contract, rhs_contract), (lhs_batch, rhs_batch) = numbers
    factors = FactorList()
    a: dict[int, tuple[int, ...]] = {}
    b: dict[int, tuple[int, ...]] = dict.fromkeys(groups, ())
    out: list[tuple[int, ...]] = []

    def add(kind: str, i: int, size: int, combine: Combine = "none") -> tuple[int, ...]:
        return factors.add(f"{kind}{i}", size, combine=combine, fixed=fixed.get(kind, fixed.get(f"{kind}{i}", "")))

    for i, (d, e) in enumerate(zip(lhs_batch, rhs_batch, strict=True)):
        a[d] = b[e] = add("batch", i, lhs[d])
        out.append(a[d])
    for i, (d, e) in enumerate(zip(lhs_contract, rhs_contract, strict=True)):
        a[d] = b[e] = add("contract", i, lhs[d], "sum")
    for kind, shape, dims in (("row", lhs, a), ("column", rhs, b)):
        for i, d in enumerate(d for d in range(len(shape)) if d not in dims):
            dims[d] = add(kind, i, shape[d])
            out.append(dims[d])
    return _Product(factors, tuple(a[d] for d in range(len(lhs))), tuple(b[d] for d in range(len(rhs))), tuple(out))


@register("dot_general")
class DotGeneral(Rule):
    """Every loop splits. A split contraction leaves a pending sum."""

    def factorise(self, eqn: Equation) -> Factorisation:
        product = _product(*eqn.in_shapes, eqn.params["dimension_numbers"], {}, ())
        factors = product.factors.done()
        return Factorisation(
            factors=factors,
            in_dims=(product.lhs, product.rhs),
            out_dims=(product.out,),
            linear=product_linear(eqn),
            residuals=PRODUCT_RESIDUALS,
            flops=multiply_adds(eqn, math.prod(f.size for f in factors)),
            work="matmul",
            fuses=False,
        )


@register("ragged_dot_general")
class RaggedDot(Rule):
    """Rows of the left operand are sorted by group; each group has its own matrix.

    The ragged dim does not split (a shard would cut groups). Where the groups are a dim of the right operand, they
    split: each device multiplies the rows of its own groups and leaves zeros elsewhere, a pending sum.
    """

    def factorise(self, eqn: Equation) -> Factorisation:
        lhs, rhs, sizes = eqn.in_shapes[:3]
        numbers = eqn.params["ragged_dot_dimension_numbers"]
        (lhs_contract, _), (lhs_batch, _) = numbers.dot_dimension_numbers
        (ragged,) = numbers.lhs_ragged_dimensions
        groups = tuple(numbers.rhs_group_dimensions)
        kinds = {"contract": list(lhs_contract), "batch": list(lhs_batch)}
        kinds["row"] = [d for d in range(len(lhs)) if d not in lhs_contract and d not in lhs_batch]
        fixed = {f"{kind}{dims.index(ragged)}": CUTS_GROUPS for kind, dims in kinds.items() if ragged in dims}
        if len(sizes) > 1:  # a list of sizes for each batch element would have to be split along with the batch
            fixed.update(batch=BY_BATCH, row=BY_BATCH)
        product = _product(lhs, rhs, numbers.dot_dimension_numbers, fixed, groups)
        rows = math.prod(f.size for f in product.factors.done())  # every row meets one group's matrix
        right, out = list(product.rhs), product.out
        if groups:
            by_row = self.splits_groups(eqn)
            reason = "" if by_row else "groups split only for a plain list of group sizes and no batch dims"
            right[groups[0]] = product.factors.add(
                "group", rhs[groups[0]], combine="sum" if by_row else "none", fixed=reason
            )
        elif ragged in lhs_contract:  # one product a group: they become the leading dim of the result
            out = (product.factors.add("group", sizes[-1], fixed=CUTS_GROUPS), *out)
        return Factorisation(
            factors=product.factors.done(),
            in_dims=(product.lhs, tuple(right), *(tuple(() for _ in shape) for shape in eqn.in_shapes[2:])),
            out_dims=(out,),
            linear=product_linear(eqn),
            residuals=((1, 2), (0, 2)),
            flops=multiply_adds(eqn, rows),
            work="matmul",
            fuses=False,
        )

    @staticmethod
    def splits_groups(eqn: Equation) -> bool:
        numbers = eqn.params["ragged_dot_dimension_numbers"]
        (contract, _), (batch, _) = numbers.dot_dimension_numbers
        ragged = numbers.lhs_ragged_dimensions[0]
        return len(eqn.inputs) == 3 and len(eqn.in_shapes[2]) == 1 and not batch and ragged not in contract

    def local(self, eqn: Equation, place: Placement, args: list[Any]) -> list[Any]:
        numbers = eqn.params["ragged_dot_dimension_numbers"]
        group = next((i for i, f in enumerate(place.op.factors) if f.name == "group"), None)
        if group is None or place.parts(group) == 1:
            return jc.bind(eqn.primitive, args, eqn.params)
        lhs, rhs, sizes = args
        count = rhs.shape[numbers.rhs_group_dimensions[0]]
        first = place.part_index(group) * count
        starts = jnp.cumsum(sizes) - sizes
        offset = starts[first]
        own = lax.dynamic_slice_in_dim(sizes, first, count)
        ragged = numbers.lhs_ragged_dimensions[0]
        # The primitive's groups begin at row 0: bring this device's first row there, and take the results back.
        rolled = jnp.roll(lhs, -offset, axis=ragged)
        (product,) = jc.bind(eqn.primitive, [rolled, rhs, own], eqn.params)
        dim = ragged - sum(1 for d in numbers.dot_dimension_numbers[0][0] if d < ragged)
        rows = lax.broadcasted_iota(sizes.dtype, product.shape, dim)
        return [jnp.roll(jnp.where(rows < own.sum(), product, jnp.zeros_like(product)), offset, axis=dim)]
