"""Costs of every contiguous range of blocks under every stage option, as arrays.

Ranges are [first, end) with 0 ≤ first < end ≤ L; arrays have shape [O, L + 1, L + 1] and are indexed [option, first,
end]. Costs are never negative, so time and memory grow with the range: for a fixed end, the firsts that satisfy a time
cap and a memory limit are an interval that ends at end − 1.
"""

from dataclasses import dataclass

import numpy as np

from planner.search.problem import Floats, Ints
from planner.search.stages import GroupCosts, StageProblem


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StageTables:
    """Range costs and what else the DP reads.

    Attributes:
        time_s: seconds of one microbatch; inf where the option cannot run the range, or first ≥ end.
        once_s: seconds once a step.
        room: most microbatches in flight that fit, 0 where not even one does (at most the problem's microbatches).
        used: [O, P] devices of each option, in units of `unit`; `devices`: [P] devices of each pool, in the same units.
        link: [O] link class of each option: options of one class send and receive at equal cost.
        send_s: [E, E, L + 1] seconds of a cut before block j between link classes; 0 at j = 0 and j = L.
    """

    time_s: Floats
    once_s: Floats
    room: Ints
    used: Ints
    devices: Ints
    link: Ints
    send_s: Floats


def stage_tables(problem: StageProblem, *, with_memory: bool = True) -> StageTables:
    """Tables of a problem; without memory, every range fits."""
    shape = (len(problem.options), len(problem.blocks) + 1, len(problem.blocks) + 1)
    time_s, once_s = np.zeros(shape), np.zeros(shape)
    room = np.full(shape, problem.microbatches, dtype=np.int64)
    classes = np.array(problem.blocks)
    for index, option in enumerate(problem.options):
        for group in option.groups:
            time_s[index] = np.maximum(
                time_s[index], group.share * _range_sum(group.forward_s[classes] + group.backward_s[classes])
            )
            once_s[index] = np.maximum(once_s[index], _range_sum(group.once_s[classes]))
            if with_memory:
                room[index] = np.minimum(room[index], _room(group, classes, problem.microbatches))
    valid = np.arange(shape[1])[:, None] < np.arange(shape[2])[None, :]
    room = np.where(valid & np.isfinite(time_s), room, 0)
    time_s = np.where(valid & (room > 0), time_s, np.inf)
    used = np.array([option.devices for option in problem.options], dtype=np.int64)
    unit = np.maximum(np.gcd.reduce(used, axis=0), 1)
    link, send_s = _links(problem)
    return StageTables(
        time_s=time_s,
        once_s=once_s,
        room=room,
        used=used // unit,
        devices=np.array(problem.devices, dtype=np.int64) // unit,
        link=link,
        send_s=send_s,
    )


def _range_sum(costs: Floats) -> Floats:
    """[L + 1, L + 1] sums over [first, end), inf where a cost in the range is inf."""
    finite = np.isfinite(costs)
    total = np.concatenate([[0.0], np.cumsum(np.where(finite, costs, 0.0))])
    blocked = np.concatenate([[0], np.cumsum(~finite)])
    return np.where(blocked[None, :] > blocked[:, None], np.inf, total[None, :] - total[:, None])


def _range_max(costs: Floats) -> Floats:
    """[L + 1, L + 1] largest cost in [first, end), 0 where that is empty."""
    size = len(costs) + 1
    inside = np.arange(size)[:, None] <= np.arange(size - 1)[None, :]
    largest = np.maximum.accumulate(np.where(inside, costs[None, :], 0.0), axis=1)
    return np.concatenate([np.zeros((size, 1)), largest], axis=1)


def _room(group: GroupCosts, classes: Ints, microbatches: int) -> Ints:
    """[L + 1, L + 1] most microbatches that a stage may hold for one of its groups to fit (S3)."""
    saved = _range_sum(group.saved_bytes[classes])
    left = (
        group.memory_limit_bytes - _range_sum(group.state_bytes[classes]) - _range_max(group.transient_bytes[classes])
    )
    most = np.where(saved > 0, np.floor(left / np.where(saved > 0, saved, 1.0)), microbatches)
    own = np.where(left >= 0, np.clip(most, 0, microbatches), 0).astype(np.int64)
    return np.minimum(own * group.share_denominator // group.share_numerator, microbatches)


def stage_excess(problem: StageProblem, in_flight: int) -> Floats:
    """[O, L + 1, L + 1] bytes by which the worst group of a stage exceeds its limit while it holds `in_flight` (S3)."""
    classes = np.array(problem.blocks)
    excess = []
    for option in problem.options:
        groups = [
            _range_sum(group.state_bytes[classes])
            + group.in_flight(in_flight) * _range_sum(group.saved_bytes[classes])
            + _range_max(group.transient_bytes[classes])
            - group.memory_limit_bytes
            for group in option.groups
        ]
        excess.append(np.maximum.reduce(groups))
    return np.stack(excess)


def _links(problem: StageProblem) -> tuple[Ints, Floats]:
    """Classes of options with equal links, and the seconds of a cut between classes at each boundary."""
    both = np.concatenate(
        [problem.send_latency_s, problem.send_s_per_byte, problem.send_latency_s.T, problem.send_s_per_byte.T], axis=1
    )
    _, first, link = np.unique(both, axis=0, return_index=True, return_inverse=True)
    size = len(problem.blocks) + 1
    send_s = np.zeros((len(first), len(first), size))
    pick = np.ix_(first, first)
    send_s[:, :, 1 : size - 1] = (
        problem.send_latency_s[pick][:, :, None]
        + problem.send_s_per_byte[pick][:, :, None] * problem.boundary_bytes[None, None, :]
    )
    return link.reshape(-1).astype(np.int64), send_s


def coarsened(tables: StageTables, boundaries: Ints, unit: Ints) -> StageTables:
    """The same problem with cuts only at some boundaries and devices counted in larger units.

    Plans of the coarser problem are plans of the finer one: options round their devices up, pools round them down.

    Args:
        boundaries: [L' + 1] ascending, from 0 to L.
        unit: [P] devices that count as one.
    """
    pick = np.ix_(np.arange(len(tables.used)), boundaries, boundaries)
    return StageTables(
        time_s=tables.time_s[pick],
        once_s=tables.once_s[pick],
        room=tables.room[pick],
        used=-(-tables.used // unit),
        devices=tables.devices // unit,
        link=tables.link,
        send_s=tables.send_s[:, :, boundaries],
    )


def sparse_boundaries(problem: StageProblem, most: int) -> Ints:
    """About `most` boundaries, with all around blocks of a class of their own where these are few."""
    count = len(problem.blocks)
    changes = [i for i in range(1, count) if problem.blocks[i] != problem.blocks[i - 1]]
    if count + 1 <= most:
        return np.arange(count + 1)
    even = np.linspace(0, count, most).round().astype(np.int64)
    return np.unique(np.concatenate([even, changes if len(changes) <= most // 2 else []]).astype(np.int64))


def coarse_unit(tables: StageTables, cells: int) -> Ints:
    """[P] smallest powers of two as units under which the pools' device counts span at most `cells` combinations."""
    unit = np.ones(len(tables.devices), dtype=np.int64)
    while np.prod(tables.devices // unit + 1) > cells:
        unit[int((tables.devices // unit).argmax())] *= 2
    return unit
