"""Findings of a matrix of plans and clusters, as text for people and as files for CI systems."""

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal
from xml.sax.saxutils import escape, quoteattr

from planner.check.codes import COMPILE_RULES, MODEL_RULES, RULE_BY_CODE, RULES
from planner.planfile.schema import Finding

Format = Literal["text", "json", "junit", "sarif", "github"]
FORMATS: tuple[Format, ...] = ("text", "json", "junit", "sarif", "github")
TOOL = "meshplan"
DOCUMENTATION = "docs/errors.md"

_SARIF_LEVELS = {"error": "error", "warning": "warning", "note": "note"}
_GITHUB_LEVELS = {"error": "error", "warning": "warning", "note": "notice"}


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckResult:
    """What was found for one plan on one cluster.

    Attributes:
        plan: path of the plan file.
        cluster: path of the cluster file.
        findings: errors first.
        lines: for each finding, the line of the plan file that it is about.
        skipped: codes of the rules that were not looked at: those of the model without `--model`, those of
            the compiler without `--compile`, all of an unreadable plan.
    """

    plan: str
    cluster: str
    findings: tuple[Finding, ...]
    lines: tuple[int, ...]
    skipped: tuple[str, ...] = ()

    def count(self, severity: str) -> int:
        """How many findings have this severity."""
        return sum(finding.severity == severity for finding in self.findings)

    @property
    def passed(self) -> bool:
        """No finding is an error."""
        return not self.count("error")

    def located(self) -> Iterator[tuple[Finding, int]]:
        """Findings with their lines."""
        return zip(self.findings, self.lines, strict=True)


def render(results: Sequence[CheckResult], form: Format) -> str:
    """The results in one of FORMATS, ending in a newline."""
    return _RENDERERS[form](results)


def _text(results: Sequence[CheckResult]) -> str:
    lines = []
    for result in results:
        verdict = "ok" if result.passed else "failed"
        counts = [f"{n} {s}{'s' if n > 1 else ''}" for s in ("error", "warning", "note") if (n := result.count(s))]
        lines.append(f"{result.plan} on {result.cluster}: {verdict}" + (f" ({', '.join(counts)})" if counts else ""))
        for finding, line in result.located():
            message = finding.message.replace("\n", "\n    ")
            lines.append(f"  {finding.severity} {finding.code}: {message}")
            if finding.hint:
                lines.append(f"    hint: {finding.hint}")
            if finding.where:
                lines.append(f"    at {result.plan}:{line} ({finding.where})")
    if len(results) > 1:
        failed = sum(not result.passed for result in results)
        lines.append(f"{len(results)} combinations checked, {failed} failed")
    return "\n".join(lines) + "\n"


def _json(results: Sequence[CheckResult]) -> str:
    return (
        json.dumps({"passed": all(r.passed for r in results), "results": [_plain(r) for r in results]}, indent=1) + "\n"
    )


def _plain(result: CheckResult) -> dict[str, Any]:
    return {
        "plan": result.plan,
        "cluster": result.cluster,
        "passed": result.passed,
        "skipped": list(result.skipped),
        "findings": [
            {
                "code": finding.code,
                "rule": _rule_name(finding),
                "severity": finding.severity,
                "message": finding.message,
                "hint": finding.hint,
                "where": finding.where,
                "line": line,
            }
            for finding, line in result.located()
        ],
    }


def _junit(results: Sequence[CheckResult]) -> str:
    """One suite a combination, one case a rule: a rule that was looked at and has no findings is a case that passed."""
    suites = []
    totals = [0, 0, 0]
    for result in results:
        found: dict[str, list[Finding]] = {rule.code: [] for rule in RULES}
        for finding in result.findings:
            found.setdefault(finding.code, []).append(finding)
        cases, failures, skips = [], 0, 0
        for code, findings in found.items():
            errors = [finding for finding in findings if finding.severity == "error"]
            failures += bool(errors)
            name = RULE_BY_CODE[code].name if code in RULE_BY_CODE else "input"
            body = "".join(
                f"<failure message={_attribute(e.message.splitlines()[0])} type={_attribute(code)}>"
                f"{_xml(_paragraph(e))}</failure>"
                for e in errors[:1]
            )
            rest = errors[1:] + [finding for finding in findings if finding.severity != "error"]
            if rest:
                body += f"<system-out>{_xml(chr(10).join(map(_paragraph, rest)))}</system-out>"
            if code in result.skipped and not findings:
                skips += 1
                body = f"<skipped message={_attribute(_why_skipped(result, code))}/>"
            cases.append(
                f"<testcase classname={_attribute(f'{result.plan} on {result.cluster}')} "
                f"name={_attribute(f'{code} {name}')}>{body}</testcase>"
            )
        totals = [one + more for one, more in zip(totals, (len(cases), failures, skips), strict=True)]
        name = _attribute(f"{result.plan} on {result.cluster}")
        counts = f'tests="{len(cases)}" failures="{failures}" skipped="{skips}"'
        suites.append(f"<testsuite name={name} {counts}>{''.join(cases)}</testsuite>")
    head = f'<testsuites name="{TOOL}" tests="{totals[0]}" failures="{totals[1]}" skipped="{totals[2]}">'
    return "\n".join(['<?xml version="1.0" encoding="UTF-8"?>', head, *suites, "</testsuites>"]) + "\n"


def _why_skipped(result: CheckResult, code: str) -> str:
    if set(result.skipped) > {*MODEL_RULES, *COMPILE_RULES}:
        return "not checked: the input could not be read"
    if code in COMPILE_RULES:
        return "not checked: needs --compile, and a plan without errors"
    return "not checked: give --model"


def _sarif(results: Sequence[CheckResult]) -> str:
    used = {finding.code for result in results for finding in result.findings}
    rules = [
        {
            "id": rule.code,
            "name": "".join(word.capitalize() for word in rule.name.split("-")),
            "shortDescription": {"text": rule.summary},
            "help": {"text": f"{rule.summary} See {rule.code} in {DOCUMENTATION}."},
            "defaultConfiguration": {"level": _SARIF_LEVELS[rule.severity]},
        }
        for rule in RULES
    ]
    rules += [{"id": code, "shortDescription": {"text": "bad input"}} for code in sorted(used - set(RULE_BY_CODE))]
    index = {rule["id"]: at for at, rule in enumerate(rules)}
    entries = [
        {
            "ruleId": finding.code,
            "ruleIndex": index[finding.code],
            "level": _SARIF_LEVELS[finding.severity],
            "message": {"text": f"{_paragraph(finding)} (cluster {result.cluster})"},
            "locations": [
                {
                    "physicalLocation": {
                        "artifactLocation": {"uri": result.plan.replace("\\", "/")},
                        "region": {"startLine": line},
                    },
                    "logicalLocations": [{"fullyQualifiedName": finding.where or "plan"}],
                }
            ],
            "partialFingerprints": {"meshplan/v1": f"{finding.code}:{result.cluster}:{finding.where}"},
        }
        for result in results
        for finding, line in result.located()
    ]
    document = {
        "$schema": "https://json.schemastore.org/sarif-2.1.0.json",
        "version": "2.1.0",
        "runs": [{"tool": {"driver": {"name": TOOL, "rules": rules}}, "results": entries}],
    }
    return json.dumps(document, indent=1) + "\n"


def _github(results: Sequence[CheckResult]) -> str:
    """Workflow commands: annotations on the plan file's lines."""
    lines = []
    for result in results:
        for finding, line in result.located():
            title = f"{finding.code} {_rule_name(finding)} on {result.cluster}"
            properties = f"file={_property(result.plan)},line={line},title={_property(title)}"
            lines.append(f"::{_GITHUB_LEVELS[finding.severity]} {properties}::{_data(_paragraph(finding))}")
        if result.passed:
            lines.append(f"{result.plan} on {result.cluster}: ok")
    return "\n".join(lines) + "\n"


def _rule_name(finding: Finding) -> str:
    return RULE_BY_CODE[finding.code].name if finding.code in RULE_BY_CODE else "input"


def _paragraph(finding: Finding) -> str:
    return finding.message + (f"\nhint: {finding.hint}" if finding.hint else "")


def _xml(text: str) -> str:
    """Text that XML 1.0 can hold."""
    return escape("".join(char if char in "\n\t" or ord(char) >= 32 else "?" for char in text))


def _attribute(text: str) -> str:
    return quoteattr("".join(char if ord(char) >= 32 else " " for char in text))


def _data(text: str) -> str:
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _property(text: str) -> str:
    return _data(text).replace(":", "%3A").replace(",", "%2C")


_RENDERERS: dict[Format, Callable[[Sequence[CheckResult]], str]] = {
    "text": _text,
    "json": _json,
    "junit": _junit,
    "sarif": _sarif,
    "github": _github,
}
