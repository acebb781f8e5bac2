"""Estimates of strategies against the planner's own scores, counts of collectives and closed forms."""

from collections import Counter
from dataclasses import replace
from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp
import msgspec
import optax
import pytest
from jax import lax

import planner
from costmodel.cluster import Cluster, parse_cluster
from costmodel.collectives import axis_links
from costmodel.errors import InputError
from costmodel.estimator import Pricing
from costmodel.graph import UpdateJoins
from costmodel.stack import Stack
from planner.frontend.capture import capture
from planner.frontend.graph import model_graph
from planner.models.families.gpt import gpt
from planner.models.families.llama import llama
from planner.models.families.moe import moe
from planner.report.estimate import document, render_comparison, render_estimate
from planner.search.facts import Facts
from planner.space.decision import Decision
from planner.space.model_space import ModelSpace
from planner.space.setting import Setting
from planner.strategy.attention import attention_cores
from planner.strategy.captured import CapturedModel
from planner.strategy.class_work import work_of
from planner.strategy.memory import in_flight
from planner.strategy.pricing import class_times
from planner.strategy.restricted import Role, choose
from planner.strategy.stages import equal_parts
from planner.strategy.strategy import Strategy, parse_strategy
from planner.strategy.work import interpolated
from profiles.catalogue import device_kind, load_catalogue

KIND = device_kind("A100-SXM4-80GB")
TASK = gpt(hidden=1024, layers=8, heads=16, vocab=8192, seq=512)
PLAIN = Stack(name="plain")
SENDING = Stack(name="sending", send_share=0.1, flat_state=False)


@lru_cache(maxsize=4)
def cluster(nodes: int = 4, per_node: int = 8) -> Cluster:
    group = {"name": "a", "nodes": nodes, "device": KIND.name, "devices_per_node": per_node}
    return parse_cluster({"name": "c", "group": [group]}, load_catalogue())


@lru_cache(maxsize=2)
def estimator(nodes: int = 4) -> planner.Estimator:
    return planner.Estimator(model=TASK, cluster=cluster(nodes))


def decision(
    tp: int,
    microbatch: int,
    *,
    sp: bool = False,
    remat: str = "none",
    task: object = TASK,
    choice: tuple[int, ...] | None = None,
) -> Decision:
    mesh = (tp,) if tp > 1 else ()
    links = axis_links(cluster().groups[0], mesh) if mesh else ()
    pricing = Pricing(kind=KIND, mesh=mesh, axis_names=("model",)[: len(mesh)], links=links)
    space = ModelSpace(graph=model_graph(capture(task, microbatch), UpdateJoins()), pricing=pricing)  # type: ignore[arg-type]
    roles: tuple[Role, ...] = ("model",)[: len(mesh)]
    setting = Setting(microbatches=4, stages=1, in_flight=1, remat=remat)  # type: ignore[arg-type]
    picked = choose(space, roles, sp=sp) if choice is None else choice
    return Decision(space=space, setting=setting, choice=picked, time_s=0.0, bound_s=0.0)


@pytest.mark.parametrize("tp", [1, 4])
@pytest.mark.parametrize("sp", [False, True])
@pytest.mark.parametrize("remat", ["none", "full"])
def test_blocks_cost_what_the_search_charges_for_the_same_decision(tp: int, sp: bool, remat: str) -> None:
    one = {which: decision(tp, 6, sp=sp and tp > 1, remat=which) for which in ("none", "full")}
    work = work_of(one, "graph")
    axis = "tp"

    class Links:
        def seconds(self, kind: str, name: str, moved_bytes: float, starts: float = 1.0) -> float:
            assert name == axis
            fixed, slope = one["none"].space.pricing.casts.line(kind, 0)
            return fixed * starts + slope * moved_bytes

    times = class_times(work, KIND, PLAIN, Links(), (axis,)[: 1 if tp > 1 else 0], remat)  # type: ignore[arg-type]
    for key, cost in one[remat].costs.items():
        assert times[key].forward_s == pytest.approx(cost.forward_s + cost.forward_cast_s, rel=1e-6)
        backward = cost.backward_s + cost.backward_cast_s - _accumulated(one[remat], key)
        assert times[key].backward_s == pytest.approx(backward, rel=1e-6)
        assert work.classes[key].entry_bytes == pytest.approx(one["full"].costs[key].saved_bytes)
        assert work.classes[key].saved["residuals"].kept_bytes == pytest.approx(one["none"].costs[key].saved_bytes)


def test_products_of_one_byte_cast_each_activation_once_and_each_cotangent() -> None:
    """What queries, keys and values read, what attention mixes, what gate and up read, what down reads; read in 16 bits
    and written twice in 8. Backward the cotangents of all seven results."""
    hidden, heads, kv_heads, ffn, positions = 512, 8, 4, 1408, 3 * 256
    task = llama(hidden=hidden, layers=4, heads=heads, kv_heads=kv_heads, vocab=16384, seq=256, ffn=ffn)
    both = {which: decision(1, 3, remat=which, task=task) for which in ("none", "full")}
    plain, cast = (work_of(both, "graph", dtype).classes for dtype in (None, "int8"))
    (key,) = (key for key, one in plain.items() if one.layered)
    seconds = {
        way: [one[key].kernels.memory_s[one[key].backward == way].sum() for one in (plain, cast)]
        for way in (False, True)
    }
    of_one = positions * (2 + 2 * 1) / KIND.memory_bandwidth_bytes_per_s
    assert seconds[False][1] - seconds[False][0] == pytest.approx((3 * hidden + ffn) * of_one)
    results = 3 * hidden + 2 * hidden * kv_heads / heads + 2 * ffn
    assert seconds[True][1] - seconds[True][0] == pytest.approx(results * of_one)


def _accumulated(one: Decision, key: str) -> float:
    """Adding gradients of microbatches up, which estimates charge to the stage."""
    from planner.space.accumulation import accumulate_s

    nodes = {id(n): n for n in one.parameter_nodes.values() if key in n.shares}
    return sum(n.shares[key] * accumulate_s(one.space, n, one.storage[n.names[0]]) for n in nodes.values())


@pytest.mark.parametrize(
    "task",
    [
        gpt(hidden=512, layers=4, heads=8, vocab=32768, seq=256),
        llama(hidden=512, layers=4, heads=8, kv_heads=4, vocab=16384, seq=256, ffn=1408),
    ],
)
def test_work_lies_on_the_line_through_two_sizes(task: object) -> None:
    samples, choice = {}, decision(2, 7, task=task).choice
    for size in (7, 11, 3):
        both = {which: decision(2, size, remat=which, task=task, choice=choice) for which in ("none", "full")}
        samples[size] = work_of(both, "fused")
    guess = interpolated(samples[7], samples[11], 3)
    for found, real in zip(guess.classes.values(), samples[3].classes.values(), strict=True):
        assert found.kernels.matmul_s == pytest.approx(real.kernels.matmul_s, rel=1e-9)
        assert found.kernels.memory_s == pytest.approx(real.kernels.memory_s, rel=1e-9)
        assert found.kernels.dims == pytest.approx(real.kernels.dims, rel=1e-9)
        assert found.moves["full"].amounts == pytest.approx(real.moves["full"].amounts, rel=1e-9)
        for saves, kept in found.saved.items():
            assert kept.kept_bytes == pytest.approx(real.saved[saves].kept_bytes)
            assert kept.core_bytes == pytest.approx(real.saved[saves].core_bytes)
        assert found.live_bytes == pytest.approx(real.live_bytes)


def test_tensor_parallel_layers_run_the_collectives_of_megatron() -> None:
    """Shoeybi et al. 2019: two all-reduces each way; Korthikanti et al. 2022: with sequence parallelism a gather and a
    scatter for each of them."""
    plain, split = decision(4, 6), decision(4, 6, sp=True)
    (layer,) = [key for key, count in plain.space.counts.items() if count > 1]
    stream = 6 * 512 * 1024 * 2
    assert _large(plain, layer, stream) == {("forward", "all_reduce"): 2, ("backward", "all_reduce"): 2}
    (layer,) = [key for key, count in split.space.counts.items() if count > 1]
    counts = _large(split, layer, stream)
    assert counts["forward", "all_gather"] == counts["forward", "reduce_scatter"] == 2
    assert counts["backward", "reduce_scatter"] == 2 and ("forward", "all_reduce") not in counts


def _large(one: Decision, key: str, least: float) -> dict[tuple[str, str], float]:
    found: Counter[tuple[str, str]] = Counter()
    for move in one.costs[key].moves:
        if move.phase != "once" and move.moved_bytes >= least:
            found[move.phase, move.kind] += round(move.starts)
    return dict(found)


def test_attention_is_found_and_known_to_be_causal() -> None:
    graph = model_graph(capture(TASK, 2), UpdateJoins())
    cores = [core for cls in graph.classes.values() for core in attention_cores(cls)]
    assert len(cores) == 1 and cores[0].causal
    experts = moe(hidden=256, layers=2, heads=4, vocab=512, seq=64, ffn=512, experts=4)
    graph = model_graph(capture(experts, 2), UpdateJoins())
    assert sum(len(attention_cores(cls)) for cls in graph.classes.values()) == 1


def test_flash_attention_moves_and_computes_less_than_fused_and_that_less_than_ops_one_by_one() -> None:
    found = [estimator()(f"dp=4,microbatch=4,attention={kind}", 64) for kind in ("graph", "fused", "flash")]
    assert found[0].step_time_s > found[1].step_time_s > found[2].step_time_s
    assert found[0].memory.peak_bytes > found[1].memory.peak_bytes > found[2].memory.peak_bytes


def test_more_recomputation_takes_longer_and_less_memory() -> None:
    found = [estimator()(f"dp=4,microbatch=4,remat={remat}", 64) for remat in ("none", "selective", "full")]
    assert found[0].step_time_s < found[1].step_time_s < found[2].step_time_s
    assert found[0].memory.peak_bytes > found[1].memory.peak_bytes > found[2].memory.peak_bytes


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_state_is_split_as_zero_says(zero: int) -> None:
    one, many = estimator()("dp=1,microbatch=1", 8), estimator()(f"dp=8,microbatch=1,zero={zero}", 64)
    shares = [8 if zero >= stage else 1 for stage in (3, 2, 1)]
    for name, share in zip(("parameters_bytes", "gradients_bytes", "optimizer_bytes"), shares, strict=True):
        assert getattr(many.memory[0], name) == pytest.approx(
            getattr(one.memory[0], name) / share, rel=0.01
        )  # small ones stay whole


def test_parts_of_a_step_add_up_and_layers_are_conserved() -> None:
    for text in (
        "dp=2,tp=2,pp=4,microbatch=1",
        "dp=4,pp=2,interleave=2,microbatch=2,zero=1",
        "dp=2,cp=2,tp=2,microbatch=1",
    ):
        found = estimator()(text, 32)
        parts = [getattr(found.breakdown, name) for name in found.breakdown.__struct_fields__]
        assert sum(parts) == pytest.approx(found.step_time_s, rel=1e-9) and min(parts) >= 0.0
    model = CapturedModel(TASK)
    work = model.work(Facts(KIND), Strategy(pp=3))
    assert sum(equal_parts(8, 3)) == 8 and work.order == tuple(work.order)


def test_a_pipeline_of_equal_stages_takes_what_the_closed_form_says() -> None:
    """(m + p - 1) (F + B) for 1F1B with free sends, and a bubble of 1/v of that when interleaved v times."""
    free = replace(parse_strategy("pp=4,microbatch=1"), partition=(2, 2, 2, 2))
    found = estimator()(free, 32)
    assert found.breakdown.bubble_s > 0.0
    looped = estimator()(replace(free, interleave=2, partition=(1,) * 8), 32)
    assert looped.breakdown.bubble_s == pytest.approx(found.breakdown.bubble_s / 2, rel=0.35)


def test_in_flight_counts_are_those_of_the_schedules() -> None:
    assert [in_flight(Strategy(pp=4), s, 8) for s in range(4)] == [4, 3, 2, 1]
    assert [in_flight(Strategy(pp=4, schedule="gpipe"), s, 8) for s in range(4)] == [8] * 4
    assert in_flight(Strategy(pp=4, interleave=2), 0, 8) == (2 * 3 + 4 + 1) / 2


@pytest.mark.parametrize("schedule", ["zb-h1", "zb-h2", "zb-v", "dapple-pa", "breadth-first", "v-half"])
def test_other_schedules_are_simulated(schedule: str) -> None:
    plain = estimator()("pp=4,microbatch=1,remat=full", 64)
    other = estimator()(f"pp=4,microbatch=1,remat=full,schedule={schedule}", 64)
    parts = [getattr(other.breakdown, name) for name in other.breakdown.__struct_fields__]
    assert sum(parts) == pytest.approx(other.step_time_s, rel=1e-9)
    if schedule.startswith("zb"):
        assert other.step_time_s < plain.step_time_s
    assert all(stage.in_flight > 0 for stage in other.memory)


def test_a_simulated_schedule_agrees_with_the_formula_where_both_hold() -> None:
    """DAPPLE's early backward with warm-up p - i is 1F1B."""
    formula = estimator()("pp=4,microbatch=1,partition=2+2+2+2", 64)
    simulated = estimator()("pp=4,microbatch=1,partition=2+2+2+2,schedule=dapple-pa", 64)
    assert simulated.step_time_s == pytest.approx(formula.step_time_s, rel=0.03)
    assert [s.in_flight for s in simulated.memory] == [s.in_flight for s in formula.memory] == [4, 3, 2, 1]


def test_parts_of_a_simulated_step_add_up_whatever_a_stack_exposes_of_sends() -> None:
    for text in ("pp=4,microbatch=1,schedule=zb-h1", "pp=4,microbatch=1,interleave=2"):
        found = estimator()(f"{text},send_exposed=1.0", 3)  # fewer microbatches than stages
        parts = [getattr(found.breakdown, name) for name in found.breakdown.__struct_fields__]
        assert sum(parts) == pytest.approx(found.step_time_s, rel=1e-9) and min(parts) >= 0.0


def test_interleaved_with_one_microbatch_goes_through_every_part_in_turn() -> None:
    """Nothing is gained from several parts where there is nothing to run beside them."""
    plain = estimator()("pp=4,microbatch=1,partition=2+2+2+2", 1)
    looped = estimator()("pp=4,microbatch=1,interleave=2,partition=1+1+1+1+1+1+1+1", 1)
    assert looped.step_time_s == pytest.approx(plain.step_time_s, rel=0.05)


def test_a_shipped_stack_leaves_what_a_cluster_states_of_its_devices() -> None:
    slow = msgspec.structs.replace(KIND, matmul_efficiency=0.2)
    group = msgspec.structs.replace(cluster(1).groups[0], device=slow)
    own = msgspec.structs.replace(cluster(1), groups=(group,))
    for stack in (None, "vtrain"):
        text = "microbatch=8"
        shipped = planner.estimate(TASK, cluster(1), text, global_batch=8, stack=stack)
        stated = planner.estimate(TASK, own, text, global_batch=8, stack=stack)
        assert stated.breakdown.compute_s > 2.0 * shipped.breakdown.compute_s


def test_a_stage_of_two_kinds_has_the_smaller_memory_and_the_slower_pace() -> None:
    kinds = {name: msgspec.structs.replace(KIND, name=name) for name in ("big", "small")}
    kinds["small"] = msgspec.structs.replace(kinds["small"], memory_bytes=KIND.memory_bytes // 2)
    kinds["big"] = msgspec.structs.replace(kinds["big"], matmul_efficiency=0.4)
    groups = [{"name": name, "nodes": 1, "device": name, "devices_per_node": 2} for name in kinds]
    link = {"between": list(kinds), "bandwidth_bytes_per_s": 1e10, "latency_s": 1e-5}
    both = parse_cluster({"name": "c", "group": groups, "link": [link]}, kinds)
    found = planner.estimate(TASK, both, "dp=4,microbatch=2", global_batch=8)
    assert found.memory[0].limit_bytes == kinds["small"].memory_bytes
    slow = planner.estimate(TASK, both, "dp=2,microbatch=2", global_batch=4)
    assert slow.breakdown.compute_s == pytest.approx(found.breakdown.compute_s, rel=1e-6)


def test_a_slow_device_sets_the_pace_of_its_stage() -> None:
    document = {"name": "a", "nodes": 1, "device": KIND.name, "devices_per_node": 4}
    slow = parse_cluster({"name": "c", "group": [{**document, "overrides": {"slow": {"0/2": 3.0}}}]}, load_catalogue())
    plain = parse_cluster({"name": "c", "group": [document]}, load_catalogue())
    for text in ("dp=4,microbatch=2", "pp=4,microbatch=2"):
        one, other = (planner.estimate(TASK, where, text, global_batch=32) for where in (plain, slow))
        least = 2.9 if text.startswith("dp") else 2.0  # a stage in the middle has no head
        assert least < other.breakdown.compute_s / one.breakdown.compute_s <= 3.0 + 1e-9
    two = [planner.estimate(TASK, where, "dp=2,microbatch=2", global_batch=32).step_time_s for where in (plain, slow)]
    assert two[0] == two[1]  # the slow device is not among the first two
    with pytest.raises(InputError, match="uses 32 devices, the cluster has 4"):
        planner.estimate(TASK, slow, "dp=4,pp=8,microbatch=2", global_batch=32)


def test_an_estimate_says_where_it_comes_from_and_how_far_it_may_be_off() -> None:
    found = planner.estimate(TASK, cluster(), "dp=4,tp=2,microbatch=2", global_batch=32)
    low, high = found.error_bar
    assert low < found.step_time_s < high
    assert set(found.provenance) == {"compute", "communication", "memory", "step_time"}
    assert 0.0 < found.mfu < 1.0 and found.fits
    tokens = 32 * 512 / found.step_time_s / 8
    assert found.tokens_per_s_per_device == pytest.approx(tokens)


def test_constants_of_a_stack_count_and_may_be_written_in_the_strategy() -> None:
    plain = estimator()("dp=4,microbatch=2", 32)
    slow = estimator()("dp=4,microbatch=2,step_s=0.5", 32)
    assert slow.step_time_s == pytest.approx(plain.step_time_s + 0.5)
    assert estimator()({"dp": 4, "microbatch": 2, "slowdown": 2.0}, 32).step_time_s == pytest.approx(
        2 * plain.step_time_s
    )


def test_sends_have_a_share_of_the_network_of_their_own() -> None:
    text = "dp=4,tp=2,pp=4,microbatch=1,send_exposed=1.0,inter_share=0.5"
    same, faster = (estimator()(f"{text}{more}", 32).breakdown for more in (",send_share=0.5", ",send_share=1.0"))
    plain = estimator()(text, 32).breakdown
    assert same == plain and faster.sends_s < plain.sends_s
    untied = replace(parse_strategy("dp=4,tp=2,microbatch=1"), pp=1)  # no sends: nothing changes
    without, with_share = (estimator(), planner.Estimator(model=TASK, cluster=cluster(), stack=SENDING))
    assert faster.communication_s == plain.communication_s
    assert without(untied, 32).step_time_s == with_share(untied, 32).step_time_s


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "zb-h1"])
def test_short_parts_of_activations_stall_each_microbatch(schedule: str) -> None:
    """Only where tensor-parallel devices send parts to another node at once, and only parts below the bound."""
    text = f"dp=4,pp=4,microbatch=2,schedule={schedule}"
    part = 2 * 512 * 1024 * 2 / 2  # bytes: two examples in bfloat16, over two devices
    stall = ",stall_s=0.1,stall_bytes="
    split = f"{text},tp=2,scatter_gather=on"
    plain, stalled = estimator()(split, 32), estimator()(f"{split}{stall}{part + 1}", 32)
    added = stalled.step_time_s - plain.step_time_s
    assert added == pytest.approx((32 / 4 / 2 + 3) * 0.1, rel=0.15)
    parts = [getattr(stalled.breakdown, name) for name in stalled.breakdown.__struct_fields__]
    assert sum(parts) == pytest.approx(stalled.step_time_s, rel=1e-9)
    assert estimator()(f"{split}{stall}{part}", 32).step_time_s == plain.step_time_s
    for other in (f"{text},tp=2", text, split.replace("pp=4", "pp=1").replace(f",schedule={schedule}", "")):
        assert estimator()(f"{other}{stall}1e9", 32).step_time_s == estimator()(other, 32).step_time_s
    one_node = planner.Estimator(model=TASK, cluster=cluster(1))
    inside = "tp=2,pp=4,microbatch=2,scatter_gather=on"
    assert one_node(f"{inside}{stall}1e9", 32).step_time_s == one_node(inside, 32).step_time_s


@pytest.mark.parametrize(
    ("text", "batch", "code"),
    [
        ("dp=64,microbatch=1", 64, "MP183"),
        ("dp=3,microbatch=2", 32, "MP185"),
        ("pp=16,microbatch=1", 32, "MP184"),
        ("pp=2,partition=3+4,microbatch=1", 32, "MP184"),
        ("dp=2,microbatch=1,step_s=-1", 32, "MP182"),
        ("dp=2,microbatch=1,error=1e300", 32, "MP182"),
        ("dp=2,microbatch=1,error=10.1", 32, "MP182"),
        ("dp=2,microbatch=1,stack=nothing", 32, "MP187"),
        ("dp=2,microbatch=1,step_s=much", 32, "MP182"),
        ("dp=2,microbatch=1,reruns=layer", 32, "MP182"),
        ("dp=2,microbatch=1,saves=residual", 32, "MP182"),
        ("pp=2,microbatch=1,schedule=layer-major", 32, "MP180"),
        ("pp=2,microbatch=1,schedule=nothing", 32, "MP180"),
        ("pp=2,microbatch=1,schedule=zb-v,interleave=3", 32, "MP180"),
        ("pp=2,microbatch=1,schedule=gpipe,interleave=2", 32, "MP180"),
        ("pp=1,microbatch=1,partition=8", 32, "MP180"),
        ("microbatch=1,matmul_dtype=float8", 32, "MP180"),
        ("microbatch=1,attention=unfused", 32, "MP180"),
    ],
)
def test_what_cannot_be_is_refused_with_numbers(text: str, batch: int, code: str) -> None:
    with pytest.raises(InputError) as caught:
        estimator()(text, batch)
    assert caught.value.code == code and caught.value.message


def test_a_first_part_without_layers_runs_what_stands_before_them() -> None:
    """As frameworks do whose first stage is the embedding alone; the last part runs the head, be it alone."""
    found = estimator()("pp=3,partition=0+4+4,microbatch=1", 32)
    tables = 4 * 1024 * (8192 + 512)  # bytes of the embeddings of tokens and positions, which the first stage holds
    assert found.memory[0].parameters_bytes == tables
    other = estimator()("pp=3,partition=4+4+0,microbatch=1", 32)
    assert all(stage.parameters_bytes > 0 for one in (found, other) for stage in one.memory)


def test_a_part_that_runs_the_whole_model_is_named() -> None:
    """A model with nothing before its layers: a first part without any of them runs nothing."""
    params = {"w": jax.ShapeDtypeStruct((8, 32, 32), jnp.float32)}
    batch = {"x": jax.ShapeDtypeStruct((1, 32), jnp.float32)}

    def loss(params: Any, batch: Any) -> Any:
        return jnp.mean(lax.scan(lambda x, w: (jnp.tanh(x @ w), None), batch["x"], params["w"])[0] ** 2)

    task = planner.TrainingTask(loss_fn=loss, params=params, batch=batch, optimizer=optax.sgd(0.1))
    with pytest.raises(InputError, match=r"partition=0\+8: one of 2 parts runs all \d+ blocks") as caught:
        planner.estimate(task, cluster(), "pp=2,partition=0+8,microbatch=1", global_batch=32)
    assert caught.value.code == "MP184" and "give another part some of the layers" in caught.value.hint


@pytest.mark.parametrize(
    ("text", "model"),
    [
        ("dp=8,microbatch=2", "program"),
        ("dp=8,microbatch=2,remat=full", "program"),
        ("dp=8,microbatch=2,remat=selective", "blocks"),
        ("dp=8,microbatch=2,attention=flash", "blocks"),
        ("dp=8,microbatch=2,stack=selene", "blocks"),
        ("dp=4,pp=2,microbatch=2", "blocks"),
    ],
)
def test_how_memory_is_counted_is_said(text: str, model: str) -> None:
    found = estimator()(text, 64)
    assert found.memory_model == model == document(found)["memory_model"]
    words = {"program": "memory as one program has it", "blocks": "memory counted block by block"}
    assert words[model] in render_estimate(found)


def test_memory_counted_in_two_ways_is_marked_in_one_table() -> None:
    program, blocks = (estimator()(f"dp=8,microbatch=2{more}", 64) for more in ("", ",remat=selective"))
    table = render_comparison([program, blocks])
    marked = [line for line in table.splitlines() if "GiB*" in line or "MiB*" in line]
    assert len(marked) == 1 and "remat=selective" in marked[0]
    assert "\n* memory counted block by block" in table and "others: memory as one program has it" in table
    for alone in (program, blocks):
        assert "*" not in render_comparison([alone, alone])


def test_the_widest_interval_is_a_number() -> None:
    low, high = estimator()("dp=2,microbatch=1,error=10", 32).error_bar
    assert 0.0 < low < high / 1e8 < float("inf")


def test_int8_products_of_parameters_run_at_their_rate() -> None:
    """An A100 computes them at twice its bfloat16 rate; what else a step takes stays."""
    plain, faster = (estimator()(f"microbatch=8{more}", 8) for more in ("", ",matmul_dtype=int8"))
    assert 0.5 * plain.breakdown.compute_s < faster.breakdown.compute_s < plain.breakdown.compute_s
    assert faster.breakdown.optimizer_s == plain.breakdown.optimizer_s


def test_a_task_has_its_own_sequence_length() -> None:
    with pytest.raises(InputError, match="sequence=77 was given with a task") as caught:
        planner.Estimator(model=TASK, cluster=cluster(), sequence=77)
    assert caught.value.code == "MP124"


def test_a_bad_strategy_of_many_is_named() -> None:
    for bad, named in (("dp=3", "strategy 'dp=3': "), ({"dp": 3}, "strategy number 2: ")):
        with pytest.raises(InputError) as caught:
            estimator().many(["dp=2", bad], 32)
        assert caught.value.code == "MP185" and caught.value.message.startswith(named)


@pytest.mark.parametrize("tp", [3, 5, 7])
def test_odd_degrees_are_estimated(tp: int) -> None:
    task = llama(hidden=105 * 16, layers=3, heads=105, vocab=105 * 32, seq=128, ffn=105 * 32)
    odd = planner.estimate(task, cluster(1), f"tp={tp},microbatch=1", global_batch=4)
    one = planner.estimate(task, cluster(1), "microbatch=1", global_batch=4)
    assert odd.memory.peak_bytes < one.memory.peak_bytes


def test_an_allocator_in_pools_holds_every_class_s_fullest_moment() -> None:
    """What the layers free does not serve the head: their peaks add up, each with what is computed again for it."""
    text = "dp=8,microbatch=2,remat=full,flat_state=on"
    alone, pooled = (estimator()(f"{text}{more}", 64).memory[0] for more in ("", ",pooled=on"))
    work = estimator()._captured.work(Facts(KIND), Strategy(dp=8, microbatch=2, remat="full"))
    peaks = [one.saved["residuals"].kept_bytes + one.live_bytes for one in work.classes.values()]
    assert len(peaks) == 3 and min(peaks) > 0
    assert alone.transient_bytes == pytest.approx(max(peaks)) and pooled.transient_bytes == pytest.approx(sum(peaks))
    assert replace(pooled, transient_bytes=alone.transient_bytes) == alone
