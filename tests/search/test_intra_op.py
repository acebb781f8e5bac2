"""The intra-op search against enumeration, each road by itself and all together."""

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.search import reduce
from planner.search.bruteforce import best_assignment
from planner.search.elimination import Elimination
from planner.search.intra_op import least_memory, solve, solve_by_ilp
from planner.search.lagrange import relax
from planner.search.problem import (
    NOT_NEEDED,
    Goal,
    IntraOpProblem,
    Node,
    SearchBudget,
    SearchStatus,
    TensorEdge,
    evaluate,
    score,
)
from tests.search.graphs import random_problem, small_problems

EXACT = settings(derandomize=True, deadline=None, max_examples=250)
FEWER = settings(derandomize=True, deadline=None, max_examples=120)
CLOSE = 2e-6


def node(name, time_s, memory_bytes=None, transient_bytes=None):
    count = len(time_s)
    return Node(
        name=name,
        time_s=np.array(time_s, dtype=float),
        memory_bytes=np.array([memory_bytes or [0.0] * count], dtype=float),
        transient_bytes=np.array(transient_bytes or [0.0] * count, dtype=float),
    )


def edge(name, producer, source, consumers, cast_time_s, cast_memory_bytes=None):
    cast = np.array(cast_time_s, dtype=float)
    memory = np.zeros(cast.shape) if cast_memory_bytes is None else np.array(cast_memory_bytes, dtype=float)
    return TensorEdge(
        name=name,
        producer=producer,
        source=np.array(source),
        consumers=tuple((index, np.array(target)) for index, target in consumers),
        cast_time_s=cast,
        cast_memory_bytes=memory[None],
    )


def problem(nodes, tensors, budget=math.inf):
    return IntraOpProblem(nodes=tuple(nodes), tensors=tuple(tensors), budget_bytes=np.array([budget], dtype=float))


def check_against_enumeration(found, case):
    best, _ = best_assignment(case)
    if math.isfinite(best):
        assert found.status is SearchStatus.optimal
        assert found.time_s == pytest.approx(best, rel=CLOSE, abs=1e-9)
        assert found.bound_s <= best * (1 + 1e-9) + 1e-12
        cost = evaluate(case, found.choice)
        assert cost.feasible and cost.time_s == found.time_s
        assert found.memory_bytes == tuple(cost.memory_bytes + cost.transient_bytes)
        return
    assert found.time_s == math.inf and not found.status.found
    excess, _ = best_assignment(case, Goal.excess)
    if math.isfinite(excess):
        assert found.status is SearchStatus.infeasible_memory
        assert found.missing_bytes == pytest.approx(excess, rel=1e-5, abs=1e-4)
        assert evaluate(case, found.choice).missing_bytes == found.missing_bytes
    else:
        assert found.status is SearchStatus.infeasible_casts
        assert found.choice == ()


@EXACT
@given(small_problems())
def test_E0_solve_equals_enumeration(case):
    check_against_enumeration(solve(case), case)


@FEWER
@given(small_problems())
def test_E1_to_E7_ilp_alone_equals_enumeration(case):
    check_against_enumeration(solve_by_ilp(case), case)


@FEWER
@given(small_problems(rows=0))
def test_elimination_and_min_marginals_equal_enumeration(case):
    elimination = Elimination.build(case, 1_000_000)
    assert elimination is not None
    costs = [n.time_s for n in case.nodes], [t.cast_time_s for t in case.tensors]
    value, choice = elimination.minimise(*costs)
    best, _ = best_assignment(case)
    assert value == pytest.approx(best) if math.isfinite(best) else choice == ()
    if choice:
        assert evaluate(case, choice).time_s == pytest.approx(best)
        for index, marginal in enumerate(elimination.min_marginals(*costs)):
            for strategy, least in enumerate(marginal):
                alone = np.where(np.arange(len(marginal)) == strategy, case.nodes[index].time_s, np.inf)
                nodes = list(case.nodes)
                nodes[index] = replace(nodes[index], time_s=alone)
                expected, _ = best_assignment(replace(case, nodes=tuple(nodes)))
                assert least == pytest.approx(expected) or (math.isinf(least) and math.isinf(expected))


@FEWER
@given(small_problems(), st.booleans())
def test_R1_to_R6_reductions_keep_an_optimum(case, with_memory):
    judged = case if with_memory else replace(case, budget_bytes=np.full(len(case.budget_bytes), np.inf))
    best, _ = best_assignment(judged)
    reduced = reduce.apply(case, with_memory=with_memory)
    if isinstance(reduced, SearchStatus):
        assert math.isinf(best)
        return
    assert sum(reduced.problem.sizes) <= sum(case.sizes)
    small, choice = best_assignment(reduced.problem)
    assert small == pytest.approx(best) or (math.isinf(small) and math.isinf(best))
    if choice:
        assert score(judged, reduced.invert(choice), Goal.time) == pytest.approx(best)
        assert reduced.project(reduced.invert(choice)) == choice


@FEWER
@given(small_problems(rows=2), st.sampled_from(list(Goal)))
def test_L1_to_L3_bounds_hold_for_every_assignment(case, goal):
    case = replace(case, budget_bytes=np.where(np.isfinite(case.budget_bytes), case.budget_bytes, 5.0))
    elimination = Elimination.build(case, 1_000_000)
    assert elimination is not None
    relaxed = relax(case, elimination, goal, SearchBudget())
    best, _ = best_assignment(case, goal)
    assert relaxed.bound <= best + 1e-6
    if relaxed.choice:
        assert score(case, relaxed.choice, goal) == relaxed.value
    for index, through in enumerate(relaxed.through):
        for strategy, bound in enumerate(through):
            alone = np.where(np.arange(len(through)) == strategy, case.nodes[index].time_s, np.inf)
            nodes = list(case.nodes)
            nodes[index] = replace(nodes[index], time_s=alone)
            assert bound <= best_assignment(replace(case, nodes=tuple(nodes)), goal)[0] + 1e-6


@FEWER
@given(small_problems(rows=2))
def test_least_memory_equals_enumeration(case):
    found = least_memory(case)
    limited = np.isfinite(case.budget_bytes)
    judged = case if limited.any() else replace(case, budget_bytes=np.zeros(2))
    best, _ = best_assignment(judged, Goal.excess)
    if math.isinf(best):
        assert found.status is SearchStatus.infeasible_casts
    else:
        assert evaluate(judged, found.choice).excess_bytes == pytest.approx(best, abs=1e-4)


def in_milliseconds_and_gigabytes(case):
    """The problem with costs of the size that real ones have."""
    return IntraOpProblem(
        nodes=tuple(
            replace(
                n, time_s=n.time_s * 1e-3, memory_bytes=n.memory_bytes * 1e9, transient_bytes=n.transient_bytes * 1e9
            )
            for n in case.nodes
        ),
        tensors=tuple(
            replace(t, cast_time_s=t.cast_time_s * 1e-3, cast_memory_bytes=t.cast_memory_bytes * 1e9)
            for t in case.tensors
        ),
        budget_bytes=case.budget_bytes * 1e9,
    )


@pytest.mark.parametrize("seed", range(24))
def test_roads_agree_on_larger_graphs(seed):
    """Large enough that the relaxation leaves work to the ILP below cutoffs."""
    case = in_milliseconds_and_gigabytes(
        random_problem(
            np.random.default_rng(seed),
            nodes=16,
            max_strategies=9,
            rows=2,
            coarse=seed % 2 == 0,
            tightness=0.4 + 0.1 * (seed % 3),
            tree=True,
            impossible=0.02,
        )
    )
    whole, ilp = solve(case), solve_by_ilp(case)
    assert whole.missing_bytes == pytest.approx(ilp.missing_bytes, abs=1e6)
    assert whole.status is ilp.status
    assert whole.time_s == ilp.time_s or whole.time_s == pytest.approx(ilp.time_s, rel=CLOSE)
    without_elimination = solve(case, budget=SearchBudget(table_entries=2))
    assert without_elimination.status is ilp.status
    assert without_elimination.time_s == ilp.time_s or without_elimination.time_s == pytest.approx(
        ilp.time_s, rel=CLOSE
    )


def test_cast_is_paid_once_per_target_spec():
    """q, k and v need one gathered x: one gather; a fourth consumer with another spec pays its own."""
    consumers = [node(name, [1.0, 1.4]) for name in ("q", "k", "v")]
    gathers = [(index, [0, 1]) for index in (1, 2, 3)]
    x = edge("x", 0, [0], gathers, [[5.0, 4.5]])
    case = problem([node("norm", [0.0]), *consumers], [x])
    assert evaluate(case, (0, 0, 0, 0)).time_s == 3.0 + 5.0
    assert evaluate(case, (0, 0, 0, 1)).time_s == 3.4 + 9.5
    found = solve(case)
    assert found.choice == (0, 0, 0, 0) and found.time_s == 8.0
    separate = [edge(f"x{index}", 0, [0], [(index, [0, 1])], [[5.0, 4.5]]) for index in (1, 2, 3)]
    assert solve(problem(case.nodes, separate)).choice == (0, 1, 1, 1)


def test_many_consumers_use_one_variable_a_target():
    """Nine consumers: the joint table would be huge, so that the tables hold yes/no variables instead."""
    rng = np.random.default_rng(3)
    nodes = [node("p", rng.random(4)), *(node(f"c{i}", rng.random(5)) for i in range(9))]
    tensor = edge("x", 0, [0, 1, 2, 3], [(i + 1, [0, 1, 2, 3, NOT_NEEDED]) for i in range(9)], rng.random((4, 4)))
    case = problem(nodes, [tensor])
    elimination = Elimination.build(case, 100_000)
    assert elimination is not None
    value, choice = elimination.minimise([n.time_s for n in nodes], [tensor.cast_time_s])
    assert value == pytest.approx(evaluate(case, choice).time_s)
    assert value == pytest.approx(solve_by_ilp(case).time_s, rel=CLOSE)


def test_memory_counts_the_largest_transient_once():
    """Each node alone fits with its fast strategy; the pair fits because transients do not add up."""
    nodes = [node("a", [1.0, 3.0], [4.0, 1.0], [5.0, 0.0]), node("b", [1.0, 3.0], [4.0, 1.0], [5.0, 0.0])]
    assert solve(problem(nodes, [], 13.0)).choice == (0, 0)
    tight = solve(problem(nodes, [], 12.0))
    assert tight.time_s == 4.0 and tight.memory_bytes == (10.0,)
    assert solve(problem(nodes, [], 2.0)).choice == (1, 1)
    impossible = solve(problem(nodes, [], 1.0))
    assert impossible.status is SearchStatus.infeasible_memory
    assert impossible.missing_bytes == 1.0 and impossible.choice == (1, 1)


def test_paid_casts_take_memory():
    tensor = edge("x", 0, [0], [(1, [0, 1])], [[1.0, 0.0]], [[3.0, 0.0]])
    nodes = [node("a", [0.0]), node("b", [0.0, 5.0])]
    assert solve(problem(nodes, [tensor], 3.0)).choice == (0, 0)
    assert solve(problem(nodes, [tensor], 2.0)).choice == (0, 1)


def test_impossible_casts_are_told_from_missing_memory():
    tensor = edge("x", 0, [0, 0], [(1, [1])], [[0.0, np.inf]])
    found = solve(problem([node("a", [1.0, 2.0]), node("b", [1.0])], [tensor], 0.0))
    assert found.status is SearchStatus.infeasible_casts
    assert "resharding" in found.status.value


def test_same_input_same_output():
    case = random_problem(np.random.default_rng(5), nodes=14, max_strategies=8, rows=2, tightness=0.2, tree=True)
    assert solve(case) == solve(case)


@FEWER
@given(case=small_problems(), share=st.floats(0.0, 2.0), prove=st.booleans())
def test_what_is_too_slow_is_given_up_with_a_bound(case, share, prove):
    """Of interest, the answer is as ever; else the search may end early, with a bound that holds and is above it."""
    best, _ = best_assignment(case)
    limit = share * best if math.isfinite(best) else math.inf
    found = solve(case, budget=SearchBudget(prove=prove), of_interest_s=limit)
    assert found.bound_s <= best * (1 + 1e-9) + 1e-12 and found.time_s >= best * (1 - 1e-9) - 1e-12
    if prove and limit >= best * (1 + 1e-9):
        check_against_enumeration(found, case)
    elif prove and not found.status.found:
        assert found.limit_fired and found.bound_s > limit


def test_limit_is_reported_with_a_bound():
    rng = np.random.default_rng(11)
    nodes = [
        Node(
            name=f"n{index}",
            time_s=rng.random(6),
            memory_bytes=rng.random((2, 6)),
            transient_bytes=np.zeros(6),
        )
        for index in range(40)
    ]
    case = IntraOpProblem(nodes=tuple(nodes), tensors=(), budget_bytes=np.full(2, 14.0))
    stopped = solve(case, budget=SearchBudget(mip_nodes=0, dual_steps=6, relative_gap=1e-9))
    best = solve(case)
    assert best.status is SearchStatus.optimal
    assert stopped.limit_fired and not stopped.wall_limit_fired
    assert stopped.status in (SearchStatus.feasible_limit, SearchStatus.unknown_limit)
    assert stopped.bound_s <= best.time_s <= stopped.time_s


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"source": np.array([0, 2])}, "names a spec outside 0..1"),
        ({"source": np.array([0])}, "another number of strategies"),
        ({"producer": 7}, "does not exist"),
        ({"cast_time_s": np.array([[0.0, -1.0], [0.0, 0.0]])}, "below zero"),
        ({"cast_memory_bytes": np.zeros((2, 2, 2))}, "expected"),
    ],
)
def test_bad_tensors_are_named(change, message):
    good = edge("x", 0, [0, 1], [(1, [0, NOT_NEEDED])], [[0.0, 1.0], [1.0, 0.0]])
    nodes = [node("a", [1.0, 2.0]), node("b", [1.0, 2.0])]
    problem(nodes, [good])
    with pytest.raises(ValueError, match=message):
        problem(nodes, [replace(good, **change)])


def test_bad_nodes_are_named():
    with pytest.raises(ValueError, match="node 'a' has no strategy"):
        problem([node("a", [])], [])
    with pytest.raises(ValueError, match="not a number"):
        problem([node("a", [math.nan])], [])
