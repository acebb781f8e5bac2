"""Slack: how much delay each link of a straight pipeline absorbs, for a given schedule.

Let M(d) be the makespan if every message over a link, both ways, takes d longer. It is the longest path through the
schedule, and a path that crosses the link n times grows by n·d: M is convex and piecewise linear in d. Two questions:

    free_s      largest d with M(d) = M(0): the step is not a bit longer;
    absorbs_s   largest d with M(d) ≤ M(0) + 2·d: a microbatch crosses the link once each way, so filling and draining
                the pipeline may cost 2·d once, but no more. Beyond it every so many microbatches pay again.    (K1)

For stages alike and m microbatches, `absorbs_s` is what the slow-link law gives for the period, (Δ - 1)·T/2 for fused
backwards and ((Δ - 1)·T + W)/2 in the order B, W, F, or up to a few T/m more, since a step ends. Both are found
exactly, by Newton steps along critical paths.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from costmodel.schedule.local_search import sender
from costmodel.schedule.straight import ROUNDING, StraightCosts, Word, time_words

_MOST_STEPS = 60


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkSlack:
    """What one link absorbs.

    Args:
        link: index i of the link between stages i and i + 1.
        free_s: one-way delay beyond the planned one that leaves the makespan as it is.
        absorbs_s: one-way delay beyond the planned one that leaves the period as it is.
    """

    link: int
    free_s: float
    absorbs_s: float


def link_slacks(costs: StraightCosts, words: Sequence[Word]) -> tuple[LinkSlack, ...]:
    """The slack of every link, each by itself while the others are as planned.

    Args:
        costs: the stages, with the planned delays of links.
        words: a schedule that runs.

    Returns:
        One record a link; infinite where no delay, however long, costs more than (K1) allows.

    Raises:
        ValueError: if the words deadlock.
    """
    if time_words(costs, words) is None:
        raise ValueError("the words deadlock")
    return tuple(
        LinkSlack(
            link=link,
            free_s=_largest_delay_s(costs, words, link, 0),
            absorbs_s=_largest_delay_s(costs, words, link, 2),
        )
        for link in range(costs.stages - 1)
    )


def _largest_delay_s(costs: StraightCosts, words: Sequence[Word], link: int, slope: int) -> float:
    """Largest d with M(d) ≤ M(0) + slope·d, from the right: where a critical path's line meets that line."""
    start_s = _delayed(costs, words, link, 0.0)[0]
    scale_s = max(start_s, 1e-30)
    delay_s = 2.0 * scale_s
    for _ in range(_MOST_STEPS):
        makespan_s, crossings = _delayed(costs, words, link, delay_s)
        if makespan_s <= start_s + slope * delay_s + ROUNDING * scale_s or crossings <= slope:
            return delay_s if delay_s < 2.0 * scale_s else float("inf")
        # the path takes makespan - crossings·(delay - d) at another delay d
        delay_s = max(0.0, (start_s - makespan_s + crossings * delay_s) / (crossings - slope))
    return delay_s


def _delayed(costs: StraightCosts, words: Sequence[Word], link: int, delay_s: float) -> tuple[float, int]:
    """The makespan with a delay on one link, and how often a critical path crosses that link."""
    sends = list(costs.send_s)
    sends[link] += delay_s
    slow = replace(costs, send_s=tuple(sends))
    times = time_words(slow, words)
    assert times is not None  # delays cannot make a schedule deadlock
    took = (costs.forward_s, costs.backward_s, costs.weight_s)
    ordinals, positions = [], []
    for word in words:
        counts, own, where = [0, 0, 0], [], ([], [], [])
        for at, kind in enumerate(word):
            own.append(counts[kind])
            where[kind].append(at)
            counts[kind] += 1
        ordinals.append(own)
        positions.append(where)
    last = len(words) - 1
    stage = max(range(len(words)), key=lambda s: times.last_end_s[s])
    at, crossings = len(words[stage]) - 1, 0
    while at >= 0:
        starts_s, kind, n = times.starts_s[stage], words[stage][at], ordinals[stage][at]
        if at and starts_s[at] <= starts_s[at - 1] + took[words[stage][at - 1]][stage]:
            at -= 1
        elif kind == 0 and stage:
            crossings += stage - 1 == link
            stage, at = stage - 1, sender(slow, times, stage - 1, positions[stage - 1][0], 0, n, starts_s[at])
        elif kind == 1 and stage < last:
            crossings += stage == link
            stage, at = stage + 1, sender(slow, times, stage + 1, positions[stage + 1][1], 1, n, starts_s[at])
        elif kind == 1:
            at = positions[stage][0][n]
        else:
            break
    return times.makespan_s, crossings
