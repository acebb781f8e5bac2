"""What the commands print and write, and with which exit code."""

import json
import math
import re
import xml.etree.ElementTree as ElementTree

import pytest

from planner.check.codes import COMPILE_RULES, MODEL_RULES, RULES
from planner.plan_files import read_plan, write_plan
from planner.planfile.codec import encode
from tests.golden_files import check_golden
from tests.plans import tiny_plan


def test_explain_golden(call):
    done = call("explain", "good.plan.json")
    assert done.code == 0 and not done.err
    check_golden("explain_two_stages.txt", done.out)


def test_explain_forms(call):
    assert call("explain", "good.plan.json", "--summary").out == f"{tiny_plan()!r}\n"
    assert json.loads(call("explain", "good.plan.json", "--json").out)["plan"] == "tiny"
    assert call("explain", "good.plan.json", "--html").out.startswith("<!DOCTYPE html>")
    assert call("explain", "good.plan.json", "--timeline").out.startswith("stage 0 | 0")
    done = call("explain", "good.plan.json", "--html", "--json")
    assert done.code == 2 and "give one of" in done.err


def test_output_goes_to_a_file(call, tmp_path):
    done = call("explain", "good.plan.json", "--json", "-o", "x.json")
    assert done.code == 0 and not done.out and done.err == "wrote x.json\n"
    assert json.loads((tmp_path / "x.json").read_text())["plan"] == "tiny"


def test_validate_golden(call):
    done = call("validate", "good.plan.json", "--cluster", "mixed.toml", "--cluster", "small.toml")
    assert done.code == 1 and not done.err
    check_golden("validate.txt", done.out)


def test_validate_ok(call):
    done = call("validate", "good.plan.json", "--cluster", "mixed.toml")
    assert (done.code, done.out) == (0, "good.plan.json on mixed.toml: ok\n")


def test_validate_matrix_with_a_bad_plan(call, tmp_path):
    (tmp_path / "cut.plan.json").write_bytes(encode(tiny_plan())[:500])
    done = call(
        "validate", "good.plan.json", "cut.plan.json", "--cluster", "mixed.toml", "--cluster", "small.toml", "--json"
    )
    assert done.code == 2
    document = json.loads(done.out)
    got = [(r["plan"], r["cluster"], r["passed"]) for r in document["results"]]
    assert got == [
        ("good.plan.json", "mixed.toml", True), ("good.plan.json", "small.toml", False),
        ("cut.plan.json", "mixed.toml", False), ("cut.plan.json", "small.toml", False),
    ]  # fmt: skip
    assert document["results"][2]["findings"][0]["code"] == "MP151"
    lines = (tmp_path / "good.plan.json").read_text().splitlines()
    for found in document["results"][1]["findings"]:
        name = re.findall(r"\w+", found["where"])[-1]
        assert name.isdigit() or f'"{name}"' in lines[found["line"] - 1]


def test_validate_warning_is_no_failure(call, tmp_path):
    text = (tmp_path / "mixed.toml").read_text()
    (tmp_path / "slower.toml").write_text(text.replace("12_500_000_000", "11_000_000_000").replace("12.5e9", "11e9"))
    assert text != (tmp_path / "slower.toml").read_text()
    done = call("validate", "good.plan.json", "--cluster", "slower.toml")
    assert done.code == 0 and "ok (1 warning)" in done.out and "MP600" in done.out


@pytest.mark.parametrize("form", ["junit", "sarif", "github", "json", "text"])
def test_validate_formats(call, form, tmp_path):
    done = call("validate", "good.plan.json", "--cluster", "small.toml", "--format", form, "-o", "found")
    assert done.code == 1 and not done.out
    text = (tmp_path / "found").read_text()
    assert "MP601" in text
    if form == "junit":
        assert ElementTree.fromstring(text).get("failures") == "1"
    elif form in ("sarif", "json"):
        json.loads(text)


def cases(call, *args):
    tree = ElementTree.fromstring(call("validate", *args, "--format", "junit").out)
    found = {case.get("name").split()[0]: case for case in tree.iter("testcase")}
    skipped = {code for code, case in found.items() if case.find("skipped") is not None}
    assert tree.get("skipped") == str(len(skipped)) and tree.get("tests") == str(len(found))
    return found, skipped


def test_junit_does_not_pass_what_was_not_checked(call, tmp_path):
    found, skipped = cases(call, "good.plan.json", "--cluster", "mixed.toml")
    assert skipped == {*MODEL_RULES, *COMPILE_RULES} and "--compile" in found["MP650"].find("skipped").get("message")
    assert "--model" in found["MP630"].find("skipped").get("message")
    (tmp_path / "cut.plan.json").write_bytes(encode(tiny_plan())[:500])
    found, skipped = cases(call, "cut.plan.json", "--cluster", "mixed.toml")
    assert skipped == {rule.code for rule in RULES} and found["MP151"].find("failure") is not None
    document = json.loads(call("validate", "good.plan.json", "--cluster", "mixed.toml", "--json").out)
    assert document["results"][0]["skipped"] == [*MODEL_RULES, *COMPILE_RULES]


def test_cluster_show(call):
    done = call("cluster", "show", "mixed.toml")
    assert done.code == 0 and not done.err
    check_golden("cluster_show.txt", done.out)
    document = json.loads(call("cluster", "show", "mixed.toml", "--json").out)
    assert document["devices"] == 8 and document["price_per_hour"] is None


def test_cluster_init_round_trip(call, tmp_path):
    done = call("cluster", "init", "--name", "here", "-o", "here.toml")
    assert done.code == 0 and "devices" in done.err
    shown = call("cluster", "show", "here.toml")
    assert shown.code == 0 and "Cluster here: 8 devices" in shown.out  # the tests' fake CPU devices
    assert call("cluster", "init").out.startswith('name = "local"')
    document = json.loads(call("cluster", "init", "--json").out)
    assert document["name"] == "local" and document["devices"] == 8


def test_models(call):
    done = call("models")
    assert done.code == 0 and any(line.startswith("gpt2 ") for line in done.out.splitlines())
    assert {"name", "family", "parameters"} <= set(json.loads(call("models", "--json").out)["models"][0])
    shown = call("models", "gpt(hidden=64,layers=2,heads=4,vocab=128,seq=16)")
    assert shown.code == 0 and "parameters in" in shown.out and "batch leaf" in shown.out
    document = json.loads(call("models", "gpt(hidden=64,layers=2,heads=4,vocab=128,seq=16)", "--json").out)
    assert document["parameters"] == sum(math.prod(shape) for shape, _ in document["parameter_shapes"].values())


def test_plans_are_written_the_same_way(call, tmp_path):
    write_plan(tmp_path / "again.plan.json", read_plan(tmp_path / "good.plan.json"))
    assert (tmp_path / "again.plan.json").read_bytes() == (tmp_path / "good.plan.json").read_bytes()


def test_version_and_help(call):
    assert call("--version").out.startswith("meshplan ")
    done = call("--help")
    assert done.code == 0 and "Exit codes:" in done.out and "validate" in done.out
    assert call("-h").out == done.out
