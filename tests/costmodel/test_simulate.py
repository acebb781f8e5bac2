"""The simulator by hand: links, split backwards, virtual stages, and what it rejects."""

import pytest

from costmodel.errors import InputError
from costmodel.schedule.actions import Action, Actor, parse_schedule
from costmodel.schedule.generate import gpipe, one_f_one_b
from costmodel.simulate import SendTimes, StageTimes, UpdateWait, simulate
from tests.costmodel.pipelines import chain


def test_a_link_carries_one_message_at_a_time():
    """Two microbatches leave stage 0 at 1 and 2; each occupies the link for 3 and then travels for 10."""
    times, sends = chain([1.0, 1.0], [1.0, 1.0], 3.0, 0.0, 10.0)
    result = simulate(gpipe(2, 2), times, sends)
    starts = [e.start_s for e in result.timeline if e.actor == (1, 0) and e.action.kind == "F"]
    assert starts == [1 + 3 + 10, 1 + 3 + 3 + 10]


def test_directions_do_not_share_a_link():
    times, sends = chain([1.0, 1.0], [1.0, 1.0], 5.0)
    result = simulate(one_f_one_b(2, 2), times, sends)
    starts = {e.action: e.start_s for e in result.timeline}
    assert starts[Action(0, "B", 0)] == 1 + 5 + 1 + 1 + 5  # while the activation of microbatch 1 is on its way until 11


def test_backward_is_whole_unless_the_schedule_splits_it():
    times = {Actor(0, 0): StageTimes(forward_s=1.0, backward_s=2.0, weight_s=4.0)}
    fused = simulate(parse_schedule("schedule x microbatches 1\n0.0: 0F0 0B0"), times)
    split = simulate(parse_schedule("schedule x microbatches 1\n0.0: 0F0 0B0 0W0"), times)
    assert [(str(e.action), e.start_s, e.end_s) for e in fused.timeline] == [("0F0", 0, 1), ("0B0", 1, 7)]
    assert [(str(e.action), e.start_s, e.end_s) for e in split.timeline] == [
        ("0F0", 0, 1),
        ("0B0", 1, 3),
        ("0W0", 3, 7),
    ]


def test_virtual_stages_on_one_actor_send_nothing():
    """The turn of a V-shape needs no link; the two chunks' messages share the link between the actors."""
    schedule = parse_schedule("schedule v microbatches 1\n0.0: 0F0 3F0 3B0 0B0\n1.0: 1F0 2F0 2B0 1B0")
    times = {Actor(stage, 0): StageTimes(forward_s=1.0, backward_s=1.0) for stage in range(4)}
    sends = {(Actor(a, 0), Actor(a + 1, 0)): SendTimes(activation_s=2.0, gradient_s=2.0) for a in (0, 2)}
    result = simulate(schedule, times, sends)
    assert result.makespan_s == 8 + 4 * 2.0
    assert result.use(0).peak_in_flight == 2


def test_timeline_is_optional():
    times, sends = chain([1.0, 2.0], [2.0, 1.0], 0.5)
    with_timeline = simulate(one_f_one_b(2, 4), times, sends)
    without = simulate(one_f_one_b(2, 4), times, sends, keep_timeline=False)
    assert without.timeline == ()
    assert (without.makespan_s, without.actors) == (with_timeline.makespan_s, with_timeline.actors)


def test_missing_times_and_links_are_named():
    times, sends = chain([1.0, 1.0], [1.0, 1.0], 1.0)
    with pytest.raises(InputError, match="no times for stage 1 group 0") as caught:
        simulate(gpipe(2, 2), {Actor(0, 0): times[Actor(0, 0)]})
    assert caught.value.code == "MP145"
    with pytest.raises(InputError, match="no send times from stage 0 group 0 to stage 1 group 0") as caught:
        simulate(gpipe(2, 2), times, {})
    assert caught.value.code == "MP145"
    with pytest.raises(KeyError):
        simulate(gpipe(2, 2), times, sends).use(2)


def test_times_that_no_sum_holds_are_refused():
    """One message of 1e308 s is a number, all of them together are none."""
    times, sends = chain([1.0, 1.0], [1.0, 1.0], latency_s=1e308)
    with pytest.raises(InputError, match=r"messages inf s.* more than 1e\+302 s") as caught:
        simulate(gpipe(2, 2), times, sends)
    assert caught.value.code == "MP147"
    times, sends = chain([1.0, 1e300], [1.0, 1.0])
    assert simulate(gpipe(2, 2), times, sends).makespan_s >= 2e300


@pytest.mark.parametrize("time_s", [-1.0, float("nan"), float("inf")])
def test_times_must_be_finite_and_not_negative(time_s):
    times, sends = chain([1.0, time_s], [1.0, 1.0])
    with pytest.raises(InputError, match=f"stage 1 group 0: forward_s is {time_s}") as caught:
        simulate(gpipe(2, 2), times)
    assert caught.value.code == "MP147"
    times, sends = chain([1.0, 1.0], [1.0, 1.0], latency_s=time_s)
    with pytest.raises(InputError, match=f"latency_s is {time_s}"):
        simulate(gpipe(2, 2), times, sends)
    wait = UpdateWait(stages=frozenset({0, 1}), time_s=time_s)
    with pytest.raises(InputError, match=f"update of stage 0: time_s is {time_s}"):
        simulate(gpipe(2, 2), times, waits={0: wait})


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("0.0: 0F0 0B0 0F1 0B1\n1.0: 1F0 1F1 1B0 1B1", "MP613"),
        ("0.0: 0F0 0F1 0B0 0B1\n1.0: 1F0 1B0 1B1", "MP610"),
        ("0.0: 0F0 0F0 0F1 0B0 0B1\n1.0: 1F0 1B0 1F1 1B1", "MP611"),
        ("0.0: 0F0 0F1 0B0 0B1 0F2\n1.0: 1F0 1B0 1F1 1B1", "MP614"),
    ],
)
def test_a_schedule_that_cannot_run_is_rejected_with_the_grid(text, code):
    schedule = parse_schedule(f"schedule broken microbatches 2\n{text}")
    with pytest.raises(InputError) as caught:
        simulate(schedule, chain([1.0, 1.0], [1.0, 1.0])[0])
    assert caught.value.code == "MP148"
    assert f"{code}: " in caught.value.message
    assert "stage 1 group 0 | " in caught.value.message


def test_forwards_that_nobody_takes_go_nowhere():
    schedule = parse_schedule("schedule x microbatches 2\n0.0: 0F0 0F1\n1.0: 1F1")
    times, sends = chain([1.0, 1.0], [1.0, 1.0], 1.0)
    result = simulate(schedule, times, sends)
    assert [(str(m.action), m.start_s) for m in result.messages] == [("0F1", 2.0)]
    assert result.makespan_s == 4.0
