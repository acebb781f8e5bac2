"""Golden files are never rewritten in CI, and never made by accident."""

import pytest

from tests.golden_files import FOLDER, check_golden


def test_no_rewriting_in_ci(monkeypatch):
    monkeypatch.setenv("CI", "true")
    monkeypatch.setenv("MESHPLAN_UPDATE_GOLDEN", "1")
    with pytest.raises(pytest.fail.Exception, match="not rewritten in CI"):
        check_golden("tiny.plan.json", "other")


def test_a_missing_file_fails(monkeypatch):
    monkeypatch.delenv("MESHPLAN_UPDATE_GOLDEN", raising=False)
    with pytest.raises(AssertionError, match="no golden file"):
        check_golden("none.txt", "text")
    assert not (FOLDER / "none.txt").exists()


def test_a_difference_fails(monkeypatch):
    monkeypatch.delenv("MESHPLAN_UPDATE_GOLDEN", raising=False)
    with pytest.raises(AssertionError):
        check_golden("tiny.plan.json", "other")
