"""Sorting and selection: every strategy equals the unsharded op, and the ordered dim never splits."""

from typing import Any

import numpy as np
from jax import lax

from tests.frontend.rules.harness import check_rule

RNG = np.random.default_rng(0)


def normal(*shape: int) -> np.ndarray:
    return RNG.standard_normal(shape).astype(np.float32)


def test_sort_with_one_and_several_operands() -> None:
    assert check_rule(lambda a: lax.sort(a, dimension=0), normal(4, 6)) >= 14
    order = RNG.permutation(24).reshape(4, 6).astype(np.int32)

    def together(a: Any, b: Any, c: Any) -> Any:
        return lax.sort((a, b, c), dimension=1, num_keys=2)

    assert check_rule(together, np.floor(normal(4, 6)), normal(4, 6), order) >= 13


def test_top_k_along_any_dim() -> None:
    assert check_rule(lambda a: lax.top_k(a, 3), normal(4, 6, 12)) >= 22
    assert check_rule(lambda a: lax.top_k(a, 3, axis=0), normal(12, 6), meshes=[(2,), (3,)]) >= 6


def test_approximate_top_k() -> None:
    assert check_rule(lambda a: lax.approx_max_k(a, 3), normal(4, 12), meshes=[(2,)]) >= 3
