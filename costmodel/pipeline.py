"""Closed forms of pipeline time and in-flight microbatches, for p stages of one group each and m microbatches.

Different claims; do not mix them up (F, B = forward and whole backward of a microbatch on a stage, T = F + B, c and g =
activation and gradient send over a link):

    gpipe_time_s                  exact for GPipe.
    pipeline_time_s               ΣT + Σ(c + g) + (m-1)·max T, the usual formula. An estimate, *not* a bound, of 1F1B.
    pipeline_lower_bound_s        never above the simulated time of any schedule.
    one_f_one_b_lower_bound_s     never above that of 1F1B, and tighter, above all with slow links.

All take arrays whose last dim is the stage (links: p - 1 entries) and broadcast over the dims before it. Why the usual
formula is no bound: if stage j is the bottleneck, the stages after it work in the shadow of its own queue. With p = 2,
m = 4, F = B = (10, 1) and free sends, 1F1B takes 80, the formula says 82.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

from costmodel.errors import InputError
from costmodel.schedule.actions import require_positive

FloatArray = NDArray[np.float64]


def pipeline_time_s(stage_times_s: ArrayLike, microbatches: int, send_s: ArrayLike = 0.0) -> FloatArray:
    """E1: ΣT + Σ send + (m-1)·max T, the formula that the stage DP minimises.

    - GPipe: never above the simulated time. Exact if one stage has both the longest F and the longest B, and no link is
      occupied for longer than that F by an activation or that B by a gradient.
    - 1F1B: exact if all stages have the same F and B and sends are free. Never above the simulated time if the last
      stage is a slowest one. Otherwise it can err both ways: above by at most the T and sends after the (last) slowest
      stage, below without limit where links are slow (see `one_f_one_b_lower_bound_s`).

    Args:
        stage_times_s: F + B per microbatch, shape (..., p).
        microbatches: m.
        send_s: activation plus gradient send time of one microbatch, shape (..., p - 1), or one number for every link.

    Returns:
        Seconds, shape (...).
    """
    times_s = np.asarray(stage_times_s, dtype=np.float64)
    _check_microbatches(microbatches)
    trips_s = _per_link(send_s, times_s.shape[-1])
    return times_s.sum(axis=-1) + trips_s.sum(axis=-1) + (microbatches - 1) * times_s.max(axis=-1)


def gpipe_time_s(
    forward_s: ArrayLike,
    backward_s: ArrayLike,
    microbatches: int,
    send_s: ArrayLike = 0.0,
    gradient_send_s: ArrayLike | None = None,
) -> FloatArray:
    """E2: ΣF + Σc + (m-1)·max(F, c) + ΣB + Σg + (m-1)·max(B, g): exact for GPipe, sends occupying their links.

    Forwards and backwards are two flow shops of equal jobs, whose machines are stages and links; the second begins
    where the first ends, on the last stage. Latency that does not occupy a link adds itself once each way.

    Args:
        forward_s: F, shape (..., p).
        backward_s: whole backward, shape (..., p).
        microbatches: m.
        send_s: activation send c of one microbatch, shape (..., p - 1), or one number for every link.
        gradient_send_s: gradient send g; as `send_s` if None.

    Returns:
        Seconds, shape (...).
    """
    _check_microbatches(microbatches)
    total_s = np.float64(0.0)
    for work_s, link_s in ((forward_s, send_s), (backward_s, send_s if gradient_send_s is None else gradient_send_s)):
        work = np.asarray(work_s, dtype=np.float64)
        links = _per_link(link_s, work.shape[-1])
        slowest = np.maximum(work.max(axis=-1), links.max(axis=-1, initial=0.0))
        total_s = total_s + work.sum(axis=-1) + links.sum(axis=-1) + (microbatches - 1) * slowest
    return np.asarray(total_s)


def pipeline_lower_bound_s(
    forward_s: ArrayLike,
    backward_s: ArrayLike,
    microbatches: int,
    send_s: ArrayLike = 0.0,
    gradient_send_s: ArrayLike | None = None,
    *,
    weight_s: ArrayLike = 0.0,
    step_s: ArrayLike = 0.0,
    load_s: ArrayLike | None = None,
) -> FloatArray:
    """E3: time that no schedule can beat, max over stages j of (way to j) + (work of j) + (way back from j).

    With h_j = Σ_(i<j) (F_i + c_i), the earliest start of stage j, and the end of the step that follows j's last B,

        u_j = max(W_j + step_j, g_(j-1) + B_(j-1) + u_(j-1)),
        bound = max_j max(h_j + m·(F+B)_j + u_j,  h_j + m·(F+B+W)_j + step_j).

    Without W and step times it is max_j (Σ_(i<j) (T_i + c_i + g_i) + m·T_j), which a DP from the last stage to the
    first can carry: R_j = max(m·T_j, T_j + c_j + g_j + R_(j+1)). The bound is exact at m = 1.

    Several groups a stage: give for F, B, c, g and step the least over the groups, and for `load_s` the F + B time of
    the stage's busiest group.

    Args:
        forward_s: F, shape (..., p).
        backward_s: B, shape (..., p); the whole backward where the schedule does not split it.
        microbatches: m.
        send_s: activation send of one microbatch, latency included, shape (..., p - 1), or one number for every link.
        gradient_send_s: gradient send; as `send_s` if None.
        weight_s: W, where the schedule splits backwards. With several groups a stage leave it 0.
        step_s: once a step after a stage's last action: reduction, exchange, update; without a barrier over stages.
        load_s: F + B time of the busiest group of each stage; m·(F + B) if None.

    Returns:
        Seconds, shape (...).
    """
    _check_microbatches(microbatches)
    forward, backward, weight, step = _stages(forward_s, backward_s, weight_s, step_s)
    stages = forward.shape[-1]
    send, gradient = _both_ways(send_s, gradient_send_s, stages)
    load = microbatches * (forward + backward) if load_s is None else np.asarray(load_s, dtype=np.float64)
    head = _heads(forward, send)
    after = weight[..., 0] + step[..., 0]
    bounds = []
    for stage in range(stages):
        if stage:
            way_s = gradient[..., stage - 1] + backward[..., stage - 1]
            after = np.maximum(weight[..., stage] + step[..., stage], way_s + after)
        bounds.append(head[..., stage] + load[..., stage] + after)
        all_s = load[..., stage] + microbatches * weight[..., stage] + step[..., stage]
        bounds.append(head[..., stage] + all_s)
    return np.max(np.stack(np.broadcast_arrays(*bounds)), axis=0)


def one_f_one_b_lower_bound_s(
    forward_s: ArrayLike,
    backward_s: ArrayLike,
    microbatches: int,
    send_s: ArrayLike = 0.0,
    gradient_send_s: ArrayLike | None = None,
    *,
    windows: Sequence[int] | None = None,
) -> FloatArray:
    """E4: the largest of E3 and two that hold for 1F1B's strict order, with K_j its in-flight count on stage j.

    E4a, waiting for the first gradient and for the last: stage j runs K_j forwards before its first backward, which
    needs a round trip r_j = Σ_(i>j) T_i + Σ_(i>=j) (c_i + g_i) over the stages after it; at the end likewise. For
    m > K_j:

        h_j + max(K·F, F + r)_j + (m - K_j)·T_j + max(K·B, B + r)_j + Σ_(i<j) (B_i + g_i).

    E4b, the slow-link law: with Δ = K_j - K_(j+1), once stage j+1 alternates, microbatch n + Δ + 1 starts on stage j no
    earlier than P = T_j + T_(j+1) + c_j + g_j after microbatch n: F(j, n), F(j+1, n), B(j+1, n - K_(j+1) + 1) and
    B(j, n - K_(j+1) + 1) come before it, each after the other. With n0 = K_(j+1) - 1 < m and
    R, l = divmod(m - 1 - n0, Δ + 1):

        h_j + n0·F_j + (R + 1)·P + (l + n0)·B_j + Σ_(i<j) (B_i + g_i).

    Together exact for equal stages and free sends.

    Args:
        forward_s: F, shape (..., p).
        backward_s: whole backward, shape (..., p).
        microbatches: m.
        send_s: activation send of one microbatch, latency included, shape (..., p - 1), or one number for every link.
        gradient_send_s: gradient send; as `send_s` if None.
        windows: as given to `one_f_one_b`; None for the usual 1F1B.

    Returns:
        Seconds, shape (...).
    """
    best = pipeline_lower_bound_s(forward_s, backward_s, microbatches, send_s, gradient_send_s)
    forward, backward = _stages(forward_s, backward_s)
    stages, m = forward.shape[-1], microbatches
    send, gradient = _both_ways(send_s, gradient_send_s, stages)
    # uncapped by m: what follows asks whether the steady order is reached at all
    held = _one_f_one_b_warm_up(stages, windows)
    head, tail = _heads(forward, send), _heads(backward, gradient)
    trip = np.zeros(np.broadcast_shapes(forward.shape[:-1], backward.shape[:-1], send.shape[:-1], gradient.shape[:-1]))
    for stage in range(stages - 1, -1, -1):
        one_f, one_b, count = forward[..., stage], backward[..., stage], int(held[stage])
        ends = head[..., stage] + tail[..., stage]
        if stage < stages - 1:
            link = send[..., stage] + gradient[..., stage]
            next_f, next_b, gap = forward[..., stage + 1], backward[..., stage + 1], count - int(held[stage + 1])
            trip = trip + next_f + next_b + link
            first = int(held[stage + 1]) - 1  # the first F that is followed by a B on the next stage
            if first < m:
                rounds, left = divmod(m - 1 - first, gap + 1)
                period = one_f + one_b + next_f + next_b + link
                best = np.maximum(best, ends + first * one_f + (rounds + 1) * period + (left + first) * one_b)
        if m > count:
            start = np.maximum(count * one_f, one_f + trip)
            end = np.maximum(count * one_b, one_b + trip)
            best = np.maximum(best, ends + start + (m - count) * (one_f + one_b) + end)
    return best


def gpipe_in_flight(stages: int, microbatches: int) -> NDArray[np.int64]:
    """Most microbatches whose activations each stage holds under GPipe: m. Shape (p,)."""
    require_positive("stages", stages)
    _check_microbatches(microbatches)
    return np.full(stages, microbatches, dtype=np.int64)


def one_f_one_b_in_flight(stages: int, microbatches: int, windows: Sequence[int] | None = None) -> NDArray[np.int64]:
    """Most microbatches whose activations each stage holds under 1F1B: min(p - i, m).

    With windows w it is min(1 + Σ_(j>i) w_j, m).

    Args:
        stages: p, one group each; with several groups a stage count by `in_flight`.
        microbatches: m.
        windows: as given to `one_f_one_b`; None for the usual 1F1B.

    Returns:
        Counts, shape (p,).
    """
    _check_microbatches(microbatches)
    return np.minimum(_one_f_one_b_warm_up(stages, windows), microbatches)


def _one_f_one_b_warm_up(stages: int, windows: Sequence[int] | None) -> NDArray[np.int64]:
    require_positive("stages", stages)
    widths = np.ones(stages, dtype=np.int64) if windows is None else np.asarray(windows, dtype=np.int64)
    if widths.shape != (stages,):
        raise InputError("MP143", f"windows are given for {widths.size} stages, the pipeline has {stages}")
    return 1 + np.append(np.cumsum(widths[:0:-1])[::-1], 0)


def _check_microbatches(microbatches: int) -> None:
    require_positive("microbatches", microbatches)


def _stages(*arrays: ArrayLike) -> list[FloatArray]:
    """The arrays with a common last dim p."""
    given = [np.atleast_1d(np.asarray(array, dtype=np.float64)) for array in arrays]
    stages = max(array.shape[-1] for array in given)
    return [np.broadcast_to(array, (*array.shape[:-1], stages)) for array in given]


def _per_link(send_s: ArrayLike, stages: int) -> FloatArray:
    """Send times with a last dim of p - 1."""
    send = np.asarray(send_s, dtype=np.float64)
    if send.ndim == 0:
        return np.full(stages - 1, send)
    if send.shape[-1] != stages - 1:
        raise InputError("MP143", f"send times are given for {send.shape[-1]} links, {stages} stages have {stages - 1}")
    return send


def _both_ways(send_s: ArrayLike, gradient_send_s: ArrayLike | None, stages: int) -> tuple[FloatArray, FloatArray]:
    return _per_link(send_s, stages), _per_link(send_s if gradient_send_s is None else gradient_send_s, stages)


def _heads(work_s: FloatArray, link_s: FloatArray) -> FloatArray:
    """Sum over the stages before each one of its work and the link after it; shape (..., p)."""
    steps = np.add(work_s[..., :-1], link_s)
    return np.concatenate((np.zeros((*steps.shape[:-1], 1)), np.cumsum(steps, axis=-1)), axis=-1)
