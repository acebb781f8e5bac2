"""What loops, branches and functions with custom derivatives cost: what is inside, at its own rates, with all trips."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from costmodel.kernels import forward_kernels, kernel_s
from tests.frontend.pricing import A100, LAUNCH_S, Priced, aval, priced

W, X = aval(4096, 4096), aval(4096, 4096)
FLOPS = 2.0 * 4096**3


@jax.custom_vjp
def product(w, x):
    return x @ w


product.defvjp(lambda w, x: (x @ w, (w, x)), lambda kept, g: (kept[1].T @ g, g @ kept[0].T))


def one(fn: Callable[..., Any], *args: Any, name: str) -> Priced:
    return priced(fn, *args)[name]


def scanned(length: int) -> Callable[..., Any]:
    return lambda w, x: lax.scan(lambda c, _: (jnp.tanh(c @ w), None), x, None, length=length)[0]


def test_a_product_costs_the_same_inside_a_function_with_its_own_derivative() -> None:
    plain, own = one(lambda w, x: x @ w, W, X, name="dot_general.0"), one(product, W, X, name="custom_vjp_call.0")
    assert own.cost.forward_s == pytest.approx(plain.cost.forward_s)
    assert own.cost.backward_s == pytest.approx(plain.cost.backward_s)  # two products, and not the forward again
    assert own.op.inside is not None and own.op.inside.matmul_flops == (("bfloat16", FLOPS),)


def test_a_scan_is_its_body_times_its_trips() -> None:
    found = one(scanned(5), W, X, name="scan.0")
    assert found.op.inside is not None and found.op.inside_backward is not None
    assert found.op.inside.matmul_flops == (("bfloat16", 5 * FLOPS),)
    assert found.op.inside.launches == 5 * 2  # the product, and what fuses behind it
    assert found.op.inside_backward.launches == 5 * 3
    plain = one(lambda w, x: x @ w, W, X, name="dot_general.0").cost
    assert found.cost.forward_s == pytest.approx(5 * plain.forward_s, rel=0.05)
    assert found.cost.backward_s == pytest.approx(5 * plain.backward_s, rel=0.05)
    assert one(scanned(4), W, X, name="scan.0").op.key != found.op.key


def test_short_trips_are_bound_by_launches() -> None:
    found = one(scanned(32), aval(512, 512), aval(32, 512), name="scan.0")
    assert found.cost.forward_s == pytest.approx(64 * LAUNCH_S)
    assert found.cost.backward_s == pytest.approx(96 * LAUNCH_S)


def test_products_count_through_every_level_in_their_own_dtype() -> None:
    def outer(w, x):
        def step(c, _):
            inner, _ = lax.scan(lambda d, _: (product(w, d), None), c, None, length=3)
            wide = (inner.astype(jnp.float32) @ w.astype(jnp.float32)).astype(c.dtype)
            return lax.cond(c.sum() > 0, lambda d: d @ w, lambda d: d, wide), None

        return lax.scan(step, x, None, length=2)[0]

    found = one(outer, W, X, name="scan.0").op
    assert found.inside is not None
    assert dict(found.inside.matmul_flops) == {"bfloat16": 2 * 4 * FLOPS, "float32": 2 * FLOPS}
    assert found.flops >= 10 * FLOPS


def test_what_is_no_product_runs_at_the_vector_rate() -> None:
    found = one(lambda x: lax.scan(lambda c, _: (jnp.sin(c), None), x, None, length=3)[0], X, name="scan.0").op
    assert found.inside is not None and found.inside.matmul_flops == ()
    peak = A100.peak_flops_per_s["float32"]
    (kernel,) = forward_kernels(found, "bfloat16", A100, 1e6, 0.0, (), ())
    assert kernel_s(kernel, A100) >= 1e6 * found.flops / peak


def test_a_body_under_checkpoint_runs_again_for_its_backward() -> None:
    def body(w):
        return lambda c, _: (jnp.tanh(c @ w), None)

    again = one(lambda w, x: lax.scan(jax.checkpoint(body(w)), x, None, length=2)[0], W, X, name="scan.0").op
    assert again.inside_backward is not None
    assert again.inside_backward.matmul_flops == (("bfloat16", 2 * 3 * FLOPS),)


def test_a_body_s_last_product_does_not_run_again() -> None:
    """Nothing of the backward pass reads its result."""

    def body(w):
        return lambda c, _: (c + jnp.tanh(c @ w) @ w, None)

    again = one(lambda w, x: lax.scan(jax.checkpoint(body(w)), x, None, length=2)[0], W, X, name="scan.0").op
    assert again.inside_backward is not None
    assert again.inside_backward.matmul_flops == (("bfloat16", 2 * (4 + 1) * FLOPS),)


def test_an_open_loop_counts_one_trip_and_names_its_line() -> None:
    def loop(w, x):
        return lax.while_loop(lambda c: c.sum() < 5, lambda c: c @ w, x)

    found = one(loop, W, X, name="while.0").op
    assert found.inside is not None and found.inside.matmul_flops == (("bfloat16", FLOPS),)
    assert len(found.guessed_trips) == 1 and "test_region_costs.py" in found.guessed_trips[0]
    around = one(lambda w, x: lax.scan(lambda c, _: (loop(w, c), None), x, None, length=2)[0], W, X, name="scan.0")
    assert around.op.guessed_trips == found.guessed_trips
    assert one(scanned(2), W, X, name="scan.0").op.guessed_trips == ()
