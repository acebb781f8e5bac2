"""Cuts for devices that run several virtual stages."""

from itertools import combinations

import numpy as np
import pytest

import planner
from planner.search.virtual_stages import _busiest_s, _evened

V_SHAPE, ROUND = (0, 1, 1, 0), (0, 1, 0, 1)


def prefixes(seconds: np.ndarray) -> list[np.ndarray]:
    return [np.concatenate([[0.0], np.cumsum(seconds)])] * 4


@pytest.mark.parametrize("home", [V_SHAPE, ROUND])
def test_moves_come_near_the_best_cut_from_any_other(home: tuple[int, ...]) -> None:
    rng, over = np.random.default_rng(7), []
    for _ in range(100):
        sums = prefixes(rng.uniform(1.0, 4.0, size=9))
        cuts = [[*stops, 9] for stops in combinations(range(1, 9), 3)]
        start = cuts[rng.integers(len(cuts))]
        found = _evened(start, sums, home, frozenset(), [None] * 4)
        least = min(_busiest_s(stops, sums, home) for stops in cuts)
        assert found in cuts and _busiest_s(found, sums, home) <= _busiest_s(start, sums, home)
        over.append(_busiest_s(found, sums, home)[0] / least[0])
    assert np.mean(over) < 1.02 and np.median(over) < 1.01


def test_pinned_stages_and_uncut_borders_stay() -> None:
    sums = prefixes(np.array([5.0, 1, 1, 1, 1, 1, 1, 1, 5.0]))
    start = [1, 4, 8, 9]
    free = _evened(start, sums, V_SHAPE, frozenset(), [None] * 4)
    assert _busiest_s(free, sums, V_SHAPE)[0] == 10.0 > 7.0
    assert _evened(start, sums, V_SHAPE, frozenset(), [1, 3, 4, 1]) == start
    slow_ends = prefixes(np.array([1.0, 1, 1, 1, 1, 1, 1, 1, 1]))
    moved = _evened(start, slow_ends, V_SHAPE, frozenset(), [None] * 4)
    assert _busiest_s(moved, slow_ends, V_SHAPE)[0] == 5.0
    assert not {2, 3} & set(_evened(start, slow_ends, V_SHAPE, frozenset({2, 3}), [None] * 4))


def test_devices_of_a_v_shaped_schedule_are_evenly_busy(tmp_path) -> None:
    """Six layers in two there and two back: not the ends with two and the middle with four of them."""
    path = tmp_path / "four.toml"
    path.write_text('name = "c"\n[[group]]\nname = "a"\nnodes = 1\ndevice = "A100-SXM4-80GB"\ndevices_per_node = 4\n')
    plan = planner.plan(
        "gpt(hidden=512,layers=6,heads=8,vocab=512,seq=128)",
        cluster=str(path), global_batch=32, strategy="pp=2,dp=2,schedule=zb-v,microbatch=2", baselines=False,
    )  # fmt: skip
    busy: dict[tuple[str, ...], float] = {}
    for stage in plan.stages:
        (own,) = stage.groups
        busy[own.devices] = busy.get(own.devices, 0.0) + own.time.forward_s + own.time.backward_s
    layer = next(stage for stage in plan.stages if stage.blocks == ("layers[1:3]",) or stage.block_count == 2)
    each = (layer.groups[0].time.forward_s + layer.groups[0].time.backward_s) / 2
    assert len(busy) == 2 and max(busy.values()) - min(busy.values()) <= 1.01 * each
