"""What is live while a block runs backward (L1 to L3), and the fullest moment of a stage (P1 to P3)."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from costmodel.graph import ModelGraph
from planner.check.rules import check_plan
from planner.frontend.capture import capture
from planner.frontend.graph import model_graph
from planner.frontend.task import TrainingTask
from planner.models import gpt, t5
from planner.search.backward_peak import Moment, fullest_moment, saved_bytes
from planner.search.score import Score
from planner.space.kernels import names_in_memory
from planner.space.liveness import BlockLiveness
from planner.space.parameters import Storage, arising_bytes, scattered_bytes
from tests.lowering.execution import pins
from tests.lowering.layouts import on
from tests.lowering.test_collectives import node_of_h100, planned

ROWS, WIDE, CLASSES = 32, 64, 128


def loss(params, batch):
    """A product, an elementwise chain, a product, a softmax of its own."""
    hidden = jnp.tanh(batch["x"] @ params["first"]) * 2.0
    scores = hidden @ params["second"]
    shifted = scores - jax.lax.stop_gradient(jnp.max(scores, axis=-1, keepdims=True))
    return jnp.mean(jnp.log(jnp.sum(jnp.exp(shifted), axis=-1)))


def task() -> TrainingTask:
    params = {"first": np.zeros((WIDE, WIDE), np.float32), "second": np.zeros((WIDE, CLASSES), np.float32)}
    batch = {"x": np.zeros((ROWS, WIDE), np.float32)}
    shapes = jax.eval_shape(lambda: (params, batch))
    return TrainingTask(loss, params=shapes[0], batch=shapes[1], optimizer=optax.sgd(0.1))


@pytest.fixture(scope="module")
def graph() -> ModelGraph:
    return model_graph(capture(task(), ROWS))


def made_by(graph: ModelGraph, primitive: str) -> list[str]:
    return [n for cls in graph.classes.values() for op in cls.ops if op.primitive == primitive for n in op.outputs]


def test_only_what_products_make_or_take_is_in_memory(graph: ModelGraph) -> None:
    found = frozenset().union(*(names_in_memory(cls) for cls in graph.classes.values()))
    assert set(made_by(graph, "dot_general")) <= found  # L1
    assert {n for n in made_by(graph, "mul") if n in found}  # L2: the second product takes it
    for primitive in ("tanh", "sub", "exp"):
        assert not set(made_by(graph, primitive)) & found


def liveness(score: Score, key: str) -> BlockLiveness:
    return score.layout.stages[0].groups[0].decision._liveness(key)


@pytest.fixture(scope="module")
def alone(graph: ModelGraph) -> Score:
    return planned(task(), node_of_h100(1), pins((on("g0", 1, mesh=()),)), microbatch=ROWS, microbatches=1)[0]


def test_cotangents_are_those_of_products(alone: Score) -> None:
    """L3: one for the result of each product and one for the operand that is no parameter and needs one."""
    for key in alone.layout.graph.classes:
        found = liveness(alone, key)
        names = {name for name, _ in found.spans.cotangents}
        products = set(made_by(alone.layout.graph, "dot_general"))
        assert products & set(found.spans.cls.tensors) <= names
        assert not names & set(made_by(alone.layout.graph, "exp"))


def test_a_block_that_runs_backward_at_once_holds_little(alone: Score) -> None:
    """By hand, in float32: scores and their cotangent; the hidden values and their cotangent. Fused values are none."""
    graph, decision = alone.layout.graph, alone.layout.stages[0].groups[0].decision
    scores, hidden = 4 * ROWS * CLASSES, 4 * ROWS * WIDE
    moment = fullest_moment(graph, decision, 0, len(graph.blocks), alone=True)
    weights = 4 * WIDE * (WIDE + CLASSES)
    assert 2 * scores <= moment.peak_bytes <= 2 * scores + 4 * hidden + weights


def test_layers_of_a_scan_are_one_run() -> None:
    captured = model_graph(capture(gpt(hidden=32, layers=3, heads=2, vocab=64, seq=8), 4))
    found = captured.runs(0, len(captured.blocks))
    assert [(r.stop - r.start, r.layered) for r in found if r.layered] == [(3, True)]
    assert sum(r.stop - r.start for r in found) == len(captured.blocks)


def test_gradients_of_layers_take_the_place_of_the_head() -> None:
    """P1, P2: a head with a large vocabulary is the fullest moment, and the layers' gradients do not add to it."""

    def planned_bytes(vocab: int) -> tuple[float, float]:
        model = gpt(hidden=128, layers=8, heads=2, vocab=vocab, seq=128, dtype="float32")
        found = planned(model, node_of_h100(1), pins((on("g0", 1, mesh=()),)), microbatch=8, microbatches=2)[0]
        (group,) = found.groups.values()
        return group.cost.arising_bytes + group.cost.transient_bytes, group.cost.gradient_bytes

    small, gradients = planned_bytes(64)
    assert small >= 0.9 * gradients  # all arise beside the accumulators
    large, _ = planned_bytes(65536)
    logits = 4 * 8 * 128 * 65536
    assert 0.99 * logits <= large <= 1.01 * logits  # beside what the head keeps; no gradient has been made yet


def test_what_is_not_there_at_the_fullest_moment_is_taken_off() -> None:
    moment = Moment(kept_bytes=100.0, peak_bytes=1000.0)
    assert moment.items(300.0, 200.0, accumulates=True) == (300.0, 200.0, 100.0, 400.0)
    assert moment.items(300.0, 900.0, accumulates=True) == (300.0, 600.0, 100.0, 0.0)
    assert moment.items(950.0, 200.0, accumulates=True) == (950.0, 0.0, 50.0, 0.0)
    assert moment.items(1100.0, 0.0, accumulates=False) == (1000.0, 0.0, 0.0, 0.0)


def test_a_gradient_arises_whole_and_is_scattered_leaf_by_leaf() -> None:
    """P5 with ZeRO-2 on two axes, ZeRO-1 and ZeRO-0."""
    facts = model_graph(capture(task(), ROWS)).params
    leaf = max(facts.values(), key=lambda p: p.elements)
    whole, split = (-1, -1), (0, 0)
    size, mesh = float(leaf.elements * leaf.gradient_itemsize), (2, 4)
    for gradient, accumulates, arising in ((split, True, size), (split, False, size), (whole, False, 0.0)):
        storage = Storage(whole, gradient, split)
        assert arising_bytes(leaf, leaf.elements, storage, mesh, accumulates=accumulates, fuses=True) == arising
        assert scattered_bytes(leaf, leaf.elements, storage, mesh) == size / 2
    assert scattered_bytes(leaf, leaf.elements, Storage(whole, whole, whole), mesh) == 0.0


def test_stacks_of_all_scans_are_there_from_the_first_ones_backward_pass_on() -> None:
    """P2: an encoder's while the decoder, which has more live, runs backward."""
    model = t5(hidden=64, layers=4, heads=2, vocab=64, seq=64, ffn=256, dtype="float32")
    found = planned(model, node_of_h100(1), pins((on("g0", 1, mesh=()),)), microbatch=8, microbatches=1)[0]
    graph, decision = found.layout.graph, found.layout.stages[0].groups[0].decision
    encoder, decoder = (run for run in graph.runs(0, len(graph.blocks)) if run.layered)
    live = decision.live_bytes(decoder.key, rerun=False)
    assert live > decision.live_bytes(encoder.key, rerun=False)
    stacks = sum(p.elements * p.gradient_itemsize for n, p in graph.params.items() if len(p.shape) > 2)
    kept = saved_bytes(graph, decision.lying, decision, 0, decoder.stop)
    assert fullest_moment(graph, decision, 0, len(graph.blocks), alone=True).peak_bytes >= kept + live + stacks


def test_a_compiler_that_fuses_little_has_everything_side_by_side() -> None:
    from planner.models import llama
    from tests.lowering.execution import slow_cluster
    from tests.lowering.layouts import FLAT, PinnedLayout

    model = llama(hidden=64, layers=2, heads=4, ffn=128, vocab=256, seq=32, dtype="float32")
    memory = PinnedLayout(slow_cluster(8), FLAT, microbatch=8).plan(model).stages[0].groups[0].memory
    assert memory.saved_bytes == memory.saved_per_microbatch_bytes
    assert memory.arising_bytes >= memory.gradients_bytes > 0 and memory.transient_bytes > 0


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_one_program_keeps_no_more_than_is_saved(dtype: str) -> None:
    """What the compiler computes again it does not keep, and it never keeps more for that."""
    model = gpt(hidden=128, layers=2, heads=2, vocab=512, seq=64, dtype=dtype)
    cluster = node_of_h100(2)
    _, plan = planned(model, cluster, pins((on("g0", 2, mesh=(2,)),)), microbatch=8, microbatches=2)
    memory = plan.stages[0].groups[0].memory
    assert 0 < memory.saved_bytes <= memory.saved_per_microbatch_bytes
    assert not [f for f in check_plan(plan, cluster) if f.code in ("MP620", "MP621", "MP622", "MP640")]
