"""`path.py:function`: the shipped examples load and run, and whatever goes wrong says where."""

from pathlib import Path

import jax
import pytest

from costmodel.errors import InputError
from planner.models import example_batch, init_params, load_model
from tests.models.tiny import quick_jit

EXAMPLES = Path(__file__).parents[2] / "examples"
TASK = """
import jax, jax.numpy as jnp, optax
from planner.frontend.task import TrainingTask

def task(size=4):
    batch = {"x": jax.ShapeDtypeStruct((size, 2), jnp.float32)}
    params = {"kernel": jax.ShapeDtypeStruct((2, 3), jnp.float32)}
    loss = lambda params, batch: jnp.mean(batch["x"] @ params["kernel"])
    return TrainingTask(loss_fn=loss, params=params, batch=batch, optimizer=optax.sgd(0.1))

def with_seq(seq=8, batch=2):
    return task(size=seq * batch)

def needs(size):
    return task(size)

def wrong():
    return {"loss": 1}

def fails():
    hidden, heads = 10, 0
    return hidden // heads

number = 3
"""


@pytest.fixture
def path(tmp_path):
    (tmp_path / "train.py").write_text(TASK)
    return tmp_path / "train.py"


@pytest.mark.parametrize("name", ["train_step", "flax_nnx_step", "equinox_step"])
def test_examples_train(name):
    task = load_model(f"{EXAMPLES / name}.py:task", batch=1)
    assert all(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(task.params))
    assert task.name == name and task.batch_size == 1
    loss = quick_jit(task.loss_fn)(init_params(task), example_batch(task))
    assert loss.shape == () and 8 < float(loss) < 11  # log(8192) is 9.01
    gradient = jax.eval_shape(jax.grad(task.loss_fn), task.params, task.batch)
    assert jax.tree.structure(gradient) == jax.tree.structure(task.params)
    state = jax.eval_shape(task.optimizer.init, task.params)
    jax.eval_shape(task.optimizer.update, gradient, state, task.params)


def test_batch_and_seq(path):
    assert load_model(f"{path}:task").batch_size == 4
    assert load_model(f"{path}:task", batch=6).batch["x"].shape == (6, 2)
    assert load_model(f"{path}:with_seq", seq=3, batch=5).batch_size == 15
    with pytest.raises(InputError, match="task takes no seq") as error:
        load_model(f"{path}:task", seq=3)
    assert error.value.code == "MP124"


def test_files_beside_the_file_can_be_imported(tmp_path):
    (tmp_path / "sizes_beside.py").write_text("SIZE = 5\n")
    (tmp_path / "train.py").write_text(f"from sizes_beside import SIZE\n{TASK}\ndef sized():\n    return task(SIZE)\n")
    assert load_model(f"{tmp_path / 'train.py'}:sized").batch_size == 5


def test_the_file_is_read_again(path):
    assert load_model(f"{path}:task").batch_size == 4
    path.write_text(TASK.replace("size=4", "size=44"))
    assert load_model(f"{path}:task").batch_size == 44


def test_a_task_that_stands_in_the_file_is_told_from_a_name_that_does_not(path):
    path.write_text(f"{TASK}\nmade = task()\n")
    with pytest.raises(InputError, match="has no function 'made': that is a TrainingTask already") as error:
        load_model(f"{path}:made")
    assert error.value.hint == "return it from one: `def task(): return made`"


@pytest.mark.parametrize(
    ("function", "fragments"),
    [
        ("missing", ["has no function 'missing'", "task, with_seq, needs, wrong, fails"]),
        ("number", ["has no function 'number'"]),
        ("wrong", ["returned dict, not a TrainingTask"]),
        ("needs", ["needs arguments that are not given: size"]),
        ("fails", ["calling fails failed at", "train.py:22", "ZeroDivisionError"]),
        ("", ["names no function"]),
    ],
)
def test_what_goes_wrong_says_where(path, function, fragments):
    with pytest.raises(InputError) as error:
        load_model(f"{path}:{function}")
    assert error.value.code == "MP124" and error.value.hint
    for fragment in fragments:
        assert fragment in str(error.value)


@pytest.mark.parametrize(
    ("text", "fragments"),
    [
        ("x = 1\nimport no_such_package\n", ["train.py:2", "ModuleNotFoundError", "no_such_package"]),
        ("x = (\n", ["SyntaxError", "train.py:1"]),
        ("raise ValueError\n", ["train.py:1", "ValueError: no message"]),
        ("x = 1\n", ["has no function 'task'", "define `def task()"]),
    ],
)
def test_files_that_do_not_run(path, text, fragments):
    path.write_text(text)
    with pytest.raises(InputError) as error:
        load_model(f"{path}:task")
    for fragment in fragments:
        assert fragment in str(error.value)


def test_relative_paths(path, monkeypatch):
    monkeypatch.chdir(path.parent)
    assert load_model("train.py:task").batch_size == 4
    with pytest.raises(InputError, match=r"failed at train\.py:22"):
        load_model("train.py:fails")


def test_missing_python_file(tmp_path):
    with pytest.raises(InputError, match="does not exist") as error:
        load_model(f"{tmp_path / 'none.py'}:task")
    assert error.value.code == "MP125"
