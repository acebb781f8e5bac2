"""Constants fitted to runs that were made with known ones: predictions come near, whatever one bad run says."""

from functools import lru_cache
from pathlib import Path

import msgspec
import numpy as np
import pytest

import planner
from costmodel.cluster import Cluster, parse_cluster
from costmodel.errors import InputError
from costmodel.stack import Stack
from planner.calibrating import Calibrated
from planner.fitted_constants import kind_findings, with_kinds
from planner.measured_runs import read_runs
from planner.models.families.gpt import gpt
from planner.report.calibration import document, render_calibration
from planner.strategy.strategy import Strategy
from profiles.catalogue import load_catalogue
from profiles.constants import Constants, FittedKinds, write_constants

TASK = gpt(hidden=1024, layers=8, heads=16, vocab=8192, seq=512)
BATCH = 256
TRUTH = Stack(name="truth", step_s=0.02, microbatch_s=0.002, tier_share=0.6, inter_share=0.4, traffic=1.4)
STRATEGIES = (
    "dp=8,microbatch=4",
    "dp=8,tp=2,microbatch=2",
    "dp=4,tp=4,pp=2,microbatch=1",
    "dp=2,tp=8,pp=2,microbatch=2",
    "dp=16,microbatch=1",
    "dp=8,tp=4,microbatch=8",
    "dp=4,pp=8,microbatch=2",
    "dp=32,microbatch=2,zero=1",
)
UNSEEN = ("dp=16,tp=2,microbatch=4", "dp=4,tp=2,pp=4,microbatch=2", "dp=4,tp=8,microbatch=4,zero=1")


@lru_cache(maxsize=1)
def cluster() -> Cluster:
    group = {"name": "a", "nodes": 4, "device": "A100-SXM4-80GB", "devices_per_node": 8}
    return parse_cluster({"name": "c", "group": [group]}, load_catalogue())


@lru_cache(maxsize=1)
def real() -> planner.Estimator:
    """The cluster as it really is: its devices achieve less, and the software adds more."""
    kind = cluster().groups[0].device
    slower = msgspec.structs.replace(kind, matmul_efficiency=0.5, bandwidth_efficiency=0.6)
    return planner.Estimator(model=TASK, cluster=with_kinds(cluster(), {kind.name: slower}), stack=TRUTH)


def runs(strategies: tuple[str, ...] = STRATEGIES, noise: float = 0.01) -> list[dict[str, object]]:
    off = np.random.default_rng(7).normal(0.0, noise, len(strategies))
    return [
        {"strategy": text, "global_batch": BATCH, "step_time_s": real()(text, BATCH).step_time_s * float(np.exp(o))}
        for text, o in zip(strategies, off, strict=True)
    ]


@lru_cache(maxsize=1)
def calibrated() -> Calibrated:
    return planner.calibrate(runs(), cluster(), TASK)


def test_predictions_come_near_those_of_the_real_cluster(tmp_path: Path) -> None:
    found = calibrated()
    assert found.improved and found.mean_error("before") > 0.3
    assert found.mean_error("after") < 0.03
    assert found.mean_error("after") <= found.mean_error("held_out") < 0.5 * found.mean_error("before")
    write_constants(tmp_path / "mine.toml", found.constants)
    fitted = planner.Estimator(model=TASK, cluster=cluster(), stack=str(tmp_path / "mine.toml"))
    base = planner.Estimator(model=TASK, cluster=cluster())
    outside = []  # of an interval that holds nine of ten, by a few runs
    for text in UNSEEN:
        wanted = real()(text, BATCH).step_time_s
        off = abs(fitted(text, BATCH).step_time_s / wanted - 1.0)
        assert off < 0.15 and off < abs(base(text, BATCH).step_time_s / wanted - 1.0) / 3
        low, high = fitted(text, BATCH).error_bar
        outside += [max(low / wanted, wanted / high)] if not low < wanted < high else []
    assert len(outside) <= 1 and max(outside, default=1.0) < 1.05
    for one in found.runs:
        again = fitted(one.run.strategy, BATCH).step_time_s
        assert again == pytest.approx(one.after_s, rel=1e-4)


def test_the_error_bar_is_that_of_runs_held_out() -> None:
    found = calibrated()
    off = [abs(np.log(one.held_out_s / one.run.step_time_s)) for one in found.runs]
    assert found.stack.error == pytest.approx(max(off)) and found.parts == len(STRATEGIES)


def test_one_bad_run_does_not_ruin_the_others() -> None:
    bad = runs()
    bad[0]["step_time_s"] = 3.0 * float(bad[0]["step_time_s"])  # type: ignore[arg-type]
    found = planner.calibrate(bad, cluster(), TASK)
    others, before = np.abs(found.errors("after")[1:]), np.abs(found.errors("before")[1:])
    assert np.median(others) < 0.05 and others.mean() < 0.3 * before.mean()
    assert found.errors("after")[0] < -0.4  # the run itself is not believed


def test_constants_that_no_run_depends_on_stay() -> None:
    one_node = tuple(text for text in STRATEGIES if "dp=8,microbatch" in text)
    texts = (*one_node, "dp=4,tp=2,microbatch=2", "dp=2,tp=4,microbatch=2", "dp=4,microbatch=4", "dp=8,microbatch=1")
    found = planner.calibrate(runs(texts), cluster(), TASK)
    names = {one.name for one in found.fitted}
    assert "traffic" in names and names.isdisjoint({"inter_share", "inter_start_s", "send_exposed", "gradient_overlap"})
    assert found.stack.inter_share is None and found.stack.send_exposed == 0.0


def test_constants_that_runs_confirm_are_kept() -> None:
    """Runs that are as predicted but for noise: a fit to it is no gain, and the document says so."""
    plain = planner.Estimator(model=TASK, cluster=cluster())
    off = (1.02, 0.98, 1.03, 0.97, 1.02, 0.98)
    exact = [
        {"strategy": text, "global_batch": BATCH, "step_time_s": plain(text, BATCH).step_time_s * factor}
        for text, factor in zip(STRATEGIES[:6], off, strict=True)
    ]
    found = planner.calibrate(exact, cluster(), TASK)
    assert not found.improved and "no better" in found.stack.fitted_on
    assert found.constants.fitted == () and found.stack.step_s == 0.0
    assert found.stack.error == pytest.approx(-np.log(0.97), rel=1e-6)
    assert "are kept" in render_calibration(found)


def test_the_report_names_constants_and_runs() -> None:
    text = render_calibration(calibrated())
    assert "8 runs of measured runs" in text and "fitted to the other runs" in text and "matmul_efficiency" in text
    assert all(strategy in text for strategy in STRATEGIES)
    entry = document(calibrated())
    assert entry["mean_error"]["held_out"] == pytest.approx(calibrated().mean_error("held_out"))
    assert len(entry["runs"]) == len(STRATEGIES)


HEADER = "dp,tp,microbatch,global_batch,step_time_s"
GOOD = ("8,1,4,256,1.0", "4,2,4,256,1.1", "2,4,4,256,1.2", "8,1,8,256,1.0", "8,1,2,256,1.1")


@pytest.mark.parametrize(
    ("header", "rows", "code", "words"),
    [
        (HEADER, GOOD[:4], "MP186", "4 measured runs"),
        (HEADER, GOOD[:2] * 3, "MP186", "2 different configurations"),
        (HEADER, (*GOOD, "8,1,4,256,nan"), "MP186", "line 7: step_time_s is 'nan'"),
        (HEADER, (*GOOD, "8,1,4,256,-2"), "MP186", "line 7"),
        (HEADER, (*GOOD, "8,1,4,256,fast"), "MP186", "line 7"),
        (HEADER, (*GOOD, "8,1,4,,1.0"), "MP188", "line 7: global_batch is missing"),
        (HEADER, (*GOOD, "8,1,4,inf,1.0"), "MP188", "line 7: global_batch"),
        (HEADER, (*GOOD, "8,1,4,256"), "MP188", "line 7: 4 cells under 5 columns"),
        (HEADER, (*GOOD, "x,1,4,256,1.0"), "MP180", "line 7: dp=x"),
        (HEADER, (*GOOD, "64,1,4,256,1.0"), "MP183", "line 7: dp=64"),
        (HEADER, (*GOOD, "3,1,4,256,1.0"), "MP185", "line 7: global batch 256"),
        ("dpp,tp,microbatch,global_batch,step_time_s", GOOD, "MP188", "unknown column 'dpp'"),
        ("dp,mbs,microbatch,global_batch,step_time_s", GOOD, "MP188", "two columns of 'microbatch'"),
        ("dp,tp,microbatch,global_batch,seq", GOOD, "MP188", "no column step_time_s"),
        (HEADER, (), "MP188", "has no runs"),
        ("global_batch,step_time_s", ("256,1.0",) * 5, "MP180", "line 2: the strategy names none of its fields"),
        ("strategy,global_batch,step_time_s", (",256,1.0",) * 5, "MP180", "line 2: the strategy names none"),
    ],
)
def test_a_bad_table_is_refused_with_its_line(
    tmp_path: Path, header: str, rows: tuple[str, ...], code: str, words: str
) -> None:
    path = tmp_path / "runs.csv"
    path.write_text("\n".join([header, *rows]) + "\n")
    with pytest.raises(InputError) as caught:
        planner.calibrate(path, cluster(), TASK)
    assert caught.value.code == code and words in caught.value.message


def test_empty_cells_of_a_strategy_are_defaults(tmp_path: Path) -> None:
    (tmp_path / "runs.csv").write_text("dp,tp,global_batch,step_time_s\n,,256,1.0\n")
    (run,) = read_runs(tmp_path / "runs.csv")
    assert run.strategy == Strategy()


@pytest.mark.parametrize(
    ("factor", "rows", "said"),
    [
        (1000.0, 8, "8 of 8 runs are so far off"),
        (1000.0, 1, "1 of 8 runs are so far off"),
        (1e-3, 8, "as short as the"),
    ],
)
def test_times_in_another_unit_are_refused(factor: float, rows: int, said: str) -> None:
    given = runs(noise=0.0)
    for one in given[:rows]:
        one["step_time_s"] = factor * float(one["step_time_s"])  # type: ignore[arg-type]
    with pytest.raises(InputError) as caught:
        planner.calibrate(given, cluster(), TASK)
    assert caught.value.code == "MP186" and said in caught.value.message
    assert f"run 0: step_time_s is {given[0]['step_time_s']:g}, " in caught.value.message
    assert "is in seconds" in caught.value.hint


def test_what_is_given_and_not_used_is_said() -> None:
    kinds = FittedKinds(kinds=("H100-SXM5-80GB", "A100-SXM4-40GB"), matmul_efficiency=0.5)
    document_of = Constants(stacks=(Stack(name="mine"),), fitted=(kinds,))
    (found,) = kind_findings(document_of, cluster())
    assert (found.code, found.severity) == ("MP178", "warning") and "H100-SXM5-80GB" in found.message
    assert "did you mean A100-SXM4-80GB?" in found.hint or "A100-SXM4-80GB" in found.hint
    both = Constants(fitted=(kinds, FittedKinds(kinds=("A100-SXM4-80GB",), matmul_efficiency=0.5)))
    assert [one.severity for one in kind_findings(both, cluster())] == ["note"]
    assert kind_findings(Constants(), cluster()) == kind_findings(None, cluster()) == ()


def test_estimates_say_whose_fitted_constants_they_leave_out(tmp_path: Path) -> None:
    kinds = FittedKinds(kinds=("H100-SXM5-80GB",), matmul_efficiency=0.5)
    write_constants(tmp_path / "other.toml", Constants(stacks=(Stack(name="mine"),), fitted=(kinds,)))
    found = planner.estimate(TASK, cluster(), "dp=8,microbatch=4", global_batch=256, stack=str(tmp_path / "other.toml"))
    assert [one.code for one in found.findings] == ["MP178"] and "H100-SXM5-80GB" in found.findings[0].message


def test_a_model_that_no_run_takes_is_said() -> None:
    spec = "gpt(hidden=64,layers=2,heads=4,vocab=128,seq=32)"
    step_s = planner.estimate(spec, cluster(), "dp=2,microbatch=4", global_batch=64).step_time_s
    named = [
        {"strategy": f"dp={dp},microbatch=4", "global_batch": 64, "step_time_s": step_s, "model": spec, "seq": 32}
        for dp in (1, 2, 4, 8, 16)
    ]
    found = planner.calibrate(named, cluster(), "gpt2", sequence=16)
    assert [one.message.partition(" changes")[0] for one in found.findings] == [
        "the model that is given",
        "sequence length 16",
    ]
    assert "note MP178: sequence length 16 changes nothing" in render_calibration(found)
    assert [one["code"] for one in document(found)["findings"]] == ["MP178"] * 2


def test_a_run_without_a_model_is_refused() -> None:
    with pytest.raises(InputError, match="names no model") as caught:
        planner.calibrate(runs(), cluster())
    assert caught.value.code == "MP188"
