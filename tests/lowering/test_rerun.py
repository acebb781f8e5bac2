"""What remat runs again, as it is priced, against the products of the programs."""

import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from costmodel.graph import derived_from_parameters
from costmodel.kernels import is_matmul
from planner.frontend.capture import capture
from planner.frontend.graph import model_graph
from planner.frontend.task import TrainingTask
from planner.lowering.compile import compile_plan
from planner.lowering.pipeline import PipelineTrainer
from planner.models import gpt, llama, t5
from planner.space.backward import done_again
from tests.lowering.execution import gentle
from tests.lowering.schedules import scheduled_plan

WIDE = {"hidden": 64, "heads": 4, "vocab": 256, "seq": 32, "batch": 4, "dtype": "float32"}
MODELS = {
    "gpt": lambda: gpt(layers=4, **WIDE),
    "llama": lambda: llama(layers=4, kv_heads=2, ffn=96, **WIDE),
    "t5": lambda: t5(layers=2, ffn=128, target_seq=24, **WIDE),
}


def backward_programs(plan, task) -> list[Any]:
    """All backward programs, lowered; each class of a stage's blocks is there once, in a loop."""
    trainer = compile_plan(plan, task)
    assert isinstance(trainer, PipelineTrainer)
    return [
        traced.lower()
        for programs in trainer.programs.values()
        for phase, traced in programs.traces()
        if phase == "backward"
    ]


def backward_products(plan, task) -> int:
    """Matrix products of all compiled backward programs."""
    texts = [lowered.compile().as_text() for lowered in backward_programs(plan, task)]
    return sum(len(re.findall(r" dot\(", text)) for text in texts)


def products_and_again(plan, task, *, full: bool) -> tuple[int, int]:
    """Matrix products of the classes of all stages, and how many run again, as they are priced."""
    graph = model_graph(capture(task, plan.microbatch_size))
    products, again, first = 0, 0, 0
    for stage in plan.stages:
        last = first + stage.block_count
        keys, first = {block.class_key for block in graph.blocks[first:last]}, last
        for key in keys:
            cls = graph.classes[key]
            runs = done_again(cls.ops, cls.tensors, derived_from_parameters(cls.ops, cls.tensors), full=full).runs
            products += sum(is_matmul(op) for op in cls.ops)
            again += sum(runs.get(op.name, 0) for op in cls.ops if is_matmul(op))
    return products, again


@pytest.mark.parametrize("model", MODELS)
def test_full_remat_runs_those_products_again_that_the_backward_pass_needs(model: str) -> None:
    task = gentle(MODELS[model]())
    plans = {remat: scheduled_plan(task, "1f1b", (1, 4), microbatches=2, remat=remat) for remat in (None, "full")}
    more = backward_products(plans["full"], task) - backward_products(plans[None], task)
    products, again = products_and_again(plans["full"], task, full=True)
    assert more == again
    assert 0 < again < products  # the last product of a layer is not among them


def wrapped(first: Callable = lambda f: f, second: Callable = lambda f: f, both: Callable = lambda f: f):
    """Layers of two halves with two products each, wrapped so; a head of one product."""

    def half(a: str, b: str) -> Callable:
        return lambda x, w: x + jnp.tanh(x @ w[a]) @ w[b]

    layer = both(lambda x, w: second(half("c", "d"))(first(half("a", "b"))(x, w), w))

    def loss(params: Any, batch: Any) -> Any:
        x, _ = jax.lax.scan(lambda x, w: (layer(x, w), None), batch["x"], params["layers"])
        return jnp.mean((x @ params["head"] - batch["y"]) ** 2)

    matrix = np.zeros((64, 64), np.float32)
    params = {"layers": {name: np.zeros((4, 64, 64), np.float32) for name in "abcd"}, "head": matrix}
    batch = {"x": np.zeros((8, 64), np.float32), "y": np.zeros((8, 64), np.float32)}
    return gentle(TrainingTask(loss, params=params, batch=batch, optimizer=optax.sgd(0.1)))


def keeping_products(layer: Callable) -> Callable:
    return jax.checkpoint(layer, policy=jax.checkpoint_policies.dots_saveable)


@pytest.mark.parametrize(
    ("regions", "alone", "in_full"),
    [
        ({"first": jax.checkpoint}, 1, 4),
        ({"second": jax.checkpoint}, 1, 3),
        ({"first": jax.checkpoint, "second": jax.checkpoint}, 2, 4),  # b makes what the second half starts from
        ({"both": jax.checkpoint}, 3, 3),
        ({"both": keeping_products}, 0, 3),
        ({"first": keeping_products, "second": jax.checkpoint}, 1, 3),
    ],
)
def test_regions_run_again_from_what_enters_them(regions: dict[str, Callable], alone: int, in_full: int) -> None:
    """As JAX lowers them, which XLA's compiler for GPUs leaves; a layer is there once in each of two stages."""
    task = gentle(wrapped(**regions))
    plain = scheduled_plan(wrapped(), "1f1b", (1, 4), microbatches=2, remat=None)
    counts = [sum(one.as_text().count("dot_general") for one in backward_programs(plain, wrapped()))]
    for remat, of_layer, of_head in ((None, alone, 0), ("full", in_full, 1)):
        plan = scheduled_plan(task, "1f1b", (1, 4), microbatches=2, remat=remat)
        counts.append(sum(one.as_text().count("dot_general") for one in backward_programs(plan, task)))
        _, again = products_and_again(plan, task, full=remat == "full")
        assert (counts[-1] - counts[0], again) == (again, 2 * of_layer + of_head)
