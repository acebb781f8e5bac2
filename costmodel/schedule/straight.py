"""Straight pipelines, one actor a stage: their costs, and their schedules as one word a stage, timed exactly.

Microbatches are alike, so exchanging two never helps: some best schedule runs each kind of action in order of
microbatch on every stage. A stage's list is then a word over F, B and W, in which the n-th F is microbatch n's.

Memory is counted in activations of one microbatch: an action adds its delta, a positive one at its start, a negative
one at its end.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

from costmodel.errors import InputError
from costmodel.schedule.actions import Action, ActionKind, ActorActions, Schedule, require_positive

F, B, W = 0, 1, 2
KINDS: tuple[ActionKind, ...] = ("F", "B", "W")

Word = bytes
"""One stage's actions in order, each `F`, `B` or `W`."""

ROUNDING = 1e-9


@dataclass(frozen=True, slots=True, kw_only=True)
class StraightCosts:
    """What the stages of a straight pipeline cost.

    Args:
        forward_s, backward_s, weight_s: F, B and W of one microbatch, per stage.
        send_s: one-way delay of each of the p - 1 links, both directions.
        memory_cap: most activations that each stage may hold; infinite if there is no limit.
        memory_delta: what F, B and W add to them.
        wire_s: part of each link's delay for which a message occupies the link, in its direction: the next one waits
            for that long. Empty if messages overlap.

    Raises:
        InputError: MP143 if lists have different lengths or there is no stage, MP147 for a time that is negative or not
            finite, MP149 for a cap that is NaN or a delta under which a microbatch would leave memory behind.
    """

    forward_s: tuple[float, ...]
    backward_s: tuple[float, ...]
    weight_s: tuple[float, ...]
    send_s: tuple[float, ...]
    memory_cap: tuple[float, ...]
    memory_delta: tuple[float, float, float] = (1.0, 0.0, -1.0)
    wire_s: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        p = len(self.forward_s)
        require_positive("stages", p)
        wanted = {"backward_s": p, "weight_s": p, "send_s": p - 1, "memory_cap": p, "memory_delta": 3}
        wanted |= {"wire_s": p - 1} if self.wire_s else {}
        for name, count in wanted.items():
            values = getattr(self, name)
            if len(values) != count:
                raise InputError("MP143", f"{name} has {len(values)} entries for {p} stages, expected {count}")
        for name in ("forward_s", "backward_s", "weight_s", "send_s", "wire_s"):
            for at, time_s in enumerate(getattr(self, name)):
                if not 0.0 <= time_s < inf:
                    raise InputError("MP147", f"{name}[{at}] is {time_s}, it must be finite and not negative")
        for at, (wire_s, send_s) in enumerate(zip(self.wire_s, self.send_s)):
            if wire_s > send_s:
                message = f"wire_s[{at}] is {wire_s}, more than the delay send_s[{at}], {send_s}, that it is part of"
                raise InputError("MP147", message, "a delay is the time on the link and its latency together")
        for stage, cap in enumerate(self.memory_cap):
            if not cap >= 0.0:
                raise InputError("MP149", f"memory_cap[{stage}] is {cap}, it must be a number of activations")
        forward, backward, weight = self.memory_delta
        sound = forward > 0.0 and forward + backward >= -ROUNDING and abs(forward + backward + weight) <= ROUNDING
        if not (sound and forward < inf):
            raise InputError(
                "MP149",
                f"memory_delta is {self.memory_delta}: F must add, and W must have freed what F and B added",
                "use (1, 0, -1) if an activation is whole until its W, (1, -0.5, -0.5) if its B frees half",
            )

    @property
    def stages(self) -> int:
        return len(self.forward_s)

    @property
    def wires_s(self) -> tuple[float, ...]:
        """Of each link, the time for which a message occupies it."""
        return self.wire_s or (0.0,) * (self.stages - 1)

    @property
    def fused(self) -> bool:
        """Whether W is part of B: it takes no time, frees no memory, and words leave it out."""
        return self.memory_delta[2] == 0.0 and not any(self.weight_s)

    @property
    def letters(self) -> int:
        """Actions of one microbatch on one stage."""
        return 2 if self.fused else 3

    @property
    def least_cap(self) -> float:
        """Activations without which no schedule can run: one microbatch's highest."""
        forward, backward, _ = self.memory_delta
        return max(forward, forward + backward)

    def round_trip_s(self, stage: int) -> float:
        """Least time between the end of a microbatch's F on `stage` and the arrival of its gradient."""
        later = range(stage + 1, self.stages)
        return sum(self.forward_s[i] + self.backward_s[i] for i in later) + 2.0 * sum(self.send_s[stage:])


@dataclass(frozen=True, slots=True, kw_only=True)
class WordTimes:
    """When words run.

    Args:
        makespan_s: end of the last action.
        first_start_s, last_end_s: of each stage.
        starts_s: of each action, per stage.
    """

    makespan_s: float
    first_start_s: tuple[float, ...]
    last_end_s: tuple[float, ...]
    starts_s: tuple[list[float], ...]

    @property
    def longest_span_s(self) -> float:
        """The longest time from a stage's first start to its last end."""
        return max(last - first for first, last in zip(self.first_start_s, self.last_end_s))


def time_words(costs: StraightCosts, words: Sequence[Word]) -> WordTimes | None:
    """Runs words, each action as early as it can; None if they deadlock."""
    p, wires_s = len(words), costs.wires_s
    forward_s, backward_s, weight_s, send_s = costs.forward_s, costs.backward_s, costs.weight_s, costs.send_s
    activations: list[list[float]] = [[] for _ in range(p)]  # arrival times
    gradients: list[list[float]] = [[] for _ in range(p)]
    steps, forwards, backwards, clocks = [0] * p, [0] * p, [0] * p, [0.0] * p
    starts_s: list[list[float]] = [[] for _ in range(p)]
    runnable, queued, last = list(range(p - 1, -1, -1)), [True] * p, p - 1
    while runnable:
        s = runnable.pop()
        queued[s] = False
        word, step, f, b, now, starts = words[s], steps[s], forwards[s], backwards[s], clocks[s], starts_s[s]
        came, back = activations[s], gradients[s]
        on = activations[s + 1] if s < last else back
        off = gradients[s - 1] if s else None
        on_s = send_s[s] if s < last else 0.0
        off_s = send_s[s - 1] if s else 0.0
        on_wire_s = wires_s[s] if s < last else 0.0
        off_wire_s = wires_s[s - 1] if s else 0.0
        took_f, took_b, took_w = forward_s[s], backward_s[s], weight_s[s]
        begun, size, here = step, len(word), len(came)
        while step < size:
            kind = word[step]
            if kind == 0:
                if s:
                    if f >= here:
                        break
                    if came[f] > now:
                        now = came[f]
                starts.append(now)
                now += took_f
                at = now + on_s
                if on_wire_s and on and on[-1] + on_wire_s > at:  # the link is occupied
                    at = on[-1] + on_wire_s
                on.append(at)
                f += 1
            elif kind == 1:
                if b >= len(back):
                    break
                if back[b] > now:
                    now = back[b]
                starts.append(now)
                now += took_b
                b += 1
                if off is not None:
                    at = now + off_s
                    if off_wire_s and off and off[-1] + off_wire_s > at:
                        at = off[-1] + off_wire_s
                    off.append(at)
            else:
                starts.append(now)
                now += took_w
            step += 1
        if step > begun:
            steps[s], forwards[s], backwards[s], clocks[s] = step, f, b, now
            for neighbour in (s - 1, s + 1):
                if 0 <= neighbour < p and not queued[neighbour] and steps[neighbour] < len(words[neighbour]):
                    queued[neighbour] = True
                    runnable.append(neighbour)
    if any(step < len(word) for step, word in zip(steps, words)):
        return None
    return WordTimes(
        makespan_s=max(clocks),
        first_start_s=tuple(starts[0] if starts else 0.0 for starts in starts_s),
        last_end_s=tuple(clocks),
        starts_s=tuple(starts_s),
    )


def peak_memory(word: Word, delta: Sequence[float]) -> float:
    """Most activations that a stage holds at one time."""
    held = peak = 0.0
    for kind in word:
        change = delta[kind]
        if change > 0.0:
            held += change
            if held > peak:
                peak = held
        else:
            held += change
    return peak


def fits(costs: StraightCosts, words: Sequence[Word]) -> bool:
    """Whether every stage keeps within its cap."""
    return all(
        cap == inf or peak_memory(word, costs.memory_delta) <= cap + ROUNDING
        for word, cap in zip(words, costs.memory_cap)
    )


def words_of(schedule: Schedule) -> tuple[Word, ...]:
    """The words of a straight schedule that splits its backwards and keeps microbatches in order."""
    letters = {kind: letter for letter, kind in enumerate(KINDS)}
    return tuple(bytes(letters[action.kind] for action in row.actions) for row in schedule.actions)


def schedule_of(words: Sequence[Word], microbatches: int, name: str) -> Schedule:
    """Words as a schedule; the inverse of `words_of`."""
    rows = []
    for stage, word in enumerate(words):
        counts, actions = [0, 0, 0], []
        for kind in word:
            actions.append(Action(stage, KINDS[kind], counts[kind]))
            counts[kind] += 1
        rows.append(ActorActions(stage=stage, group=0, actions=tuple(actions)))
    return Schedule(name=name, microbatches=microbatches, actions=tuple(rows))
