"""1F1B with chosen warm-up counts: DAPPLE's two policies, and the fewest extra forwards that hide given link delays.

The slow-link law. Let w_i be the warm-up count of stage i (forwards before its first backward), Δ_i = w_i - w_(i+1),
T_i the time of a microbatch on stage i and c_i the one-way delay of link (i, i+1). A microbatch's way from stage i over
the link and back to the next forward that waits for it takes T_i + T_(i+1) + 2·c_i, in which Δ_i + 1 microbatches pass:

    period ≥ (T_i + T_(i+1) + 2·c_i) / (Δ_i + 1)                    fused backwards,                            (S1)
    period ≥ (T_i + T_(i+1) - W_(i+1) + 2·c_i) / (Δ_i + 1)          split backwards in the order B, W, F.       (S2)

With stages alike, (S1) reads: no slowdown iff c ≤ (Δ - 1)·T/2, and (S2): iff c ≤ ((Δ - 1)·T + W)/2. Each extra Δ costs
one activation on every stage upstream of the link.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, inf

from costmodel.errors import InputError
from costmodel.schedule.actions import Schedule, require_positive
from costmodel.schedule.generate import Shares, checked_shares, default_windows, one_f_one_b


@dataclass(frozen=True, slots=True, kw_only=True)
class WarmUps:
    """Warm-up counts chosen for given link delays.

    Args:
        counts: forwards of each stage before its first backward; also the activations that it holds.
        windows: for `one_f_one_b`: 1, then Δ of each link.
        absorbs_s: one-way delay of each link that leaves the period as it is, by the slow-link law.
        period_s: time per microbatch in the steady state, by the same law.
        absorbed: whether every given delay is absorbed, that is, the period is that of the slowest stage.
    """

    counts: tuple[int, ...]
    windows: tuple[int, ...]
    absorbs_s: tuple[float, ...]
    period_s: float
    absorbed: bool


def dapple_pa(stages: int, microbatches: int, shares: Shares | None = None) -> Schedule:
    """DAPPLE's early backward with warm-up policy A: p - i forwards on stage i first, which is 1F1B.

    Args:
        stages: number of stages p.
        microbatches: number of microbatches m.
        shares: per stage and group the microbatches that it runs; by default each stage has one group.

    Raises:
        InputError: MP143 for a count below 1, MP144 if the groups of a stage do not partition the microbatches.
    """
    return _named("dapple-pa", one_f_one_b(stages, microbatches, shares))


def dapple_pb(stages: int, microbatches: int, shares: Shares | None = None) -> Schedule:
    """DAPPLE's early backward with warm-up policy B, for slow links: 2·(p - i) - 1 forwards on stage i first.

    It absorbs a one-way delay of half a microbatch's time on each link. Where stages have several groups, windows are
    twice those of 1F1B with the same shares.

    Args and Raises: as `dapple_pa`.
    """
    usual = default_windows(checked_shares(stages, microbatches, shares))
    return _named("dapple-pb", one_f_one_b(stages, microbatches, shares, windows=[2 * width for width in usual]))


def hetero_1f1b(
    stages: int,
    microbatches: int,
    delays_s: Sequence[float],
    stage_times_s: Sequence[float] | float,
    memory_cap: Sequence[float] | None = None,
) -> Schedule:
    """1F1B with the extra early forwards that hide slow links, as far as memory allows.

    Args:
        stages: number of stages p.
        microbatches: number of microbatches m.
        delays_s: one-way delay of each of the p - 1 links.
        stage_times_s: F + B of each stage, or of all.
        memory_cap: most activations that each stage may hold; None if there is no limit.

    Raises:
        InputError: as `warm_ups_for_delays`.
    """
    times_s = [stage_times_s] * stages if isinstance(stage_times_s, int | float) else list(stage_times_s)
    if len(times_s) != stages:
        raise InputError("MP143", f"times are given for {len(times_s)} stages, the schedule has {stages}")
    chosen = warm_ups_for_delays(times_s, delays_s, memory_cap=memory_cap)
    return _named("hetero-1f1b", one_f_one_b(stages, microbatches, windows=chosen.windows))


def warm_ups_for_delays(
    stage_times_s: Sequence[float],
    delays_s: Sequence[float],
    *,
    weight_s: Sequence[float] | None = None,
    memory_cap: Sequence[float] | None = None,
) -> WarmUps:
    """The fewest warm-up forwards for the shortest period that the slow-link law and memory allow.

    Without caps Δ_i = max(1, ⌈(T_i + T_(i+1) - W_(i+1) + 2·c_i) / T⌉ - 1), where T is the slowest stage's time; with
    stages alike that is max(1, 1 + ⌈(2·c_i - W)/T⌉). If that is too much memory, the shortest period that fits takes
    T's place.

    Args:
        stage_times_s: F + B (+ W) per microbatch of each of p stages.
        delays_s: one-way delay of each of the p - 1 links.
        weight_s: W of each stage, contained in `stage_times_s`, if backwards are split and W follows its B; else None.
        memory_cap: most activations that each stage may hold; None if there is no limit.

    Raises:
        InputError: MP143 if lists have different lengths, MP147 for a time that is negative or not finite, MP149 if a
            stage may hold fewer activations than 1F1B needs there.
    """
    p = len(stage_times_s)
    require_positive("stages", p)
    weights_s = [0.0] * p if weight_s is None else list(weight_s)
    caps = [inf] * p if memory_cap is None else list(memory_cap)
    for name, given, wanted in (("delays", delays_s, p - 1), ("W times", weights_s, p), ("caps", caps, p)):
        if len(given) != wanted:
            raise InputError("MP143", f"{len(given)} {name} are given for {p} stages, expected {wanted}")
    for name, values in (("stage_times_s", stage_times_s), ("delays_s", delays_s), ("weight_s", weights_s)):
        for at, time_s in enumerate(values):
            if not 0.0 <= time_s < inf:
                raise InputError("MP147", f"{name}[{at}] is {time_s}, it must be finite and not negative")
    for stage, cap in enumerate(caps):
        if not cap >= p - stage:
            raise InputError(
                "MP149",
                f"stage {stage} may hold {cap:g} activations, 1F1B over {p} stages needs {p - stage} there",
                f"allow at least {[p - i for i in range(p)]}, or let a schedule be synthesized for these caps",
            )
    trips_s = [stage_times_s[i] + stage_times_s[i + 1] - weights_s[i + 1] + 2.0 * delays_s[i] for i in range(p - 1)]
    slowest_s = max(stage_times_s)
    for period_s in _periods(slowest_s, trips_s, caps):
        gaps = [max(1, ceil(trip / period_s - 1.0 - 1e-12)) if period_s else 1 for trip in trips_s]
        counts = [1 + sum(gaps[i:]) for i in range(p)]
        if all(count <= cap for count, cap in zip(counts, caps)):
            break
    else:
        raise AssertionError("gaps of 1 fit")  # the longest period is the longest trip / 2
    reached_s = max([slowest_s, *(trip / (gap + 1) for trip, gap in zip(trips_s, gaps))])
    free_s = [trip - 2.0 * delay for trip, delay in zip(trips_s, delays_s)]
    return WarmUps(
        counts=tuple(counts),
        windows=(1, *gaps),
        absorbs_s=tuple(max(0.0, ((gap + 1) * slowest_s - free) / 2.0) for gap, free in zip(gaps, free_s)),
        period_s=reached_s,
        absorbed=reached_s <= slowest_s * (1.0 + 1e-12),
    )


def _named(name: str, schedule: Schedule) -> Schedule:
    return Schedule(name=name, microbatches=schedule.microbatches, actions=schedule.actions)


def _periods(slowest_s: float, trips_s: Sequence[float], caps: Sequence[float]) -> list[float]:
    """Every period at which a link's Δ changes, from the shortest that is possible."""
    most = int(min(max(caps), sum(ceil(2.0 + trip / slowest_s) for trip in trips_s))) + 1 if slowest_s else 1
    changes = {trip / (gap + 1) for trip in trips_s for gap in range(1, most + 1)}
    return [slowest_s, *sorted(period_s for period_s in changes if period_s > slowest_s)]
