"""Primitives that work element by element: every dim is a parallel factor."""

from planner.frontend.flat import Equation
from planner.frontend.rules.base import Factorisation, Residual, Rule, elements, factors_of, identity_dims, register


class Elementwise(Rule):
    """All operands have the result's shape, or are scalars.

    Args:
        residuals: per operand, what its cotangent reads.
        linear: operand sets through which a pending sum passes.
        flops: operations an element.
    """

    def __init__(
        self,
        *,
        residuals: tuple[tuple[Residual, ...], ...] = (),
        linear: tuple[tuple[int, ...], ...] = (),
        flops: float = 1.0,
    ):
        self.residuals, self.linear, self.flops = residuals, linear, flops

    def factorise(self, eqn: Equation) -> Factorisation:
        shape = eqn.out_shapes[0]
        whole = identity_dims([shape])[0]
        return Factorisation(
            factors=factors_of(shape),
            in_dims=tuple(whole if s == shape else tuple(() for _ in s) for s in eqn.in_shapes),
            out_dims=(whole,) * len(eqn.outputs),
            linear=self.linear,
            residuals=self.residuals,
            flops=self.flops * elements(shape),
        )


_LINEAR_UNARY = Elementwise(linear=((0,),))
register("neg", "copy", "copy_p", "real", "imag", "conj", "reduce_precision", "name", "optimization_barrier_one")(_LINEAR_UNARY)
register("add", "sub", "add_any")(Elementwise(linear=((0, 1),)))
register("mul")(Elementwise(residuals=((1,), (0,)), linear=((0,), (1,))))
register("div")(Elementwise(residuals=((1,), (1, ~0)), linear=((0,),)))
