"""What full remat runs again, as it is priced, against the products of the compiled programs."""

import re

import pytest

from costmodel.graph import derived_from_parameters
from costmodel.kernels import is_matmul
from planner.frontend.capture import capture
from planner.frontend.graph import model_graph
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


def backward_products(plan, task) -> int:
    """Matrix products of all compiled backward programs; each class of a stage's blocks is there once, in a loop."""
    trainer = compile_plan(plan, task)
    assert isinstance(trainer, PipelineTrainer)
    texts = [
        traced.lower().compile().as_text()
        for programs in trainer.programs.values()
        for phase, traced in programs.traces()
        if phase == "backward"
    ]
    return sum(len(re.findall(r" dot\(", text)) for text in texts)


@pytest.mark.parametrize("model", MODELS)
def test_full_remat_runs_those_products_again_that_the_backward_pass_needs(model: str) -> None:
    task = gentle(MODELS[model]())
    plans = {remat: scheduled_plan(task, "1f1b", (1, 4), microbatches=2, remat=remat) for remat in (None, "full")}
    more = backward_products(plans["full"], task) - backward_products(plans[None], task)
    graph = model_graph(capture(task, plans["full"].microbatch_size))
    products, again, first = 0, 0, 0
    for stage in plans["full"].stages:
        last = first + stage.block_count
        keys, first = {block.class_key for block in graph.blocks[first:last]}, last
        for key in keys:
            cls = graph.classes[key]
            runs = done_again(cls.ops, cls.tensors, derived_from_parameters(cls.ops, cls.tensors), full=True).runs
            products += sum(is_matmul(op) for op in cls.ops)
            again += sum(is_matmul(op) and op.name in runs for op in cls.ops)
    assert more == again
    assert 0 < again < products  # the last product of a layer is not among them
