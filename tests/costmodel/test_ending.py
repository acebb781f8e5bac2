"""The end of a step: reductions, exchanges between groups, and what updates wait for."""

from costmodel.schedule.actions import Actor
from costmodel.schedule.generate import gpipe, one_f_one_b
from costmodel.simulate import StageTimes, UpdateWait, simulate


def test_groups_of_a_stage_meet_before_they_update():
    times = {
        Actor(0, 0): StageTimes(forward_s=1.0, backward_s=1.0, reduce_s=2.0, exchange_s=3.0, update_s=4.0),
        Actor(0, 1): StageTimes(forward_s=5.0, backward_s=5.0, reduce_s=1.0, exchange_s=3.0, update_s=1.0),
    }
    result = simulate(gpipe(1, 2, [[(0,), (1,)]]), times)
    assert [use.step_end_s for use in result.actors] == [11 + 3 + 4, 11 + 3 + 1]
    assert (result.pipeline_s, result.makespan_s) == (10.0, 18.0)


def test_global_norm_makes_every_stage_wait_for_the_first():
    """1F1B ends on stage 0; without a barrier the last stage updates long before."""
    times = {Actor(i, 0): StageTimes(forward_s=1.0, backward_s=1.0, reduce_s=0.5, update_s=0.25) for i in range(3)}
    free = simulate(one_f_one_b(3, 4), times)
    assert [use.step_end_s for use in free.actors] == [12.75, 11.75, 10.75]
    every = UpdateWait(stages=frozenset({0, 1, 2}), time_s=0.125)
    tied = simulate(one_f_one_b(3, 4), times, waits=dict.fromkeys(range(3), every))
    assert [use.step_end_s for use in tied.actors] == [12 + 0.5 + 0.125 + 0.25] * 3
    assert [use.joined_s for use in tied.actors] == [0.125, 1.125, 2.125]


def test_an_update_waits_for_those_stages_only_that_it_reads():
    """Stages of unequal speed; the second and the third share a leaf that the optimizer takes the norm of."""
    times = {
        Actor(i, 0): StageTimes(forward_s=t, backward_s=t, reduce_s=r, update_s=0.25)
        for i, (t, r) in enumerate([(1.0, 0.0), (3.0, 4.0), (2.0, 0.5)])
    }
    free = simulate(one_f_one_b(3, 4), times)
    pair = UpdateWait(stages=frozenset({1, 2}), time_s=0.5)
    tied = simulate(one_f_one_b(3, 4), times, waits={1: pair, 2: pair})
    ready = [use.step_end_s - 0.25 for use in free.actors]
    assert ready[1] > ready[2]
    assert [use.step_end_s for use in tied.actors] == [free.actors[0].step_end_s, *[ready[1] + 0.5 + 0.25] * 2]
    assert tied.makespan_s == free.makespan_s + 0.5 and tied.pipeline_s == free.pipeline_s


def test_an_actor_without_actions_only_updates():
    times = {Actor(0, g): StageTimes(forward_s=1.0, backward_s=1.0, update_s=1.0) for g in range(2)}
    use = simulate(gpipe(1, 3, [[range(3), ()]]), times).use(0, 1)
    assert (use.first_start_s, use.last_end_s, use.busy_s, use.bubble_s, use.peak_in_flight) == (0, 0, 0, 0, 0)
    assert use.step_end_s == 6 + 1
