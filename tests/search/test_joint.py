"""The whole search on small models and clusters: what it promises, whatever it finds."""

import dataclasses

import jax
import jax.numpy as jnp
import optax
import pytest
from jax import lax

import planner
from costmodel.errors import InfeasibleError, InputError
from planner.frontend.task import TrainingTask
from planner.models import gpt
from planner.search.joint import microbatch_sizes
from tests.search.test_windows import nodes_of_a100


def small(**changes):
    return gpt(**{"hidden": 64, "layers": 4, "heads": 4, "vocab": 256, "seq": 32, "dtype": "float32", **changes})


@pytest.fixture(scope="module")
def plan():
    return planner.plan(small(), cluster=nodes_of_a100(1, 8), global_batch=32)


def test_no_baseline_is_faster(plan):
    assert {b.name for b in plan.baselines} == {"data parallel", "FSDP", "Megatron", "GPipe"}
    times = [b.step_time_s for b in plan.baselines if b.step_time_s is not None]
    assert times and plan.prediction.step_time_s <= min(times) * (1 + 1e-9)


def test_bounds_are_below_the_plan(plan):
    certificate = plan.certificate
    assert 0 < certificate.hardware_bound_s <= certificate.lower_bound_s <= plan.prediction.step_time_s
    assert not any(line.startswith("not used") for line in certificate.space)


def rnn():
    """A scan over time: products inside a region."""

    def loss_fn(params, batch):
        def cell(h, x):
            return jnp.tanh(x @ params["w"] + h @ params["u"]), None

        h, _ = lax.scan(cell, jnp.zeros((batch["x"].shape[1], 64)), batch["x"])
        return jnp.mean((h @ params["v"]) ** 2)

    shape = jax.ShapeDtypeStruct
    params = {"w": shape((32, 64), jnp.float32), "u": shape((64, 64), jnp.float32), "v": shape((64, 8), jnp.float32)}
    batch = {"x": shape((16, 12, 32), jnp.float32)}
    return TrainingTask(
        loss_fn=loss_fn, params=params, batch=batch, optimizer=optax.adam(1e-3), batch_dims={"x": 1}, name="rnn"
    )


@pytest.mark.parametrize("task", [small(dtype="bfloat16"), rnn()], ids=["bfloat16", "rnn"])
def test_hardware_bounds_hold_for_vectors_and_regions(task):
    """On slow devices with fast links, arithmetic is all that there is."""
    slow = {
        "name": "slow",
        "platform": "cpu",
        "peak_flops_per_s": {"float32": 1e8, "bfloat16": 1e8, "float64": 1e8},
        "memory_bytes": 1_000_000_000,
        "memory_bandwidth_bytes_per_s": 4e8,
    }
    cluster = nodes_of_a100(1, 2, device=slow, intra=[{"span": 2, "bandwidth_bytes_per_s": 5e11, "latency_s": 1e-9}])
    plan = planner.plan(task, cluster=cluster, global_batch=12, baselines=False)
    assert 0 < plan.certificate.hardware_bound_s <= plan.prediction.step_time_s
    assert not any(line.startswith("not used") for line in plan.certificate.space)


def test_batches_with_large_divisors():
    assert microbatch_sizes(10_000_019) == (10_000_019, 1)
    assert microbatch_sizes(10**12)[:3] == (10**12, 10**12 // 2, 10**12 // 4)
    assert microbatch_sizes(36) == (36, 18, 12, 9, 6, 4, 3, 2, 1)


@pytest.mark.parametrize(("devices", "batch"), [(3, 12), (7, 35)])
def test_no_pinned_layout_beats_the_bound(devices, batch):
    """Bounds hold against layouts that other code makes: every number of stages."""
    cluster = nodes_of_a100(1, devices)
    best = planner.plan(small(), cluster=cluster, global_batch=batch, baselines=False)
    for stages in (1, 3):
        try:
            other = planner.plan(small(), cluster=cluster, global_batch=batch, baselines=False, stages=stages)
        except (InfeasibleError, InputError):
            continue
        assert len(other.stages) == stages
        assert other.prediction.step_time_s >= best.certificate.lower_bound_s * (1 - 1e-9)


@pytest.mark.parametrize("stages", [2, 3])
def test_a_pinned_number_of_stages_is_that_number(stages):
    plan = planner.plan(small(), cluster=nodes_of_a100(1, 8), global_batch=32, stages=stages, baselines=False)
    assert len(plan.stages) == stages


def test_the_same_input_gives_the_same_bytes(plan, tmp_path):
    again = planner.plan(small(), cluster=nodes_of_a100(1, 8), global_batch=32)
    for i, one in enumerate((plan, again)):
        planner.save_plan(tmp_path / f"{i}.json", one)
    assert (tmp_path / "0.json").read_bytes() == (tmp_path / "1.json").read_bytes()


def test_the_fingerprint_covers_what_is_computed(plan):
    other = small()
    doubled = dataclasses.replace(other, loss_fn=lambda params, batch: 2.0 * other.loss_fn(params, batch))
    records = [planner.capture_record(task, plan).fingerprint for task in (small(), doubled, small(seq=16))]
    assert records[0] == plan.model.fingerprint and len(set(records)) == 3


def test_what_does_not_fit_is_said_in_bytes():
    with pytest.raises(InfeasibleError) as caught:
        planner.plan("gpt3-6.7b", cluster=nodes_of_a100(1, 1), global_batch=8)
    text = str(caught.value)
    assert caught.value.code.startswith("MP2") and "GiB" in text and "stage 0" in text
