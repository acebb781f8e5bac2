"""What full remat runs again and keeps: every block as far as needed, layers as far as needed, or whole layers."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import planner
from costmodel.cluster import parse_cluster
from costmodel.errors import InputError
from costmodel.sharding import split_factor
from costmodel.stack import Stack
from planner.models import moe, t5
from planner.models.families.gpt import gpt
from profiles.catalogue import load_catalogue

HIDDEN, LAYERS, SEQ, VOCAB = 2048, 8, 512, 32768
GROUP = {"name": "a", "nodes": 2, "device": "A100-SXM4-80GB", "devices_per_node": 8}
CLUSTER = parse_cluster({"name": "c", "group": [GROUP]}, load_catalogue())
TASK = gpt(hidden=HIDDEN, layers=LAYERS, heads=16, vocab=VOCAB, seq=SEQ)
MODES = ("blocks", "layers", "whole_layers")


def found(text: str, reruns: str = "blocks"):
    stack = Stack(name="one", reruns=reruns)  # type: ignore[arg-type]
    return planner.Estimator(model=TASK, cluster=CLUSTER, stack=stack)(text, 16)


def test_without_remat_it_does_not_matter_what_would_run_again() -> None:
    assert len({found("dp=4,tp=2,microbatch=4", mode).step_time_s for mode in MODES}) == 1


def test_a_layer_s_last_product_runs_again_in_whole_layers_alone() -> None:
    """It is a third of a layer's product FLOPs without attention's: 4 of 12 hidden^2."""
    plain_s = found("microbatch=4,attention=flash", "layers").step_time_s
    more_s = {mode: found("microbatch=4,remat=full,attention=flash", mode).step_time_s - plain_s for mode in MODES}
    a100 = CLUSTER.groups[0].device
    product_s = 4 * 2 * 4 * HIDDEN**2 * SEQ * LAYERS * 4 / (a100.peak_flops_per_s["bfloat16"] * a100.matmul_efficiency)
    last_s = more_s["whole_layers"] - more_s["layers"]
    assert product_s < last_s < 1.4 * product_s  # of its shape, and with the sum that follows it


def test_the_head_runs_again_in_the_planner_s_programs_alone() -> None:
    plain_s = found("microbatch=4,attention=flash", "layers").step_time_s
    more_s = {mode: found("microbatch=4,remat=full,attention=flash", mode).step_time_s - plain_s for mode in MODES}
    a100 = CLUSTER.groups[0].device
    logits_s = 4 * 2 * 4 * SEQ * HIDDEN * VOCAB / (a100.peak_flops_per_s["bfloat16"] * a100.matmul_efficiency)
    assert more_s["blocks"] - more_s["layers"] > logits_s


@pytest.mark.parametrize(("mode", "times"), [("layers", 5 / 4), ("whole_layers", 6 / 4)])
def test_a_layer_s_last_all_reduce_runs_again_in_whole_layers_alone(mode: str, times: float) -> None:
    """Two all-reduces each way, and those of the forward pass again, but for the one behind the last product."""
    plain, full = (found(f"tp=8,microbatch=4,{remat}", mode).breakdown for remat in ("remat=none", "remat=full"))
    assert full.communication_s == pytest.approx(times * plain.communication_s, rel=0.1)


def test_the_head_s_activations_are_kept_where_only_layers_run_again() -> None:
    kept = {mode: found("pp=2,microbatch=4,remat=full", mode).memory for mode in MODES}
    assert kept["layers"] == kept["whole_layers"]
    (first, last), (whole_first, whole_last) = kept["blocks"], kept["layers"]
    logits_bytes = 4 * SEQ * VOCAB * 4
    assert whole_last.saved_bytes - last.saved_bytes > logits_bytes
    assert whole_first.transient_bytes <= first.transient_bytes


def test_a_plan_is_charged_what_the_planner_s_programs_run_again() -> None:
    text = "dp=2,microbatch=2,zero=1"
    cluster = parse_cluster({"name": "c", "group": [{**GROUP, "nodes": 1, "devices_per_node": 2}]}, load_catalogue())
    plain, full = (
        planner.plan(TASK, cluster=cluster, strategy=f"{text},remat={remat}", global_batch=8, baselines=False)
        for remat in ("none", "full")
    )
    again_s = full.prediction.step_time_s - plain.prediction.step_time_s
    estimated_s = [
        planner.estimate(TASK, cluster, f"{text},remat={remat}", global_batch=8).step_time_s
        for remat in ("none", "full")
    ]
    assert again_s == pytest.approx(estimated_s[1] - estimated_s[0], rel=1e-6)
    assert again_s < 0.3 * plain.prediction.step_time_s  # a whole forward pass is a third


def test_one_microbatch_s_gradients_are_added_to_none() -> None:
    """As its program has no loop."""
    cluster = parse_cluster({"name": "c", "group": [{**GROUP, "nodes": 1, "devices_per_node": 2}]}, load_catalogue())
    text = "dp=2,microbatch=4,zero=1"
    plan = planner.plan(TASK, cluster=cluster, strategy=text, global_batch=8, baselines=False)
    estimate = planner.estimate(TASK, cluster, text, global_batch=8)
    assert plan.prediction.step_time_s == pytest.approx(estimate.step_time_s, rel=0.01)


@pytest.mark.parametrize("sp", [False, True])
@pytest.mark.parametrize("tp", [1, 2, 4, 8])
def test_frameworks_keep_what_megatron_s_layers_do(tp: int, sp: bool) -> None:
    """Korthikanti et al. 2022, table 2, in bytes of a position: 10 + 24/t, 34/t with sequence parallelism, less the
    masks of two dropouts, which the model does not have."""
    if tp == 1 and sp:
        pytest.skip("sequence parallelism splits nothing")
    text = f"tp={tp},pp=2,microbatch=2,attention=flash,sp={'on' if sp else 'off'}"
    saved = {
        saves: planner.Estimator(model=TASK, cluster=CLUSTER, stack=Stack(name="one", saves=saves))(text, 8)  # type: ignore[arg-type]
        for saves in ("residuals", "inputs")
    }
    in_flight, layers = 2, LAYERS // 2
    position_bytes = saved["inputs"].memory[0].saved_bytes / (in_flight * layers * 2 * SEQ * HIDDEN)
    masks = 1 / tp if sp else 1.0
    assert position_bytes == pytest.approx((34 / tp if sp else 10 + 24 / tp) - 2 * masks, rel=0.02)
    assert saved["residuals"].memory[0].saved_bytes > 1.5 * saved["inputs"].memory[0].saved_bytes


@pytest.mark.parametrize(
    "task",
    [
        t5(layers=2, hidden=64, heads=4, ffn=128, vocab=256, seq=32),
        moe(layers=2, hidden=64, heads=4, ffn=128, vocab=256, seq=32, experts=4),
    ],
    ids=["t5", "moe"],
)
def test_frameworks_keep_what_enters_a_block_as_it_does(task: planner.TrainingTask) -> None:
    """With sequence parallelism an encoder's output, or what experts read, is gathered again, and not kept whole."""
    estimator = planner.Estimator(model=task, cluster=CLUSTER, stack=Stack(name="one", saves="inputs"))
    estimator("tp=4,microbatch=2,sp=on", 16)
    entering = 0
    for decision in estimator._captured._decisions.values():
        for key, cls in decision.space.graph.classes.items():
            specs = decision.input_specs[key]
            for (name, _), size in decision.fused_saves(key).items():
                if name in specs and split_factor(specs[name], decision.space.mesh) > 1:
                    entering += 1
                    assert size == pytest.approx(cls.tensors[name].bytes / 4)
    assert entering


def test_frameworks_keep_of_a_user_s_remat_what_it_does() -> None:
    """What enters each layer, whatever its functions read."""
    width, layers = 64, 4

    def layer(x, w):
        return x + jnp.tanh(x @ w["a"]) @ w["b"], None

    def loss(params, batch):
        x, _ = jax.lax.scan(jax.checkpoint(layer), batch["x"], params)
        return jnp.mean(x**2)

    params = {name: np.zeros((layers, width, width), np.float32) for name in "ab"}
    batch = {"x": np.zeros((8, width), np.float32)}
    task = planner.TrainingTask(loss_fn=loss, params=params, batch=batch, optimizer=optax.sgd(0.1))
    estimator = planner.Estimator(model=task, cluster=CLUSTER, stack=Stack(name="one", saves="inputs"))
    saved_bytes = estimator("microbatch=8", 8).memory[0].saved_bytes
    assert layers <= saved_bytes / (8 * width * 4) <= layers + 1  # and one for the loss


def test_what_a_stack_saves_may_be_written_among_a_strategy() -> None:
    text = "pp=2,microbatch=2,attention=flash"
    written = planner.Estimator(model=TASK, cluster=CLUSTER, stack=Stack(name="one"))(f"{text},saves=inputs", 8)
    given = planner.Estimator(model=TASK, cluster=CLUSTER, stack=Stack(name="one", saves="inputs"))(text, 8)
    assert written.memory == given.memory


@pytest.mark.parametrize(("words", "field"), [({"reruns": "layer"}, "reruns"), ({"saves": "input"}, "saves")])
def test_a_stack_of_unknown_words_is_refused(words: dict[str, str], field: str) -> None:
    stack = Stack(name="one", **words)  # type: ignore[arg-type]
    with pytest.raises(InputError, match=f"the stack.{field} is '{words[field]}'") as caught:
        planner.Estimator(model=TASK, cluster=CLUSTER, stack=stack)("microbatch=2", 8)
    assert caught.value.code == "MP182" and f"{words[field]}s" in caught.value.hint
