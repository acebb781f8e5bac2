"""`meshplan estimate` from the command line."""

import json
import re

import pytest

CLUSTER = 'name = "c"\n[[group]]\nname = "a"\nnodes = 1\ndevice = "A100-SXM4-80GB"\ndevices_per_node = 8\n'
MODEL = "gpt(hidden=512,layers=4,heads=8,vocab=4096,seq=128)"


@pytest.fixture
def estimate(call, tmp_path):
    (tmp_path / "c.toml").write_text(CLUSTER)
    return lambda *args: call("estimate", "--model", MODEL, "--cluster", "c.toml", "--global-batch", 64, *args)


def test_one_strategy_is_shown_in_full(estimate):
    done = estimate("--strategy", "dp=2,tp=2,pp=2,microbatch=4,zero=1,sp=on")
    assert done.code == 0 and not done.err
    assert done.out.startswith("dp=2,tp=2,pp=2,microbatch=4,zero=1,sp=on\nstep time ")
    shares = [float(share) for share in re.findall(r"(\d+\.\d)%  ", done.out)]
    assert sum(shares) == pytest.approx(100.0, abs=0.5)
    assert "fits: stage" in done.out and "in flight" in done.out and "figures: compute" in done.out


def test_json_has_every_figure(estimate):
    found = json.loads(estimate("--strategy", "dp=8,microbatch=2", "--json").out)
    low, high = found["error_bar_s"]
    assert low < found["step_time_s"] < high
    assert sum(found["breakdown"].values()) == pytest.approx(found["step_time_s"])
    (stage,) = found["memory"]
    items = [
        size for name, size in stage.items() if name.endswith("_bytes") and name not in ("peak_bytes", "limit_bytes")
    ]
    assert sum(items) == pytest.approx(stage["peak_bytes"], abs=1) and found["peak_memory_bytes"] == stage["peak_bytes"]


def test_several_strategies_are_compared_fastest_first(estimate):
    done = estimate("--strategy", "dp=1,microbatch=8", "--strategy", "dp=8,microbatch=8")
    lines = done.out.splitlines()
    assert lines[0] == "Strategies, fastest first"
    assert lines[3].startswith("dp=8") and lines[4].startswith("dp=1")
    documents = json.loads(estimate("--strategy", "dp=1,microbatch=8", "--strategy", "dp=8,microbatch=8", "--json").out)
    assert [one["strategy"]["dp"] for one in documents] == [1, 8]


def test_what_does_not_fit_is_a_finding(estimate, call):
    big = ("--model", "gpt3-13b", "--cluster", "c.toml", "--global-batch", 8)
    done = call("estimate", *big, "--strategy", "dp=8,microbatch=1")
    assert done.code == 1 and "does not fit: stage 0 needs" in done.out and "more than it has" in done.out


@pytest.mark.parametrize(
    ("text", "code"),
    [("dp=16", "MP183"), ("dp", "MP180"), ("dp=3", "MP185"), ("pp=8", "MP184"), ("dp=2,stack=none", "MP187")],
)
def test_bad_strategies_are_usage_errors(estimate, text, code):
    done = estimate("--strategy", text)
    assert done.code == 2 and f"error {code}" in done.err and "hint:" in done.err


def test_stacks_are_listed(call):
    done = call("estimate", "--list-stacks")
    assert done.code == 0 and done.out.startswith("compiled: assumed constants")


RUNS = "dp,tp,microbatch,global_batch,step_time_s\n8,1,4,64,.4\n4,2,4,64,.5\n2,4,4,64,.6\n8,1,8,64,.4\n8,1,2,64,.45\n"


def test_a_stack_calibrated_to_measured_runs_is_used(estimate, call, tmp_path):
    (tmp_path / "runs.csv").write_text(RUNS)
    fit = ("profile", "calibrate", "runs.csv", "--model", MODEL, "--cluster", "c.toml", "-o", "mine.toml")
    done = call(*fit)
    assert done.code == 0 and "5 runs of runs.csv" in done.out and "wrote mine.toml" in done.err
    plain, mine = (
        json.loads(estimate("--strategy", "dp=8,microbatch=4", "--json", *more).out)
        for more in ((), ("--stack", "mine.toml"))
    )
    assert mine["stack"] == "mine" and abs(mine["step_time_s"] - 0.4) < abs(plain["step_time_s"] - 0.4) / 3
    entry = json.loads(call(*fit, "--json").out)
    assert entry["improved"] and len(entry["runs"]) == 5


def test_bad_runs_write_nothing(call, tmp_path, estimate):
    (tmp_path / "runs.csv").write_text(RUNS.replace(".45", "none"))
    fit = ("profile", "calibrate", "runs.csv", "--model", MODEL, "--cluster", "c.toml")
    done = call(*fit, "-o", "mine.toml")
    assert done.code == 2 and "error MP186: runs.csv, line 6" in done.err and not (tmp_path / "mine.toml").exists()
    assert call(*fit).code == 2
    assert "MP188" in call("profile", "calibrate", "no.csv", *fit[3:], "-o", "mine.toml").err


def test_an_imported_table_of_layer_times_is_used(estimate, call, tmp_path):
    times = [(0.0002, 0.0), *[(0.001, 0.002)] * 4, (0.0003, 0.0005)]
    rows = [
        f"{model},{size},{i},{size * f},{size * b}"
        for model in "mn"
        for size in (1, 4)
        for i, (f, b) in enumerate(times)
    ]
    (tmp_path / "t.csv").write_text("\n".join(["model,micro_batch_seqs,layer,forward_s,backward_s", *rows]) + "\n")
    assert call("profile", "import", "t.csv", "--model", "m", "--device", "A100-SXM4-80GB", "-o", "t.json").code == 0
    found = json.loads(
        estimate("--strategy", "microbatch=4", "--profile", "t.json", "--layer-model", "m", "--json").out
    )
    assert found["provenance"]["compute"] == "measured"
    assert found["breakdown"]["compute_s"] == pytest.approx(16 * 4 * sum(map(sum, times)))
    plan = ("plan", "--model", MODEL, "--cluster", "c.toml", "--global-batch", 64, "--strategy", "dp=8,microbatch=8")
    planned = call(*plan, "--profile", "t.json", "-o", "p.json")
    assert (
        planned.code == 0 and "the profile has layer times of m (6 entries): a plan is priced op by op" in planned.err
    )
    assert "MP179" in call("explain", "p.json").out
    refused = estimate("--strategy", "cp=2,microbatch=1", "--profile", "t.json")
    assert refused.code == 2 and "error MP189" in refused.err
    unknown = estimate("--strategy", "microbatch=1", "--profile", "t.json", "--layer-model", "o")
    assert unknown.code == 4 and "MP311" in unknown.err
