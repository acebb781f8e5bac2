"""Every code that the source can show is documented, and every documented code exists."""

import re
from collections import Counter
from pathlib import Path

from planner.check.codes import RULES

ROOT = Path(__file__).parents[2]
SOURCES = ("cli", "planner", "profiles", "costmodel")
PAGE = (ROOT / "docs" / "errors.md").read_text()
HEADINGS = re.findall(r"^### (MP\d{3})(?: (\S+))?$", PAGE, re.MULTILINE)


def used_codes():
    found = {}
    for folder in SOURCES:
        for path in sorted((ROOT / folder).rglob("*.py")):
            for code in re.findall(r"""["'](MP\d{3})["']""", path.read_text()):
                found.setdefault(code, path.relative_to(ROOT))
    return found


def test_every_code_is_documented():
    missing = {code: str(path) for code, path in used_codes().items() if code not in dict(HEADINGS)}
    assert not missing, f"add to docs/errors.md: {missing}"


def test_every_documented_code_is_used():
    assert not sorted(set(dict(HEADINGS)) - set(used_codes()))


def test_headings_are_unique_and_in_order():
    codes = [code for code, _ in HEADINGS]
    assert codes == sorted(codes) and max(Counter(codes).values()) == 1


def test_rules_are_documented_by_name():
    names = dict(HEADINGS)
    assert {rule.code: rule.name for rule in RULES} == {code: names[code] for code in names if code >= "MP600"}


def test_every_code_has_a_text():
    for section in re.split(r"^### ", PAGE, flags=re.MULTILINE)[1:]:
        body = section.split("\n", 1)[1].split("\n## ")[0].strip()
        assert len(body) > 20, section[:20]
