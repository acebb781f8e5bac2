"""Slack of links against the slow-link law and against timing at and beyond it."""

import random
from dataclasses import replace

import pytest

from costmodel.schedule.early_backward import warm_ups_for_delays
from costmodel.schedule.generate import gpipe, one_f_one_b
from costmodel.schedule.slack import link_slacks
from costmodel.schedule.straight import StraightCosts, time_words, words_of
from costmodel.schedule.zero_bubble import split_backward, zb_h1


def alike(p, forward_s, backward_s, weight_s, send_s=0.0):
    return StraightCosts(
        forward_s=(forward_s,) * p,
        backward_s=(backward_s,) * p,
        weight_s=(weight_s,) * p,
        send_s=(send_s,) * (p - 1),
        memory_cap=(float("inf"),) * p,
    )


def delayed_s(costs, words, link, delay_s):
    sends = list(costs.send_s)
    sends[link] += delay_s
    return time_words(replace(costs, send_s=tuple(sends)), words).makespan_s


@pytest.mark.parametrize("gap", [1, 2, 3])
@pytest.mark.parametrize("link", [0, 1, 2])
def test_absorbed_delay_is_that_of_the_slow_link_law(gap, link):
    """Order B, W, F: ((Δ - 1)·T + W)/2."""
    rng = random.Random(10 * gap + link)
    forward_s, backward_s, weight_s = (rng.uniform(0.5, 2.0) for _ in range(3))
    costs = alike(4, forward_s, backward_s, weight_s)
    windows = [1] * 4
    windows[link + 1] = gap
    words = words_of(split_backward(one_f_one_b(4, 96, windows=windows)))
    total_s = forward_s + backward_s + weight_s
    law_s = ((gap - 1) * total_s + weight_s) / 2
    assert law_s - 1e-9 <= link_slacks(costs, words)[link].absorbs_s <= law_s + 4 * total_s / 96


def test_slack_is_exact_on_random_schedules():
    rng = random.Random(2)
    for _ in range(12):
        p, m = rng.randint(2, 5), rng.randint(2, 14)
        costs = StraightCosts(
            forward_s=tuple(rng.uniform(1, 3) for _ in range(p)),
            backward_s=tuple(rng.uniform(1, 3) for _ in range(p)),
            weight_s=tuple(rng.uniform(0, 3) for _ in range(p)),
            send_s=tuple(rng.uniform(0, 2) for _ in range(p - 1)),
            memory_cap=(float("inf"),) * p,
        )
        for schedule in (zb_h1(p, m), split_backward(gpipe(p, m))):
            words = words_of(schedule)
            base_s = time_words(costs, words).makespan_s
            for slack in link_slacks(costs, words):
                for largest_s, slope in ((slack.free_s, 0), (slack.absorbs_s, 2)):
                    if largest_s == float("inf"):
                        assert delayed_s(costs, words, slack.link, 1e6) <= (base_s + slope * 1e6) * (1 + 1e-9)
                        continue
                    assert delayed_s(costs, words, slack.link, largest_s) <= base_s + slope * largest_s + 1e-6
                    more_s = largest_s * 1.01 + 1e-3
                    assert delayed_s(costs, words, slack.link, more_s) > base_s + slope * more_s
                assert slack.free_s <= slack.absorbs_s + 1e-9


def test_chosen_warm_ups_give_the_slack_that_they_promise():
    delays_s, total_s = [1.0, 4.0, 0.0], 3.0
    chosen = warm_ups_for_delays([total_s] * 4, delays_s)
    assert chosen.absorbs_s == (1.5, 4.5, 0.0)
    costs = alike(4, 1.0, 2.0, 0.0)
    words = words_of(split_backward(one_f_one_b(4, 96, windows=chosen.windows)))
    for slack, promised_s in zip(link_slacks(costs, words), chosen.absorbs_s):
        assert promised_s - 1e-9 <= slack.absorbs_s <= promised_s + 4 * total_s / 96


def test_deadlock_has_no_slack():
    with pytest.raises(ValueError, match="deadlock"):
        link_slacks(alike(2, 1.0, 1.0, 1.0), [bytes((0, 1, 2, 0, 1, 2)), bytes((0, 0, 1, 1, 2, 2))])
