"""`meshplan run` and `plan`: what the commands do around planning and execution, which are replaced here."""

import dataclasses
import json
import os
import sys
import types

import jax
import jax.numpy as jnp
import msgspec
import optax
import pytest

import planner
from cli.steps import SHORT, SINGLE, Run, compare_runs, tolerance_of
from costmodel.errors import InfeasibleError, InputError, LoweringError, MismatchError, ProfileError
from planner import api
from planner.check.drift import drift
from planner.frontend.capture import capture
from planner.frontend.task import TrainingTask
from planner.lowering.verify import GroupReport, Verification
from planner.plan_files import read_plan, write_plan
from planner.planfile.codec import encode
from planner.planfile.schema import Finding
from tests.models.tiny import TINY
from tests.plans import tiny_cluster, tiny_plan

replace = msgspec.structs.replace


def task(rng=False):
    def loss_fn(params, batch, **extra):
        return jnp.mean((batch["x"] @ params["w"] - batch["y"]) ** 2)

    shape = jax.ShapeDtypeStruct
    batch = {"x": shape((4, 3), jnp.float32), "y": shape((4, 2), jnp.float32)}
    params = {"w": shape((3, 2), jnp.float32)}
    return TrainingTask(loss_fn=loss_fn, params=params, batch=batch, optimizer=optax.sgd(0.1), rng=rng)


@dataclasses.dataclass
class Runner:
    """One device, with the interface that commands use; `factor` makes its gradients wrong."""

    task: TrainingTask
    factor: float = 1.0
    kept: int = 101

    def init(self, params):
        return params

    def step(self, state, batch, **extra):
        assert ("rng" in extra) == self.task.rng
        loss, gradients = jax.value_and_grad(self.task.loss_fn)(state, batch, **extra)
        assert batch["x"].shape[0] == 32  # the plan's global batch
        return jax.tree.map(lambda p, g: p - 0.1 * self.factor * g, state, gradients), {"loss": loss}

    def params(self, state):
        return state

    @property
    def captured(self):
        return capture(self.task, 4)

    def verify(self, *, compiled):
        assert not compiled
        collectives = {"forward all_gather data": 3.0}
        report = GroupReport(stage=0, group=0, saved_planned_bytes=100, saved_found_bytes=self.kept,
                             planned=collectives, written=collectives)  # fmt: skip
        found = Verification((report,))
        found.check()
        return found


@pytest.fixture
def fake(monkeypatch, call, tmp_path):
    """`planner` with functions that plan and run nothing; what they were called with is in `seen`."""
    seen = types.SimpleNamespace(
        factor=1.0, kept=101, task=task(), record=tiny_plan().model, spec=None, plan_arguments=None
    )

    def load_task(spec, sequence=None):
        seen.spec = (spec, sequence)
        return seen.task

    def plan(model, **arguments):
        seen.plan_arguments = {"model": model, **arguments}
        arguments["progress"]("searching", 1, 2)
        return tiny_plan()

    for name, function in {
        "load_task": load_task,
        "plan": plan,
        "capture_record": lambda task, plan: seen.record,
        "compile_plan": lambda plan, task, *, devices=None: Runner(task, seen.factor, seen.kept),
        "reference": lambda task, plan: Runner(task),
    }.items():
        monkeypatch.setitem(vars(planner), name, function)
    monkeypatch.setattr(api, "model_findings", lambda plan, task: drift(plan, seen.record))
    return seen


def test_run_prints_steps_and_times(call, fake):
    done = call("run", "good.plan.json", "--steps", "3")
    assert done.code == 0, done.err
    lines = done.out.splitlines()
    assert [line.split()[:3] for line in lines[:3]] == [["step", str(i), "loss"] for i in range(3)]
    assert "(compiles)" in lines[0] and "(compiles)" not in lines[1]
    assert lines[3].startswith("predicted step time 45.2 ms, measured ") and "say nothing" in lines[3]
    assert fake.spec == ("tiny", 128)
    assert "planned for Large-80GB, Small-32GB, running on" in done.err


def test_run_one_step_measures_nothing(call, fake):
    assert "run two steps or more" in call("run", "good.plan.json", "--steps", "1").out


def test_run_json(call, fake):
    done = call("run", "good.plan.json", "--json", "--compare")
    document = json.loads(done.out)
    assert (
        done.code == 0
        and len(document["steps"]) == 3
        and document["predicted_step_time_s"] == tiny_plan().prediction.step_time_s
    )
    assert document["comparison"]["loss_difference"] == 0 and document["comparable"] is False
    assert "step 0" in done.err


def test_run_compares(call, fake):
    done = call("run", "good.plan.json", "--compare")
    assert done.code == 0 and "largest difference of a loss 0.00e+00" in done.out
    fake.factor = 1.5
    done = call("run", "good.plan.json", "--compare", "--json")
    assert done.code == 5 and "error MP413" in done.err and "report it" in done.err


def test_run_compares_programs_with_the_plan(call, fake):
    assert "3 collectives by kind, axis and phase, kept bytes within 1.0%" in call("run", "good.plan.json").err
    fake.kept = 10_000
    done = call("run", "good.plan.json")
    assert done.code == 0 and "warning MP504: stage 0 group 0 keeps 10000 bytes" in done.err
    done = call("run", "good.plan.json", "--verify")
    assert done.code == 5 and "error MP504" in done.err
    done = call("run", "good.plan.json", "--no-verify")
    assert done.code == 0 and "as planned" not in done.err and "MP504" not in done.err


def test_tolerance_follows_the_shortest_values():
    assert tolerance_of(capture(task(), 4)) == SINGLE
    assert tolerance_of(capture(TINY["gpt"](dtype="bfloat16"), 4)) == SHORT


def test_run_with_rng(call, fake):
    fake.task = task(rng=True)
    assert call("run", "good.plan.json", "--steps", "1").code == 0


def test_run_needs_enough_devices(call, fake, tmp_path):
    write_plan(tmp_path / "wide.plan.json", tiny_plan(data=8, model=2, devices=16, microbatch_size=8))
    done = call("run", "wide.plan.json")
    assert done.code == 5 and "error MP401: the plan runs on 32 devices, 8 are attached" in done.err
    assert "--fake-devices 32" in done.err


def test_run_needs_a_model(call, fake, tmp_path):
    plan = tiny_plan()
    write_plan(tmp_path / "anonymous.plan.json", replace(plan, model=replace(plan.model, spec=None)))
    done = call("run", "anonymous.plan.json")
    assert done.code == 2 and "MP162" in done.err and "--model train.py:task" in done.err
    assert call("run", "anonymous.plan.json", "--model", "x.py:task", "--steps", "1").code == 0
    assert fake.spec == ("x.py:task", 128)


def test_run_checks_the_cluster(call, fake):
    done = call("run", "good.plan.json", "--cluster", "small.toml")
    assert done.code == 5 and "MP411" in done.err and "MP601" in done.err
    assert call("run", "good.plan.json", "--cluster", "mixed.toml", "--steps", "1").code == 0


def test_run_checks_the_model(call, fake):
    fake.record = replace(fake.record, fingerprint="sha256:x", blocks=("embedding", "layers[0:9]", "head"))
    done = call("run", "good.plan.json")
    assert done.code == 5 and "MP412" in done.err and "MP630" in done.err and "MP631" in done.err and "new:" in done.err


def test_fake_devices_are_asked_for_before_jax(call, fake, monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "--other=1")
    monkeypatch.setenv("JAX_PLATFORMS", "")
    done = call("run", "good.plan.json", "--fake-devices", "8")
    assert done.code == 2 and "MP161" in done.err  # JAX is imported already here
    monkeypatch.delitem(sys.modules, "jax")
    from cli.fake_devices import request_cpu_devices

    assert request_cpu_devices(6, only=True)
    assert os.environ["XLA_FLAGS"] == "--other=1 --xla_force_host_platform_device_count=6"
    assert os.environ["JAX_PLATFORMS"] == "cpu" and not request_cpu_devices(7, only=False)


def test_devices_are_spoken_of_after_the_checks(call, fake, monkeypatch):
    monkeypatch.setattr("cli.run.request_cpu_devices", lambda count, *, only: True)
    done = call("run", "good.plan.json", "--fake-devices", "8")
    assert done.code == 0 and "8 CPU devices share this machine" in done.err
    fake.record = replace(fake.record, fingerprint="sha256:x")
    done = call("run", "good.plan.json", "--fake-devices", "8")
    assert done.code == 5 and done.err.startswith("error MP412") and "share this machine" not in done.err


def run_of(losses, before, after):
    return Run(losses=losses, times_s=(1.0,) * len(losses), before=before, after=after)


def test_comparison():
    zero, one, two = ({"w": jnp.full(3, float(i))} for i in range(3))
    same = compare_runs(run_of((1.0, 2.0), zero, one), run_of((1.0, 2.0), zero, one))
    assert (same.loss, same.update) == (0.0, 0.0)
    same.require_equal()
    for ours, theirs in [
        (run_of((1.0,), zero, two), run_of((1.0,), zero, one)),
        (run_of((1.1,), zero, one), run_of((1.0,), zero, one)),
        (run_of((float("nan"),), zero, one), run_of((1.0,), zero, one)),
        (run_of((1.0,), zero, {"w": jnp.full(3, jnp.nan)}), run_of((1.0,), zero, one)),
        (run_of((1.0,), zero, one), run_of((1.0,), zero, zero)),
    ]:
        with pytest.raises(MismatchError) as caught:
            compare_runs(ours, theirs).require_equal()
        assert caught.value.code == "MP413"


def test_plan_command(call, fake, tmp_path):
    args = ("plan", "--model", "gpt2", "--seq", "64", "--cluster", "mixed.toml", "--global-batch", "32")
    done = call(*args, "-o", "out.plan.json", "--max-microbatch", "4", "--schedule", "gpipe", "--stages", "2",
                "--name", "n", "--no-baselines", "--profile", "p.json")  # fmt: skip
    assert done.code == 0 and done.out == f"{tiny_plan()!r}\n"
    assert done.err == "searching (2) ...\nwrote out.plan.json\n"
    assert read_plan(tmp_path / "out.plan.json") == tiny_plan()
    seen = {name: value for name, value in fake.plan_arguments.items() if name != "progress"}
    assert seen == {
        "model": "gpt2", "cluster": tiny_cluster(), "global_batch": 32, "profile": "p.json", "max_microbatch": 4,
        "microbatch": None, "strategy": None,
        "schedule": "gpipe", "chunks": None, "stages": 2, "baselines": False, "name": "n", "sequence": 64,
    }  # fmt: skip
    done = call(*args, "--json")
    assert done.out.encode() == encode(tiny_plan())
    assert "was not written" in call(*args).err


def test_plan_for_the_attached_devices(call, fake):
    done = call("plan", "--model", "gpt2", "--global-batch", "32")
    assert done.code == 0 and "planning for the 8 attached devices" in done.err
    assert fake.plan_arguments["cluster"].device_count == 8


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (InputError("MP101", "bad", "do"), 2),
        (InfeasibleError("MP201", "needs 96 GiB of 80 GiB", "more devices"), 3),
        (ProfileError("MP301", "stale", "profile again"), 4),
        (MismatchError("MP401", "too few"), 5),
        (LoweringError("MP501", "gathered twice"), 5),
        (KeyboardInterrupt(), 130),
        (RuntimeError("boom\nmore"), 70),
    ],
)
def test_exit_codes(call, fake, monkeypatch, error, code):
    def fail(*args, **kwargs):
        raise error

    monkeypatch.setitem(vars(planner), "plan", fail)
    args = ("plan", "--model", "gpt2", "--cluster", "mixed.toml", "--global-batch", "8")
    done = call(*args, "--profile", "given.profile.json")
    assert done.code == code and not done.out
    if code == 70:
        assert (
            "internal error at test_run.py:" in done.err and "RuntimeError: boom" in done.err and "--debug" in done.err
        )
    elif code == 130:
        assert done.err == "interrupted\n"
    else:
        assert done.err.startswith(f"error {error.code}: ")
        assert json.loads(call(*args, "--json").out)["error"]["exit_code"] == code


def test_findings_of_a_plan_are_exit_code_1(call, fake, monkeypatch):
    found = Finding(code="MP700", severity="error", message="m")
    monkeypatch.setitem(vars(planner), "plan", lambda *a, **k: replace(tiny_plan(), findings=(found,)))
    args = ("plan", "--model", "gpt2", "--cluster", "mixed.toml", "--global-batch", "8")
    assert call(*args).code == 1


def test_validate_with_model(call, fake):
    assert call("validate", "good.plan.json", "--cluster", "mixed.toml", "--model", "tiny").code == 0
    fake.record = replace(fake.record, fingerprint="sha256:x")
    done = call("validate", "good.plan.json", "--cluster", "mixed.toml", "--model", "tiny")
    assert done.code == 1 and "MP630" in done.out and fake.spec == ("tiny", 128)
