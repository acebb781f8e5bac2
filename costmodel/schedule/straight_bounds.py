"""Lower bounds on the time of any schedule of a straight pipeline that splits its backwards, within memory caps.

For stage s with F, B, W, T = F + B + W, let

    head    the least time at which its first forward can start: Σ F + sends before it,
    tail    the least time from the end of its last backward to the end of the step on a stage before it,
    R       the least time between the end of a microbatch's F and the arrival of its gradient,
    K       most microbatches between F and B that its cap, or one upstream, allows: forwards here ≤ forwards on
            stage j ≤ backwards on j + K_j ≤ backwards here + K_j for each j ≤ s,
    turns_j, hold_j   stage j's k-th forward waits for its (k - turns_j)-th backward, or for its W if a B frees nothing,
            and hold_j = F_j + R_j + B_j (+ W_j) is the least time of that loop, which passes every stage after j.

Any n of m microbatches make stage s busy for

    busy(n) = max(n·T, n·(F + B) + (n - q)·W + max(tail, q·W)),  at the best number q of W after the last B.

    fill    = max(0, R - (min(m, K) - 1)·F)  until the first gradient returns a stage can only run forwards;  (L1)
    drain   = max(0, R - most work left)     between the last F and its own B: B of K - 1 others, and W that memory
                                             allows to be late. Only if m > K, so that both do not overlap;    (L2)
    step    ≥ head + fill + busy(m) + drain;                                                                   (L3)
    step    ≥ head + r·hold_j + busy(m - r·turns_j) + drain   for j ≤ s and r ≥ 1 while r·turns_j < m;         (L4)
    step    ≥ head + ⌊(m - 1)/turns_s⌋·hold_s + ((m - 1) mod turns_s)·F + F + R + B + max(tail, W);            (L5)
    step    ≥ head + (m - 1)·c + F + R + B + max(tail, W),  c the time that a message occupies the link before
            stage s: the last activation arrives as late, and the last gradient leaves as late.                (L6)

The same without head and tail bounds the longest time from a stage's first start to its last end.
"""

from math import floor, inf

from costmodel.schedule.straight import ROUNDING, StraightCosts


def step_lower_bounds_s(costs: StraightCosts, microbatches: int) -> tuple[float, ...]:
    """For each stage, never above the end of the last action of any schedule.

    A stage's tail is on stages before it; its bound without that tail is never above the end of its own last action.
    """
    bounds_s, head_s = [], 0.0
    for stage in range(costs.stages):
        bounds_s.append(head_s + _stage_bound_s(costs, microbatches, stage, _tail_s(costs, stage)))
        if stage + 1 < costs.stages:
            head_s += costs.forward_s[stage] + costs.send_s[stage]
    return tuple(bounds_s)


def span_lower_bounds_s(costs: StraightCosts, microbatches: int) -> tuple[float, ...]:
    """For each stage, never above the time from its first start to its last end under any schedule."""
    return tuple(_stage_bound_s(costs, microbatches, stage, 0.0) for stage in range(costs.stages))


def heads_s(costs: StraightCosts) -> tuple[float, ...]:
    """The least time at which each stage can start."""
    heads = [0.0]
    for forward_s, send_s in zip(costs.forward_s, costs.send_s):
        heads.append(heads[-1] + forward_s + send_s)
    return tuple(heads)


def most_in_flight(costs: StraightCosts, stage: int, microbatches: int) -> int:
    """Most microbatches between F and B that the stage's own cap allows."""
    forward, backward, _ = costs.memory_delta
    cap = costs.memory_cap[stage]
    if cap == inf:
        return microbatches
    return min(microbatches, floor((cap - max(backward, 0.0)) / forward + ROUNDING))


def _tail_s(costs: StraightCosts, stage: int) -> float:
    tail_s, way_s = 0.0, 0.0
    for earlier in range(stage - 1, -1, -1):
        way_s += costs.send_s[earlier] + costs.backward_s[earlier]
        tail_s = max(tail_s, way_s + costs.weight_s[earlier])
    return tail_s


def _stage_bound_s(costs: StraightCosts, m: int, stage: int, tail_s: float) -> float:
    """L3 to L6 of one stage, without its head."""
    forward_s, backward_s, weight_s = costs.forward_s[stage], costs.backward_s[stage], costs.weight_s[stage]
    trip_s = costs.round_trip_s(stage)
    most = min(most_in_flight(costs, earlier, m) for earlier in range(stage + 1))
    after = min(m, _late(costs, stage, m, 1) + 1)

    def busy_s(count: int) -> float:
        pending = {1, min(count, after)}
        if weight_s > 0.0:
            crossing = int(tail_s / weight_s)
            pending |= {q for q in (crossing, crossing + 1) if 1 <= q <= min(count, after)}
        work_s = count * (forward_s + backward_s)
        return min(work_s + (count - q) * weight_s + max(tail_s, q * weight_s) for q in sorted(pending))

    drain_s = 0.0
    if m > most:
        left_s = max(
            (others - 1) * (backward_s + weight_s) + _late(costs, stage, m, others) * weight_s
            for others in range(1, most + 1)
        )
        drain_s = max(0.0, trip_s - left_s)
    best_s = max(0.0, trip_s - (most - 1) * forward_s) + busy_s(m) + drain_s
    for earlier in range(stage + 1):
        turns, hold_s = _loop(costs, earlier, m)
        most_rounds = (m - 1) // turns
        for rounds in {1, most_rounds} if most_rounds else ():
            best_s = max(best_s, rounds * hold_s + busy_s(m - rounds * turns) + drain_s)
    turns, hold_s = _loop(costs, stage, m)
    chain_s = (m - 1) // turns * hold_s + (m - 1) % turns * forward_s
    link_s = (m - 1) * costs.wires_s[stage - 1] if stage else 0.0
    return max(best_s, max(chain_s, link_s) + forward_s + trip_s + backward_s + max(tail_s, weight_s))


def _late(costs: StraightCosts, stage: int, m: int, others: int) -> int:
    """Most W that can be late while `others` microbatches are between F and B."""
    forward, backward, _ = costs.memory_delta
    cap = costs.memory_cap[stage]
    if forward + backward <= ROUNDING or cap == inf:
        return m - others
    return max(0, min(m - others, floor((cap - others * forward) / (forward + backward) + ROUNDING)))


def _loop(costs: StraightCosts, stage: int, m: int) -> tuple[int, float]:
    """turns and hold."""
    hold_s = costs.forward_s[stage] + costs.round_trip_s(stage) + costs.backward_s[stage]
    forward, backward, _ = costs.memory_delta
    if backward < 0.0:
        return most_in_flight(costs, stage, m), hold_s
    cap = costs.memory_cap[stage]
    turns = m if cap == inf else max(1, min(m, floor(cap / forward + ROUNDING)))
    return turns, hold_s + costs.weight_s[stage]
