"""Fits of constants to measurements of which some are in trouble."""

import numpy as np
import pytest

from profiles.calibrate import Constant, calibrate

WORK = np.linspace(1.0, 4.0, 12)
CONSTANTS = (Constant("rate", 1.5, 2.0), Constant("fixed", 0.3, 2.0))


def _predict(values):
    return values["fixed"] + WORK / values["rate"]


def test_exact_measurements_give_the_constants_back():
    found = calibrate(CONSTANTS, _predict, _predict({"rate": 2.0, "fixed": 0.5}))
    assert found.values["rate"] == pytest.approx(2.0, rel=0.02) and found.values["fixed"] == pytest.approx(
        0.5, rel=0.05
    )
    assert np.abs(found.residuals).max() < 0.01


@pytest.mark.parametrize("slow", [(1, 5, 9), (2, 6, 10), (0, 4, 11)])
def test_a_quarter_that_is_far_too_slow_hardly_moves_the_others(slow):
    """Under soft-L1 alone the others are off by 1% on average."""
    measured = _predict({"rate": 2.0, "fixed": 0.5})
    measured[list(slow)] *= 1.5
    found = calibrate(CONSTANTS, _predict, measured)
    assert np.abs(np.delete(found.residuals, slow)).mean() < 0.005
    assert found.residuals[list(slow)] == pytest.approx(-np.log(1.5), abs=0.02)
