"""Plans that are wrong in any way are findings, not crashes: in checks, explanations, pictures."""

import json

from hypothesis import given, settings
from hypothesis import strategies as st

import planner
from costmodel.errors import InputError, PlanError
from planner.check.rules import check_plan
from planner.planfile.codec import decode, encode
from planner.planfile.lines import find_lines
from planner.report.explain import explain
from planner.report.html import render_html
from planner.report.timeline import render_timeline
from tests.plans import tiny_cluster, tiny_plan

DOCUMENTS = [
    json.loads(encode(tiny_plan(stages=3, devices=8, tied=True))),
    json.loads(encode(tiny_plan(stages=1, zero=3))),
]
STRINGS = st.sampled_from(
    ["", "data", "large/0/0", "0F0", "layers[0:4]", "layers[9:1]", "float32", "/", "1F1 1B1", "é\n", "-1"]
)


def leaves(value, path=()):
    """Paths of everything inside a document."""
    entries = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, entry in entries:
        yield (*path, key)
        yield from leaves(entry, (*path, key))


PATHS = [sorted(leaves(document), key=repr) for document in DOCUMENTS]


def other(value, data):
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return data.draw(st.sampled_from([-1, 0, 1, 2, 3, 7, 10**12, 2**63 - 1, 10**30]))
    if isinstance(value, float):
        return data.draw(st.sampled_from([-1.0, 0.0, 1e-300, 0.5, 1e300]))
    if isinstance(value, str):
        return data.draw(STRINGS)
    if isinstance(value, list):
        return data.draw(st.sampled_from([[], value[:-1], value + value[-1:], value[::-1]]))
    return None if value is None else {}


@settings(max_examples=120, deadline=None)
@given(st.data())
def test_mutated_plans(data):
    which = data.draw(st.integers(0, len(DOCUMENTS) - 1))
    document = json.loads(json.dumps(DOCUMENTS[which]))
    for _ in range(data.draw(st.integers(1, 3))):
        *parents, last = data.draw(st.sampled_from(PATHS[which]))
        holder = document
        try:
            for step in parents:
                holder = holder[step]
            holder[last] = other(holder[last], data)
        except (KeyError, IndexError, TypeError):
            continue  # an earlier change took it away
    try:
        plan = decode(json.dumps(document).encode())
    except InputError:
        return
    findings = check_plan(plan, tiny_cluster(8))
    find_lines(encode(plan).decode(), tuple(finding.where for finding in findings))
    explanation = explain(plan)
    assert explanation.text and explanation.summary and render_html(explanation)
    json.dumps(explanation.to_plain())
    try:
        render_timeline(plan)
    except PlanError as error:  # MP147: each time is a number, all together are none
        assert error.code == "MP147" or any(
            "MP610" <= finding.code <= "MP617" or finding.code == "MP625" for finding in findings
        )
    try:
        step = planner.simulate(plan, share_nics=True, most_what_ifs=1)
        assert step.text and step.html and json.loads(step.trace) and json.dumps(step.to_plain(), allow_nan=False)
    except PlanError as error:  # MP147: each time is a number, all together are none
        assert error.code == "MP147" or any(
            "MP610" <= finding.code <= "MP617" or finding.code == "MP625" for finding in findings
        )
