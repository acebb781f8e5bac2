"""Straight pipeline schedules by CP-SAT: improves words, or proves that none are better, for small p and m.

Every action is an interval on its stage's machine; microbatches keep their order (see `costmodel.schedule.straight`).

    F(s, k) ≥ F(s-1, k) + send,  B(s, k) ≥ F(s, k),  B(s, k) ≥ B(s+1, k) + send,  W(s, k) ≥ B(s, k),             (C1)
    F(s, k) ≥ F(s-1, j) + send + (k - j)·wire for j < k, and B likewise, where messages occupy their link longer than
    the action that makes them takes (else C2 says it),                                                          (C5)
    no two actions of a stage overlap,                                                                           (C2)
    a microbatch holds delta F from its F to the end of its B (to the start, if B adds memory), and delta F + delta B
    from then to the end of its W; in sum no more than the stage's cap,                                          (C3)
    minimise the largest (last end + after) over stages, the first criterion of the goal.                        (C4)

Times are whole multiples of a unit: exact if all are decimals of few digits, else rounded to 1 / RESOLUTION of the
makespan at hand; the order that comes out is timed exactly in either case. Memory is counted in thousandths of an
activation; where deltas are not whole thousandths the bound is left as it was. One worker, a fixed seed and limits of
deterministic time: the same input gives the same answer.
"""

from collections.abc import Iterable
from math import ceil, inf

from ortools.sat.python import cp_model

from costmodel.schedule.goal import Goal
from costmodel.schedule.straight import B, F, StraightCosts, W, Word, WordTimes, fits

RESOLUTION = 10**8
_MEMORY_PARTS = 1000
_MOST_ACTIONS = 110
_EFFORT = 0.2
_PROVABLE_ACTIONS = 48

Starts = tuple[list[list[cp_model.IntVar]], ...]


def solve_words(
    costs: StraightCosts, microbatches: int, words: tuple[Word, ...], times: WordTimes, goal: Goal
) -> tuple[tuple[Word, ...], float]:
    """Improves words where there are few actions; a `costmodel.schedule.synthesize.Solver`.

    Args:
        costs: the stages.
        microbatches: m.
        words: within the caps.
        times: when they run.
        goal: its first criterion is minimised.

    Returns:
        Words within the caps, those given if none are better, and a proven bound of the first criterion in seconds.
    """
    p, m = costs.stages, microbatches
    actions = costs.letters * p * m
    if actions > _MOST_ACTIONS or times.makespan_s <= 0.0:
        return words, goal.bound_s
    kinds = (F, B) if costs.fused else (F, B, W)
    unit_s, exact = _unit_s(costs, goal, times.makespan_s)
    took = [[round(t / unit_s) for t in series] for series in (costs.forward_s, costs.backward_s, costs.weight_s)]
    sends = [round(t / unit_s) for t in costs.send_s]
    wires = [round(t / unit_s) for t in costs.wires_s]
    rounding = 0 if exact else 3 * actions
    horizon = round(times.makespan_s / unit_s) + rounding + 1
    model = cp_model.CpModel()
    starts: Starts = tuple(
        [[model.new_int_var(0, horizon, "") for _ in range(m)] for _ in range(p)] for _ in range(len(kinds))
    )
    for s in range(p):
        model.add_no_overlap(
            model.new_fixed_size_interval_var(start, took[kind][s], "") for kind in kinds for start in starts[kind][s]
        )
        for kind in kinds:
            for k in range(m):
                start = starts[kind][s][k]
                if k:
                    model.add(start >= starts[kind][s][k - 1] + took[kind][s])
                if kind:
                    model.add(start >= starts[kind - 1][s][k] + took[kind - 1][s])
                for j in range(k + 1) if kind != W and s else ():
                    sender, taker = (s - 1, start) if kind == F else (s, starts[B][s - 1][k])
                    if j == k or wires[s - 1] > took[kind][sender]:
                        arrives = starts[kind][sender][j] + took[kind][sender] + sends[s - 1] + (k - j) * wires[s - 1]
                        model.add(taker >= arrives)
        _limit_memory(model, costs, s, starts, took, horizon)
    after = [round(seconds / unit_s) for seconds in goal.after_s]
    value = model.new_int_var(-horizon, 2 * horizon + max(after), "")
    last = kinds[-1]
    for s in range(p):
        model.add(value >= starts[last][s][m - 1] + took[last][s] + after[s])
    model.add(value <= round(goal.key(times.last_end_s)[0] / unit_s) + rounding)
    model.add(value >= int(goal.bound_s / unit_s * (1.0 - 1e-12)) - rounding)
    model.minimize(value)
    for s, word in enumerate(words):
        counts = [0, 0, 0]
        for kind, start_s in zip(word, times.starts_s[s]):
            model.add_hint(starts[kind][s][counts[kind]], round(start_s / unit_s))
            counts[kind] += 1
    solver = cp_model.CpSolver()
    solver.parameters.num_workers = 1
    solver.parameters.random_seed = 7
    solver.parameters.linearization_level = 0  # a hundred times faster here, and no weaker
    solver.parameters.cp_model_probing_level = 0
    solver.parameters.max_deterministic_time = 2.0 if actions <= _PROVABLE_ACTIONS else _EFFORT
    status = solver.solve(model)
    if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        return words, goal.bound_s
    bound_s = goal.bound_s
    if _whole(costs.memory_delta, _MEMORY_PARTS):
        bound_s = max(bound_s, (solver.best_objective_bound - rounding) * unit_s)
    found = tuple(
        bytes(
            kind
            for _, kind, _ in sorted(
                (solver.value(t), kind, k) for kind in kinds for k, t in enumerate(starts[kind][s])
            )
        )
        for s in range(p)
    )
    return (found if fits(costs, found) else words), bound_s


def _limit_memory(
    model: cp_model.CpModel, costs: StraightCosts, s: int, starts: Starts, took: list[list[int]], horizon: int
) -> None:
    """C3 of one stage."""
    cap, microbatches = costs.memory_cap[s], len(starts[F][s])
    forward, backward, _ = costs.memory_delta
    if cap == inf or cap >= microbatches * costs.least_cap:
        return
    intervals, demands = [], []
    last = len(starts) - 1
    for k in range(microbatches):
        begin, middle = starts[F][s][k], starts[B][s][k] + (took[B][s] if backward <= 0.0 else 0)
        end = starts[last][s][k] + took[last][s]
        spells = [(begin, middle, _parts(forward)), (middle, end, _parts(forward + backward))]
        for first, until, demand in spells:
            if demand > 0:
                intervals.append(model.new_interval_var(first, model.new_int_var(0, horizon, ""), until, ""))
                demands.append(demand)
    model.add_cumulative(intervals, demands, int(cap * _MEMORY_PARTS + 1e-6))


def _parts(amount: float) -> int:
    return ceil(amount * _MEMORY_PARTS - 1e-6)


def _unit_s(costs: StraightCosts, goal: Goal, makespan_s: float) -> tuple[float, bool]:
    """A unit of time, and whether all times are multiples of it."""
    every = (*costs.forward_s, *costs.backward_s, *costs.weight_s, *costs.send_s, *costs.wire_s, *goal.after_s)
    for digits in range(7):
        if _whole(every, 10**digits) and makespan_s * 10**digits < 1e12:
            return 10.0**-digits, True
    return makespan_s / RESOLUTION, False


def _whole(values: Iterable[float], scale: int) -> bool:
    return all(abs(value * scale - round(value * scale)) < 1e-9 for value in values)
