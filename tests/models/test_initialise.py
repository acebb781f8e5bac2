"""Concrete parameters, state and batches: by name, by seed, within bounds."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from costmodel.errors import InputError
from planner.frontend.task import TrainingTask, path_string
from planner.models import bert, example_batch, init_params, init_state, llama, moe, t5, vit
from planner.models.initialise import fan_in
from tests.models.tiny import TINY


@pytest.mark.parametrize("name", TINY)
def test_shapes_and_kinds(name):
    task = TINY[name]()
    for built, abstract in ((init_params(task), task.params), (example_batch(task), task.batch)):
        assert jax.tree.map(lambda x: (x.shape, x.dtype), built) == jax.tree.map(lambda x: (x.shape, x.dtype), abstract)
    for path, leaf in jax.tree_util.tree_leaves_with_path(init_params(task)):
        last = path_string(path).rsplit("/", 1)[-1]
        if last.endswith("bias"):
            assert not np.any(leaf), path
        elif last == "scale":
            assert np.all(leaf == 1), path
        else:
            assert np.std(leaf) > 0, path


def test_weights_are_scaled_by_fan_in():
    task = llama(hidden=256, layers=2, heads=8, kv_heads=4, ffn=512, vocab=512, seq=8)
    params = init_params(task)
    attention, mlp = params["layers"]["attention"], params["layers"]["mlp"]
    for leaf, inputs in (
        (attention["wq"], 256),
        (attention["wk"], 256),
        (attention["wo"], 256),
        (mlp["up"], 256),
        (mlp["down"], 512),
        (params["head"]["kernel"], 256),
    ):
        assert float(jnp.std(leaf)) == pytest.approx(inputs**-0.5, rel=0.03)
        assert float(jnp.max(jnp.abs(leaf))) < 2.3 * inputs**-0.5
    assert float(jnp.std(params["token_embedding"])) == pytest.approx(0.02, rel=0.03)


@pytest.mark.parametrize(
    ("name", "shape", "expected"),
    [
        ("layers/attention/wq", (2, 64, 4, 16), 64),
        ("layers/attention/wq", (2, 64, 2, 2, 16), 64),
        ("layers/attention/wo", (2, 2, 2, 16, 64), 64),
        ("layers/experts/down", (2, 8, 128, 64), 128),
        ("layers/router/kernel", (2, 64, 8), 64),
        ("group1/first/spatial/kernel", (3, 3, 16, 32), 144),
        ("group1/rest/spatial/kernel", (5, 3, 3, 16, 32), 144),
        ("patch_embedding/kernel", (14, 14, 3, 32), 588),
        ("w", (), 1),
    ],
)
def test_fan_in(name, shape, expected):
    assert fan_in(name, shape) == expected


def test_seeds():
    task = TINY["moe"]()
    first, again, other = (init_params(task, seed) for seed in (0, 0, 1))
    assert jax.tree.all(jax.tree.map(lambda a, b: bool(np.array_equal(a, b)), first, again))
    assert not np.array_equal(first["token_embedding"], other["token_embedding"])
    wq, wk = first["layers"]["attention"]["wk"], first["layers"]["attention"]["wv"]
    assert not np.array_equal(wq, wk)  # leaves of one shape differ
    assert not np.array_equal(example_batch(task)["tokens"], example_batch(task)["targets"])


@pytest.mark.parametrize(
    ("task", "bounds"),
    [
        (moe(hidden=8, layers=1, heads=2, ffn=8, experts=2, vocab=50, seq=64), {"tokens": 50, "targets": 50}),
        (bert(hidden=8, layers=1, heads=2, vocab=50, seq=64, types=3), {"tokens": 50, "token_types": 3, "targets": 50}),
        (
            t5(hidden=8, layers=1, heads=2, ffn=8, vocab=50, seq=64),
            {"inputs": 50, "decoder_inputs": 50, "targets": 50},
        ),
        (vit(hidden=8, layers=1, heads=2, patch=4, image=8, classes=5), {"labels": 5}),
    ],
    ids=lambda x: x.name.split("(")[0] if isinstance(x, TrainingTask) else "",
)
def test_ids_are_in_bounds(task, bounds):
    batch = example_batch(task, 20)
    for name, bound in bounds.items():
        assert batch[name].shape[0] == 20
        assert int(batch[name].min()) == 0 and int(batch[name].max()) == bound - 1
    if "mask" in batch:
        assert set(np.unique(batch["mask"])) == {0.0, 1.0} and np.asarray(batch["mask"]).any(axis=1).all()


def test_other_tasks_get_legal_values():
    batch = {
        "category": jax.ShapeDtypeStruct((4,), jnp.int32),
        "x": jax.ShapeDtypeStruct((4, 3), jnp.bfloat16),
        "keep": jax.ShapeDtypeStruct((4,), jnp.bool_),
        "temperature": jax.ShapeDtypeStruct((), jnp.float32),
    }
    params = {"w": jax.ShapeDtypeStruct((3, 2), jnp.float32), "count": jax.ShapeDtypeStruct((), jnp.int32)}
    task = TrainingTask(loss_fn=lambda p, b: 0.0, params=params, batch=batch, optimizer=optax.sgd(1.0))
    drawn = example_batch(task, 7)
    assert set(np.asarray(drawn["category"])) <= {0, 1} and drawn["x"].shape == (7, 3) and drawn["keep"].dtype == bool
    assert drawn["temperature"].shape == () and init_params(task)["count"] == 0
    assert init_state(task) is None
    with pytest.raises(InputError, match="batch_size=0"):
        example_batch(task, 0)


def test_state_starts_at_unit_variance():
    state = init_state(TINY["wide_resnet"]())
    assert float(state["stem"]["mean"].max()) == 0 and float(state["stem"]["variance"].min()) == 1
    assert state["group1"]["rest"]["reduce"]["variance"].shape == (2, 16)
