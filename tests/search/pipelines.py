"""Random stage problems for property tests."""

import numpy as np
from hypothesis import strategies as st

from planner.search.stages import GroupCosts, StageOption, StageProblem


def random_stage_problem(
    rng: np.random.Generator,
    *,
    blocks: int,
    options: int,
    pools: int,
    microbatches: int,
    schedule: str,
    max_stages: int,
    tightness: float,
    min_stages: int = 1,
    coarse: bool = True,
) -> StageProblem:
    """A random problem with uneven device counts, classes that an option cannot run, and options of two groups.

    Args:
        tightness: share of the blocks' state that a stage's memory limit holds.
    """
    classes = int(rng.integers(1, blocks + 1))

    def costs(high):
        return rng.integers(0, high, classes).astype(float) if coarse else rng.random(classes) * high

    def group(share):
        state = rng.integers(1, 6, classes).astype(float)
        return GroupCosts(
            forward_s=np.where(rng.random(classes) < 0.05, np.inf, costs(6) + 1),
            backward_s=costs(6),
            once_s=costs(5) * (rng.random() < 0.7),
            state_bytes=state,
            saved_bytes=rng.integers(0, 4, classes).astype(float),
            transient_bytes=rng.integers(0, 4, classes).astype(float),
            memory_limit_bytes=float(np.round(tightness * 6.0 * blocks)),
            share_numerator=share,
            share_denominator=4 if share < 4 else share,
        )

    made = []
    for index in range(options):
        taken = [int(rng.choice([1, 1, 2, 3])) for _ in range(pools)]
        two = pools > 1 and rng.random() < 0.3
        if not two:
            only = int(rng.integers(0, pools))
            taken = [count if pool == only else 0 for pool, count in enumerate(taken)]
        share = int(rng.integers(1, 4))
        groups = (group(share), group(4 - share)) if two else (group(4),)
        made.append(StageOption(name=f"o{index}", devices=tuple(taken), groups=groups))
    kinds = rng.integers(0, 2, options)
    speed = rng.integers(0, 3, (2, 2)).astype(float)
    return StageProblem(
        blocks=(*(int(x) for x in rng.integers(0, classes, blocks - 1)), classes - 1),
        devices=tuple(int(rng.choice([2, 3, 5, 6, 7])) for _ in range(pools)),
        options=tuple(made),
        boundary_bytes=rng.integers(0, 3, blocks - 1).astype(float),
        send_latency_s=speed[np.ix_(kinds, kinds)] * 0.5,
        send_s_per_byte=speed[np.ix_(kinds, kinds)],
        microbatches=microbatches,
        schedule=schedule,
        max_stages=max_stages,
        min_stages=min_stages,
    )


@st.composite
def small_stage_problems(draw):
    """Small enough to enumerate."""
    max_stages = draw(st.sampled_from([1, 2, 3, 6]))
    return random_stage_problem(
        np.random.default_rng(draw(st.integers(0, 2**32 - 1))),
        blocks=draw(st.integers(1, 6)),
        options=draw(st.integers(1, 4)),
        pools=draw(st.integers(1, 2)),
        microbatches=draw(st.sampled_from([1, 2, 3, 5, 8])),
        schedule=draw(st.sampled_from(["1f1b", "gpipe"])),
        max_stages=max_stages,
        min_stages=draw(st.sampled_from([1, 1, max_stages])),
        tightness=draw(st.sampled_from([0.2, 0.5, 1.0, 3.0])),
        coarse=draw(st.booleans()),
    )
