"""Measured blocks in a plan: they are what a block costs, at any microbatch, and a slower block changes the plan."""

import msgspec
import pytest

import planner
from costmodel.block_times import block_scales
from costmodel.cluster import Cluster, parse_cluster
from costmodel.estimator import Pricing
from planner.frontend.capture import capture
from planner.frontend.graph import model_graph
from planner.models import gpt
from planner.profile_facts import facts_of_kinds, with_measured_size
from planner.space.model_space import ModelSpace
from profiles.catalogue import device_kind
from profiles.schema import BlockTime, Profile
from tests.small_profiles import small_profile

TASK = gpt(hidden=32, layers=4, heads=2, vocab=64, seq=8, dtype="float32")
GRAPHS = {size: model_graph(capture(TASK, size)) for size in (1, 2, 4)}


def cpus(count: int) -> Cluster:
    group = {"name": "g", "nodes": 1, "device": "cpu", "devices_per_node": count}
    return parse_cluster({"name": "c", "group": [group]}, {"cpu": device_kind("cpu")})


def profiled(size: int = 2, *, slow: dict[str, float] | None = None, base_s: float = 1e-3) -> Profile:
    """Every block class takes `base_s` forward and twice that backward, times what `slow` says of its first block."""
    graph, slow = GRAPHS[size], slow or {}
    names = {block.class_key: block.name for block in reversed(graph.blocks)}
    blocks = tuple(
        BlockTime(
            block_class=key,
            mesh=(1,),
            microbatch=size,
            forward_s=base_s * slow.get(name, 1.0),
            backward_s=base_s * slow.get(name, 1.0),
            weight_s=base_s * slow.get(name, 1.0),
        )
        for key, name in names.items()
    )
    return small_profile(ops={}, blocks=blocks, gaps=(), usable_memory_bytes=None)


def plan_of(profile: Profile | None, devices: int = 1, **options: object) -> planner.Plan:
    return planner.plan(TASK, cluster=cpus(devices), profile=profile, baselines=False, **{"global_batch": 8, **options})


def space_of(profile: Profile, size: int) -> ModelSpace:
    kinds = with_measured_size(facts_of_kinds(cpus(1), profile), profile, GRAPHS.__getitem__, (4, 2, 1))
    facts, graph = kinds.facts["cpu"], GRAPHS[size]
    pricing = Pricing(kind=facts.kind, mesh=(), axis_names=(), links=(), op_times=facts.op_times_of(graph))
    return ModelSpace(graph=graph, pricing=pricing, scales=facts.block_scales_of(graph))


def totals(space: ModelSpace) -> dict[str, tuple[float, float]]:
    found = {}
    for key, cls in space.graph.classes.items():
        costs = [space.op_cost(key, op, ()) for op in cls.ops]
        found[key] = sum(c.forward_s for c in costs), sum(c.backward_s for c in costs)
    return found


def test_a_block_on_one_device_costs_what_was_measured() -> None:
    space = space_of(profiled(slow={"embedding": 3.0}), 2)
    keys = {block.name: block.class_key for block in space.graph.blocks}
    of = totals(space)
    assert of[keys["embedding"]] == (pytest.approx(3e-3), pytest.approx(6e-3))
    assert of[keys["layers[0]"]] == (pytest.approx(1e-3), pytest.approx(2e-3))
    assert {cost.provenance for cost in space._op_costs.values()} == {"measured"}


def test_at_another_microbatch_the_same_correction_holds() -> None:
    measured, other = space_of(profiled(), 2), space_of(profiled(), 4)
    bare = space_of(small_profile(ops={}, blocks=(), gaps=()), 4)
    keys = zip(GRAPHS[2].blocks, GRAPHS[4].blocks, strict=True)
    for small, large in {(a.class_key, b.class_key) for a, b in keys}:
        scale = measured.scales[small]
        assert other.scales[large].forward == scale.forward and other.scales[large].provenance == "interpolated"
        assert totals(other)[large][0] == pytest.approx(scale.forward * totals(bare)[large][0])


def test_a_block_without_a_measured_backward_keeps_the_prices_of_its_ops() -> None:
    profile = profiled()
    forward = tuple(_without_backward(one) for one in profile.blocks)
    facts = facts_of_kinds(cpus(1), small_profile(ops={}, blocks=forward)).facts["cpu"]
    scales = block_scales(facts.blocks, GRAPHS[2], facts.kind, {})
    assert scales and {scale.backward for scale in scales.values()} == {1.0}
    assert block_scales({}, GRAPHS[2], facts.kind, {}) == {}


def _without_backward(one: BlockTime) -> BlockTime:
    fields = {name: getattr(one, name) for name in one.__struct_fields__}
    return BlockTime(**{**fields, "backward_s": 0.0, "weight_s": None})


def test_the_plan_of_one_device_takes_what_its_blocks_take() -> None:
    plan = plan_of(profiled(), microbatch=2, stages=1)
    blocks = len(GRAPHS[2].blocks)
    assert plan.prediction.compute_s == pytest.approx(4 * blocks * 3e-3, rel=0.05)
    assert plan.prediction.provenance["compute"] in ("fitted", "measured")
    (finding,) = (one for one in plan.findings if one.code == "MP173")
    assert "3 of 3 block classes are measured" in finding.message and finding.severity == "note"


def test_weight_gradients_are_the_measured_part_of_a_split_backward() -> None:
    def weight_s(share: float) -> float:
        profile = profiled()
        blocks = tuple(
            msgspec.structs.replace(one, backward_s=2e-3 * (1 - share), weight_s=2e-3 * share) for one in profile.blocks
        )
        plan = plan_of(msgspec.structs.replace(profile, blocks=blocks), devices=2, microbatch=2, stages=2)
        (group,) = plan.stages[0].groups
        assert group.time.backward_s == pytest.approx(6e-3, rel=0.05)
        return group.time.weight_s

    few, many = weight_s(0.25), weight_s(0.75)
    # Adding gradients up is part of W, and no part of the block.
    assert few == pytest.approx(1.5e-3, rel=0.15) and many == pytest.approx(4.5e-3, rel=0.06)


def test_a_slower_block_moves_the_cut_between_stages() -> None:
    def cut(slow: dict[str, float]) -> list[tuple[str, ...]]:
        plan = plan_of(profiled(slow=slow), devices=2, microbatch=2, stages=2)
        return [stage.blocks for stage in plan.stages]

    assert cut({}) == [("embedding", "layers[0:2]"), ("layers[2:4]", "head")]
    assert cut({"head": 4.0}) == [("embedding", "layers[0:3]"), ("layers[3]", "head")]
    assert cut({"embedding": 4.0}) == [("embedding", "layers[0]"), ("layers[1:4]", "head")]


def test_blocks_faster_than_their_ops_leave_the_bound_below_the_plan() -> None:
    plan = plan_of(profiled(base_s=1e-7), microbatch=128, stages=1, global_batch=128)
    assert 0 < plan.certificate.hardware_bound_s <= plan.prediction.step_time_s
    assert not [words for words in plan.certificate.space if "defect" in words]


def test_layers_of_others_models_are_not_taken_for_blocks() -> None:
    block = BlockTime(block_class="m/0", mesh=(1,), microbatch=1, forward_s=9.0, backward_s=9.0)
    kinds = facts_of_kinds(cpus(1), small_profile(ops={}, blocks=(block,)))
    assert kinds.facts["cpu"].blocks == {}
