"""Factorisations, solves and Fourier transforms: batch dims split, the dims that the algorithm runs over do not."""

import math
from collections.abc import Callable

from costmodel.graph import Dims
from planner.frontend.flat import Equation
from planner.frontend.rules.base import Factorisation, Residual, Rule, elements, register
from planner.frontend.rules.factors import FactorList

MATRIX_DIM = "the algorithm runs over the whole matrix"


class OverBatch(Rule):
    """Leading dims of every operand and result are one batch; the rest stay whole.

    Args:
        core: number of trailing dims of the first operand that are not batch.
        flops: operations for one batch element, from the operands' trailing shapes. Counts for iterative algorithms
            are the usual estimates.
        residuals, linear: as in `Factorisation`.
        columns: operand and result dims, counted from the end, that are right-hand sides: they are independent.
    """

    def __init__(
        self,
        flops: Callable[..., float],
        *,
        core: int = 2,
        residuals: tuple[tuple[Residual, ...], ...] = (),
        linear: tuple[tuple[int, ...], ...] = (),
        columns: Callable[[Equation], int] | None = None,
    ):
        self.core, self.flops, self.residuals, self.linear, self.columns = core, flops, residuals, linear, columns

    def factorise(self, eqn: Equation) -> Factorisation:
        batch = eqn.in_shapes[0][: len(eqn.in_shapes[0]) - self.core]
        nbatch = len(batch)
        factors = FactorList()
        leading = factors.dims(batch, "batch")
        column_dim, column = -1, ()
        if self.columns:
            column_dim = len(eqn.in_shapes[-1]) + self.columns(eqn)
            column = factors.add("column", eqn.in_shapes[-1][column_dim])

        def dims(shape: tuple[int, ...], has_columns: bool) -> Dims:
            return leading + tuple(
                column if has_columns and d == column_dim else factors.add(f"m{d}", shape[d], fixed=MATRIX_DIM)
                for d in range(nbatch, len(shape))
            )

        last = len(eqn.inputs) - 1
        in_dims = tuple(dims(shape, i == last) for i, shape in enumerate(eqn.in_shapes))
        out_dims = tuple(dims(shape, True) for shape in eqn.out_shapes)
        cores = [shape[nbatch:] for shape in eqn.in_shapes]
        return Factorisation(
            in_dims=in_dims,
            out_dims=out_dims,
            factors=factors.done(),
            linear=self.linear,
            residuals=self.residuals,
            flops=elements(batch) * self.flops(*cores),
            work="opaque",
            fuses=False,
        )


def _cubic(scale: float) -> Callable[..., float]:
    """``scale * m * n * min(m, n)`` of the first operand."""
    return lambda matrix, *_: scale * matrix[0] * matrix[1] * min(matrix)


def _right_hand_sides(eqn: Equation) -> int:
    return -1 if eqn.params["left_side"] else -2


register("cholesky")(OverBatch(_cubic(1 / 3), residuals=((~0,),)))
register("lu")(OverBatch(_cubic(2 / 3), residuals=((~0, ~2),)))
register("qr")(OverBatch(_cubic(2.0), residuals=((~0, ~1),)))
register("eigh")(OverBatch(_cubic(9.0), residuals=((~0, ~1),)))
register("svd")(OverBatch(_cubic(20.0), residuals=((~0, ~1, ~2),)))
register("eig", "schur", "hessenberg", "tridiagonal", "geqrf")(OverBatch(_cubic(10.0), residuals=((0, ~0),)))
register("householder_product")(OverBatch(_cubic(2.0), residuals=((0, ~0), (0, ~0))))
register("lu_pivots_to_permutation")(OverBatch(lambda pivots: float(pivots[0]), core=1))
register("triangular_solve")(
    OverBatch(
        lambda a, b: float(a[0] * math.prod(b)),
        residuals=((0, ~0), (0,)),
        linear=((1,),),
        columns=_right_hand_sides,
    )
)
register("tridiagonal_solve")(
    OverBatch(
        lambda lower, diagonal, upper, b: 8.0 * math.prod(b),
        core=1,
        residuals=((0, 1, 2, ~0),) * 3 + ((0, 1, 2),),
        linear=((3,),),
        columns=lambda eqn: -1,
    )
)


@register("fft")
class FastFourierTransform(Rule):
    """The transformed dims, the last ones, stay whole; real transforms change their sizes."""

    def factorise(self, eqn: Equation) -> Factorisation:
        lengths = eqn.params["fft_lengths"]
        (source,), (result,) = eqn.in_shapes, eqn.out_shapes
        nbatch = len(source) - len(lengths)
        batch = source[:nbatch]
        factors = FactorList()
        leading = factors.dims(batch, "batch")

        def dims(shape: tuple[int, ...]) -> Dims:
            return leading + tuple(
                factors.add(f"frequency{d}", shape[d], fixed="a transformed dim") for d in range(nbatch, len(shape))
            )

        in_dims, out_dims = (dims(source),), (dims(result),)
        count = math.prod(lengths)
        return Factorisation(
            in_dims=in_dims,
            out_dims=out_dims,
            factors=factors.done(),
            linear=((0,),),
            residuals=((),),
            flops=elements(batch) * 5.0 * count * max(1.0, math.log2(count)),
            work="opaque",
            fuses=False,
        )
