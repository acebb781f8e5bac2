"""What a stage holds of its parameters and how it keeps it in step, against plans and by hand."""

from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import msgspec
import optax
import pytest

import planner
from costmodel.collectives import AxisLink
from costmodel.graph import Parameter
from planner import load_cluster
from planner.models.families.gpt import gpt
from planner.models.families.moe import moe
from planner.strategy.leaves import HeldLeaf, Leaf
from planner.strategy.links import AxisLinks, strategy_links
from planner.strategy.state import states_of
from planner.strategy.strategy import Strategy, parse_strategy
from planner.strategy.zero import state_parts
from profiles.constants import COMPILED

TWO_NODES = """name = "c"
[[group]]
name = "a"
nodes = 2
device = "A100-SXM4-80GB"
devices_per_node = {0}
inter = {{ bandwidth_bytes_per_s = 12.5e9, latency_s = 5e-6 }}
"""
FACTS = Parameter(
    path="w",
    shape=(64, 64),
    dtype="float32",
    itemsize=4,
    trained=True,
    gradient_dtype="float32",
    gradient_itemsize=4,
    optimizer_bytes_per_element=8.0,
)
EXPERTS = moe(hidden=256, layers=4, heads=8, vocab=1024, seq=64, experts=8, ffn=512, capacity_factor=1.25)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Path(tmp_path_factory.mktemp("clusters"))


@lru_cache(maxsize=8)
def two_nodes_of(folder: Path, each: int) -> str:
    path = folder / f"{each}.toml"
    path.write_text(TWO_NODES.format(each))
    return str(path)


def leaf(*shape: int, **changes: Any) -> Leaf:
    fields = {"facts": FACTS, "elements": 4096.0, "split": {}, "small": False}
    return Leaf(**{**fields, "layered": True, "shape": shape, "readers": frozenset(), **changes})


@pytest.mark.parametrize(
    ("shape", "dp", "cp", "parts"),
    [
        ((12, 514), 2, 4, (2, 4)),  # the second dim for dp, though the first one would do
        ((12, 515), 2, 4, (1, 4)),  # one dim for either: the larger degree takes it
        ((12, 515), 2, 6, (2, 6)),  # one dim for both
        ((3, 5), 2, 4, (1, 1)),
        ((8,), 8, 1, (8, 1)),
    ],
)
def test_state_is_split_in_as_many_parts_as_dims_allow(
    shape: tuple[int, ...], dp: int, cp: int, parts: tuple[int, int]
) -> None:
    strategy = Strategy(dp=dp, cp=cp, zero=1)
    assert state_parts(leaf(*shape), strategy, flat=False) == parts
    assert state_parts(leaf(*shape), strategy, flat=True) == (dp, cp)
    assert state_parts(leaf(*shape, small=True), strategy, flat=False) == (1, 1)
    shared = replace(strategy, dp=2 * dp, ep=2)
    assert state_parts(leaf(*shape, split={"expert": 0}), shared, flat=True) == (dp, cp)


@pytest.mark.parametrize("zero", [1, 2])
def test_state_that_one_degree_divides_is_scattered_there_and_summed_over_the_other(folder: Path, zero: int) -> None:
    """Three devices of positions, a width of 1,024: ZeRO splits over dp alone, as in the plan of the same strategy."""
    cluster, text = two_nodes_of(folder, 3), f"dp=2,cp=3,zero={zero},microbatch=1"
    task = gpt(hidden=1024, layers=4, heads=16, vocab=32768, seq=768)
    found = planner.estimate(task, cluster, text, global_batch=8)
    plan = planner.plan(task, cluster=cluster, global_batch=8, strategy=text, baselines=False)
    assert found.step_time_s == pytest.approx(plan.prediction.step_time_s, rel=0.15)
    flat = planner.estimate(task, cluster, f"{text},flat_state=on", global_batch=8)
    assert flat.step_time_s < 0.9 * found.step_time_s


@pytest.mark.parametrize(("order", "inner"), [("tp-cp-dp-pp", "cp"), ("tp-dp-cp-pp", "dp")])
def test_the_inner_axis_moves_all_and_the_outer_one_what_is_left(order: str, inner: str) -> None:
    links = AxisLinks({"cp": _link(4), "dp": _link(2)}, 1)
    outer = {"cp": "dp", "dp": "cp"}[inner]
    strategy = parse_strategy(f"dp=2,cp=4,zero=1,rank_order={order}")
    (state,) = states_of([HeldLeaf(leaf(64, 64), 4096.0, 1)], strategy, COMPILED)
    assert [axis for axis, _ in state.axes] == [inner, outer] and state.split == {"cp", "dp"}
    left = 1e6 / dict(state.axes)[inner]
    took = links.seconds("all_gather", inner, 1e6) + links.seconds("all_gather", outer, left)
    assert state.split_s(links, "all_gather", 1e6, 1.0) == pytest.approx(took)
    assert state.rest_s(links) == 0.0


def test_what_zero_leaves_whole_is_summed_of_what_a_device_keeps() -> None:
    links = AxisLinks({"cp": _link(3), "dp": _link(2)}, 1)
    (state,) = states_of([HeldLeaf(leaf(64, 64), 4096.0, 1)], parse_strategy("dp=2,cp=3,zero=2"), COMPILED)
    assert state.split == {"dp"} and state.gradients == 4 * 4096 and state.kept_gradients == 4 * 2048
    assert state.rest_s(links) == pytest.approx(links.seconds("all_reduce", "cp", 4 * 2048))
    assert state.moved == state.moved_whole / 2


def _link(size: int) -> AxisLink:
    return AxisLink(size=size, bandwidth_bytes_per_s=1e9, latency_s=1e-6)


def test_layers_are_gathered_one_by_one_and_experts_meet_where_others_hold_the_same() -> None:
    strategy = parse_strategy("dp=4,ep=2,zero=3")
    owned = [HeldLeaf(leaf(64, 64), 8 * 4096.0, 8), HeldLeaf(leaf(4, 64, 64, split={"expert": 0}), 8 * 16384.0, 8)]
    others, experts = states_of(owned, strategy, COMPILED)
    assert (others.axes, experts.axes) == ((("dp", 4),), (("edp", 2),))
    assert (others.gathers, others.scatters, others.starts) == (8, 8, 1)
    frozen = replace(FACTS, trained=False)
    (still,) = states_of([HeldLeaf(leaf(64, 64, facts=frozen), 8 * 4096.0, 8)], strategy, COMPILED)
    assert (still.gathers, still.scatters, still.starts, still.gradients) == (8, 0, 0, 0)
    parted = [replace(one, leaf=replace(one.leaf, split={**one.leaf.split, "batch": 1})) for one in owned]
    assert [one.axes for one in states_of(parted, strategy, COMPILED)] == [(("ep", 2),), ()]
    links = AxisLinks({"ep": _link(2)}, 1)
    assert [one.split_s(links, "all_gather", 1e6, 1.0) > 0 for one in states_of(parted, strategy, COMPILED)] == [
        True,
        False,
    ]
    flat = states_of(owned, strategy, msgspec.structs.replace(COMPILED, flat_state=True))[0]
    assert (flat.gathers, flat.scatters) == (1, 1)


def test_devices_that_share_out_experts_are_neighbours(folder: Path) -> None:
    """On two nodes of four, tokens stay inside a node and the experts' gradients leave it; two nodes apart, not."""
    cluster = load_cluster(two_nodes_of(folder, 4))
    (links,) = strategy_links(cluster, parse_strategy("dp=8,ep=4"), COMPILED)
    inside, outside = links.by_axis["ep"], links.by_axis["edp"]
    assert (inside.size, outside.size) == (4, 2)
    assert inside.bandwidth_bytes_per_s > 10 * outside.bandwidth_bytes_per_s
    found = planner.Estimator(model=EXPERTS, cluster=cluster)
    near, far = (found(f"dp=8,ep={ep},microbatch=2", 64).breakdown for ep in (4, 8))
    assert far.communication_s > 2 * near.communication_s and far.gradients_s < near.gradients_s


def test_a_stage_hands_on_what_one_replica_computes(folder: Path) -> None:
    """With experts shared out work is that of all sharers together, what is sent that of one."""
    found = planner.Estimator(model=EXPERTS, cluster=two_nodes_of(folder, 4))
    alone, shared = (found(f"dp=4,pp=2,{ep}microbatch=2", 64) for ep in ("", "ep=4,"))
    assert 0 < shared.breakdown.sends_s == pytest.approx(alone.breakdown.sends_s, rel=0.05)  # but for a rotary table
    assert alone.memory[0].buffers_bytes == pytest.approx(4 * 2 * 64 * 256 * 2, rel=0.1)
    assert shared.memory[0].buffers_bytes == pytest.approx(4 * 2 * 64 * 256 * 2, rel=0.1)


def matrix(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def test_a_matrix_of_every_stage_meets_in_all_of_them(folder: Path) -> None:
    def loss(params: Any, batch: Any) -> Any:
        x = batch["x"] @ params["first"]
        for weights in params["layers"]:
            x = jnp.tanh(x @ weights) @ params["shared"]
        return jnp.mean(x**2)

    params = {"first": matrix(512, 512), "shared": matrix(512, 512), "layers": [matrix(512, 512) for _ in range(8)]}
    task = planner.TrainingTask(loss_fn=loss, params=params, batch={"x": matrix(1, 512)}, optimizer=optax.sgd(0.1))
    cluster = load_cluster(two_nodes_of(folder, 4))
    found = planner.Estimator(model=task, cluster=cluster)
    link = strategy_links(cluster, parse_strategy("pp=4"), COMPILED)[0].by_axis["pp"]
    for stages in (2, 4):
        once = found(f"pp={stages},microbatch=2", 64).breakdown.gradients_s
        moved = 2 * (stages - 1) / stages * 512 * 512 * 4
        assert once == pytest.approx(link.start_s + moved / link.bandwidth_bytes_per_s)


def test_one_layer_at_a_time_is_gathered(folder: Path) -> None:
    """Twice the largest block's parameters, whatever the number of layers, by a framework."""
    sizes = []
    for layers in (4, 8):
        task = gpt(hidden=256, layers=layers, heads=4, vocab=512, seq=16)
        found = planner.estimate(
            task, two_nodes_of(folder, 4), "dp=8,zero=3,microbatch=1,flat_state=on", global_batch=8
        )
        sizes.append(found.memory[0].buffers_bytes)
    matrices = (4 + 8) * 256 * 256
    assert sizes[0] == sizes[1] == pytest.approx(2 * 4 * matrices, rel=0.02)


def test_stages_with_other_unstacked_matrices_are_not_taken_for_alike(folder: Path) -> None:
    """Written-out layers of which one is eight times as wide inside: its stage alone updates so much."""

    def loss(params: Any, batch: Any) -> Any:
        x = batch["x"] @ params["first"]
        for weights in params["layers"]:
            x = jnp.tanh(x @ weights["up"]) @ weights["down"]
        return jnp.mean(x**2)

    layers = [{"up": matrix(256, 512), "down": matrix(512, 256)} for _ in range(6)]
    params = {"first": matrix(256, 256), "layers": layers}
    task = planner.TrainingTask(loss_fn=loss, params=params, batch={"x": matrix(1, 256)}, optimizer=optax.adam(0.1))
    found = planner.estimate(task, two_nodes_of(folder, 4), "pp=3,microbatch=2", global_batch=12)
    own = 2 * 2 * 256 * 512
    assert [stage.optimizer_bytes for stage in found.memory] == pytest.approx([8 * (own + 65536), 8 * own, 8 * own])
