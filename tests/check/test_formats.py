"""Findings in every form: each is valid for its reader and loses nothing."""

import json
import xml.etree.ElementTree as ElementTree

import pytest

from planner.check.formats import FORMATS, CheckResult, render
from planner.planfile.schema import Finding

HARD = "bad <tag> & \"quotes\" 'x', 100%: a,b\nstep | 0F0 >1B0<\x07"
ERROR = Finding(code="MP601", severity="error", message=HARD, hint="do <this>", where="stages[0].groups[0].devices[1]")
SECOND = Finding(code="MP601", severity="error", message="another", where="stages[1]")
WARNING = Finding(code="MP600", severity="warning", message="different cluster", where="cluster.fingerprint")
INPUT = Finding(code="MP151", severity="error", message="cut short")
RESULTS = [
    CheckResult(plan="a.plan.json", cluster="one.toml", findings=(), lines=()),
    CheckResult(plan="b,c:d.plan.json", cluster="two.toml", findings=(ERROR, SECOND, WARNING), lines=(12, 20, 3)),
    CheckResult(plan="cut.plan.json", cluster="one.toml", findings=(INPUT,), lines=(1,)),
    CheckResult(plan="w.plan.json", cluster="one.toml", findings=(WARNING,), lines=(3,)),
]


@pytest.mark.parametrize("form", FORMATS)
def test_every_format_ends_in_a_newline_and_takes_nothing(form):
    assert render(RESULTS, form).endswith("\n")
    assert render(RESULTS[:1], form).endswith("\n")


def test_passed():
    assert [result.passed for result in RESULTS] == [True, False, False, True]


def test_text():
    text = render(RESULTS, "text")
    assert "a.plan.json on one.toml: ok\n" in text
    assert "b,c:d.plan.json on two.toml: failed (2 errors, 1 warning)" in text
    assert "hint: do <this>" in text and "at b,c:d.plan.json:12 (stages[0].groups[0].devices[1])" in text
    assert text.endswith("4 combinations checked, 2 failed\n")


def test_json():
    document = json.loads(render(RESULTS, "json"))
    assert document["passed"] is False and len(document["results"]) == 4
    first = document["results"][1]["findings"][0]
    assert first == {
        "code": "MP601", "rule": "device-exists", "severity": "error", "message": HARD, "hint": "do <this>",
        "where": "stages[0].groups[0].devices[1]", "line": 12,
    }  # fmt: skip


def test_junit():
    root = ElementTree.fromstring(render(RESULTS, "junit"))
    suites = root.findall("testsuite")
    assert [suite.get("failures") for suite in suites] == ["0", "1", "1", "0"] and root.get("failures") == "2"
    for suite in suites:
        cases = suite.findall("testcase")
        assert len(cases) == int(suite.get("tests", 0)) > 10
        assert sum(len(case.findall("failure")) for case in cases) == int(suite.get("failures", 0))
    failed = next(case for case in suites[1].findall("testcase") if case.find("failure") is not None)
    assert failed.get("name") == "MP601 device-exists" and "100%" in (failed.find("failure").text or "")
    assert "another" in (failed.find("system-out").text or "")


def test_sarif():
    document = json.loads(render(RESULTS, "sarif"))
    assert document["version"] == "2.1.0" and document["$schema"].endswith("sarif-2.1.0.json")
    (run,) = document["runs"]
    rules = run["tool"]["driver"]["rules"]
    assert len({rule["id"] for rule in rules}) == len(rules)
    assert len(run["results"]) == 5
    for result in run["results"]:
        assert rules[result["ruleIndex"]]["id"] == result["ruleId"]
        assert result["level"] in ("error", "warning", "note") and result["message"]["text"]
        place = result["locations"][0]["physicalLocation"]
        assert place["artifactLocation"]["uri"] and place["region"]["startLine"] >= 1
    prints = [json.dumps(result["partialFingerprints"]) for result in run["results"][:3]]
    assert len(set(prints)) == 3


def test_github():
    lines = render(RESULTS, "github").splitlines()
    assert lines[0] == "a.plan.json on one.toml: ok"
    errors = [line for line in lines if line.startswith("::error ")]
    assert len(errors) == 3 and sum(line.startswith("::warning ") for line in lines) == 2
    assert errors[0].startswith("::error file=b%2Cc%3Ad.plan.json,line=12,title=MP601 device-exists on two.toml::")
    assert "%0Astep | 0F0" in errors[0] and "100%25" in errors[0]
