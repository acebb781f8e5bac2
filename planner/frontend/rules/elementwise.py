"""Primitives that work element by element: every dim is a parallel factor.

Residuals are what the cotangent rules of JAX read; where JAX saves a value derived from an operand or result (the
cosine of a sine's operand), the operand or result of the same size stands for it.
"""

from collections.abc import Sequence
from typing import Any

from costmodel.graph import Dims, Work
from planner.frontend.flat import Equation
from planner.frontend.rules.base import (
    Factorisation,
    Placement,
    Residual,
    Rule,
    elements,
    factors_of,
    identity_dims,
    register,
)
from planner.frontend.rules.factors import FactorList, adds_up, is_inexact

# Operations an element. Only the order of magnitude matters: these kernels are bound by memory. ROOT is an iterated
# approximation, TRANSCENDENTAL a range reduction and a polynomial of about ten terms, SPECIAL a series or a quotient of
# polynomials with branches.
MOVE, CHEAP, ROOT, TRANSCENDENTAL, SPECIAL = 0.0, 1.0, 4.0, 10.0, 50.0


def dims_within(shape: Sequence[int], whole: Sequence[int]) -> Dims:
    """Dims of an operand whose result has shape `whole`: dims of size one, and all of a scalar, are repeated."""
    if len(shape) not in (0, len(whole)):
        raise ValueError(f"an operand of shape {tuple(shape)} does not go with a result of shape {tuple(whole)}")
    return identity_dims([shape])[0]


class Elementwise(Rule):
    """All operands have the result's shape, up to dims of size one, or are scalars.

    Args:
        residuals: per operand, what its cotangent reads.
        linear: operand sets through which a pending sum passes.
        flops: operations an element.
        work: ``view`` for identities that the compiler removes.
    """

    def __init__(
        self,
        *,
        residuals: tuple[tuple[Residual, ...], ...] = (),
        linear: tuple[tuple[int, ...], ...] = (),
        flops: float = CHEAP,
        work: Work = "elementwise",
    ):
        self.residuals, self.linear, self.flops, self.work = residuals, linear, flops, work

    def linear_sets(self, eqn: Equation) -> tuple[tuple[int, ...], ...]:
        """The linear sets of this equation: none where its values cannot be added up."""
        return self.linear if adds_up(eqn.outputs[0]) else ()

    def reads(self, eqn: Equation) -> tuple[tuple[Residual, ...], ...]:
        """The residuals of this equation."""
        return self.residuals

    def factorise(self, eqn: Equation) -> Factorisation:
        shape = eqn.out_shapes[0]
        return Factorisation(
            factors=factors_of(shape),
            in_dims=tuple(dims_within(s, shape) for s in eqn.in_shapes),
            out_dims=identity_dims(eqn.out_shapes),
            linear=self.linear_sets(eqn),
            residuals=self.reads(eqn),
            flops=self.flops * elements(shape),
            work=self.work,
        )


class ConvertElementType(Elementwise):
    """A cast is linear between floats (up to rounding); integers and booleans round or saturate."""

    def linear_sets(self, eqn: Equation) -> tuple[tuple[int, ...], ...]:
        return ((0,),) if is_inexact(eqn.inputs[0]) and is_inexact(eqn.outputs[0]) else ()

    def local_params(self, eqn: Equation, place: Placement) -> dict[str, Any]:
        # A sharding that the program was traced with speaks of the user's mesh.
        return {**eqn.params, "sharding": None}


class Div(Elementwise):
    """Division rounds between integers: only a quotient of floats is linear in its dividend."""

    def linear_sets(self, eqn: Equation) -> tuple[tuple[int, ...], ...]:
        return ((0,),) if is_inexact(eqn.outputs[0]) else ()


class IntegerPow(Elementwise):
    """The square and the third power are products; the exponent is static."""

    def reads(self, eqn: Equation) -> tuple[tuple[Residual, ...], ...]:
        return ((),) if eqn.params["y"] in (0, 1) else ((0,),)


class Select(Elementwise):
    """``select_n``: the predicate is fixed, the cases are jointly linear."""

    def linear_sets(self, eqn: Equation) -> tuple[tuple[int, ...], ...]:
        return (tuple(range(1, len(eqn.inputs))),) if adds_up(eqn.outputs[0]) else ()

    def reads(self, eqn: Equation) -> tuple[tuple[Residual, ...], ...]:
        return ((), *((0,) for _ in eqn.inputs[1:]))


class BitcastConvertType(Rule):
    """The same bits as another type. Where widths differ, a minor dim of one side counts the parts of an element."""

    def factorise(self, eqn: Equation) -> Factorisation:
        source, target = eqn.in_shapes[0], eqn.out_shapes[0]
        factors = FactorList()
        shared = factors.dims(min(source, target, key=len))
        longer = max(source, target, key=len)
        extra = tuple(factors.add("parts", n, fixed="parts of one element") for n in longer[len(shared) :])
        return Factorisation(
            factors=factors.done(),
            in_dims=((*shared, *extra) if len(source) > len(shared) else shared,),
            out_dims=((*shared, *extra) if len(target) > len(shared) else shared,),
            work="view",
        )


class Together(Rule):
    """Several values passed through at once (``optimization_barrier``), the same count out as in.

    Dims of equal size, matched in order, share a factor, and only factors that every value has can split: the values
    of one barrier are split alike.
    """

    def __init__(self, *, passes_through: bool = False):
        self.passes_through = passes_through

    def factorise(self, eqn: Equation) -> Factorisation:
        factors = FactorList()
        known: list[tuple[int, tuple[int, ...]]] = []
        tensors: list[Dims] = []
        for shape in eqn.out_shapes:
            free = list(known)
            dims = []
            for size in shape:
                match = next((entry for entry in free if entry[0] == size), None)
                if match is None:
                    match = (size, factors.add(f"d{len(known)}", size))
                    known.append(match)
                else:
                    free.remove(match)
                dims.append(match[1])
            tensors.append(tuple(dims))
        summable = all(adds_up(value) for value in eqn.outputs)
        return Factorisation(
            factors=factors.done(),
            in_dims=tuple(tensors),
            out_dims=tuple(tensors),
            linear=(tuple(range(len(eqn.inputs))),) if summable else (),
            work="view",
            fuses=False,
        )

    def local(self, eqn: Equation, place: Placement, args: list[Any]) -> list[Any]:
        return list(args) if self.passes_through else super().local(eqn, place, args)


# Identities.
register("copy", "copy_p", "name", "stop_gradient")(Elementwise(linear=((0,),), flops=MOVE, work="view"))
# Equinox's guards against transformations that are over by the time a program is captured.
register("nonbatchable", "nondifferentiable_backward", "nontraceable")(
    Elementwise(linear=((0,),), flops=MOVE, work="view")
)
register("convert_element_type")(ConvertElementType(flops=MOVE))
register("bitcast_convert_type")(BitcastConvertType())
register("optimization_barrier")(Together())
# Where a value lies is what the plan decides: a placement that the user wrote keeps its value and no more.
register("device_put", "sharding_constraint", "reshard")(Together(passes_through=True))

# Linear in the operand.
register("neg", "real", "imag", "conj", "reduce_precision")(Elementwise(linear=((0,),)))
register("complex")(Elementwise(linear=((0, 1),), flops=MOVE))

# Arithmetic.
register("add", "sub", "add_any")(Elementwise(linear=((0, 1),)))
register("mul")(Elementwise(residuals=((1,), (0,)), linear=((0,), (1,))))
register("div")(Div(residuals=((1,), (0, 1)), flops=ROOT))
register("rem")(Elementwise(residuals=((), (0, 1)), flops=ROOT))
register("max", "min")(Elementwise(residuals=((0, 1, ~0), (0, 1, ~0))))
register("clamp")(Elementwise(residuals=((0, 1, 2), (0, 1, 2), (0, 1, 2)), flops=2 * CHEAP))
register("select_n")(Select())
register("abs", "square")(Elementwise(residuals=((0,),)))
register("integer_pow")(IntegerPow(flops=2 * CHEAP))
register("sign", "floor", "ceil", "round")(Elementwise())
register("mulhi", "nextafter", "clz", "population_count")(Elementwise())

# No derivative: comparisons and bits.
register("eq", "ne", "ge", "gt", "le", "lt", "eq_to", "le_to", "lt_to", "is_finite")(Elementwise())
register("and", "or", "not", "xor", "shift_left", "shift_right_logical", "shift_right_arithmetic")(Elementwise())

# Functions of one operand, by what their derivative reads.
register("sqrt")(Elementwise(residuals=((~0,),), flops=ROOT))
register("rsqrt", "cbrt")(Elementwise(residuals=((0, ~0),), flops=ROOT))
register("exp", "exp2", "expm1", "tanh", "logistic", "tan")(Elementwise(residuals=((~0,),), flops=TRANSCENDENTAL))
register("log", "log1p", "sin", "cos", "sinh", "cosh", "asin", "acos", "atan", "asinh", "acosh", "atanh")(
    Elementwise(residuals=((0,),), flops=TRANSCENDENTAL)
)
register("erf", "erfc", "lgamma", "digamma")(Elementwise(residuals=((0,),), flops=SPECIAL))
register("erf_inv")(Elementwise(residuals=((~0,),), flops=SPECIAL))
register("bessel_i0e", "bessel_i1e")(Elementwise(residuals=((0, ~0),), flops=SPECIAL))

# Functions of several operands.
register("pow")(Elementwise(residuals=((0, 1), (0, ~0)), flops=2 * TRANSCENDENTAL))
register("atan2")(Elementwise(residuals=((0, 1), (0, 1)), flops=TRANSCENDENTAL))
register("igamma", "igammac", "igamma_grad_a", "polygamma", "zeta")(
    Elementwise(residuals=((0, 1), (0, 1)), flops=2 * SPECIAL)
)
