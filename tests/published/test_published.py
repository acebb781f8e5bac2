"""Training functions that nobody here wrote: captured whole, split over eight devices, and equal to one device.

pip install -r tests/published/requirements.txt
pytest -m published tests/published
"""

import dataclasses
import time
from collections import Counter
from collections.abc import Iterator
from functools import cache
from importlib.util import find_spec

import jax
import pytest

import planner
from costmodel.errors import LoweringError
from planner.frontend.capture import Capture, capture
from planner.frontend.graph import model_graph
from planner.frontend.microbatch import check_microbatches
from planner.frontend.ops import op_from_equation, rule_for
from planner.lowering.compile import Trainer
from planner.planfile.schema import Plan
from planner.space.groups import group_ops, group_strategies
from tests.published.functions import MICROBATCH, REGISTRY, Published, entries
from tests.published.planned import MISCOUNTED, PIPELINES, compared, pipelined, planned, share_of

pytestmark = [pytest.mark.published, pytest.mark.filterwarnings("ignore")]

LAYERS = {  # equal blocks that must be found: those of the deepest run
    "hf_gpt2": 3, "hf_gptj": 2, "hf_llama": 3, "hf_mistral": 2, "hf_opt": 2, "hf_bloom": 2, "hf_bert": 3,
    "hf_roberta": 2,
    "hf_big_bird": 2, "hf_bart": 2, "hf_whisper": 2, "hf_vit": 3, "hf_clip": 2, "hf_wav2vec2": 2, "hk_transformer": 3,
    "hk_layer_stack": 4, "linen_scanned_transformer": 4, "nnx_transformer": 3, "equimo_vit": 3, "penzai_llama": 2,
    "keras_transformer": 3, "flowjax_coupling_flow": 4, "jraph_graph_convolution": 2, "keras_mobilenet_v2": 3,
}  # fmt: skip
BOTH_STACKS = ("hf_bart", "hf_whisper", "hf_clip")  # two runs: encoder and decoder, text and vision
SLOW_CAPTURE_S = 60.0  # on a busy machine; a few seconds at most otherwise

NAMES = sorted(entries())


@cache
def _built(name: str) -> Published:
    return REGISTRY[name].build()


@cache
def _captured(name: str) -> tuple[Capture, float]:
    start = time.perf_counter()
    captured = capture(_built(name).task, MICROBATCH)
    return captured, time.perf_counter() - start


@pytest.fixture(scope="module", params=NAMES)
def name(request: pytest.FixtureRequest) -> Iterator[str]:
    """A function's name. All tests of one function run together, and what they made is dropped before the next's."""
    missing = [p for p in REGISTRY[request.param].packages if find_spec(p) is None]
    if missing:
        pytest.skip(f"{', '.join(missing)} not installed: pip install -r tests/published/requirements.txt")
    yield request.param
    _built.cache_clear()
    _captured.cache_clear()
    jax.clear_caches()


def test_every_equation_is_in_exactly_one_block(name: str) -> None:
    captured, _ = _captured(name)
    layers = {e.name: e for e in captured.program.equations if any(b.run >= 0 for b in captured.blocks)}
    ran = Counter()
    for block in captured.blocks:
        ran.update(e.primitive.name for e in block.cls.program.equations)
    runs = {run.first for run in captured.runs}
    scans = Counter(e.primitive.name for e in layers.values())["scan"]
    outside = Counter(e.primitive.name for e in captured.program.equations)
    inside = Counter()
    for first in runs:
        block = captured.blocks[first]
        length = captured.runs[block.run].length
        inside.update(
            {k: n * length for k, n in Counter(e.primitive.name for e in block.cls.program.equations).items()}
        )
    assert ran.total() == outside.total() - len(runs) + inside.total() - _sunk(captured), (ran, outside)
    assert len(runs) <= scans


def _sunk(captured: Capture) -> int:
    """Casts of stacked parameters, which run once each before the loop as written and in every layer as captured."""
    return sum(
        e.name.startswith("convert_element_type.sunk") or ".sunk" in e.outputs[0].name
        for run in captured.runs
        for e in captured.blocks[run.first].cls.program.equations
    )


def test_floating_point_operations_are_conserved(name: str) -> None:
    captured, _ = _captured(name)
    ops = [op_from_equation(e, rule_for(e.primitive.name), lambda v: False) for e in captured.program.equations]
    assert captured.flops == pytest.approx(sum(op.flops for op in ops), rel=1e-9)
    assert captured.flops > 0


def test_capture_is_fast_and_repeats_itself(name: str, record_property) -> None:
    captured, seconds = _captured(name)
    record_property("capture_s", round(seconds, 2))
    assert seconds < SLOW_CAPTURE_S
    again = capture(_built(name).task, MICROBATCH)
    assert [b.name for b in again.blocks] == [b.name for b in captured.blocks]
    assert list(again.classes) == list(captured.classes)


def test_equal_layers_are_found(name: str) -> None:
    if name not in LAYERS:
        pytest.skip("this model has no equal layers")
    counts = Counter(b.cls.key for b in _captured(name)[0].blocks)
    assert counts.most_common(1)[0][1] >= LAYERS[name], counts
    if name in BOTH_STACKS:
        assert [n for _, n in counts.most_common(2)] == [LAYERS[name]] * 2


def test_every_op_is_in_one_group_with_a_strategy(name: str) -> None:
    graph = model_graph(_captured(name)[0])
    for cls in graph.classes.values():
        groups = group_ops(cls.ops, cls.tensors, frozenset(n for n in cls.outputs if n))
        assert sorted(op.name for g in groups for op in g.ops) == sorted(op.name for op in cls.ops)
        for group in groups:
            assert group_strategies(group, (2, 4), cls.tensors), group.name
        assert all(op.known for op in cls.ops), [op.primitive for op in cls.ops if not op.known]


def test_microbatches_keep_their_meaning_where_examples_do_not_meet(name: str) -> None:
    task = _built(name).task
    check = check_microbatches(dataclasses.replace(task, independent_microbatches=False))
    assert check.splits != task.independent_microbatches, check


def test_one_device_does_a_quarter_and_the_step_equals_one_devices(name: str, record_property) -> None:
    published = _built(name)
    plan = planned(published)
    share = share_of(plan, _captured(name)[0])
    record_property("share", round(share.total, 3))
    assert share.total <= 0.25, share.whole[:8]
    compared(published, plan, _verified(name, plan)).check()


def test_a_pipeline_equals_one_device(name: str) -> None:
    if name not in PIPELINES:
        pytest.skip("not run as a pipeline")
    plan = pipelined(_built(name), PIPELINES[name])
    assert len(plan.stages) == PIPELINES[name].stages
    compared(_built(name), plan, _verified(name, plan)).check()


def _verified(name: str, plan: Plan) -> Trainer:
    """The compiled plan, whose collectives and kept bytes are the planned ones."""
    trainer = planner.compile_plan(plan, _built(name).task)
    try:
        trainer.verify(compiled=False)
    except LoweringError as error:
        if name not in MISCOUNTED or error.code != "MP505":
            raise
    return trainer
