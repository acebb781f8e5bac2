"""Primitives that no rule knows: planned whole on every device, charged, and reported. Callbacks are of this kind."""

from planner.frontend.flat import Equation
from planner.frontend.rules.base import Factorisation, Rule, elements, register

NO_RULE = "no rule"


class Unknown(Rule):
    """Nothing is split: a dim without a factor is whole on every device, and no pending sum passes.

    Args:
        known: False where meshplan does not know the primitive; such ops are reported with their share of time.
        reason: why nothing splits, for reports.
    """

    def __init__(self, *, known: bool = False, reason: str = NO_RULE):
        self.known, self.reason = known, reason

    def factorise(self, eqn: Equation) -> Factorisation:
        """No factors. One operation for each element of the results is an assumption, not a measurement."""
        reads = tuple(range(len(eqn.inputs)))
        return Factorisation(
            factors=(),
            in_dims=tuple(tuple(() for _ in shape) for shape in eqn.in_shapes),
            out_dims=tuple(tuple(() for _ in shape) for shape in eqn.out_shapes),
            residuals=(reads,) * len(eqn.inputs),
            flops=sum(elements(shape) for shape in eqn.out_shapes),
            work="opaque",
            fuses=False,
        )


register("unknown")(Unknown())
# A callback's Python function takes whole arrays and runs once on every device; what it costs nobody knows, so it is
# reported like an unknown primitive. Printing is not.
register("pure_callback", "io_callback")(Unknown(reason="a Python callback takes whole arrays"))
register("debug_callback", "debug_print")(Unknown(known=True, reason="a Python callback takes whole arrays"))
