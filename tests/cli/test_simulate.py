"""`meshplan simulate`: what it prints, writes and refuses."""

import json

import msgspec
import pytest

from planner.plan_files import write_plan
from planner.planfile.codec import encode
from planner.report.timeline import render_timeline
from tests.plans import plan_with_groups, tiny_plan, with_uneven_transfers


def test_text_and_files(call, tmp_path):
    done = call("simulate", "good.plan.json", "--slow", "stage1=1.5x", "--html", "x.html", "--trace", "x.json")
    assert done.code == 0 and done.err == "wrote x.json\nwrote x.html\n"
    assert "changed: stage 1 takes 1.5x as long" in done.out and "\nTimeline\nstage 0 | 0" in done.out
    assert (tmp_path / "x.html").read_text().startswith("<!DOCTYPE html>")
    assert json.loads((tmp_path / "x.json").read_text())["otherData"]["plan"] == "tiny"
    again = call("simulate", "good.plan.json", "--slow", "stage1=1.5", "-o", "report.txt")
    assert again.code == 0 and not again.out and (tmp_path / "report.txt").read_text() == done.out


def test_every_change_is_named(call):
    write_plan("groups.plan.json", plan_with_groups(stages=2, microbatches=6))
    done = call(
        "simulate", "groups.plan.json", "--fail", "stage1/far", "--slow", "stage0.B=0.7x", "--slow", "link0-1=2x",
        "--delay", "0-1=30us", "--schedule", "gpipe", "--jitter", "5%", "--seed", "3", "--share-nics",
        "--comm-slowdown", "1.1x", "--early-reduction", "50%", "--what-ifs", "0", "--json",
    )  # fmt: skip
    assert done.code == 0 and not done.err
    document = json.loads(done.out)
    assert document["changes"] == [
        "schedule gpipe instead of 1f1b", "stage 1 group 1 failed", "B of stage 0 takes 0.7x as long",
        "link 0-1 takes 2x as long", "messages of link 0-1 arrive 30 us later",
        "messages of a node share one network card in each direction",
        "compute takes 1.1x as long beside communication",
        "50% of each gradient reduction runs beside the last action", "all times jitter by up to 5%, seed 3",
    ]  # fmt: skip
    assert document["what_ifs"] == []


def test_a_plan_that_does_not_fit_is_a_finding(call):
    write_plan("long.plan.json", tiny_plan(microbatches=80))
    assert call("simulate", "long.plan.json").code == 0
    done = call("simulate", "long.plan.json", "--schedule", "gpipe", "--json")
    assert done.code == 1 and json.loads(done.out)["fits"] is False


@pytest.mark.parametrize(
    ("args", "code", "part"),
    [
        (["--slow", "stage1"], "MP100", "stage2=1.5x"),
        (["--slow", "stage1=fast"], "MP100", "'fast' is no factor"),
        (["--slow", "=2x"], "MP100", "stage2=1.5x"),
        (["--slow", "stage1=2x", "--slow", "stage1=3x"], "MP100", "twice"),
        (["--slow", "stage7=2x"], "MP190", "no stage 7"),
        (["--slow", "stage1=nan"], "MP193", "factor is nan"),
        (["--delay", "0-1=3"], "MP100", "'3' is no time"),
        (["--delay", "0-5=3ms"], "MP190", "no link 0-5"),
        (["--fail", "stage1/group0"], "MP194", "no peers"),
        (["--schedule", "zb"], "MP146", "no schedule 'zb'"),
        (["--jitter", "some"], "MP100", "'some' is no share"),
        (["--jitter", "200%"], "MP191", "jitter is 2"),
        (["--comm-slowdown", "0.9x"], "MP192", "0.9"),
        (["--early-reduction", "120%"], "MP192", "1.2"),
        (["--what-ifs", "-1"], "MP100", "--what-ifs"),
        (["--html", "no/such/folder/x"], "MP156", "cannot write"),
    ],
)
def test_bad_input(call, args, code, part):
    done = call("simulate", "good.plan.json", *args)
    assert done.code == 2 and done.err.startswith(f"error {code}: ") and part in " ".join(done.err.split())
    assert not done.out


@pytest.mark.parametrize(
    ("path", "value", "error"),
    [
        (("to_stage",), -1, "MP616: transfers[0] leads from stage 0 to stage -1 of 2 stages"),
        (("from_stage",), 7, "MP616: transfers[0] leads from stage 7 to stage 1 of 2 stages"),
        (("links", 0, "gradient_s"), 1e308, "MP147: actions take"),
    ],
)
def test_transfers_that_no_step_can_have(call, tmp_path, path, value, error):
    document = json.loads(encode(with_uneven_transfers(tiny_plan())))
    *parents, last = path
    place = document["transfers"][0]
    for step in parents:
        place = place[step]
    place[last] = value
    (tmp_path / "bad.plan.json").write_text(json.dumps(document))
    done = call("simulate", "bad.plan.json")
    assert done.code == 2 and not done.out and f"error {error}" in " ".join(done.err.split())


def test_a_step_that_is_long_beside_its_shortest_action_is_drawn():
    plan = with_uneven_transfers(tiny_plan())
    link = msgspec.structs.replace(plan.transfers[0].links[0], activation_s=1e300)
    slow = msgspec.structs.replace(plan.transfers[0], links=(link,))
    stage = plan.stages[0]
    time = msgspec.structs.replace(stage.groups[0].time, forward_s=1e-300)
    quick = msgspec.structs.replace(stage, groups=(msgspec.structs.replace(stage.groups[0], time=time),))
    drawn = render_timeline(msgspec.structs.replace(plan, transfers=(slow,), stages=(quick, *plan.stages[1:])))
    assert "of 100000 columns left out" in drawn


def test_a_plan_that_cannot_be_read(call, tmp_path):
    (tmp_path / "cut.plan.json").write_text("{")
    assert call("simulate", "cut.plan.json").err.startswith("error MP151")
    assert call("simulate", "none.plan.json").err.startswith("error MP150")
