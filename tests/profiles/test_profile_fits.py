"""Fits recover the constants that made the data; timing says what it saw. No devices."""

import math
from collections.abc import Callable, Iterator
from itertools import repeat

import pytest

from profiles.device_loop import DeviceLoop
from profiles.fits import fit_line, fit_rate
from profiles.schema import Sample
from profiles.timing import MeasurementError, combine, measure, summarise

SIZES = (4e3, 64e3, 1e6, 8e6, 64e6)


@pytest.mark.parametrize(("fixed_s", "rate"), [(25e-6, 300e9), (1e-4, 5e9), (0.0, 1e9)])
def test_a_line_is_recovered_over_four_orders_of_magnitude(fixed_s: float, rate: float) -> None:
    fit = fit_line(SIZES, [fixed_s + size / rate for size in SIZES])
    assert fit.fixed_s == pytest.approx(fixed_s, rel=1e-4, abs=1e-9)
    assert fit.s_per_byte == pytest.approx(1 / rate, rel=1e-4)
    assert fit.error < 1e-4 and fit.samples == 5 and fit.provenance == "fitted"


def test_noise_of_a_tenth_moves_a_line_by_less_than_a_fifth() -> None:
    noise = [1.1, 0.9, 1.1, 0.9, 1.1]
    fit = fit_line(SIZES, [one * (1e-4 + size / 5e9) for one, size in zip(noise, SIZES, strict=True)])
    assert fit.fixed_s == pytest.approx(1e-4, rel=0.2) and fit.s_per_byte == pytest.approx(1 / 5e9, rel=0.2)
    assert 0.05 < fit.error < 0.15


def test_a_line_is_never_negative() -> None:
    falling = fit_line([1e3, 1e6], [2e-3, 1e-3])
    assert falling.s_per_byte == 0.0 and falling.fixed_s > 0
    steep = fit_line([1e6, 2e6], [1e-3, 3e-3])
    assert steep.fixed_s == 0.0 and steep.s_per_byte > 0
    with pytest.raises(MeasurementError, match="two sizes"):
        fit_line([1e6, 1e6], [1e-3, 1e-3])


def test_a_rate_is_recovered_and_samples_at_the_floor_do_not_count() -> None:
    work, floor_s = [1e6, 1e9, 2e9, 8e9], 5e-6
    fit = fit_rate(work, [max(one / 100e12, floor_s) for one in work], floor_s)
    assert fit.value == pytest.approx(100e12) and fit.samples == 2 and fit.error < 1e-6
    alone = fit_rate([1e3], [floor_s], floor_s)
    assert alone.value == pytest.approx(1e3 / floor_s) and alone.samples == 1
    with pytest.raises(MeasurementError):
        fit_rate([], [])


def from_series(times: Iterator[float]) -> tuple[Callable[[], float], Callable[[], float]]:
    """A run that takes the next of `times`, and the clock that it moves."""
    now = [0.0]

    def run() -> float:
        took = next(times)
        now[0] += took
        return took

    return run, lambda: now[0]


def test_runs_before_the_steady_state_do_not_count() -> None:
    run, clock = from_series(iter([9.0, 3.0, 1.5, 1.0, 1.01] + [1.0] * 40))
    sample = measure(run, 100.0, clock=clock)
    assert sample.time_s == 1.0 and sample.spread_s == 0.0 and sample.samples == 5


def test_the_time_is_kept_but_two_runs_are_made() -> None:
    for runs_s in (0.0, -1.0, 1.5):
        run, clock = from_series(iter([1.0] * 50))
        assert measure(run, runs_s, clock=clock) == Sample(time_s=1.0, samples=2) and clock() == 2.0
    noisy, clock = from_series(iter([1.0, 1.3] * 50))
    assert measure(noisy, 20.0, clock=clock).samples < 20 and clock() <= 20.0


def test_a_long_first_run_counts_only_where_the_second_takes_as_long() -> None:
    run, clock = from_series(iter([8.0, 5.0, 5.2] + [5.0] * 9))
    sample = measure(run, 1.0, clock=clock)
    assert sample.time_s == pytest.approx(5.1) and sample.samples == 2 and sample.spread_s == pytest.approx(0.1)
    assert clock() == pytest.approx(18.2)


def test_a_run_that_was_made_already_is_not_made_again() -> None:
    run, clock = from_series(iter([5.0] * 9))
    assert measure(run, 0.0, clock=clock, before_s=5.1).samples == 2 and clock() == 5.0


@pytest.mark.parametrize(("op_s", "runs_s", "most_s"), [(5.0, 0.5, 10.0), (0.2, 1.0, 1.2), (1e-3, 0.1, 0.12)])
def test_a_loop_spends_its_time_and_no_more_than_two_runs_above(
    op_s: float, runs_s: float, most_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, clock = from_series(repeat(op_s))
    monkeypatch.setattr(DeviceLoop, "runner", lambda *_: run)
    monkeypatch.setattr(DeviceLoop, "arrays", lambda *_: [])
    sample = DeviceLoop(devices=(), clock=clock).time(lambda: None, [], runs_s)
    assert sample.time_s == pytest.approx(op_s) and clock() <= most_s


def test_drift_compares_the_halves_of_the_runs() -> None:
    assert summarise([1.0, 1.0, 2.0, 2.0]).drift == 1.0
    assert summarise([1.0, 1.1, 0.9, 1.0]).drift == pytest.approx(-0.0952)
    assert summarise([1.0]) == Sample(time_s=1.0)


def test_what_surrounds_a_repetition_is_taken_off() -> None:
    one = combine(Sample(time_s=1.1, spread_s=0.2, samples=9), repeats=10, call_s=0.1, each_s=0.02)
    assert one.time_s == pytest.approx(0.08) and one.spread_s == pytest.approx(0.02) and one.samples == 9
    with pytest.raises(MeasurementError, match="too short"):
        combine(Sample(time_s=0.1), repeats=10, call_s=0.1, each_s=0.0)
    assert math.isfinite(one.drift)
