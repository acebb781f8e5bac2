"""Loops, branches and functions with custom derivatives under every strategy."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from planner.frontend.flat import flatten
from planner.frontend.rules.base import rule_for
from tests.frontend.rules.harness import check_rule

RNG = np.random.default_rng(0)
X = RNG.standard_normal((6, 8)).astype(np.float32)
W = (0.3 * RNG.standard_normal((8, 8))).astype(np.float32)
SEQUENCE = RNG.standard_normal((3, 6, 8)).astype(np.float32)


def factors_of(fn, *args, name):
    """Factors of the first equation of a kind."""
    program = flatten(jax.make_jaxpr(fn)(*args), [f"arg{i}" for i in range(len(args))])
    eqn = next(e for e in program.equations if e.primitive.name == name)
    return rule_for(name).factorise(eqn)


def splitting(facts):
    return {f.size for f in facts.factors if f.splits}


def recurrence(w, h, xs):
    def step(h, x):
        h = jnp.tanh(h @ w + x)
        return h, h * 2

    return lax.scan(step, h, xs)


def test_recurrence_splits_by_examples_only():
    check_rule(recurrence, W, X, SEQUENCE)
    assert splitting(factors_of(recurrence, W, X, SEQUENCE, name="scan")) == {6}


def test_reverse_scan_with_elementwise_state_splits_all_dims():
    def fn(h, xs):
        return lax.scan(lambda h, x: (0.5 * h + jnp.sin(x), jnp.exp(h)), h, xs, reverse=True)

    check_rule(fn, X, SEQUENCE)
    assert splitting(factors_of(fn, X, SEQUENCE, name="scan")) == {6, 8}


def test_scan_gathers_a_sum_over_split_examples_in_its_carry():
    """A chunked loss: the total starts as a constant and is a pending sum at the end; a counter goes along."""

    def fn(w, xs):
        def step(carry, x):
            total, count = carry
            return (total + jnp.square(x @ w).sum(), count + 1.0), None

        return lax.scan(step, (jnp.float32(0.0), jnp.float32(0.0)), xs)[0]

    check_rule(fn, W, SEQUENCE, meshes=((2,), (2, 2)))
    facts = factors_of(fn, W, SEQUENCE, name="scan")
    assert 6 in splitting(facts)
    assert {f.combine for f in facts.factors if f.splits} == {"sum"}


def test_scan_whose_flag_cannot_be_a_summand():
    def fn(xs):
        def step(carry, x):
            total, seen = carry
            return (total + x.sum(), ~seen), None

        return lax.scan(step, (jnp.float32(0.0), jnp.bool_(False)), xs)[0]

    check_rule(fn, SEQUENCE, meshes=((2,),))
    assert not any(f.splits for f in factors_of(fn, SEQUENCE, name="scan").factors)


def test_scan_over_keys_and_integers():
    def fn(keys, ids, table):
        def step(h, inputs):
            key, i = inputs
            return h * jax.random.bernoulli(key, 0.7, h.shape) + table[i], i + 1

        return lax.scan(step, jnp.asarray(X), (keys, ids))

    check_rule(fn, jax.random.split(jax.random.key(0), 3), np.arange(3, dtype=np.int32), SEQUENCE, meshes=((2,),))


def test_nested_scan():
    def fn(w, h, xs):
        def outer(h, x):
            return lax.scan(lambda h, _: (jnp.tanh(h @ w) + x, None), h, None, length=2)[0], x.sum(-1)

        return lax.scan(outer, h, xs)

    check_rule(fn, W, X, SEQUENCE, meshes=((2,),))
    assert splitting(factors_of(fn, W, X, SEQUENCE, name="scan")) == {6}


def test_while_with_a_counter_splits():
    def fn(x):
        return lax.while_loop(lambda s: s[0] < 3, lambda s: (s[0] + 1, s[1] * 1.5), (0, x))

    check_rule(fn, X, grads=False)
    assert splitting(factors_of(fn, X, name="while")) == {6, 8}


def test_while_whose_condition_asks_all_examples():
    """As vmap makes of a loop: all devices run until the last example is done."""

    def fn(x):
        def body(s):
            done = s > 4.0
            return jnp.where(done, s, s * 1.7)

        return lax.while_loop(lambda s: jnp.any(s <= 4.0), body, x)

    check_rule(fn, np.abs(X) + 0.1, grads=False)
    assert splitting(factors_of(fn, np.abs(X) + 0.1, name="while")) == {6, 8}


def test_while_with_a_condition_for_each_example():
    """Newton's method under vmap: examples stop at different times."""

    def root(a):
        return lax.while_loop(lambda s: jnp.abs(s * s - a) > 1e-4 * a, lambda s: 0.5 * (s + a / s), a)

    def fn(a):
        return jax.vmap(jax.vmap(root))(a)

    check_rule(fn, np.abs(X) * 10 + 0.1, grads=False)
    assert splitting(factors_of(fn, np.abs(X) + 0.1, name="while")) == {6, 8}


def test_while_whose_condition_sums_does_not_split():
    def fn(x):
        return lax.while_loop(lambda s: s.sum() < 100.0, lambda s: s * 1.5, x)

    check_rule(fn, np.abs(X), grads=False, meshes=((2,),))
    assert not splitting(factors_of(fn, np.abs(X), name="while"))


def test_cond():
    def fn(i, x, w):
        return lax.switch(i, [lambda x, w: x @ w, lambda x, w: jnp.sin(x), lambda x, w: jnp.zeros_like(x)], x, w)

    check_rule(fn, np.int32(1), X, W)
    assert splitting(factors_of(fn, np.int32(0), X, W, name="cond")) == {6}


def test_cond_of_a_sum_or_a_constant():
    def fn(flag, x):
        return lax.cond(flag, lambda x: (x * x).sum(), lambda x: jnp.float32(3.0), x)

    check_rule(fn, np.bool_(True), X)
    check_rule(fn, np.bool_(False), X, meshes=((2,),))
    assert splitting(factors_of(fn, np.bool_(True), X, name="cond")) == {6, 8}


@jax.custom_jvp
def relu(x):
    return jnp.maximum(x, 0)


@relu.defjvp
def _relu_jvp(primals, tangents):
    (x,), (t,) = primals, tangents
    return relu(x), jnp.where(x > 0, t, jnp.zeros_like(t))


@jax.custom_jvp
def logsumexp(x):
    top = lax.stop_gradient(x.max(-1, keepdims=True))
    return jnp.log(jnp.exp(x - top).sum(-1)) + top[..., 0]


@logsumexp.defjvp
def _logsumexp_jvp(primals, tangents):
    (x,), (t,) = primals, tangents
    out = logsumexp(x)
    return out, (jnp.exp(x - out[..., None]) * t).sum(-1)


def test_custom_jvp_of_an_elementwise_function():
    check_rule(relu, X)
    assert splitting(factors_of(relu, X, name="custom_jvp_call")) == {6, 8}


def test_custom_jvp_of_a_reduction_splits_by_rows():
    check_rule(logsumexp, X)
    assert splitting(factors_of(logsumexp, X, name="custom_jvp_call")) == {6}


def test_custom_jvp_of_several_operands():
    @jax.custom_jvp
    def scaled(x, w, n):
        return x @ w * n

    @scaled.defjvp
    def rule(primals, tangents):
        (x, w, n), (tx, tw, _) = primals, tangents
        return scaled(x, w, n), (tx @ w + x @ tw) * n

    check_rule(scaled, X, W, np.int32(3))
    assert splitting(factors_of(scaled, X, W, np.int32(3), name="custom_jvp_call")) == {6, 8}


@partial(jax.custom_vjp, nondiff_argnums=(1,))
def clipped(x, limit):
    """The identity, whose cotangent is clipped: not linear in it."""
    return x * 1.0


clipped.defvjp(lambda x, limit: (x * 1.0, None), lambda limit, _, ct: (jnp.clip(ct, -limit, limit),))


def test_custom_vjp_keeps_a_backward_that_is_not_linear():
    check_rule(lambda x: clipped(x, 0.1), X)
    assert splitting(factors_of(lambda x: clipped(x, 0.1), X, name="custom_vjp_call")) == {6, 8}


@jax.custom_vjp
def scaled_backward(x, w):
    return x @ w


scaled_backward.defvjp(lambda x, w: (x @ w, (x, w)), lambda kept, ct: (3.0 * ct @ kept[1].T, 5.0 * kept[0].T @ ct))


def test_custom_vjp_keeps_a_scaled_backward():
    check_rule(scaled_backward, X, W)
    assert splitting(factors_of(scaled_backward, X, W, name="custom_vjp_call")) == {6, 8}


def test_custom_vjp_with_captured_arrays_and_arguments_as_residuals():
    """The forward hands arguments on as they are; their positions count the captured array in front of them."""
    table = jnp.arange(8)

    @jax.custom_vjp
    def f(x, w):
        return (x * table) @ w

    f.defvjp(
        lambda x, w: ((x * table) @ w, (w, x)), lambda kept, ct: (ct @ kept[0].T * table, (kept[1] * table).T @ ct)
    )
    check_rule(f, X, W)
    program = flatten(jax.make_jaxpr(f)(X, W), ["x", "w"])
    assert program.equations[0].params["num_consts"] == 1
    assert splitting(factors_of(f, X, W, name="custom_vjp_call")) == {6, 8}


def test_custom_vjp_without_cotangent_for_an_operand():
    @jax.custom_vjp
    def straight_through(x, ids):
        return jnp.round(x) + ids

    straight_through.defvjp(lambda x, ids: (jnp.round(x) + ids, None), lambda _, ct: (ct, None))
    check_rule(straight_through, X, np.arange(8, dtype=np.int32))


def test_custom_vjp_with_several_results_and_a_norm_in_the_backward():
    @jax.custom_vjp
    def both(x):
        return x * 2.0, jnp.arange(3), x.sum(-1)

    def back(_, cts):
        first, _, rows = cts
        ct = 2.0 * first + rows[:, None]
        return (ct / (1.0 + jnp.sqrt((ct * ct).sum(-1, keepdims=True))),)

    both.defvjp(lambda x: (both(x), None), back)
    check_rule(both, X)
    assert splitting(factors_of(both, X, name="custom_vjp_call")) == {6}


def test_custom_vjp_inside_a_scan_and_a_custom_jvp():
    def fn(w, h, xs):
        def step(h, x):
            return relu(scaled_backward(h, w)) + clipped(x, 0.2), logsumexp(h)

        return lax.scan(step, h, xs)

    check_rule(fn, W, X, SEQUENCE, meshes=((2,), (2, 2)))
    assert splitting(factors_of(fn, W, X, SEQUENCE, name="scan")) == {6}


def test_a_derivative_that_cannot_be_traced_runs_whole():
    @jax.custom_vjp
    def only_first(x, y):
        return x * y

    def forward(x, y):
        if y.perturbed:
            raise RuntimeError("y has no derivative")
        return x.value * y.value, y.value

    only_first.defvjp(forward, lambda y, ct: (ct * y, None), symbolic_zeros=True)
    facts = factors_of(only_first, X, X, name="custom_vjp_call")
    assert not splitting(facts)
    assert "y has no derivative" in facts.factors[0].reason
    check_rule(only_first, X, X, grads=False, meshes=((2,),))


@pytest.mark.parametrize("scale", [2.0, 3.0])
def test_texts_tell_backwards_apart(scale):
    """Two functions that differ in the backward only, by a captured number."""

    def make(scale):
        @jax.custom_vjp
        def f(x):
            return x + 0.0

        f.defvjp(lambda x: (x + 0.0, None), lambda _, ct: (ct * scale,))
        return f

    def text(fn):
        program = flatten(jax.make_jaxpr(fn)(X), ["x"])
        (eqn,) = program.equations
        return rule_for("custom_vjp_call").describe(eqn)

    assert text(make(scale)) == text(make(scale))
    assert text(make(scale)) != text(make(scale + 1))
