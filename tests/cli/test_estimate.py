"""`meshplan estimate` from the command line."""

import json
import re

import pytest

from costmodel.errors import InfeasibleError
from planner.api import strategy_pins

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
    assert lines[0] == "Strategies, fastest first, those that do not fit last"
    assert lines[3].startswith("dp=8") and lines[4].startswith("dp=1")
    documents = json.loads(estimate("--strategy", "dp=1,microbatch=8", "--strategy", "dp=8,microbatch=8", "--json").out)
    assert [one["strategy"]["dp"] for one in documents] == [1, 8]


def test_rows_of_one_strategy_are_told_apart(estimate):
    done = estimate(*["--strategy", "dp=8,microbatch=8"] * 2, "--strategy", "dp=8,microbatch=8,step_s=0.5")
    rows = [line.split()[0] for line in done.out.splitlines()[3:]]
    assert rows == ["dp=8,microbatch=8", "dp=8,microbatch=8", "dp=8,microbatch=8,step_s=0.5"]


def test_one_bad_strategy_of_several_is_said_and_the_others_are_shown(estimate):
    several = ("--strategy", "dp=4,microbatch=8", "--strategy", "dp=3", "--strategy", "dp=8,microbatch=8")
    done = estimate(*several)
    assert done.code == 2 and "error MP185: strategy 'dp=3': global batch 64" in done.err
    assert [line.split()[0] for line in done.out.splitlines()[3:]] == ["dp=8,microbatch=8", "dp=4,microbatch=8"]
    first, bad, last = json.loads(estimate(*several, "--json").out)
    assert first["strategy"]["dp"] == 4 and last["strategy"]["dp"] == 8
    assert bad["given"] == "dp=3" and bad["error"]["code"] == "MP185" and bad["error"]["exit_code"] == 2
    nothing = estimate("--strategy", "dp=3", "--strategy", "dp=5")
    assert nothing.code == 2 and not nothing.out and nothing.err.count("error MP185") == 2


def test_nothing_is_compiled_before_every_strategy_was_checked(estimate, monkeypatch):
    """One of them that no plan decides is said first; one whose plan fails keeps its estimate."""
    made = []

    def compiled(model, cluster, global_batch, asked, *more):
        made.append(asked.own)
        if asked.own.startswith("dp=4"):
            raise InfeasibleError("MP201", "nothing fits", "a larger cluster")
        return (), ()

    monkeypatch.setattr("cli.estimate._compiled", compiled)
    monkeypatch.setattr("planner.api.strategy_pins", lambda *args, real=strategy_pins: (made.append(0), real(*args)))
    texts = ("dp=8,microbatch=8,attention=flash", "dp=8,microbatch=8,step_s=0.1", "dp=4,microbatch=8")
    several = [word for text in texts for word in ("--strategy", text)]
    done = estimate(*several, "--compile")
    assert made == [0, 0, 0, "dp=8,microbatch=8", "dp=4,microbatch=8"] and done.code == 2
    assert "error MP180: strategy 'dp=8,microbatch=8,attention=flash': attention=flash: a plan runs" in done.err
    assert "error MP201: strategy 'dp=4,microbatch=8': nothing fits" in done.err
    assert len(done.out.splitlines()) == 7 and "* memory counted block by block" in done.out
    alone = estimate("--strategy", "dp=4,microbatch=8", "--compile")
    assert (
        alone.code == 3 and alone.out.startswith("dp=4,microbatch=8\nstep time") and "error MP201: nothing" in alone.err
    )


def test_what_does_not_fit_is_a_finding(estimate, call):
    big = ("--model", "gpt3-13b", "--cluster", "c.toml", "--global-batch", 8)
    done = call("estimate", *big, "--strategy", "dp=8,microbatch=1")
    assert done.code == 1 and "does not fit: stage 0 needs" in done.out and "more than it has" in done.out


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("step_s=1,step_s=2", "MP182"),
        ("dp=16", "MP183"),
        ("dp", "MP180"),
        ("dp=3", "MP185"),
        ("pp=8", "MP184"),
        ("dp=2,stack=none", "MP187"),
    ],
)
def test_bad_strategies_are_usage_errors(estimate, text, code):
    done = estimate("--strategy", text)
    assert done.code == 2 and f"error {code}" in done.err and "hint:" in done.err


def test_stacks_are_listed(call):
    done = call("estimate", "--list-stacks")
    assert done.code == 0 and done.out.startswith("compiled: assumed constants")
    for args in (("--list-stacks", "--json"), ("--json", "--list-stacks")):
        first, *more = json.loads(call("estimate", *args).out)
        assert first["name"] == "compiled" and first["fitted_on"] == "" and "selene" in [one["name"] for one in more]


def test_a_plan_of_a_strategy_takes_no_constants_of_a_stack(call, estimate):
    plan = ("plan", "--model", MODEL, "--cluster", "c.toml", "--global-batch", 64)
    done = call(*plan, "--strategy", "dp=8,microbatch=8,stack=selene")
    assert done.code == 2 and "error MP180: stack=selene: constants of a software stack are for" in done.err
    assert "`meshplan estimate`" in done.err
    both = call(*plan, "--strategy", "dp=8,microbatch=8", "--max-microbatch", 1)
    assert both.code == 2 and "strategy and max_microbatch were both given" in both.err


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
