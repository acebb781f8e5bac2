"""Random intra-op problems for property tests."""

import numpy as np
from hypothesis import strategies as st

from planner.search.problem import NOT_NEEDED, IntraOpProblem, Node, TensorEdge


@st.composite
def small_problems(draw, max_nodes: int = 5, max_strategies: int = 4, rows: int | None = None):
    """Small enough to enumerate: shared consumers, impossible casts, optional operands, transients, ties, budgets."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    return random_problem(
        rng,
        nodes=draw(st.integers(1, max_nodes)),
        max_strategies=max_strategies,
        rows=draw(st.integers(0, 2)) if rows is None else rows,
        coarse=draw(st.booleans()),
        tightness=draw(st.sampled_from([0.0, 0.1, 0.3, 0.6, 1.0])),
        tree=draw(st.booleans()),
    )


def random_problem(
    rng: np.random.Generator,
    *,
    nodes: int,
    max_strategies: int,
    rows: int,
    coarse: bool = True,
    tightness: float = 0.3,
    tree: bool = False,
    specs: int = 4,
    tensors: int | None = None,
    impossible: float = 0.2,
) -> IntraOpProblem:
    """A random problem.

    Args:
        coarse: integer costs from a small range, so that ties and identical strategies occur.
        tightness: where each budget lies between the smallest and the largest memory that the nodes could take.
        tree: one tensor a node at most, to a later node.
        impossible: share of casts that do not exist.
    """
    sizes = rng.integers(1, max_strategies + 1, nodes)

    def costs(shape, high):
        return rng.integers(0, high, shape).astype(float) if coarse else rng.random(shape) * high

    made = tuple(
        Node(
            name=f"n{index}",
            time_s=np.where(rng.random(size) < 0.03, np.inf, costs(size, 6)),
            memory_bytes=costs((rows, size), 8),
            transient_bytes=costs(size, 5) * (rng.random(size) < 0.5),
        )
        for index, size in enumerate(sizes)
    )
    edges = []
    count = nodes - 1 if tree else (int(rng.integers(0, nodes + 2)) if tensors is None else tensors)
    for index in range(count):
        producer = index if tree else int(rng.integers(0, nodes))
        consumers = (
            [int(rng.integers(index + 1, nodes))] if tree else rng.integers(0, nodes, rng.integers(1, 4)).tolist()
        )
        source_count, target_count = int(rng.integers(1, specs + 1)), int(rng.integers(1, specs + 1))
        shape = (source_count, target_count)
        edges.append(
            TensorEdge(
                name=f"t{index}",
                producer=producer,
                source=rng.integers(0, source_count, sizes[producer]),
                consumers=tuple(
                    (node, rng.integers(NOT_NEEDED if rng.random() < 0.3 else 0, target_count, sizes[node]))
                    for node in consumers
                ),
                cast_time_s=np.where(rng.random(shape) < impossible, np.inf, costs(shape, 5)),
                cast_memory_bytes=costs((rows, *shape), 4),
            )
        )
    least = sum((node.memory_bytes.min(axis=1) for node in made), np.zeros(rows))
    most = sum((node.memory_bytes.max(axis=1) for node in made), np.zeros(rows)) + 4.0
    budget = np.round(least + tightness * (most - least)) if coarse else least + tightness * (most - least)
    budget = np.where(rng.random(rows) < 0.1, np.inf, budget)
    return IntraOpProblem(nodes=made, tensors=tuple(edges), budget_bytes=budget)
