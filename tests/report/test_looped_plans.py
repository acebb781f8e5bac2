"""Plans whose devices run several stages: other schedules on them, and what their stages and links are called."""

import json
from dataclasses import replace

import msgspec
import pytest

import planner
from costmodel.errors import InputError
from costmodel.schedule.actions import Actor
from costmodel.schedule.generate import one_f_one_b
from costmodel.schedule.registry import make_schedule
from costmodel.simulate import SendTimes, StageTimes, simulate
from costmodel.units import format_bytes
from planner.check.device_memory import device_bytes
from planner.device_stages import device_stages
from planner.plan_problem import problem_of
from planner.plan_slack import with_slack
from tests.plans import GIB, looped_plan, tiny_plan

LOOPED = ["interleaved", "breadth-first", "zb-v", "v-half", "v-min"]


@pytest.mark.parametrize("name", LOOPED)
def test_its_own_schedule_by_name_is_its_own(name):
    plan = looped_plan(name, homes=3)
    own, named = planner.simulate(plan), planner.simulate(plan, schedule=name)
    assert named.step == own.step and named.changes == ()


@pytest.mark.parametrize("name", LOOPED)
@pytest.mark.parametrize("alike", [True, False])
def test_straight_schedules_join_the_stages_of_each_set_of_devices(name, alike):
    """Times and sends by hand: the schedule runs p stages, each as long as all its parts."""
    plan = looped_plan(name, homes=2, microbatches=8, alike=alike)
    homes = problem_of(plan).schedule.homes
    times = {}
    for home in range(2):
        parts = [plan.stages[s].groups[0].time for s in homes if homes[s] == home]
        times[Actor(home, 0)] = StageTimes(
            forward_s=sum(t.forward_s for t in parts),
            backward_s=sum(t.backward_s for t in parts),
            reduce_s=sum(t.gradient_reduction_s for t in parts),
            update_s=sum(t.optimizer_s for t in parts),
        )
    sends = {(Actor(0, 0), Actor(1, 0)): SendTimes(activation_s=1e-4, gradient_s=1e-4)}
    step = planner.simulate(plan, schedule="1f1b")
    assert step.makespan_s == pytest.approx(simulate(one_f_one_b(2, 8), times, sends).makespan_s, rel=1e-12)
    assert [len(row.stages) for row in step.groups] == [2, 2] and step.step.schedule.stages == 2
    assert "joined to one" in " ".join(step.notes)
    for row, held in zip(step.groups, (2, 1), strict=True):
        # parameters, gradients, optimizer state of both parts; their largest transient and reserve once
        parameters = sum(plan.stages[s].groups[0].memory.parameters_bytes for s in row.stages)
        assert row.peak_bytes == parameters + (2 * 5 + held) * GIB + GIB // 4 + GIB


@pytest.mark.parametrize("name", LOOPED)
def test_memory_is_told_per_device_over_all_stages_that_it_runs(name):
    """Parameters, gradients and state of both stages; the largest transient and the reserve once; the sum is what a
    simulated step and the check of the plan count."""
    plan = looped_plan(name, homes=2, microbatches=8)
    larger = msgspec.structs.replace(
        (memory := plan.stages[3].groups[0].memory),
        transient_bytes=memory.transient_bytes + GIB,
        total_bytes=memory.total_bytes + GIB,
    )
    group = msgspec.structs.replace(plan.stages[3].groups[0], memory=larger)
    stages = (*plan.stages[:3], msgspec.structs.replace(plan.stages[3], groups=(group,)))
    plan = msgspec.structs.replace(plan, stages=stages)
    rows, needs = planner.explain(plan).memory, {a.stage: size for a, size in device_bytes(plan).items()}
    parts = device_stages(plan)
    assert {row.label: row.stage for row in rows} == {f"{a}+{b}": a for a, b in parts.values()}
    for row in rows:
        each = [plan.stages[int(stage)].groups[0].memory for stage in row.label.split("+")]
        assert row.items["saved"] == sum(m.saved_bytes for m in each) and row.in_flight == sum(
            m.in_flight for m in each
        )
        assert row.items["transient"] == max(m.transient_bytes for m in each) and row.items["reserve"] == GIB
        assert sum(row.items.values()) == row.total_bytes == needs[row.stage] > max(m.total_bytes for m in each)
        assert row.headroom_bytes == row.limit_bytes - row.total_bytes
    worst = max(rows, key=lambda row: row.total_bytes)
    assert f"worst memory: stage {worst.label}, {format_bytes(worst.total_bytes)} of 80.00 GiB a device" in repr(plan)
    assert f"{worst.label} " in planner.explain(plan)._repr_html_()


def test_a_plan_made_straight_and_the_joined_one_agree():
    """Four stages on two sets of devices, joined, are the two stages that a plan would have made of them."""
    looped = looped_plan("interleaved", homes=2, microbatches=8)
    straight = tiny_plan(stages=2, layers=4, microbatches=8, devices=16)
    homes = problem_of(looped).schedule.homes
    stages = []
    for home, stage in enumerate(straight.stages):
        parts = [looped.stages[s].groups[0].time for s in homes if homes[s] == home]
        names = ("forward_s", "backward_s", "gradient_reduction_s", "optimizer_s")
        time = msgspec.structs.replace(
            stage.groups[0].time, **{name: sum(getattr(t, name) for t in parts) for name in names}
        )
        stages.append(msgspec.structs.replace(stage, groups=(msgspec.structs.replace(stage.groups[0], time=time),)))
    made = msgspec.structs.replace(straight, stages=tuple(stages))
    for name in ("1f1b", "gpipe", "zb-h1"):
        joined, own = (planner.simulate(plan, schedule=name) for plan in (looped, made))
        assert joined.makespan_s == pytest.approx(own.makespan_s, rel=1e-12)


def test_another_placement_takes_the_records_of_the_stages_along():
    plan = looped_plan("interleaved", homes=2, microbatches=8)
    step = planner.simulate(plan, schedule="zb-v")
    times = {
        Actor(s, 0): StageTimes(
            forward_s=t.forward_s,
            backward_s=t.backward_s / 2,
            weight_s=t.backward_s / 2,
            reduce_s=t.gradient_reduction_s,
            update_s=t.optimizer_s,
        )
        for s, t in enumerate(stage.groups[0].time for stage in plan.stages)
    }
    send = SendTimes(activation_s=1e-4, gradient_s=1e-4)
    sends = {(Actor(s, 0), Actor(s + 1, 0)): send for s in (0, 2)}
    assert step.makespan_s == pytest.approx(simulate(make_schedule("zb-v", 2, 8), times, sends).makespan_s, rel=1e-12)
    assert "stages run on other devices than in the plan" in " ".join(step.notes)


@pytest.mark.parametrize(
    ("plan", "schedule", "code", "parts"),
    [
        (
            looped_plan("interleaved", alike=False),
            "zb-v",
            "MP196",
            ("runs stage 3 on the devices of stage 0 (4 x Large-80GB)", "on others (4 x Small-32GB)"),
        ),
        (looped_plan("interleaved", chunks=4), "zb-v", "MP196", ("runs 2 stages on each", "times of 4 there")),
        (looped_plan("interleaved"), "hetero-1f1b", "MP146", ("needs delays_s, stage_times_s",)),
        (looped_plan("interleaved"), "sequence-chunks", "MP195", ("runs 16 units",)),
        (tiny_plan(), "layer-major", "MP146", ("needs layers",)),
    ],
)
def test_what_the_plan_has_no_times_for_is_refused(plan, schedule, code, parts):
    with pytest.raises(InputError) as caught:
        planner.simulate(plan, schedule=schedule)
    assert caught.value.code == code and all(part in caught.value.message for part in parts)
    assert "gpipe" in caught.value.hint or schedule == "zb-v"


def test_errors_list_only_what_can_be_simulated():
    for plan, more in ((tiny_plan(), False), (looped_plan("interleaved"), True)):
        with pytest.raises(InputError, match="no schedule 'zbv'") as caught:
            planner.simulate(plan, schedule="zbv")
        names = caught.value.hint.split("known: ")[1].split(", ")
        assert ("layer-major" in names) is more
        for name in names:
            assert planner.simulate(plan, schedule=name).makespan_s > 0


def test_one_numbering_of_stages_and_links():
    plan = looped_plan("zb-v", homes=3, microbatches=8)
    step = planner.simulate(plan)
    assert [row.label for row in step.groups] == ["stage 0+5", "stage 1+4", "stage 2+3"]
    assert [row.stages for row in step.groups] == [(0, 5), (1, 4), (2, 3)]
    assert "6 stages on 3 sets of devices" in step.text
    slow = [planner.simulate(plan, slow={place: 2.0}) for place in ("stage1", "stage4")]
    assert slow[0].changes == slow[1].changes == ("stage 1+4 takes 2x as long",)
    assert slow[0].step == slow[1].step and slow[0].groups[1].busy_s == pytest.approx(2 * step.groups[1].busy_s)
    late = [planner.simulate(plan, delay_s={link: 0.01}) for link in ("0-1", "4-5", "link5-4")]
    assert {run.changes for run in late} == {("messages of link 0-1 (and 4-5) arrive 10 ms later",)}
    assert len({run.makespan_s for run in late}) == 1 and late[0].makespan_s > step.makespan_s
    what = {entry.what: entry.makespan_s for entry in planner.simulate(plan, most_what_ifs=50).what_ifs}
    assert what["B of stage 0+5 30% faster"] == pytest.approx(planner.simulate(plan, slow={"stage5.B": 0.7}).makespan_s)
    warm_ups = planner.explain(plan).text
    assert "on stage 0+5" in warm_ups and "on stage 2+3" in warm_ups
    names = [e["args"]["name"] for e in json.loads(step.trace)["traceEvents"] if e["name"] == "process_name"]
    assert names == [row.label for row in step.groups]


def test_a_looped_link_leads_back_to_the_first_devices():
    plan = looped_plan("interleaved", homes=3)
    late = planner.simulate(plan, delay_s={"2-3": 0.01})
    assert late.changes == ("messages of link 2-3 arrive 10 ms later",) and late.makespan_s > late.unchanged_s
    assert planner.simulate(plan, delay_s={"0-2": 0.01}).step == late.step  # the same two sets of devices


@pytest.mark.parametrize(
    ("changes", "code", "message", "hint"),
    [
        (
            {"slow": {"stage6": 2.0}},
            "MP190",
            "no stage 6",
            "stages are 0 to 5; on the same devices are 0 and 5, 1 and 4",
        ),
        ({"delay_s": {"5-6": 1.0}}, "MP190", "no link 5-6", "links are 0-1 (and 4-5), 1-2 (and 3-4)"),
        ({"delay_s": {"2-3": 1.0}}, "MP190", "no link 2-3: both stages are on the same devices", "links are"),
        ({"delay_s": {"0-2": 1.0}}, "MP190", "no link 0-2", "links are 0-1"),
        ({"fail": ["stage6"]}, "MP190", "no stage 6", "stages are 0 to 5"),
        ({"fail": ["stage4"]}, "MP194", "stage 1+4 group 0 has no peers", "plan again"),
        ({"slow": {"stage5.W": 2.0}, "schedule": "1f1b"}, "MP190", "1f1b runs no W", "change stage5.B"),
    ],
)
def test_what_there_is_not_names_what_there_is(changes, code, message, hint):
    with pytest.raises(InputError) as caught:
        planner.simulate(looped_plan("zb-v", homes=3), **changes)
    assert caught.value.code == code and message in caught.value.message and hint in caught.value.hint


def test_w_of_a_schedule_without_any_is_an_error():
    plan = tiny_plan()
    with pytest.raises(InputError, match="schedule 1f1b runs no W by itself") as caught:
        planner.simulate(plan, slow={"stage1.W": 2.0})
    assert caught.value.code == "MP190"
    split = planner.simulate(plan, schedule="zb-h1")
    assert planner.simulate(plan, schedule="zb-h1", slow={"stage1.W": 2.0}).makespan_s > split.makespan_s


@pytest.mark.parametrize("name", ["interleaved", "zb-v"])
def test_slack_is_that_of_the_link(name):
    """What `explain` says a link absorbs is what a delay of that link shows."""
    plan = with_slack(looped_plan(name, homes=3, microbatches=12))
    before_s = planner.simulate(plan).makespan_s
    homes = problem_of(plan).schedule.homes
    ends = [tuple(sorted((homes[t.from_stage], homes[t.to_stage]))) for t in plan.transfers]
    for transfer, pair in zip(plan.transfers, ends, strict=True):
        if pair[0] == pair[1]:
            assert transfer.slack is None
            continue
        link, slack, borders = f"{transfer.from_stage}-{transfer.to_stage}", transfer.slack, ends.count(pair)
        assert planner.simulate(plan, delay_s={link: slack.free_s}).makespan_s == pytest.approx(before_s, rel=1e-9)
        assert planner.simulate(plan, delay_s={link: slack.free_s + 1e-5}).makespan_s > before_s + 1e-6
        if slack.absorbs_s is not None:
            most_s = planner.simulate(plan, delay_s={link: slack.absorbs_s}).makespan_s
            assert most_s <= before_s + 2 * borders * slack.absorbs_s + 1e-9
            more_s = slack.absorbs_s + 1e-5
            assert planner.simulate(plan, delay_s={link: more_s}).makespan_s > before_s + 2 * borders * more_s


def with_weights(plan, share):
    """The plan with a share of each backward for weight gradients."""
    stages = tuple(
        msgspec.structs.replace(
            stage,
            groups=tuple(
                msgspec.structs.replace(g, time=msgspec.structs.replace(g.time, weight_s=g.time.backward_s * share))
                for g in stage.groups
            ),
        )
        for stage in plan.stages
    )
    return msgspec.structs.replace(plan, stages=stages)


def test_a_backward_may_be_all_weight_gradients():
    """As on a stage whose input needs no gradient. Their time is a sum of its own, so it may be the least bit more."""
    plan = looped_plan("zb-v")
    exact, rounded = (planner.simulate(with_weights(plan, share)) for share in (1.0, 1.0 + 1e-15))
    assert exact.step.costs.stages[0][0].backward_s == rounded.step.costs.stages[0][0].backward_s == 0.0
    assert rounded.makespan_s == exact.makespan_s
    with pytest.raises(InputError, match="backward_s is -") as caught:
        planner.simulate(with_weights(plan, 1.5))
    assert caught.value.code == "MP147"


def test_weight_gradients_of_known_times_are_not_assumed():
    plan = looped_plan("zb-v")
    assert "assumed to take 50%" in " ".join(planner.simulate(plan).notes)
    known = planner.simulate(with_weights(plan, 0.25))
    assert known.notes == ()
    assert known.step.costs.stages[0][0] == replace(
        known.step.costs.stages[0][0], weight_s=plan.stages[0].groups[0].time.backward_s / 4
    )
