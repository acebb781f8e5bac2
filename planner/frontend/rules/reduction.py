"""Reductions, arg-reductions and scans along dims."""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import lax

from costmodel.graph import Combine, Dims
from planner.frontend import jax_compat as jc
from planner.frontend.flat import Equation
from planner.frontend.rules.base import Factorisation, Placement, Residual, Rule, elements, register
from planner.frontend.rules.factors import FactorList


def reduced_dims(eqn: Equation, axes: tuple[int, ...], combine: Combine, fixed: str) -> tuple[FactorList, Dims, Dims]:
    """Factors and dims of the first operand and of the result, where `axes` are reduced."""
    factors = FactorList()
    shape = eqn.in_shapes[0]
    source = tuple(
        factors.add(f"r{d}", n, combine=combine, fixed=fixed) if d in axes else factors.add(f"d{d}", n)
        for d, n in enumerate(shape)
    )
    return factors, source, tuple(parts for d, parts in enumerate(source) if d not in axes)


class Reduction(Rule):
    """One operand, some of its dims reduced.

    Args:
        combine: what joins the shards of a reduced dim.
        fixed: why reduced dims do not split.
        across: for ``combine="max"``, the collective of a device's result over mesh axes.
    """

    def __init__(
        self,
        combine: Combine,
        *,
        fixed: str = "",
        linear: bool = False,
        residuals: tuple[Residual, ...] = (),
        across: Callable[[Any, tuple[str, ...]], Any] | None = None,
    ):
        self.combine, self.fixed, self.across = combine, fixed, across
        self.linear = ((0,),) if linear else ()
        self.residuals = (residuals,)

    def axes(self, eqn: Equation) -> tuple[int, ...]:
        """Dims that are reduced."""
        return tuple(eqn.params["axes"])

    def factorise(self, eqn: Equation) -> Factorisation:
        factors, source, result = reduced_dims(eqn, self.axes(eqn), self.combine, self.fixed)
        return Factorisation(
            factors=factors.done(),
            in_dims=(source,),
            out_dims=(result,),
            linear=self.linear,
            residuals=self.residuals,
            flops=elements(eqn.in_shapes[0]),
            work="reduce",
        )

    def local(self, eqn: Equation, place: Placement, args: list[Any]) -> list[Any]:
        (result,) = jc.bind(eqn.primitive, args, eqn.params)
        over = [
            name for f, factor in enumerate(place.op.factors) if factor.combine == "max" for name in place.axes_of(f)
        ]
        if not over or self.across is None:
            return [result]
        return [self.across(lax.stop_gradient(result), tuple(over))]


def _largest(x: Any, axes: tuple[str, ...]) -> Any:
    """Maximum over mesh axes in which a NaN wins, as in a maximum on one device.

    Collectives may drop NaNs (the CPU's does), so floats travel as integers of the same order, NaN above infinity.
    Half-width floats travel as they are: no collective library takes integers of their width.
    """
    bits = {4: jnp.int32, 8: jnp.int64}.get(x.dtype.itemsize)
    if bits is None or not jnp.issubdtype(x.dtype, jnp.floating):
        return lax.pmax(x, axes)

    def flip(i: Any) -> Any:
        """Negative floats order backwards as integers; its own inverse."""
        return i ^ ((i >> (8 * x.dtype.itemsize - 1)) & jnp.iinfo(bits).max)

    ordered = flip(lax.bitcast_convert_type(jnp.where(jnp.isnan(x), jnp.nan, x), bits))
    return lax.bitcast_convert_type(flip(lax.pmax(ordered, axes)), x.dtype)


def _smallest(x: Any, axes: tuple[str, ...]) -> Any:
    """Minimum over mesh axes; of floats, so that a NaN wins."""
    return -_largest(-x, axes) if jnp.issubdtype(x.dtype, jnp.floating) else lax.pmin(x, axes)


def _any(flags: Any, axes: tuple[str, ...]) -> Any:
    """Collectives of one-byte integers exist everywhere; of booleans they do not."""
    return lax.pmax(flags.astype(jnp.uint8), axes).astype(flags.dtype)


def _all(flags: Any, axes: tuple[str, ...]) -> Any:
    return lax.pmin(flags.astype(jnp.uint8), axes).astype(flags.dtype)


class BitReduction(Reduction):
    """``and`` and ``or``: of booleans they are a minimum and a maximum, of integers no collective does them."""

    def factorise(self, eqn: Equation) -> Factorisation:
        if eqn.inputs[0].aval.dtype == jnp.bool_:
            return super().factorise(eqn)
        return Reduction("none", fixed="no collective joins the bits of integers").factorise(eqn)


class WholeReduction(Reduction):
    """All dims are reduced to one number."""

    def axes(self, eqn: Equation) -> tuple[int, ...]:
        return tuple(range(len(eqn.in_shapes[0])))


NO_PRODUCT = "no collective multiplies"
WINNER = "the index of the winner would need a second exchange"

register("reduce_sum")(Reduction("sum", linear=True))
register("reduce_max")(Reduction("max", residuals=(0, ~0), across=_largest))
register("reduce_min")(Reduction("max", residuals=(0, ~0), across=_smallest))
register("reduce_prod")(Reduction("none", fixed=NO_PRODUCT, residuals=(0,)))
register("reduce_or")(BitReduction("max", across=_any))
register("reduce_and")(BitReduction("max", across=_all))
# Equinox's questions to a whole batch: whether any example still runs, how far the furthest is.
register("unvmap_any")(WholeReduction("max", across=_any))
register("unvmap_all")(WholeReduction("max", across=_all))
register("unvmap_max")(WholeReduction("max", across=_largest))
register("reduce_xor")(Reduction("none", fixed="no collective joins bits by exclusive or"))
register("argmax", "argmin")(Reduction("none", fixed=WINNER))


@register("reduce")
class UserReduction(Rule):
    """``lax.reduce`` with the user's function: operands that reduce together, then one initial value for each."""

    def factorise(self, eqn: Equation) -> Factorisation:
        axes = tuple(eqn.params["dimensions"])
        factors, source, result = reduced_dims(eqn, axes, "none", "no collective runs the user's function")
        count = len(eqn.inputs) // 2
        return Factorisation(
            factors=factors.done(),
            in_dims=(source,) * count + ((),) * count,
            out_dims=(result,) * count,
            residuals=(tuple(range(len(eqn.inputs))),) * len(eqn.inputs),
            flops=count * elements(eqn.in_shapes[0]),
            work="reduce",
        )


class Scan(Rule):
    """Cumulative operations along one dim, which stays whole."""

    def __init__(self, *, linear: bool = False, residuals: tuple[Residual, ...] = ()):
        self.linear = ((0,),) if linear else ()
        self.residuals = (residuals,)

    def factorise(self, eqn: Equation) -> Factorisation:
        factors = FactorList()
        fixed = "every element depends on those before it"
        dims = tuple(
            factors.add(f"d{d}", n, fixed=fixed if d == eqn.params["axis"] else "")
            for d, n in enumerate(eqn.in_shapes[0])
        )
        return Factorisation(
            factors=factors.done(),
            in_dims=(dims,),
            out_dims=(dims,),
            linear=self.linear,
            residuals=self.residuals,
            flops=elements(eqn.in_shapes[0]),
            work="reduce",
            fuses=False,
        )


register("cumsum")(Scan(linear=True))
register("cumprod", "cummax", "cummin", "cumlogsumexp")(Scan(residuals=(0, ~0)))
