"""Improves words of a straight pipeline by swapping neighbours on a critical path, with a short tabu memory.

A critical path is a chain of actions, each starting as the one before it ends (or its message arrives), that ends with
the makespan. Only a change on it can shorten the makespan: two neighbours on a stage, the second waiting for the
first, change places.
"""

from collections.abc import Sequence

from costmodel.schedule.goal import Goal, better
from costmodel.schedule.straight import ROUNDING, StraightCosts, Word, WordTimes, peak_memory, time_words


def improve_words(
    costs: StraightCosts,
    words: Sequence[Word],
    goal: Goal,
    *,
    evaluations: int,
    patience: int = 40,
) -> tuple[tuple[Word, ...], WordTimes]:
    """The best words found by swaps.

    Args:
        costs: the stages.
        words: a start, free of deadlock and within the caps.
        goal: what to minimise.
        evaluations: most words to time.
        patience: steps without improvement before giving up.

    Returns:
        Words within the caps and their times, no worse than the start.
    """
    current = list(words)
    times = time_words(costs, current)
    if times is None:
        raise ValueError("the words to improve deadlock")
    best, best_times, best_key = tuple(current), times, goal.key(times.last_end_s)
    tabu: dict[tuple[int, Word], int] = {}
    step = idle = spent = 0
    while spent < evaluations and idle < patience and not goal.reached(best_key):
        step += 1
        choice = None
        for stage, at in _critical_pairs(costs, current, times, goal.worst_stage(times.last_end_s)):
            if spent >= evaluations:
                break
            word = swapped(current[stage], at)
            if word is None or tabu.get((stage, word), 0) > step:
                continue
            if peak_memory(word, costs.memory_delta) > costs.memory_cap[stage] + ROUNDING:
                continue
            old, current[stage] = current[stage], word
            tried = time_words(costs, current)
            current[stage] = old
            spent += 1
            if tried is not None:
                key = (*goal.key(tried.last_end_s), sum(tried.last_end_s))
                if choice is None or key < choice[0]:
                    choice = (key, stage, word, tried)
        if choice is None:
            break
        _, stage, word, times = choice
        tabu[stage, current[stage]] = step + 10
        current[stage] = word
        if better(key := goal.key(times.last_end_s), best_key):
            best, best_times, best_key, idle = tuple(current), times, key, 0
        else:
            idle += 1
    return best, best_times


def swapped(word: Word, at: int) -> Word | None:
    """The word with positions `at` and `at + 1` exchanged; None if they are of a kind, or one needs the other."""
    first, second = word[at], word[at + 1]
    if first == second:
        return None
    if second == first + 1 and word.count(first, 0, at + 1) <= word.count(second, 0, at + 2):
        return None
    return word[:at] + bytes((second, first)) + word[at + 2 :]


def _critical_pairs(costs: StraightCosts, words: Sequence[Word], times: WordTimes, stage: int) -> list[tuple[int, int]]:
    """(stage, position) of neighbours on the critical path to the end of `stage`, the second waiting for the first."""
    p = len(words)
    took = (costs.forward_s, costs.backward_s, costs.weight_s)
    at = len(words[stage]) - 1
    ordinals = [_ordinals(word) for word in words]
    positions = [_positions(word) for word in words]
    pairs = []
    while at >= 0:
        word, starts_s = words[stage], times.starts_s[stage]
        kind, start_s = word[at], starts_s[at]
        if at and start_s <= starts_s[at - 1] + took[word[at - 1]][stage] + 0.0:
            pairs.append((stage, at - 1))
            at -= 1
            continue
        n = ordinals[stage][at]
        if kind == 0 and stage:
            stage, at = stage - 1, sender(costs, times, stage - 1, positions[stage - 1][0], 0, n, start_s)
        elif kind == 1:
            if stage == p - 1:
                at = positions[stage][0][n]
            else:
                stage, at = stage + 1, sender(costs, times, stage + 1, positions[stage + 1][1], 1, n, start_s)
        else:
            break
    return pairs


def sender(
    costs: StraightCosts, times: WordTimes, stage: int, positions: list[int], kind: int, n: int, arrival_s: float
) -> int:
    """Position of the action that the arrival of message n had to wait for: the one that made it, or an earlier one
    where the link was occupied from that one's message on.

    Args:
        stage: the sender. positions: of its actions of the kind. kind: 0 for activations, 1 for gradients.
        arrival_s: of the message.
    """
    link = stage if kind == 0 else stage - 1
    wire_s, took_s = costs.wires_s[link], (costs.forward_s, costs.backward_s)[kind][stage]
    late_s = arrival_s - costs.send_s[link] - took_s
    while wire_s and n and times.starts_s[stage][positions[n]] < late_s * (1.0 - ROUNDING):
        n, late_s = n - 1, late_s - wire_s
    return positions[n]


def _ordinals(word: Word) -> list[int]:
    counts, ordinals = [0, 0, 0], []
    for kind in word:
        ordinals.append(counts[kind])
        counts[kind] += 1
    return ordinals


def _positions(word: Word) -> tuple[list[int], list[int], list[int]]:
    positions: tuple[list[int], list[int], list[int]] = ([], [], [])
    for at, kind in enumerate(word):
        positions[kind].append(at)
    return positions
