"""Pipelines that tests simulate: by hand, and drawn at random."""

import numpy as np
from hypothesis import strategies as st

from costmodel.schedule.actions import Actor
from costmodel.schedule.generate import gpipe, one_f_one_b
from costmodel.simulate import SendTimes, StageTimes

TIME = st.floats(0.0, 10.0)
POSITIVE = st.floats(0.1, 10.0)
EXACT = {"rel": 1e-9, "abs": 1e-9}


def chain(forward_s, backward_s, send_s=0.0, gradient_s=None, latency_s=0.0):
    """Times and sends of a pipeline with one group a stage."""
    stages = len(forward_s)
    times = {Actor(i, 0): StageTimes(forward_s=f, backward_s=b) for i, (f, b) in enumerate(zip(forward_s, backward_s))}
    send = np.broadcast_to(send_s, stages - 1)
    gradient = np.broadcast_to(send_s if gradient_s is None else gradient_s, stages - 1)
    sends = {
        (Actor(i, 0), Actor(i + 1, 0)): SendTimes(
            activation_s=float(send[i]), gradient_s=float(gradient[i]), latency_s=latency_s
        )
        for i in range(stages - 1)
    }
    return times, sends


@st.composite
def pipelines(draw):
    """(F, B, c, g, m): unequal stages and links."""
    stages = draw(st.integers(1, 6))
    work = st.lists(TIME, min_size=stages, max_size=stages)
    link = st.lists(TIME, min_size=stages - 1, max_size=stages - 1)
    return draw(work), draw(work), draw(link), draw(link), draw(st.integers(1, 16))


def at_most(bound_s, simulated_s):
    return float(bound_s) <= simulated_s * (1 + 1e-9) + 1e-9


@st.composite
def cases(draw):
    """A schedule with groups, its times and its sends."""
    stages, m = draw(st.integers(1, 5)), draw(st.integers(1, 10))
    shares, times = [], {}
    for stage in range(stages):
        groups = draw(st.integers(1, 3))
        owner = draw(st.lists(st.integers(0, groups - 1), min_size=m, max_size=m))
        shares.append([[k for k in range(m) if owner[k] == g] for g in range(groups)])
        for group in range(groups):
            f, b, r = draw(TIME), draw(TIME), draw(TIME)
            times[Actor(stage, group)] = StageTimes(forward_s=f, backward_s=b, reduce_s=r)
    sends = {
        (a, b): SendTimes(activation_s=draw(TIME), gradient_s=draw(TIME), latency_s=draw(st.sampled_from((0.0, 1.5))))
        for a in times
        for b in times
        if b.stage == a.stage + 1
    }
    return draw(st.sampled_from((gpipe, one_f_one_b)))(stages, m, shares), times, sends
