"""`validate --compile` on a plan for CPUs, whose compiler is always there."""

import json
import sys

import pytest

import planner
from planner.check.finding import finding
from planner.plan_files import read_plan, write_plan
from profiles.compiled import oracle
from profiles.compiled.oracle import Oracle
from profiles.compiled.target import cpu_target

SPEC = "gpt(hidden=64,layers=2,heads=4,vocab=128,seq=32,dtype=float32)"
CLUSTER = """name = "host"
[[group]]
name = "cpu"
nodes = 1
device = "cpu"
devices_per_node = 2
"""


@pytest.fixture
def planned(call, tmp_path, monkeypatch):
    """A plan for two CPU devices in the folder of `call`, and a cache of its own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "host.toml").write_text(CLUSTER)
    plan = planner.plan(SPEC, cluster=tmp_path / "host.toml", global_batch=8, stages=1, baselines=False)
    write_plan(tmp_path / "host.plan.json", plan)
    return call


def test_a_plan_is_compiled_once(planned, tmp_path, monkeypatch):
    done = planned("validate", "host.plan.json", "--cluster", "host.toml", "--compile", "--json")
    (result,) = json.loads(done.out)["results"]
    assert done.code == 0 and result["skipped"] == [] and "compiling" in done.err
    (figures,) = [finding for finding in result["findings"] if finding["code"] == "MP655"]
    assert "the compiler for cpu allocates" in figures["message"] and figures["severity"] == "note"
    assert list((tmp_path / "cache" / "meshplan" / "compiled").iterdir())
    monkeypatch.setattr(Oracle, "_run", lambda *args: pytest.fail("compiled again"))
    again = planned("validate", "host.plan.json", "--cluster", "host.toml", "--compile", "--model", SPEC, "--json")
    assert json.loads(again.out) == json.loads(done.out)


def test_a_compiler_that_hangs_is_an_error_finding(planned, monkeypatch):
    monkeypatch.setattr(
        oracle, "default_oracle",
        lambda environment, limits: Oracle(
            environment=environment, limits=limits, worker=(sys.executable, "-c", "import time; time.sleep(60)")
        ),
    )  # fmt: skip
    done = planned("validate", "host.plan.json", "--cluster", "host.toml", "--compile", "--compile-timeout", "0.2s")
    assert done.code == 1 and "MP653" in done.out and "had not finished after 0.2 s" in done.out


def test_a_kind_without_a_compiler_is_compiled_for_the_cpu(planned, tmp_path, monkeypatch):
    """Said in so many words, and its memory is not judged."""
    from planner import compile_check

    why = "JAX's CUDA plugin is not installed: pip install 'meshplan[cuda-check]'"
    monkeypatch.setattr(compile_check, "_target", lambda group, kinds, oracle: (cpu_target(len(group.devices)), why))
    done = planned("validate", "host.plan.json", "--cluster", "host.toml", "--compile")
    assert done.code == 0 and "pip install 'meshplan[cuda-check]' compiles for CUDA devices" in done.out
    assert "MP654" in done.out and "MP655" in done.out and "MP651" not in done.out


def test_a_plan_with_errors_is_not_compiled(planned, tmp_path):
    (tmp_path / "less.toml").write_text(CLUSTER.replace("devices_per_node = 2", "devices_per_node = 1"))
    done = planned("validate", "host.plan.json", "--cluster", "less.toml", "--compile", "--json")
    assert done.code == 1 and "MP650" in json.loads(done.out)["results"][0]["skipped"]


def test_a_plan_that_names_no_model_needs_one(planned, tmp_path):
    import msgspec

    plan = read_plan(tmp_path / "host.plan.json")
    nameless = msgspec.structs.replace(plan, model=msgspec.structs.replace(plan.model, spec=None))
    write_plan(tmp_path / "nameless.plan.json", nameless)
    done = planned("validate", "nameless.plan.json", "--cluster", "host.toml", "--compile")
    assert done.code == 2 and "MP100" in done.out and "--model" in done.out


def test_an_estimate_says_how_far_its_memory_is_off(planned, monkeypatch):
    """As `validate` does of a plan: of the plan that the strategy names, and of the estimate's own figure."""
    from planner import compile_findings

    strategy = ("--strategy", "dp=2,microbatch=4")
    args = ("estimate", "--model", SPEC, "--cluster", "host.toml", "--global-batch", "8", "--compile")
    monkeypatch.setattr(compile_findings, "MEMORY_TOLERANCE", 0.0)
    done = planned(*args, *strategy)
    assert done.code == 0 and "warning MP651: stage 0: planned memory of " in done.out
    assert "stage 0: estimated memory of " in done.out and "that the compiler for cpu allocates" in " ".join(
        done.out.split()
    )
    found = json.loads(planned(*args, *strategy, "--json").out)["findings"]
    assert [one["code"] for one in found] == ["MP651", "MP651"] and not any(one["where"] for one in found)
    two = planned(*args, *strategy, "--strategy", "dp=2,microbatch=4,step_s=0.1").out
    own, other = two.split("Compiled: ")[1:]
    assert "estimated memory" in own and "estimated memory" not in other and "planned memory" in other
    monkeypatch.setattr(compile_findings, "MEMORY_TOLERANCE", 0.9)
    assert "MP651" not in planned(*args, *strategy).out


def test_an_estimate_that_does_not_fit_as_compiled_exits_with_1(planned, monkeypatch):
    args = ("estimate", "--model", SPEC, "--cluster", "host.toml", "--global-batch", "8", "--strategy")
    refused = finding("MP650", "", "stage 0 does not fit cpu", "1 B too much")
    monkeypatch.setattr("cli.estimate._compiled", lambda *given: ((), (refused,)))
    done = planned(*args, "dp=2,microbatch=4", "--compile")
    assert done.code == 1 and "error MP650: stage 0 does not fit cpu" in done.out
    assert planned(*args, "dp=2,microbatch=4").code == 0
