"""Sorting and selection: the ordered dim stays whole."""

import math

from planner.frontend.flat import Equation
from planner.frontend.rules.base import Factorisation, Rule, elements, register
from planner.frontend.rules.factors import FactorList

ORDERED = "every element is compared with all others of this dim"


@register("sort")
class Sort(Rule):
    """Operands of one shape, sorted together by the first `num_keys` of them."""

    def factorise(self, eqn: Equation) -> Factorisation:
        factors = FactorList()
        shape, ordered = eqn.in_shapes[0], eqn.params["dimension"]
        dims = tuple(factors.add(f"d{d}", n, fixed=ORDERED if d == ordered else "") for d, n in enumerate(shape))
        keys = tuple(range(eqn.params["num_keys"]))
        return Factorisation(
            factors=factors.done(),
            in_dims=(dims,) * len(eqn.inputs),
            out_dims=(dims,) * len(eqn.outputs),
            residuals=(keys,) * len(eqn.inputs),  # the permutation, which the keys determine
            flops=elements(shape) * max(1.0, math.log2(max(shape[ordered], 1))),
            work="data",
            fuses=False,
        )


@register("top_k", "approx_top_k")
class TopK(Rule):
    """The largest (or smallest) elements of one dim and their indices."""

    def factorise(self, eqn: Equation) -> Factorisation:
        (shape,) = eqn.in_shapes
        ordered = eqn.params.get("axis", eqn.params.get("reduction_dimension"))
        ordered %= len(shape)
        factors = FactorList()
        source = tuple(factors.add(f"d{d}", n, fixed=ORDERED if d == ordered else "") for d, n in enumerate(shape))
        kept = factors.add("k", eqn.out_shapes[0][ordered], fixed=ORDERED)
        result = tuple(kept if d == ordered else parts for d, parts in enumerate(source))
        return Factorisation(
            factors=factors.done(),
            in_dims=(source,),
            out_dims=(result, result),
            residuals=((~1,),),
            flops=elements(shape) * max(1.0, math.log2(max(eqn.out_shapes[0][ordered], 1))),
            work="data",
            fuses=False,
        )
