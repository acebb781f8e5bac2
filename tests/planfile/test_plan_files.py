"""Plan files on disk: whole or not at all."""

import os
import stat

import pytest

import planner
from costmodel.errors import InputError
from planner.plan_files import read_plan, write_bytes, write_plan
from tests.plans import tiny_plan


def test_write_and_read(tmp_path):
    plan = tiny_plan()
    path = tmp_path / "a.plan.json"
    write_plan(path, plan)
    assert read_plan(path) == plan
    assert [entry.name for entry in tmp_path.iterdir()] == ["a.plan.json"]


def test_errors_name_the_file(tmp_path):
    for path in (tmp_path / "none.json", tmp_path):
        with pytest.raises(InputError) as caught:
            read_plan(path)
        assert caught.value.code == "MP150" and str(path) in caught.value.message
    (tmp_path / "bad.json").write_text("{")
    with pytest.raises(InputError, match=r"bad\.json"):
        read_plan(tmp_path / "bad.json")


def test_swapped_arguments_say_so(tmp_path):
    words = r"(?s)first argument is a Plan and the second a \w*Path.*save_plan\(path, plan\)"
    with pytest.raises(InputError, match=words):
        planner.save_plan(tiny_plan(), tmp_path / "a.plan.json")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("given", [None, 3, b"a.plan.json", tiny_plan()])
def test_what_is_no_path_is_refused(given):
    with pytest.raises(InputError, match=f"a str or a pathlib.Path; got a {type(given).__name__}") as caught:
        planner.load_plan(given)
    assert caught.value.code == "MP157" and "load_plan(path)" in caught.value.hint


def test_what_is_no_plan_is_not_saved(tmp_path):
    with pytest.raises(InputError, match="got a dict") as caught:
        planner.save_plan(tmp_path / "a.plan.json", {"stages": []})
    assert caught.value.code == "MP157" and not list(tmp_path.iterdir())


def test_a_failed_write_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "x"
    path.write_bytes(b"old")

    def fail(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(InputError, match="No space left") as caught:
        write_bytes(path, b"new")
    assert caught.value.code == "MP156"
    assert path.read_bytes() == b"old" and [entry.name for entry in tmp_path.iterdir()] == ["x"]


def test_missing_folder(tmp_path):
    with pytest.raises(InputError) as caught:
        write_bytes(tmp_path / "no" / "x", b"")
    assert caught.value.code == "MP156"


def test_mode_and_links_stay(tmp_path):
    target, link = tmp_path / "target", tmp_path / "link"
    target.write_bytes(b"old")
    target.chmod(0o640)
    link.symlink_to(target)
    write_bytes(link, b"new")
    assert link.is_symlink() and target.read_bytes() == b"new" and stat.S_IMODE(target.stat().st_mode) == 0o640
