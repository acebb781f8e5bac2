"""The Python API: what it is given is checked at once, and every mistake is an error with a code."""

import jax
import jax.numpy as jnp
import msgspec
import numpy as np
import optax
import pytest

import planner
from costmodel.errors import InputError, MismatchError
from planner.check.rules import check_plan
from planner.search.pinned import GroupPin, StagePin
from tests.plans import tiny_cluster, tiny_plan

shape = jax.ShapeDtypeStruct
PARAMS = {"a": {"w": shape((16, 32), jnp.float32)}, "b": {"w": shape((32, 8), jnp.float32)}}
BATCH = {"x": shape((8, 16), jnp.float32), "y": shape((8, 8), jnp.float32)}
CLUSTER = planner.load_cluster("examples/clusters/cpu8.toml")


def per_example(params, batch):
    out = jnp.tanh(batch["x"] @ params["a"]["w"]) @ params["b"]["w"]
    return ((out - batch["y"]) ** 2).sum(-1)


def loss(params, batch):
    return per_example(params, batch).mean()


def task(function=loss, **changes):
    return planner.TrainingTask(function, **{"params": PARAMS, "batch": BATCH, "optimizer": optax.adam(1e-3)} | changes)


@pytest.fixture(scope="module")
def plan():
    return planner.plan(task(), cluster=CLUSTER, global_batch=16, baselines=False)


def refused(code, *parts):
    return pytest.raises(InputError, match=rf"(?s){code}: .*" + ".*".join(parts))


def test_the_loss_is_the_first_argument():

    assert task().loss_fn is loss
    with refused("MP114", "loss_fn is a dict, not a function"):
        task({})


@pytest.mark.parametrize(
    "frozen", [lambda path: path.startswith("a/"), {"a": True, "b": False}, {"a": {"w": np.True_}, "b": {"w": False}}]
)
def test_frozen_is_a_predicate_or_a_tree_of_booleans(frozen):
    found = task(frozen=frozen).frozen
    assert found("a/w") and not found("b/w")


@pytest.mark.parametrize(
    ("frozen", "parts"),
    [
        (True, ("all 2 parameters are frozen",)),
        ("a/w", ("predicate on a parameter's path string", "'a/w'")),
        (["a/w"], ("predicate on a parameter's path string",)),
        ({"a": 1, "b": 0}, ("it holds 1",)),
        ({}, ("got {}",)),
        ({"a": True}, ("not the structure",)),
        (lambda path: path.parts, (r"frozen\('a/w'\) failed at test_arguments.py:\d+ ", "AttributeError")),
        (lambda path: True, ("all 2 parameters are frozen",)),
    ],
)
def test_frozen_of_another_kind(frozen, parts):
    with refused("MP114", *parts):
        task(frozen=frozen)


@pytest.mark.parametrize(
    ("changes", "parts"),
    [
        ({"batch_dims": 5}, ("batch_dims of x is 5", r"shape \(8, 16\)")),
        ({"batch_dims": "0"}, ("batch_dims of x is '0'",)),
        ({"batch_dims": {"x": 0}}, ("no prefix of the batch",)),
        ({"batch_dims": None}, ("no leaf of the batch has a batch dim",)),
        ({"batch": {**BATCH, "y": shape((4, 8), jnp.float32)}}, ("x has 8, y has 4",)),
    ],
)
def test_batch_dims(changes, parts):
    with refused("MP111", *parts):
        task(**changes)


def broken(params):
    raise RuntimeError("no such thing")


ADAM = optax.adam(1e-3)
OPTIMIZERS = {
    "init": (optax.GradientTransformation(broken, ADAM.update), ("init failed", "test_arguments.py", "no such thing")),
    "update": (
        optax.GradientTransformation(ADAM.init, lambda grads, state, params=None: broken(params)),
        ("update failed", "test_arguments.py", "no such thing"),
    ),
    "values": (
        optax.GradientTransformation(ADAM.init, lambda g, s, p=None: (g, s) if g["a/w"].sum() > 0 else (p, s)),
        ("update failed", "test_arguments.py", "TracerBoolConversionError"),
    ),
    "state": (
        optax.GradientTransformation(ADAM.init, lambda g, s, p=None: (g, ())),
        ("update failed", "a state of structure"),
    ),
    "shape": (
        optax.GradientTransformation(ADAM.init, lambda g, s, p=None: (g, jax.tree.map(lambda x: x[None], s))),
        ("update failed", "it made shape"),
    ),
}


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_an_optimizer_that_fails_is_found_when_planning(kind):
    optimizer, parts = OPTIMIZERS[kind]
    with refused("MP115", "the optimizer's ", *parts):
        planner.plan(task(optimizer=optimizer), cluster=CLUSTER, global_batch=16, baselines=False)


@pytest.mark.parametrize("optimizer", [None, 1e-3, optax.adam])
def test_an_optimizer_that_is_none(optimizer):
    with refused("MP115", "without the functions init and update"):
        task(optimizer=optimizer)


PINS = (StagePin(groups=(GroupPin(pool="a", devices=2),)),)
PLAN_ARGUMENTS = [
    ({"stages": 0}, "stages=0; it must be at least 1"),
    ({"stages": 1.5}, "stages is a float, 1.5"),
    ({"stages": True}, "stages is a bool"),
    ({"schedule": "x"}, "schedule='x' is not one of 'auto', 'gpipe', '1f1b', "),
    ({"schedule": 2}, "schedule=2"),
    ({"max_microbatch": -1}, "max_microbatch=-1"),
    ({"microbatch": 3}, "microbatch=3 does not divide global_batch=16"),
    ({"microbatch": 4, "max_microbatch": 8}, "microbatch and max_microbatch were both given"),
    ({"pins": PINS, "stages": 2}, "pins and stages were both given"),
    ({"global_batch": 0}, "global_batch=0; it must be at least 1"),
    ({"global_batch": 12.0}, "global_batch is a float, 12.0"),
    ({"global_batch": "12"}, "global_batch is a str, '12'"),
    ({"global_batch": 10**30}, "global_batch=1.*at most 100,000,000"),
    ({"cluster": None}, "cluster is None; it must be a Cluster or the path"),
    ({"cluster": {}}, "cluster is a dict"),
    ({"profile": 3}, "profile is an int, 3; it must be a Profile, the path"),
    ({"profile": tiny_plan()}, "profile is a Plan"),
    ({"pins": 3}, "pins is an int"),
    ({"name": 3}, "name is an int"),
    ({"sequence": "4"}, "sequence is a str"),
]


@pytest.mark.parametrize(("changes", "part"), PLAN_ARGUMENTS)
def test_arguments_of_plan(changes, part):
    with refused("MP163", part):
        planner.plan(task(), **{"cluster": CLUSTER, "global_batch": 16} | changes)


@pytest.mark.parametrize(
    ("model", "part"),
    [(task, r"task is a function.*call the function"), (None, "task is None"), (3, "an int"), (tiny_plan(), "a Plan")],
)
def test_models_of_plan(model, part):
    with refused("MP163", part):
        planner.plan(model, cluster=CLUSTER, global_batch=16)


def test_a_sequence_with_a_task_is_refused():
    with refused("MP124", "sequence=4 was given with a task"):
        planner.plan(task(), cluster=CLUSTER, global_batch=16, sequence=4)


def test_numbers_of_numpy_are_counts(plan):
    again = planner.plan(task(), cluster=CLUSTER, global_batch=np.int64(16), baselines=False)
    assert again.prediction == plan.prediction


def test_swapped_and_missing_arguments(plan, tmp_path):
    this = task()
    calls = [
        (lambda: planner.load_task(None), "spec is None"),
        (lambda: planner.load_task(3), "spec is an int, 3"),
        (lambda: planner.explain(3), "plan is an int, 3"),
        (lambda: planner.simulate(3), "plan is an int, 3"),
        (lambda: planner.validate(None, CLUSTER), "plan is None"),
        (lambda: planner.validate(plan, None), "cluster is None"),
        (lambda: planner.validate(plan, CLUSTER, task), "task is a function"),
        (lambda: planner.validate(plan, CLUSTER, "gpt2"), r"planner.load_task\('gpt2'\)"),
        (lambda: planner.compile_plan(this, plan), r"plan is a TrainingTask.*compile_plan\(plan, task\)"),
        (lambda: planner.reference(plan, this), r"task is a Plan.*reference\(task, plan\)"),
        (lambda: planner.capture_record(plan, this), "task is a Plan"),
    ]
    for call, part in calls:
        with refused("MP163", part):
            call()


def test_files_stand_for_plans(plan, tmp_path):
    path = tmp_path / "x.plan.json"
    planner.save_plan(path, plan)
    assert planner.explain(path).text == planner.explain(str(path)).text == planner.explain(plan).text
    assert planner.validate(path, CLUSTER, task()) == ()
    assert repr(planner.compile_plan(path, task())).startswith("Trainer of task: 1 stage on ")
    assert repr(planner.reference(task(), str(path))) == "Reference of task: 1 x 16 examples on one device"
    with pytest.raises(InputError, match="MP150"):
        planner.compile_plan(tmp_path / "none.json", task())


@pytest.mark.parametrize("params", [{"a": 1}, {"a": {"w": np.zeros((3, 3))}, "b": {"w": np.zeros((3, 3))}}])
def test_params_that_were_not_planned(plan, params):
    with refused("MP118"):
        planner.reference(task(), plan).init(params)


def strategies(plan, change):
    """The plan with the strategies of its first group changed."""
    stage = plan.stages[0]
    group = msgspec.structs.replace(stage.groups[0], strategies=change(stage.groups[0].strategies))
    stage = msgspec.structs.replace(stage, groups=(group, *stage.groups[1:]))
    return msgspec.structs.replace(plan, stages=(stage, *plan.stages[1:]))


def first(**changes):
    """Changes fields of the first strategy that has an op."""

    def change(kept):
        at = next(i for i, strategy in enumerate(kept) if strategy.outputs)
        given = {name: value(getattr(kept[at], name)) for name, value in changes.items()}
        return (*kept[:at], msgspec.structs.replace(kept[at], **given), *kept[at + 1 :])

    return change


INCOMPLETE = {
    "none": (lambda kept: (), "runs block .* for which it has no strategy"),
    "one lost": (lambda kept: kept[1:], "for which it has no strategy"),
    "another class": (first(block_class=lambda key: "sha256:x"), "which the model does not have|has no strategy"),
    "another op": (first(ops=lambda ops: {**ops, "sort.9": {}}), "strategy for op sort.9"),
    "another input": (first(inputs=lambda values: {}), "has no spec"),
    "an output more": (first(outputs=lambda values: {**values, "y": next(iter(values.values()))}), "output y is none"),
}


@pytest.mark.parametrize("kind", INCOMPLETE)
def test_a_plan_that_leaves_something_out_is_refused(plan, kind):
    change, part = INCOMPLETE[kind]
    bad = strategies(plan, change)
    with pytest.raises(MismatchError, match=f"MP402: .*({part})"):
        planner.compile_plan(bad, task())
    assert "MP634" in {finding.code for finding in planner.validate(bad, CLUSTER, task())}


def test_a_plan_without_strategies_is_found_without_the_model(plan):
    assert "MP628" in {f.code for f in check_plan(strategies(plan, lambda kept: ()), CLUSTER)}
    assert check_plan(tiny_plan(), tiny_cluster()) == ()


@pytest.mark.parametrize("count", [lambda mask: mask.sum(), lambda mask: mask.sum().astype(jnp.float32)])
def test_a_weight_may_be_a_count(count):
    """The sum of a boolean mask is a weight: planned in microbatches, and computed as on one device."""

    def masked(params, batch):
        mask = batch["y"][:, 0] > 0
        return (per_example(params, batch) * mask).sum(), count(mask)

    this = task(masked, reduction="weighted")
    made = planner.plan(this, cluster=CLUSTER, global_batch=16, microbatch=4, baselines=False)
    assert made.microbatches == 4 and not made.findings
    rng = np.random.default_rng(0)
    params = jax.tree.map(lambda leaf: jnp.asarray(rng.normal(size=leaf.shape), leaf.dtype), PARAMS)
    batch = {name: rng.normal(size=(16, leaf.shape[1])).astype(np.float32) for name, leaf in BATCH.items()}
    whole, weight = masked(params, batch)
    for runner in (planner.compile_plan(made, this), planner.reference(this, made)):
        _, metrics = runner.step(runner.init(params), batch)
        np.testing.assert_allclose(metrics["loss"], whole / weight, rtol=1e-5)


def test_a_loss_that_is_a_count_is_named():
    with refused("MP112", "the loss has dtype int32", "loss.astype"):
        planner.plan(task(lambda p, b: (b["y"] > 0).sum()), cluster=CLUSTER, global_batch=16)
    with refused("MP112", r"the weight has shape \(8,\)|the weight has shape"):
        wrong = task(lambda p, b: (per_example(p, b).sum(), b["y"][:, 0]), reduction="weighted")
        planner.plan(wrong, cluster=CLUSTER, global_batch=16)


def test_another_model_is_not_called_incomplete(plan):
    other = task(lambda p, b: 2.0 * loss(p, b))
    codes = {finding.code for finding in planner.validate(plan, CLUSTER, other)}
    assert "MP630" in codes and "MP634" not in codes
