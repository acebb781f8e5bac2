"""Convolutions: batch, features and groups split; a window that reaches over its neighbours keeps its dim whole."""

import math
from typing import Any

from planner.frontend.flat import Equation
from planner.frontend.rules.base import Factorisation, Placement, Rule, elements, register
from planner.frontend.rules.contraction import PRODUCT_RESIDUALS, multiply_adds, product_linear
from planner.frontend.rules.factors import FactorList

HALO = "a window reaches into the neighbouring shard"
GROUPED = "features split by whole groups only"


@register("conv_general_dilated")
class Convolution(Rule):
    """``out[n, o, s] = sum over c, k of lhs[n, c, s + k] * rhs[o, c, k]``; with groups, one such product a group.

    Feature groups are the major part of both feature dims, batch groups the major part of the left batch dim and of
    the output features.
    """

    def factorise(self, eqn: Equation) -> Factorisation:
        lhs, rhs = eqn.in_shapes
        out = eqn.out_shapes[0]
        lhs_at, rhs_at, out_at = (tuple(spec) for spec in eqn.params["dimension_numbers"])
        feature_groups, batch_groups = eqn.params["feature_group_count"], eqn.params["batch_group_count"]
        groups = feature_groups * batch_groups  # at least one of the two is 1
        factors = FactorList()
        dims: tuple[list[tuple[int, ...]], ...] = tuple([()] * len(shape) for shape in (lhs, rhs, out))

        group = factors.add("group", groups)
        batch = factors.add("batch", out[out_at[0]])
        feature_in = factors.add("feature_in", rhs[rhs_at[1]], combine="sum")
        feature_out = factors.add("feature_out", out[out_at[1]] // groups, fixed=GROUPED if groups > 1 else "")
        dims[0][lhs_at[0]] = (*group, *batch) if batch_groups > 1 else batch
        dims[0][lhs_at[1]] = (*group, *feature_in) if feature_groups > 1 else feature_in
        dims[1][rhs_at[0]] = (*group, *feature_out)
        dims[1][rhs_at[1]] = feature_in
        dims[2][out_at[0]] = batch
        dims[2][out_at[1]] = (*group, *feature_out)
        for i in range(len(lhs) - 2):
            a, k, s = lhs_at[i + 2], rhs_at[i + 2], out_at[i + 2]
            if self._pointwise(eqn, i, rhs[k]):
                dims[0][a] = dims[2][s] = factors.add(f"space{i}", lhs[a])
                continue
            dims[0][a] = factors.add(f"space{i}_in", lhs[a], fixed=HALO)
            dims[1][k] = factors.add(f"window{i}", rhs[k], fixed="the window is whole on every device")
            dims[2][s] = factors.add(f"space{i}", out[s], fixed=HALO)
        window = math.prod(rhs[d] for d in rhs_at[2:])
        return Factorisation(
            factors=factors.done(),
            in_dims=(tuple(dims[0]), tuple(dims[1])),
            out_dims=(tuple(dims[2]),),
            linear=product_linear(eqn),
            residuals=PRODUCT_RESIDUALS,
            flops=multiply_adds(eqn, elements(out) * rhs[rhs_at[1]] * window),
            work="conv",
            fuses=False,
        )

    @staticmethod
    def _pointwise(eqn: Equation, i: int, window: int) -> bool:
        """Whether output position s of spatial dim i reads input position s alone."""
        p = eqn.params
        return (
            window == 1
            and p["window_strides"][i] == 1
            and p["lhs_dilation"][i] == 1
            and tuple(p["padding"][i]) == (0, 0)
        )

    def local_params(self, eqn: Equation, place: Placement) -> dict[str, Any]:
        """Where the groups are split, a device has its share of them."""
        params = dict(eqn.params)
        for index, factor in enumerate(place.op.factors):
            if factor.name == "group":
                count = "feature_group_count" if params["feature_group_count"] > 1 else "batch_group_count"
                params[count] //= place.parts(index)
        return params
