"""What a strategy asks for and does not get is refused, or said."""

import functools
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest

import planner
from costmodel.errors import InputError
from planner.frontend.microbatch import check_microbatches
from planner.frontend.user_code import defined_at
from planner.models.families.gpt import gpt

TEXT = 'name = "{0}"\n[[group]]\nname = "a"\nnodes = 1\ndevice = "A100-SXM4-80GB"\ndevices_per_node = {0}\n'
WEIGHT = {"w": jax.ShapeDtypeStruct((32, 32), jnp.float32)}
ROWS = {"x": jax.ShapeDtypeStruct((1, 32), jnp.float32)}
TASK = gpt(hidden=48, layers=2, heads=4, vocab=129, seq=16)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = Path(tmp_path_factory.mktemp("cluster")) / "six.toml"
    path.write_text(TEXT.format(6))
    return str(path)


@pytest.fixture(scope="module")
def estimator(cluster: str) -> planner.Estimator:
    return planner.Estimator(model=TASK, cluster=cluster)


def codes(findings: Any) -> list[tuple[str, str]]:
    return [(one.code, one.severity) for one in findings]


@pytest.mark.parametrize(
    ("strategy", "said"),
    [
        ("tp=5,microbatch=2", "tp=5 divides no dim"),
        ("cp=3,microbatch=2", "cp=3: 3 devices cannot share out 16 positions"),
        ("tp=3,sp=on,microbatch=2", "sp=on with tp=3: 3 devices cannot share out 16"),
    ],
)
def test_degrees_that_divide_nothing_are_refused_by_both(
    estimator: planner.Estimator, cluster: str, strategy: str, said: str
) -> None:
    with pytest.raises(InputError) as estimated:
        estimator(strategy, 12)
    with pytest.raises(InputError) as planned:
        planner.plan(TASK, cluster=cluster, global_batch=12, strategy=strategy, baselines=False)
    assert estimated.value.code == planned.value.code == "MP181"
    assert said in str(estimated.value) and said in str(planned.value)


def test_context_parallelism_needs_positions(cluster: str) -> None:
    def loss(params: Any, batch: Any) -> Any:
        return jnp.mean((batch["x"] @ params["w"]) ** 2)

    task = planner.TrainingTask(loss_fn=loss, params=WEIGHT, batch=ROWS, optimizer=optax.sgd(0.1))
    with pytest.raises(InputError, match="computes on no positions") as found:
        planner.estimate(task, cluster, "cp=2,microbatch=2", global_batch=8)
    assert found.value.code == "MP181"


def test_what_tensor_parallelism_splits_elsewhere_is_said(estimator: planner.Estimator, cluster: str) -> None:
    """3 divides the vocabulary, the width and the width of a layer, but not four heads."""
    found = estimator("tp=3,microbatch=2", 12).findings
    assert codes(found) == [("MP176", "note")]
    assert "tp=3 does not divide 4," in found[0].message and "attention/w" in found[0].message
    plan = planner.plan(TASK, cluster=cluster, global_batch=12, strategy="tp=3,microbatch=2", baselines=False)
    assert found[0] in plan.findings
    assert estimator("tp=4,microbatch=2", 12).findings[0].message.startswith("tp=4 does not divide 129,")
    assert not estimator("dp=6,microbatch=2", 12).findings


def test_zero_that_splits_a_part_says_what_stays_whole(estimator: planner.Estimator, cluster: str) -> None:
    strategy = "dp=5,microbatch=2,zero=1"
    found = estimator(strategy, 10).findings
    assert codes(found) == [("MP177", "warning")]
    assert "dp=5 divides no dim of" in found[0].message and "100% of the parameters" in found[0].message
    plan = planner.plan(TASK, cluster=cluster, global_batch=10, strategy=strategy, baselines=False)
    assert found[0] in plan.findings
    assert not estimator(f"{strategy},flat_state=on", 10).findings


@pytest.mark.parametrize(
    ("strategy", "constants", "said"),
    [
        ("dp=2,overlap_gradients=on", {}, "stack compiled hides none"),
        ("dp=2,overlap_gradients=on", {"gradient_overlap": 0.5}, ""),
        ("overlap_gradients=on", {"gradient_overlap": 0.5}, "no such collectives"),
        ("dp=2,overlap_parameters=on", {"parameter_overlap": 0.5}, "no such collectives"),
        ("dp=2,zero=3,overlap_parameters=on", {"parameter_overlap": 0.5}, ""),
        ("tp=2,overlap_tensor=on", {}, "stack compiled hides none"),
        ("dp=2,sp=on", {}, "tp=1 leaves positions whole"),
        ("tp=2,sp=on", {}, ""),
        ("pp=2,scatter_gather=on", {}, "tensor-parallel devices of one stage"),
        ("schedule=gpipe", {}, "pp=1 has no pipeline"),
        ("pp=2,schedule=gpipe", {}, ""),
        ("tp=2,pp=2,sp=on,scatter_gather=on", {}, "sp=on sends parts already"),
        ("tp=2,pp=2,scatter_gather=on", {}, ""),
        ("zero=1", {}, "dp=1 has no replicas"),
        ("dp=2,zero=1", {}, ""),
        ("bucket_bytes=1000", {}, "dp=1 reduces no gradients"),
        ("dp=2,bucket_bytes=1000", {}, ""),
        ("attention=flash,remat=selective", {}, "flash attention stores no scores"),
        ("attention=fused,remat=selective", {}, ""),
        ("dp=2", {"gradient_overlap": 0.5}, "gradient_overlap=0.5 changes nothing: overlap_gradients is off"),
    ],
)
def test_what_changes_nothing_is_said(
    estimator: planner.Estimator, strategy: str, constants: Mapping[str, float], said: str
) -> None:
    text = ",".join([strategy, "microbatch=2", *(f"{key}={value}" for key, value in constants.items())])
    found = [one for one in estimator(text, 12).findings if one.code == "MP178"]
    assert bool(found) == bool(said)
    assert not said or said in found[0].message


@pytest.mark.parametrize("asked", ["attention=flash", "remat=selective"])
def test_a_model_without_attention_has_none_to_compute_otherwise(cluster: str, asked: str) -> None:
    def loss(params: Any, batch: Any) -> Any:
        return jnp.mean(jnp.tanh(batch["x"] @ params["w"]) ** 2)

    task = planner.TrainingTask(loss_fn=loss, params=WEIGHT, batch=ROWS, optimizer=optax.sgd(0.1))
    (found,) = planner.estimate(task, cluster, f"microbatch=2,{asked}", global_batch=8).findings
    assert found.message == f"{asked} changes nothing: the model has no attention that is recognised"


def test_a_batch_that_must_stay_whole_is_not_estimated_in_parts(cluster: str) -> None:
    def loss(params: Any, batch: Any) -> Any:
        x = jnp.tanh(batch["x"] @ params["w"])
        return jnp.mean((x - x.mean(axis=0)) ** 2)  # statistics of the whole batch

    task = planner.TrainingTask(loss_fn=loss, params=WEIGHT, batch=ROWS, optimizer=optax.sgd(0.1))
    with pytest.raises(InputError, match="makes 4 microbatches, but the batch cannot be split") as found:
        planner.estimate(task, cluster, "microbatch=2", global_batch=8)
    assert found.value.code == "MP170" and "microbatch=8 keeps it whole" in found.value.hint
    assert planner.estimate(task, cluster, "microbatch=8", global_batch=8).microbatches == 1


def _of_examples(params: Any, batch: Any) -> Any:
    return jnp.mean(jnp.tanh(batch["x"] @ params["w"]), axis=1)


def _kept(params: Any, batch: Any) -> Any:
    return _of_examples(params, batch)[0]


def _summed(params: Any, batch: Any) -> Any:
    return jnp.sum(_of_examples(params, batch))


def _sorted(params: Any, batch: Any) -> Any:
    return jnp.mean(jnp.sort(_of_examples(params, batch)) * 2.0)


class _Called:
    def __call__(self, params: Any, batch: Any) -> Any:
        return _summed(params, batch)


@pytest.mark.parametrize(
    ("loss", "line"),
    [
        (_kept, "_kept"),
        (_summed, "_summed"),
        (_sorted, "_sorted"),
        (jax.jit(_summed), "_summed"),
        (functools.partial(_summed), "_summed"),
        (_Called(), "_summed"),
    ],
)
def test_a_batch_that_stays_whole_has_the_line_that_says_so(loss: Any, line: str) -> None:
    task = planner.TrainingTask(loss_fn=loss, params=WEIGHT, batch=ROWS, optimizer=optax.sgd(0.1))
    check = check_microbatches(task)
    assert not check.splits
    assert re.fullmatch(rf"test_findings.py:\d+ \({line}\)", check.source) and f"({check.source})" in check.message


def test_where_a_function_begins() -> None:
    for loss in (_summed, jax.jit(_summed), functools.partial(jax.jit(_summed))):
        assert defined_at(loss) == f"test_findings.py:{_summed.__code__.co_firstlineno} (_summed)"
    assert defined_at(_Called()).endswith("(__call__)") and defined_at(len) == ""
