"""W does no work of B: FLOPs and matrix products of the compiled programs, and what a microbatch keeps for its W."""

import re
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from planner.lowering.compile import compile_plan
from planner.lowering.pipeline import PipelineTrainer
from planner.lowering.split_backward import SplitBackward, run_block, split
from planner.lowering.split_programs import SplitPrograms
from planner.models import gpt, t5
from tests.lowering.execution import gentle
from tests.lowering.schedules import scheduled_plan

WIDE = {"hidden": 64, "heads": 4, "vocab": 256, "seq": 32, "batch": 4, "dtype": "float32"}
MODELS = {"gpt": lambda: gpt(layers=4, **WIDE), "t5": lambda: t5(layers=2, ffn=128, target_seq=24, **WIDE)}


def figures(traced) -> tuple[float, float, int]:
    """FLOPs as written and as compiled, and the compiled program's matrix products."""
    lowered = traced.lower()
    compiled = lowered.compile()
    dots = len(re.findall(r" dot\(", compiled.as_text()))
    return lowered.cost_analysis()["flops"], compiled.cost_analysis()["flops"], dots


def backward_figures(trainer: PipelineTrainer) -> dict[tuple[int, int], list[tuple[float, float, int]]]:
    return {
        actor: [figures(traced) for phase, traced in programs.traces() if phase == "backward"]
        for actor, programs in trainer.programs.items()
    }


@pytest.mark.parametrize(("model", "remat"), [("gpt", None), ("gpt", "full"), ("t5", None)])
def test_weight_gradients_repeat_nothing(model: str, remat: str | None) -> None:
    task, devices = gentle(MODELS[model]()), (1, 4)
    whole, parted = (
        compile_plan(scheduled_plan(task, name, devices, microbatches=2, remat=remat), task)
        for name in ("1f1b", "zb-h1")
    )
    assert isinstance(whole, PipelineTrainer) and isinstance(parted, PipelineTrainer)
    fused, split_up = backward_figures(whole), backward_figures(parted)
    for actor, [activations, weights] in split_up.items():
        [both] = fused[actor]
        written, compiled, dots = (a + w for a, w in zip(activations, weights, strict=True))
        assert dots == both[2] and activations[2] > 0 and weights[2] > 0
        assert written == pytest.approx(both[0], rel=1e-4)
        assert compiled == pytest.approx(both[1], rel=0.025)  # fusions compute cheap things twice
        programs = parted.programs[actor]
        assert isinstance(programs, SplitPrograms)
        if remat is None:  # what only B reads is let go; W has cotangents instead
            assert programs.kept_bytes < 1.1 * programs.residual_bytes


def layers(params, x):
    """A stack of layers with a weight that all share."""

    def layer(h, w):
        return h + jnp.tanh(h @ w) @ params["shared"], jnp.sum(h)

    h, sums = lax.scan(layer, x, params["stack"])
    return jnp.sum(h * h) + jnp.sum(sums)


def nested(params, x):
    """A loop within each layer."""

    def layer(h, w):
        def inner(g, _):
            return jnp.sin(g @ w), None

        return lax.scan(inner, h, None, length=3)[0], None

    return jnp.sum(lax.scan(jax.checkpoint(layer), x, params["stack"])[0] ** 2)


def branches(params, x):
    """A branch and a loop of unknown length, which run whole in B."""
    h = lax.cond(jnp.sum(x) > 0, lambda h: h @ params["shared"], lambda h: jnp.cos(h), x)
    count = lax.while_loop(lambda n: n < 3.0, lambda n: n + 1.0, lax.stop_gradient(jnp.sum(x)) * 0.0)
    return jnp.sum((h * count) @ params["stack"][0])


def reversed_loop(params, x):
    """Items from the last to the first, results read as well as the carry."""

    def layer(h, w):
        h = jnp.tanh(h @ w)
        return h, h @ params["shared"]

    h, every = lax.scan(layer, x, params["stack"], reverse=True, unroll=2)
    return jnp.sum(h) + jnp.sum(every[1] * every[0])


def parted(function) -> tuple[SplitBackward, list, list, list]:
    """The split backward of a function of (params, x), its inputs, and what the whole gives (x first)."""
    rng = np.random.default_rng(0)
    params = {"stack": rng.normal(size=(4, 6, 6)), "shared": rng.normal(size=(6, 6))}
    params = jax.tree.map(lambda a: jnp.asarray(0.3 * a, jnp.float32), params)
    x = jnp.asarray(rng.normal(size=(5, 6)), jnp.float32)
    _, back = jax.vjp(function, params, x)
    leaves, tree = jax.tree.flatten(back)

    def run(leaves_, g):
        grads, gx = jax.tree.unflatten(tree, leaves_)(g)
        return gx, *jax.tree.leaves(grads)

    closed = jax.make_jaxpr(run)(leaves, jnp.ones(()))
    halves = split(closed, [True, False, False])
    inputs = [*leaves, jnp.ones(())]
    return halves, inputs, list(run(leaves, jnp.ones(()))), [closed]


def products(function, *args) -> Counter:
    """Matrix products that a function runs, loops counted."""
    found: Counter = Counter()

    def walk(jaxpr, times: int) -> None:
        for eqn in jaxpr.eqns:
            if eqn.primitive.name == "dot_general":
                found[str(eqn.outvars[0].aval)] += times
            inner = times * (eqn.params["length"] if eqn.primitive.name == "scan" else 1)
            for sub in jax.tree.leaves(list(eqn.params.values()), is_leaf=lambda v: hasattr(v, "jaxpr")):
                if hasattr(sub, "jaxpr"):
                    walk(sub.jaxpr, inner)
                elif hasattr(sub, "eqns"):
                    walk(sub, inner)

    walk(jax.make_jaxpr(function)(*args).jaxpr, 1)
    return found


@pytest.mark.parametrize("function", [layers, nested, branches, reversed_loop])
def test_both_parts_give_what_the_whole_gives(function) -> None:
    halves, inputs, expected, [closed] = parted(function)
    gx, *handed = run_block(halves.activations, inputs)
    grads = run_block(halves.weights, [*inputs, *handed])
    for got, want in zip((gx, *grads), expected, strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)
    both = products(lambda *xs: run_block(halves.activations, xs), *inputs)
    both += products(lambda *xs: run_block(halves.weights, xs), *inputs, *handed)
    assert both == products(lambda *xs: jax.core.eval_jaxpr(closed.jaxpr, closed.consts, *xs), *inputs)


def test_a_loop_hands_over_what_its_weight_gradients_read() -> None:
    """Two tensors a layer for two products a layer; W's loop carries the shared weight's sum and no cotangent."""
    halves, inputs, _, _ = parted(layers)
    gx, *handed = run_block(halves.activations, inputs)
    assert gx.shape == (5, 6)
    assert sorted(x.shape for x in handed) == [(4, 5, 6), (4, 5, 6)]
    [loop] = [step.loop for step in halves.weights.steps if step.loop is not None]
    assert loop.carries == 1 and loop.body.outputs[0].aval.shape == (6, 6)  # type: ignore[union-attr]


def test_inputs_that_only_one_part_reads_are_known() -> None:
    halves, inputs, _, _ = parted(layers)
    every = set(halves.read_by_activations) | set(halves.read_by_weights)
    assert every <= set(range(len(inputs)))
    assert set(halves.read_by_weights) - set(halves.read_by_activations)  # the layers' inputs
    unread = [x if i in halves.read_by_activations else None for i, x in enumerate(inputs)]
    assert run_block(halves.activations, unread)[0].shape == (5, 6)
