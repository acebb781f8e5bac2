"""Building an op's factors dim by dim, and which values may be pending sums."""

from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np

from costmodel.graph import Combine, Dims, Factor
from planner.frontend import jax_compat as jc
from planner.frontend.flat import Operand


class FactorList:
    """Factors of one op while its rule states them; `add` returns what goes into a tensor's dims."""

    def __init__(self) -> None:
        self._factors: list[Factor] = []

    def add(self, name: str, size: int, *, combine: Combine = "none", fixed: str = "") -> tuple[int, ...]:
        """A new factor as the content of one dim.

        Args:
            fixed: why the factor does not split; empty where it does.

        Returns:
            The factor's index in a tuple, or () for a dim of size one (or zero), which has nothing to split.
        """
        if size <= 1:
            return ()
        self._factors.append(Factor(name, int(size), combine, not fixed, fixed))
        return (len(self._factors) - 1,)

    def dims(self, shape: Sequence[int], prefix: str = "d") -> Dims:
        """One new splittable factor for every dim of `shape`."""
        return tuple(self.add(f"{prefix}{d}", n) for d, n in enumerate(shape))

    def done(self) -> tuple[Factor, ...]:
        return tuple(self._factors)


def adds_up(operand: Operand) -> bool:
    """Whether values of this dtype can be summands: numbers can, booleans and PRNG keys cannot."""
    dtype = operand.aval.dtype
    return not jc.is_key(dtype) and dtype != np.bool_


def is_inexact(operand: Operand) -> bool:
    """Whether an operand holds floats or complex numbers."""
    return bool(jnp.issubdtype(operand.aval.dtype, jnp.inexact))
