"""Explanations: every number of the plan that a reader needs, and nothing that the plan does not say."""

import json

import msgspec
import pytest

from planner.plan_slack import with_slack
from planner.planfile.schema import Finding
from planner.report.device_names import device_runs
from planner.report.explain import explain
from tests.golden_files import check_golden
from tests.plans import GIB, tiny_plan

replace = msgspec.structs.replace
KINDS = {
    "two_stages": tiny_plan(),
    "three_stages_zero3": tiny_plan(stages=3, devices=8, zero=3),
    "one_device": tiny_plan(stages=1, data=1, model=1, schedule="gpipe"),
    "slack": with_slack(tiny_plan(stages=3, microbatches=12)),
}


@pytest.mark.parametrize("kind", KINDS)
def test_golden_text(kind):
    check_golden(f"explain_{kind}.txt", explain(KINDS[kind]).text)


def test_slack_and_warm_ups_are_those_of_the_schedule():
    explained = explain(KINDS["slack"])
    assert [row.warm_up for row in explained.warm_ups] == [3, 2, 1]
    assert [row.where for row in explained.slack] == ["stage 0 -> 1", "stage 1 -> 2"]
    silent = replace(tiny_plan(stages=3), schedule=without_warm_ups(tiny_plan(stages=3)))
    assert [row.warm_up for row in explain(silent).warm_ups] == [3, 2, 1] and explain(silent).slack == ()
    assert "later without any cost" in explained._repr_html_()
    assert explained.to_plain()["slack"][0]["free_s"] == KINDS["slack"].transfers[0].slack.free_s


def without_warm_ups(plan):
    return replace(plan.schedule, actors=tuple(replace(row, warm_up=None) for row in plan.schedule.actors))


def test_repr_is_one_screen():
    text = repr(tiny_plan(stages=3, devices=8))
    assert len(text.splitlines()) < 25 and text.startswith("Plan tiny\n")
    assert repr(explain(tiny_plan())) == repr(tiny_plan())
    assert str(explain(tiny_plan())) == explain(tiny_plan()).text


def test_memory_is_worst_first_with_headroom():
    rows = explain(tiny_plan()).memory
    assert [row.stage for row in rows] == [1, 0]
    for row in rows:
        assert sum(row.items.values()) == row.total_bytes and row.headroom_bytes == row.limit_bytes - row.total_bytes


def test_time_parts_add_up():
    plan = tiny_plan()
    assert sum(row.time_s for row in explain(plan).time) == pytest.approx(plan.prediction.step_time_s)
    assert sum(row.share for row in explain(plan).time) == pytest.approx(1)
    short = replace(plan, prediction=replace(plan.prediction, compute_s=plan.prediction.compute_s - 0.01))
    assert {row.part: row.time_s for row in explain(short).time}["other"] == pytest.approx(0.01)


def test_the_slowest_stage_is_marked():
    assert [row.binds for row in explain(tiny_plan()).stages] == [False, True]
    assert [row.binds for row in explain(tiny_plan(stages=1)).stages] == [False]


def test_baselines_have_ratios():
    rows = {row.name: row for row in explain(tiny_plan()).baselines}
    assert rows["ddp"].ratio == pytest.approx(0.08 / 0.0452) and rows["pipeline"].ratio is None
    assert "does not fit" in explain(tiny_plan()).text


def test_certificate_says_what_was_searched():
    plan = tiny_plan()
    text = " ".join(explain(plan).certificate)
    for part in (
        "4.0%",
        "43.4 ms",
        "45.2 ms",
        "18.1 ms",
        "Searched: every",
        "Not searched: splitting",
        "Not checked by a compiler",
    ):
        assert part in text
    proven = replace(plan, certificate=replace(plan.certificate, gap=0.0, lower_bound_s=0.05))
    assert explain(proven).certificate[0].startswith("Optimal in the searched space")
    stopped = replace(
        plan, certificate=replace(plan.certificate, limit_fired=True), compile_check={"memory": "confirmed"}
    )
    text = " ".join(explain(stopped).certificate)
    assert "work limit stopped" in text and "Compiler check: memory confirmed." in text


def test_findings_and_unused_devices_are_shown():
    found = Finding(
        code="MP700", severity="warning", message="op sort.1 (model.py:3) is planned as replicated", hint="x"
    )
    plan = replace(tiny_plan(stages=1), findings=(found,))
    text = explain(plan).text
    assert "warning MP700: op sort.1 (model.py:3)" in text and "hint: x" in text
    assert "4 of 8 devices are used" in text
    assert "1 finding" in explain(plan).summary


def test_only_words_that_occur_are_explained():
    words = dict(explain(tiny_plan(stages=1, data=1, model=1, schedule="gpipe")).glossary)
    assert "gpipe" in words and not {"tp", "dp", "pp", "1f1b", "binds"} & set(words)
    assert {"tp", "dp", "zero", "pp", "1f1b"} <= set(dict(explain(tiny_plan()).glossary))


def test_plain_data_is_json():
    for plan in KINDS.values():
        document = json.loads(json.dumps(explain(plan).to_plain()))
        assert len(document["stages"]) == len(plan.stages)
        assert document["memory"][0]["limit_bytes"] in (32 * GIB, 80 * GIB)


@pytest.mark.parametrize(
    ("devices", "runs"),
    [
        ((), ()),
        (("a/0/0",), ("a/0/0",)),
        (("a/0/0", "a/0/1", "a/0/2"), ("a/0/0-2",)),
        (("a/0/0", "a/0/1", "a/1/0", "a/1/1"), ("a/0-1/0-1",)),
        (("a/0/0", "a/0/1", "a/1/0"), ("a/0/0-1", "a/1/0")),
        (("a/0/1", "a/0/0"), ("a/0/1,0",)),
        (("a/0/0", "a/0/2", "a/0/3"), ("a/0/0,2-3",)),
        (("a/0/0", "b/1/0"), ("a/0/0", "b/1/0")),
        (("gpu", "gpu"), ("gpu", "gpu")),
    ],
)
def test_device_runs(devices, runs):
    assert device_runs(devices) == runs


def test_one_of_a_thing_is_not_many():
    plan = tiny_plan(stages=2, microbatches=1, microbatch_size=32)
    assert "as 1 microbatch of 32" in explain(plan).text and "1 microbatches" not in explain(plan).text


def test_the_star_of_the_summary_is_explained():
    assert "* the slowest group: in the steady state the others wait for it" in explain(tiny_plan()).summary
    assert "*" not in explain(tiny_plan(stages=1)).summary
