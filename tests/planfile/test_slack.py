"""The slack that a plan file states is that of its own simulation, and goes through the file."""

import json

import msgspec
import pytest

import planner
from planner.check.rules import check_plan
from planner.plan_slack import with_slack
from planner.planfile.codec import decode, encode
from tests.plans import plan_with_groups, tiny_cluster, tiny_plan


@pytest.mark.parametrize("plan", [tiny_plan(stages=3, microbatches=12), plan_with_groups(stages=2, microbatches=9)])
def test_slack_goes_through_the_file_and_holds_in_simulation(plan):
    plan = decode(encode(with_slack(plan)))
    before_s = planner.simulate(plan).makespan_s
    assert plan.transfers and all(transfer.slack is not None for transfer in plan.transfers)
    for transfer in plan.transfers:
        link, slack = f"{transfer.from_stage}-{transfer.to_stage}", transfer.slack
        late = planner.simulate(plan, delay_s={link: slack.free_s})
        assert late.makespan_s == pytest.approx(before_s, rel=1e-9)
        assert planner.simulate(plan, delay_s={link: slack.free_s + 1e-5}).makespan_s > before_s + 1e-6
        if slack.absorbs_s is not None:
            once_s = planner.simulate(plan, delay_s={link: slack.absorbs_s}).makespan_s
            assert once_s <= before_s + 2 * slack.absorbs_s + 1e-9
            more_s = slack.absorbs_s + 1e-5
            assert planner.simulate(plan, delay_s={link: more_s}).makespan_s > before_s + 2 * more_s


def test_plans_of_an_earlier_meshplan_are_read():
    plan = tiny_plan(stages=2)
    document = json.loads(encode(plan))
    for transfer in document["transfers"]:
        del transfer["slack"]
    for row in document["schedule"]["actors"]:
        del row["warm_up"]
    for group in (group for stage in document["stages"] for group in stage["groups"]):
        del group["memory"]["until_weights_bytes"]
    found = decode(json.dumps(document).encode())
    assert found.transfers[0].slack is None and found.schedule.actors[0].warm_up is None
    assert check_plan(found, tiny_cluster()) == ()


def test_a_delay_that_is_always_absorbed_is_null():
    plan = with_slack(tiny_plan(stages=2, microbatches=1))
    assert plan.transfers[0].slack.absorbs_s is None
    assert decode(encode(plan)) == plan


def test_a_schedule_that_is_too_long_has_no_slack(monkeypatch):
    monkeypatch.setattr("planner.plan_slack.LONGEST", 3)
    assert with_slack(tiny_plan(stages=2)).transfers[0].slack is None


def test_stated_figures_are_checked():
    plan = tiny_plan(stages=2)
    actors = (msgspec.structs.replace(plan.schedule.actors[0], warm_up=7), *plan.schedule.actors[1:])
    wrong = msgspec.structs.replace(plan, schedule=msgspec.structs.replace(plan.schedule, actors=actors))
    found = check_plan(wrong, tiny_cluster())
    assert [(f.code, f.where) for f in found] == [("MP615", "schedule.actors[0].warm_up")]
    assert "states 7 forwards of warm-up, its action list runs 2" in found[0].message
