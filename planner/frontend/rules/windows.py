"""Reductions over sliding windows (pooling): a dim splits where its window is one element."""

import math
from typing import Any

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
        windowed: operand positions (i) and result positions (~i) that lie over window positions, not over elements.
        scalars: number of trailing scalar operands (initial values).
    """

    def __init__(
        self,
        windowed: tuple[int, ...] = (~0,),
        *,
        linear: tuple[tuple[int, ...], ...] = (),
        residuals: tuple[tuple[Residual, ...], ...] = (),
    ):
        self.windowed, self.linear, self.residuals = windowed, linear, residuals

    def factorise(self, eqn: Equation) -> Factorisation:
        factors = FactorList()
        shapes = {i: shape for i, shape in enumerate(eqn.in_shapes) if shape}
        shapes.update({~i: shape for i, shape in enumerate(eqn.out_shapes)})
        over = {False: next(s for i, s in shapes.items() if i not in self.windowed)}
        over[True] = next((s for i, s in shapes.items() if i in self.windowed), over[False])
        shared = {d: factors.add(f"d{d}", n) for d, n in enumerate(over[False]) if _pointwise(eqn.params, d)}
        dims = {
            kind: tuple(
                shared[d] if d in shared else factors.add(f"{'w' if kind else 'e'}{d}", n, fixed=HALO)
                for d, n in enumerate(shape)
            )
            for kind, shape in over.items()
        }
        return Factorisation(
            factors=factors.done(),
            in_dims=tuple(dims[i in self.windowed] if shape else () for i, shape in enumerate(eqn.in_shapes)),
            out_dims=tuple(dims[~i in self.windowed] for i in range(len(eqn.outputs))),
            linear=self.linear,
            residuals=self.residuals,
            flops=elements(over[True]) * math.prod(eqn.params["window_dimensions"]),
            work="reduce",
            fuses=False,
        )


register("reduce_window_sum")(WindowReduction(linear=((0,),)))
register("reduce_window_max", "reduce_window_min")(WindowReduction(residuals=((0,),)))
register("select_and_scatter_add")(WindowReduction((0,), linear=((0,),), residuals=((1,), ())))
register("select_and_gather_add")(WindowReduction(linear=((0,),), residuals=((1,), ())))


@register("reduce_window")
class UserWindowReduction(WindowReduction):
    """``lax.reduce_window`` with the user's function: operands, then one initial value for each."""

    def __init__(self) -> None:
        super().__init__()

    def factorise(self, eqn: Equation) -> Factorisation:
        self_windowed = tuple(~i for i in range(len(eqn.outputs)))
        every = (tuple(range(len(eqn.inputs))),) * len(eqn.inputs)
        return WindowReduction(self_windowed, residuals=every).factorise(eqn)
