"""A plan's simulated step: its figures, and as text, trace and page."""

import json
import re
import xml.etree.ElementTree as ElementTree
from itertools import pairwise

import msgspec
import pytest

import planner
from costmodel.errors import InputError
from costmodel.schedule.actions import Actor, parse_schedule
from planner.plan_problem import problem_of, shared_nics
from planner.report import gantt
from planner.report.step_html import render_html
from planner.report.timeline import run_schedule
from tests.golden_files import check_golden
from tests.plans import GIB, plan_with_groups, tiny_plan

replace = msgspec.structs.replace
LARGE = {"stages": 8, "layers": 8, "devices": 16, "microbatches": 400}


def test_unchanged_it_is_the_plan_s_own_timeline():
    plan = tiny_plan(stages=3, devices=8)
    step = planner.simulate(plan)
    assert step.step == run_schedule(plan) and step.changes == () and step.fits
    assert step.unchanged_s == step.makespan_s
    assert sum(share.time_s for share in step.path) == pytest.approx(step.makespan_s)
    for row, group in zip(step.groups, (stage.groups[0] for stage in plan.stages), strict=True):
        assert row.peak_bytes == group.memory.total_bytes and row.in_flight == group.memory.in_flight


def test_changes_add_up():
    plan = tiny_plan(stages=1)
    plain = planner.simulate(plan)
    assert plain.makespan_s == pytest.approx(4 * 0.006 + 0.003)
    assert planner.simulate(plan, slow={"stage0": 2.0}).makespan_s == pytest.approx(2 * plain.makespan_s)
    assert planner.simulate(plan, slow={"stage0.F": 2.0}).makespan_s == pytest.approx(plain.makespan_s + 4 * 0.002)
    faster = planner.simulate(plan, slow={"stage0.reduce": 0.5}).makespan_s
    assert faster == pytest.approx(plain.makespan_s - 0.001)
    assert planner.simulate(plan, early_reduction=1.0).makespan_s == pytest.approx(plain.makespan_s - 0.002)
    two = tiny_plan(stages=2, microbatches=1)
    late = planner.simulate(two, delay_s={"link0-1": 0.01})
    assert late.makespan_s == pytest.approx(planner.simulate(two).makespan_s + 0.02)
    assert late.unchanged_s == planner.simulate(two).makespan_s
    slower = planner.simulate(two, slow={"0-1": 3.0}).makespan_s
    assert slower == pytest.approx(late.unchanged_s + 2 * 2 * 1e-4)


def test_another_schedule():
    plan = tiny_plan(stages=3, devices=8, microbatches=8)
    step = planner.simulate(plan, schedule="gpipe")
    assert step.changes == ("schedule gpipe instead of 1f1b",)
    assert [row.in_flight for row in step.groups] == [8, 8, 8]
    assert step.groups[0].peak_bytes == plan.stages[0].groups[0].memory.total_bytes + (8 - 3) * GIB // 2
    assert planner.simulate(plan, schedule="1f1b").changes == ()
    tight = tiny_plan(stages=3, devices=8, microbatches=80)
    assert planner.simulate(tight).fits
    full = planner.simulate(tight, schedule="gpipe")
    assert not full.fits and "does not fit: stage 1 needs 46.25 GiB a device, 14.25 GiB more" in full.text


def test_a_schedule_that_cuts_microbatches_has_no_times():
    with pytest.raises(InputError, match="runs 16 units, the plan has times of 4 microbatches") as caught:
        planner.simulate(tiny_plan(), schedule="sequence-chunks")
    assert caught.value.code == "MP195"


def test_virtual_stages_and_weight_gradients(monkeypatch):
    """A V-shape of two chunks a stage with a backward split in two, from a plan that knows stages only."""
    rows = "0.0: 0F0 3F0 3B0 0B0 3W0 0W0\n1.0: 1F0 2F0 2B0 2W0 1B0 1W0"
    schedule = parse_schedule(f"schedule v microbatches 1\n{rows}")
    monkeypatch.setattr("planner.other_schedules.by_name", lambda *_: schedule)
    plan = tiny_plan(stages=2, microbatches=1)
    step = planner.simulate(plan, schedule="zb-v")
    assert [use.busy_s for use in step.step.actors] == pytest.approx([0.006, 0.009])
    assert len(step.notes) == 2 and "~ weight gradient" in step.text
    assert len(step.step.messages) == 4 and len(pictures(step.html)) == 1
    late = planner.simulate(plan, schedule="zb-v", delay_s={"0-1": 0.01})
    assert late.makespan_s == pytest.approx(step.makespan_s + 0.04)
    assert {event.get("args", {}).get("virtual stage") for event in json.loads(step.trace)["traceEvents"]} >= {2, 3}
    slow = planner.simulate(plan, schedule="zb-v", slow={"stage1.W": 2.0})
    assert slow.groups[1].busy_s == pytest.approx(0.009 + 0.003)


def test_a_failed_group_s_microbatches_go_to_its_peer():
    plan = plan_with_groups(stages=2, microbatches=6)
    step = planner.simulate(plan, fail=["stage1/near"])
    assert [(row.label, row.microbatches) for row in step.groups] == [("stage 0", 6), ("stage 1 far", 6)]
    assert step.makespan_s > step.unchanged_s
    assert "stage 1 group 0 failed" in step.changes
    by_number = planner.simulate(plan, fail=["stage1/group0"])
    assert by_number.step == step.step
    # the slow one fails: the fast one takes a third as long for what the slow one did
    assert planner.simulate(plan, fail=["stage1/far"]).groups[1].microbatches == 6


def test_cards_are_shared_between_nodes_only():
    plan = plan_with_groups(stages=3, devices=8, microbatches=6)
    shared = shared_nics(plan, problem_of(plan).schedule)
    # stages 0 and 2 (near) are on node large/0, stage 1 on small/0, the far group on small/1
    assert shared[Actor(0, 0), Actor(1, 0)] == ("large/0 out", "small/0 in")
    assert shared[Actor(1, 0), Actor(0, 0)] == ("small/0 out", "large/0 in")
    assert (Actor(0, 0), Actor(2, 0)) not in shared
    slow = {"link0-1": 80.0, "link1-2": 80.0}
    alone = planner.simulate(plan, slow=slow)
    together = planner.simulate(plan, slow=slow, share_nics=True)
    assert together.makespan_s > alone.makespan_s
    assert "messages of a node share one network card in each direction" in together.changes


def test_jitter_has_a_seed():
    plan = tiny_plan(stages=2)
    runs = [planner.simulate(plan, jitter=0.05, seed=seed).makespan_s for seed in (0, 0, 1)]
    assert runs[0] == runs[1] != runs[2]


@pytest.mark.parametrize(
    ("changes", "code", "part"),
    [
        ({"slow": {"stage2": 2.0}}, "MP190", "no stage 2"),
        ({"slow": {"stage0/group1": 2.0}}, "MP190", "stage 0 has no group 'group1'"),
        ({"slow": {"stage0.X": 2.0}}, "MP190", "'stage0.X' is no stage"),
        ({"slow": {"link1-2": 2.0}}, "MP190", "no link 1-2"),
        ({"slow": {"": 2.0}}, "MP190", "'' is no stage"),
        ({"slow": {"stage0": 0.0}}, "MP193", "factor is 0"),
        ({"delay_s": {"stage0": 1.0}}, "MP190", "'stage0' is no link"),
        ({"delay_s": {"0-1": -1.0}}, "MP193", "delay is -1.0"),
        ({"fail": ["stage0"]}, "MP194", "stage 0 group 0 has no peers"),
        ({"fail": ["0-1"]}, "MP190", "'0-1' is no group"),
        ({"fail": ["stage1"]}, "MP190", "'stage1' is no group"),
        ({"fail": ["stage1/near", "stage1/far"]}, "MP194", "stage 1 group 1 has no peers"),
        ({"fail": ["stage1/near"], "slow": {"stage1/near": 2.0}}, "MP190", "no stage 1 group 0"),
        ({"schedule": "1f2b"}, "MP146", "no schedule '1f2b'"),
        ({"jitter": 1.5}, "MP191", "jitter is 1.5"),
        ({"compute_slowdown": 0.5}, "MP192", "slowdown of compute is 0.5"),
        ({"early_reduction": -0.1}, "MP192", "early share"),
    ],
)
def test_bad_changes(changes, code, part):
    with pytest.raises(InputError) as caught:
        planner.simulate(plan_with_groups(stages=2), **changes)
    assert caught.value.code == code and part in caught.value.message


def test_golden_text():
    plan = plan_with_groups(stages=3, devices=8, microbatches=6)
    step = planner.simulate(plan, slow={"stage1": 1.5}, delay_s={"1-2": 0.003})
    check_golden("simulate.txt", step.text)
    assert repr(step) == step.text.split("\n\nCritical path")[0].replace("\n\nStages\n", "\n\n")


def test_plain_data():
    document = json.loads(json.dumps(planner.simulate(tiny_plan(), slow={"stage1": 2.0}).to_plain(), allow_nan=False))
    assert document["step_time_s"] > document["unchanged_step_time_s"]
    assert sum(entry["time_s"] for entry in document["critical_path"]) == pytest.approx(document["step_time_s"])
    assert document["what_ifs"][0]["what"] == "B of stage 1 30% faster"
    assert [group["label"] for group in document["groups"]] == ["stage 0", "stage 1"]


def test_trace():
    plan = plan_with_groups(stages=3, devices=8, microbatches=6)
    step = planner.simulate(plan)
    assert step.trace == planner.simulate(plan).trace
    document = json.loads(step.trace)
    events = document["traceEvents"]
    assert document["displayTimeUnit"] == "ms" and {event["ph"] for event in events} == {"M", "X", "C"}
    complete = [event for event in events if event["ph"] == "X"]
    actions = [event for event in complete if event["cat"] in ("forward", "backward")]
    assert len(actions) == 2 * 3 * 6
    assert len([event for event in complete if event["cat"] in ("activations", "gradient")]) == 2 * 2 * 6
    end_us = max(event["ts"] + event["dur"] for event in complete)
    assert end_us == pytest.approx(step.makespan_s * 1e6, abs=1 / 64)
    threads = {}
    for event in complete:
        assert event["dur"] >= 0 and event["ts"] >= 0
        threads.setdefault((event["pid"], event["tid"]), []).append(event)
    names = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert set(threads) <= set(names) and len(set(names.values())) == len(names)
    for own in threads.values():  # events of one thread do not overlap
        own.sort(key=lambda event: event["ts"])
        assert all(one["ts"] + one["dur"] <= other["ts"] for one, other in pairwise(own))
    peaks = [max(e["args"]["bytes"] for e in events if e["ph"] == "C" and e["pid"] == 1 + stage) for stage in range(3)]
    assert peaks == [max(row.peak_bytes for row in step.groups if row.stage == stage) for stage in range(3)]


def pictures(text):
    return [ElementTree.fromstring(svg) for svg in re.findall(r"<svg.*?</svg>", text, re.DOTALL)]


def rects(picture, *names):
    found = picture.iter("{http://www.w3.org/2000/svg}rect")
    return [rect for rect in found if set(rect.get("class", "").split()) & set(names)]


def test_page_of_a_small_step():
    plan = plan_with_groups(stages=3, devices=8, microbatches=6)
    step = planner.simulate(plan, slow={"stage1": 1.5})
    page = step.html
    assert page == planner.simulate(plan, slow={"stage1": 1.5}).html and step._repr_html_() == render_html(step)
    assert page.startswith("<!DOCTYPE html>") and 'content="light dark"' in page
    assert "<script" not in page and not re.search(r"""(src|href)=|url\(|@import""", page)
    (picture,) = pictures(page)
    assert len(rects(picture, "f", "b")) == 2 * 3 * 6
    critical = {segment.action for segment in step.chain if segment.part in "FB"}
    assert len(rects(picture, "c")) == len(critical)
    width = float(picture.get("width"))
    for rect in rects(picture, "f", "b", "o", "u"):
        assert rect.find("{http://www.w3.org/2000/svg}title").text
        assert float(rect.get("x")) >= 0 and float(rect.get("x")) + float(rect.get("width")) <= width
    assert "changed: stage 1 takes 1.5x as long" in page


def test_page_of_a_large_step_has_few_shapes():
    step = planner.simulate(tiny_plan(**LARGE), most_what_ifs=0)
    assert not gantt.draws_each(step) and step.what_ifs == ()
    page = step.html
    overview, *windows = pictures(page)
    assert len(windows) == 3 and not rects(overview, "f", "b")
    assert len(rects(overview, "tip")) == 8 * gantt.TIPS
    for window in windows:
        assert 0 < len(rects(window, "f", "b")) <= 2 * gantt.MOST_SHAPES
    assert len(page) < 1_500_000


def test_shares_of_an_aggregated_picture_are_the_busy_time():
    step = planner.simulate(tiny_plan(**LARGE), most_what_ifs=0)
    overview = pictures(step.html)[0]
    for at, use in enumerate(step.step.actors):
        tips = rects(overview, "tip")[at * gantt.TIPS : (at + 1) * gantt.TIPS]
        waiting = [float(re.search(r"waiting (\d+)%", tip[0].text)[1]) / 100 for tip in tips]
        assert 1 - sum(waiting) / gantt.TIPS == pytest.approx(use.busy_s / step.makespan_s, abs=0.01)


@pytest.mark.parametrize(("start_s", "end_s"), [(0.0, 1.0), (0.0, 0.0123), (1.37, 1.52), (0.0, 7e-9), (100.0, 4000.0)])
def test_ticks_are_round_and_inside(start_s, end_s):
    found = gantt.ticks(start_s, end_s)
    assert 3 <= len(found) <= 9
    assert all(start_s - 1e-12 <= time_s <= end_s * (1 + 1e-9) for time_s in found)


def test_a_step_without_times_has_no_pictures():
    plan = tiny_plan(stages=1)
    group = plan.stages[0].groups[0]
    idle = replace(group.time, forward_s=0.0, backward_s=0.0, once_s=0.0, gradient_reduction_s=0.0, optimizer_s=0.0)
    step = planner.simulate(replace(plan, stages=(replace(plan.stages[0], groups=(replace(group, time=idle),)),)))
    assert step.makespan_s == 0.0
    assert "no times" in step.text and "no times" in step.html and json.loads(step.trace)
