"""Reductions over sliding windows (pooling): a dim splits where its window is one element."""

import math
from typing import Any

from costmodel.graph import Dims
from planner.frontend.flat import Equation
from planner.frontend.rules.base import Factorisation, Residual, Rule, elements, register
from planner.frontend.rules.factors import FactorList

HALO = "a window reaches into the neighbouring shard"


def _pointwise(params: dict[str, Any], d: int) -> bool:
    """Whether position i of the result reads position i alone along dim d."""
    base = params.get("base_dilation")
    return (
        params["window_dimensions"][d] == 1
        and params["window_strides"][d] == 1
        and tuple(params["padding"][d]) == (0, 0)
        and (base is None or base[d] == 1)
    )


class WindowReduction(Rule):
    """Tensors over the window positions and tensors over the elements share the dims that windows do not span.

    Args:
        windowed: operands (i) and results (~i) that lie over window positions, not over elements; by default all
            results. Scalars are initial values.
        residuals: as in `Factorisation`; None where every operand's cotangent may read every operand.
    """

    def __init__(
        self,
        windowed: tuple[int, ...] | None = None,
        *,
        linear: tuple[tuple[int, ...], ...] = (),
        residuals: tuple[tuple[Residual, ...], ...] | None = (),
    ):
        self.windowed, self.linear, self.residuals = windowed, linear, residuals

    def factorise(self, eqn: Equation) -> Factorisation:
        factors = FactorList()
        windowed = tuple(~i for i in range(len(eqn.outputs))) if self.windowed is None else self.windowed
        shapes = {i: shape for i, shape in enumerate(eqn.in_shapes) if shape}
        shapes.update({~i: shape for i, shape in enumerate(eqn.out_shapes)})
        over_elements = next(shape for i, shape in shapes.items() if i not in windowed)
        over_windows = next(shape for i, shape in shapes.items() if i in windowed)
        shared = {d: factors.add(f"d{d}", n) for d, n in enumerate(over_elements) if _pointwise(eqn.params, d)}

        def dims(shape: tuple[int, ...], prefix: str) -> Dims:
            return tuple(
                shared[d] if d in shared else factors.add(f"{prefix}{d}", n, fixed=HALO) for d, n in enumerate(shape)
            )

        of = {True: dims(over_windows, "window"), False: dims(over_elements, "element")}
        every = tuple(range(len(eqn.inputs)))
        return Factorisation(
            factors=factors.done(),
            in_dims=tuple(of[i in windowed] if shape else () for i, shape in enumerate(eqn.in_shapes)),
            out_dims=tuple(of[~i in windowed] for i in range(len(eqn.outputs))),
            linear=self.linear,
            residuals=(every,) * len(every) if self.residuals is None else self.residuals,
            flops=elements(over_windows) * math.prod(eqn.params["window_dimensions"]),
            work="reduce",
            fuses=False,
        )


register("reduce_window_sum")(WindowReduction(linear=((0,),)))
register("reduce_window_max", "reduce_window_min")(WindowReduction(residuals=((0,),)))
register("reduce_window")(WindowReduction(residuals=None))  # the user's function
register("select_and_scatter_add")(WindowReduction((0,), linear=((0,),), residuals=((1,), ())))
register("select_and_gather_add")(WindowReduction(linear=((0,),), residuals=((1,), ())))
