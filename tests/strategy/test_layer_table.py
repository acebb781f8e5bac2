"""Stage times from a table of layer times: what a closed form of them says, and mistakes named."""

from functools import lru_cache
from itertools import pairwise

import jax
import optax
import pytest

import planner
from costmodel.cluster import Cluster, parse_cluster
from costmodel.errors import PlanError
from planner.models.families.gpt import gpt
from profiles.catalogue import device_kind, load_catalogue
from profiles.import_layers import import_layers
from profiles.schema import Profile

KIND = device_kind("A100-SXM4-80GB")
TASK = gpt(hidden=512, layers=8, heads=8, vocab=4096, seq=128)
EMBEDDING, LAYER, HEAD = (0.002, 0.0, 0.001), (0.01, 0.02, 0.004), (0.005, 0.01, 0.001)  # forward, backward, update


@lru_cache(maxsize=3)
def cluster(latency_s: float = 1e-9, slowdown: float = 1.0) -> Cluster:
    """Nodes of one device whose sends take the latency; the first one takes `slowdown` times as long as others."""
    inter = {"bandwidth_bytes_per_s": 1e15, "latency_s": latency_s, "start_s": 0.0, "efficiency": 1.0}
    group = {"name": "a", "nodes": 8, "device": KIND.name, "devices_per_node": 1, "inter": inter}
    if slowdown > 1.0:
        group["overrides"] = {"slow": {"0/0": slowdown}}
    return parse_cluster({"name": "c", "group": [group]}, load_catalogue())


def table(
    layers: int = 8,
    models: tuple[str, ...] = ("m",),
    sizes: tuple[int, ...] = (1, 4),
    head: bool = True,
    degrees: tuple[int, ...] = (1,),
) -> str:
    rows = ["model,gpu,micro_batch_seqs,tp,layer,forward_s,backward_s,update_s"]
    for model in models:
        for size, tp in [(size, tp) for size in sizes for tp in degrees]:
            entries = [EMBEDDING, *[LAYER] * layers, *([HEAD] if head else [])]
            rows += [f"{model},x,{size},{tp},{i},{f * size},{b * size},{u}" for i, (f, b, u) in enumerate(entries)]
    return "\n".join(rows) + "\n"


def profile(text: str, model: str = "m") -> Profile:
    return import_layers(text, source="t.csv", model=model, kind=KIND)


@lru_cache(maxsize=1)
def estimator() -> planner.Estimator:
    return planner.Estimator(model=TASK, cluster=cluster(), profile=profile(table()))


def test_one_stage_takes_what_its_layers_take() -> None:
    found = estimator()("microbatch=1", 4)
    both = [sum(one[:2]) for one in (EMBEDDING, LAYER, HEAD)]
    updates = EMBEDDING[2] + 8 * LAYER[2] + HEAD[2]
    assert found.step_time_s == pytest.approx(4 * (both[0] + 8 * both[1] + both[2]) + updates)
    assert found.provenance["compute"] == "measured" and found.breakdown.optimizer_s == pytest.approx(updates)
    assert estimator()("microbatch=2", 4).provenance["compute"] == "interpolated"
    again = estimator()("microbatch=1,remat=full", 4)
    assert again.step_time_s == pytest.approx(found.step_time_s + 4 * 8 * LAYER[0])  # neither embedding nor head


def test_only_layers_run_again_wherever_the_others_stand() -> None:
    """In the stages at the ends they are beside layers."""
    text = "pp=2,microbatch=1,partition=6+2"
    plain, again = (estimator()(f"{text},remat={remat}", 4).breakdown for remat in ("none", "full"))
    assert again.compute_s == pytest.approx(plain.compute_s + 4 * 6 * LAYER[0])


def test_stages_have_the_layers_of_the_partition_and_the_ends_what_stands_there() -> None:
    found = estimator()("pp=3,microbatch=1,partition=4+3+1", 12)
    per = sum(LAYER[:2])
    stages = [EMBEDDING[0] + 4 * per, 3 * per, per + sum(HEAD[:2])]
    pipeline = 12 * max(stages) + sum(stages) - max(stages)
    assert found.step_time_s - found.breakdown.optimizer_s == pytest.approx(pipeline, rel=1e-3)
    assert found.breakdown.optimizer_s == pytest.approx(EMBEDDING[2] + 4 * LAYER[2])
    looped = estimator()("pp=2,interleave=2,microbatch=1,partition=4+2+1+1", 12)
    busy = max(EMBEDDING[0] + 5 * per, 3 * per + sum(HEAD[:2]))
    assert looped.breakdown.compute_s == pytest.approx(12 * busy)


def test_zero_splits_the_measured_update() -> None:
    plain, split = (estimator()(f"dp=4,microbatch=1,zero={zero}", 8) for zero in (0, 1))
    assert split.breakdown.optimizer_s == pytest.approx(plain.breakdown.optimizer_s / 4, rel=0.01)


def test_memory_is_that_without_a_table() -> None:
    plain = planner.Estimator(model=TASK, cluster=cluster())
    text = "dp=2,pp=2,microbatch=1"
    assert estimator()(text, 8).memory.peak_bytes == plain(text, 8).memory.peak_bytes


def test_one_of_several_models_is_named() -> None:
    text = table(models=("m", "n"))
    both = profile(text, "m")
    joined = Profile(**{f: getattr(both, f) for f in both.__struct_fields__} | {
        "blocks": (*both.blocks, *profile(text, "n").blocks)
    })  # fmt: skip
    with pytest.raises(PlanError, match="layers of m, n") as caught:
        planner.Estimator(model=TASK, cluster=cluster(), profile=joined)
    assert caught.value.code == "MP311"
    named = planner.Estimator(model=TASK, cluster=cluster(), profile=joined, layer_model="n")
    assert named("microbatch=1", 4).step_time_s == estimator()("microbatch=1", 4).step_time_s
    with pytest.raises(PlanError, match="without a profile"):
        planner.Estimator(model=TASK, cluster=cluster(), layer_model="n")


@pytest.mark.parametrize(
    "text", ["cp=2,microbatch=1", "microbatch=1,remat=selective", "microbatch=1,matmul_dtype=int8"]
)
def test_what_the_table_does_not_know_is_refused(text: str) -> None:
    with pytest.raises(PlanError) as caught:
        estimator()(text, 4)
    assert caught.value.code == "MP189"


@pytest.mark.parametrize(
    ("layers", "words"),
    [
        (5, "the table has 7 entries of m, the model 8 layers: 1 too few"),
        (7, "the table has 9 entries of m, the model 8 layers: entry 8 takes"),
        (9, "the table has 11 entries of m, the model 8 layers: entry 9, which would stand beside them, takes what"),
        (12, "6 stand beside the layers, and an embedding, a norm and a head make 3"),
    ],
)
def test_a_table_of_another_number_of_layers_is_refused(layers: int, words: str) -> None:
    other = planner.Estimator(model=TASK, cluster=cluster(), profile=profile(table(layers)))
    with pytest.raises(PlanError, match=words) as caught:
        other("microbatch=1", 4)
    assert caught.value.code == "MP189"


def test_a_table_is_refused_for_a_model_that_repeats_nothing() -> None:
    def loss(params: list[jax.Array], batch: jax.Array) -> jax.Array:
        x = batch
        for weight in params:
            x = jax.numpy.tanh(x @ weight)
        return x.mean()

    params = [jax.ShapeDtypeStruct(pair, "float32") for pair in pairwise((64, 96, 128, 32))]
    batch = jax.ShapeDtypeStruct((8, 64), "float32")
    task = planner.TrainingTask(loss, params=params, batch=batch, optimizer=optax.sgd(0.1))
    foreign = planner.Estimator(model=task, cluster=cluster(), profile=profile(table(1)))
    with pytest.raises(PlanError, match="the table has 3 entries of m, the model 4 layers: 1 too few") as caught:
        foreign("microbatch=1", 4)
    assert caught.value.code == "MP189"


@pytest.mark.parametrize(
    ("factor", "words"), [(1.0, ""), (1e-3, "less than half of what"), (1e2, "times what the cost")]
)
def test_times_that_are_hardly_the_model_s_are_a_warning(factor: float, words: str) -> None:
    """Layers of 0.1 ms are about what the cost model says."""
    rows = ["micro_batch_seqs,layer,forward_s,backward_s"]
    entries = [(1e-5, 0.0), *[(1e-4, 2e-4)] * 8, (1e-4, 2e-4)]
    rows += [f"1,{i},{factor * f},{factor * b}" for i, (f, b) in enumerate(entries)]
    found = planner.Estimator(model=TASK, cluster=cluster(), profile=profile("\n".join(rows)))("microbatch=1", 4)
    warnings = [one for one in found.findings if one.severity == "warning"]
    assert [one.code for one in warnings] == (["MP179"] if words else [])
    assert not words or words in warnings[0].message


def test_tensor_parallel_layers_of_a_one_device_table_pay_for_collectives() -> None:
    """Compute divided among the devices, and on top what the same strategy's collectives cost without the table."""
    text = "tp=2,microbatch=1,remat=full"
    found = estimator()(text, 4)
    plain = planner.Estimator(model=TASK, cluster=cluster())(text, 4)
    ahead = EMBEDDING[0] + 8 * LAYER[0] + HEAD[0]
    behind = EMBEDDING[1] + 8 * LAYER[1] + HEAD[1]
    assert found.breakdown.compute_s == pytest.approx(4 * (ahead + 8 * LAYER[0] + behind) / 2)
    once = planner.Estimator(model=TASK, cluster=cluster())("tp=2,microbatch=1", 4)
    least, most = once.breakdown.communication_s, plain.breakdown.communication_s
    assert 0 < least < found.breakdown.communication_s < most  # the head's are run again where no table says otherwise
    alone = estimator()("tp=2,microbatch=1", 4).breakdown
    assert alone.communication_s == pytest.approx(least)
    assert found.provenance["compute"] == "fitted"
    (note,) = [one.message for one in found.findings if one.severity == "note"]
    assert "divided by 2, and the cost model's collectives come on top" in note


def test_collectives_that_come_on_top_may_be_hidden() -> None:
    text = "tp=2,microbatch=1,tensor_overlap=1.0"
    open_s, hidden_s = (estimator()(text + more, 4).step_time_s for more in ("", ",overlap_tensor=on"))
    assert hidden_s < open_s
    alone = estimator()("microbatch=1", 4).breakdown.compute_s
    assert open_s > hidden_s >= alone / 2


def test_tensor_parallel_rows_have_their_collectives_inside() -> None:
    measured = planner.Estimator(model=TASK, cluster=cluster(), profile=profile(table(degrees=(1, 2))))
    found, alone = measured("tp=2,microbatch=1,sp=on", 4), measured("microbatch=1", 4)
    assert found.breakdown.compute_s == pytest.approx(alone.breakdown.compute_s)  # the table has the same rows for both
    assert found.provenance["compute"] == "measured"
    (note,) = [one.message for one in found.findings if one.severity == "note"]
    assert "sp=on decides memory and sends" in note
    with pytest.raises(PlanError, match="have their collectives inside"):
        measured("tp=2,microbatch=1,overlap_tensor=on", 4)


def test_one_other_degree_says_nothing_of_this_one() -> None:
    split = planner.Estimator(model=TASK, cluster=cluster(), profile=profile(table(degrees=(4,))))
    assert split("tp=4,microbatch=1", 4).provenance["compute"] == "measured"
    for tp in (2, 8):
        with pytest.raises(PlanError, match=rf"measured at tp=4, .*tp={tp} does not follow") as caught:
            split(f"tp={tp},microbatch=1", 8)
        assert caught.value.code == "MP189"


def test_degrees_between_measured_ones_follow_and_larger_ones_do_not() -> None:
    split = planner.Estimator(model=TASK, cluster=cluster(), profile=profile(table(degrees=(1, 4))))
    low, between, high = (split(f"tp={tp},microbatch=1", 8).breakdown.compute_s for tp in (1, 2, 4))
    assert low == pytest.approx(between) == pytest.approx(high)  # the table has the same rows for both
    with pytest.raises(PlanError, match=r"measured at tp=1, 4, .*tp=8 does not follow"):
        split("tp=8,microbatch=1", 8)


def test_attention_that_the_table_does_not_tell_is_said() -> None:
    found, plain = estimator()("microbatch=1,attention=flash", 4), estimator()("microbatch=1", 4)
    assert found.step_time_s == plain.step_time_s and found.memory.peak_bytes < plain.memory.peak_bytes
    (note,) = [one.message for one in found.findings if one.severity == "note"]
    assert "attention=flash decides memory" in note and "attention" not in str(plain.findings)


def test_slow_devices_take_longer_than_the_measured_ones() -> None:
    slow = cluster(slowdown=1.5)
    found = planner.Estimator(model=TASK, cluster=slow, profile=profile(table()))("microbatch=1", 4)
    assert found.step_time_s == pytest.approx(1.5 * estimator()("microbatch=1", 4).step_time_s)


@pytest.mark.parametrize("partition", ["2+2+2+2", "1+3+3+1", "2+3+2+1", "1+1+1+5"])
@pytest.mark.parametrize("latency_s", [1e-6, 0.03, 0.1])
def test_a_pipeline_with_slow_sends_takes_what_its_events_take(partition: str, latency_s: float) -> None:
    """1F1B event by event, sends beside compute: microbatches under way bound the rate once sends are slow."""
    microbatches, sizes = 64, [int(n) for n in partition.split("+")]
    slow = planner.Estimator(model=TASK, cluster=cluster(latency_s), profile=profile(table()))
    found = slow(f"pp=4,microbatch=1,partition={partition}", microbatches)
    ahead = [LAYER[0] * n for n in sizes]
    behind = [LAYER[1] * n for n in sizes]
    ahead[0], ahead[-1], behind[-1] = ahead[0] + EMBEDDING[0], ahead[-1] + HEAD[0], behind[-1] + HEAD[1]
    real = _events(ahead, behind, latency_s, microbatches)
    assert found.step_time_s - found.breakdown.optimizer_s - found.breakdown.gradients_s == pytest.approx(
        real, rel=0.04
    )


def _events(ahead: list[float], behind: list[float], send_s: float, microbatches: int) -> float:
    p = len(ahead)
    orders = []
    for s in range(p):
        first = min(p - s, microbatches)
        order = [("F", i) for i in range(first)]
        for i in range(microbatches):
            order.append(("B", i))
            if i + first < microbatches:
                order.append(("F", i + first))
        orders.append(order)
    done: dict[tuple[str, int, int], float] = {}
    at, free = [0] * p, [0.0] * p
    while any(at[s] < len(orders[s]) for s in range(p)):
        for s in range(p):
            while at[s] < len(orders[s]):
                what, i = orders[s][at[s]]
                needs = [("F", s, i)] if what == "B" else []
                if what == "F" and s > 0:
                    needs.append(("F", s - 1, i))
                if what == "B" and s < p - 1:
                    needs.append(("B", s + 1, i))
                if any(need not in done for need in needs):
                    break
                ready = max([free[s], *(done[n] + (send_s if n[1] != s else 0.0) for n in needs)])
                free[s] = done[what, s, i] = ready + (ahead if what == "F" else behind)[s]
                at[s] += 1
    return max(free)
