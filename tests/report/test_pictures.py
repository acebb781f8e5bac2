"""The schedule as text and SVG, the page for notebooks."""

import xml.etree.ElementTree as ElementTree
from html.parser import HTMLParser

import msgspec
import pytest

from costmodel.errors import InputError
from planner.report.explain import explain
from planner.report.html import render_html, render_page
from planner.report.timeline import render_timeline, run_schedule
from tests.golden_files import check_golden
from tests.plans import tiny_plan

replace = msgspec.structs.replace


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
def test_golden_timeline(schedule):
    check_golden(f"timeline_{schedule}.txt", render_timeline(tiny_plan(stages=3, devices=8, schedule=schedule)))


@pytest.mark.parametrize("microbatches", [1, 4, 64, 300])
@pytest.mark.parametrize("width", [40, 80, 200])
def test_timeline_fits(microbatches, width):
    lines = render_timeline(tiny_plan(stages=4, devices=8, microbatches=microbatches), width).splitlines()
    assert len(lines) == 5 and all(len(line) <= width for line in lines[:-1])
    assert lines[0].startswith("stage 0 | 0")


def test_timeline_of_a_bad_schedule():
    plan = tiny_plan()
    actors = (replace(plan.schedule.actors[0], actions="0B0 0F0 0F1 0B1 0F2 0B2 0F3 0B3"), plan.schedule.actors[1])
    with pytest.raises(InputError):
        render_timeline(replace(plan, schedule=replace(plan.schedule, actors=actors)))


def test_stages_without_times():
    plan = tiny_plan(stages=1)
    group = plan.stages[0].groups[0]
    idle = replace(group.time, forward_s=0.0, backward_s=0.0)
    empty = replace(plan, stages=(replace(plan.stages[0], groups=(replace(group, time=idle),)),))
    assert "no times" in render_timeline(empty) and render_html(explain(empty))


def test_simulation_uses_the_plan_s_times():
    plan = tiny_plan(stages=1)
    assert run_schedule(plan).pipeline_s == pytest.approx(4 * 0.006)
    assert run_schedule(plan).makespan_s == pytest.approx(4 * 0.006 + 0.003)


class _Balance(HTMLParser):
    """Fails on tags that do not match; collects what would load something from elsewhere."""

    def __init__(self):
        super().__init__()
        self.open, self.outside = [], []

    def handle_starttag(self, tag, attrs):
        if tag not in ("meta", "br"):
            self.open.append(tag)
        self.outside += [value for name, value in attrs if name in ("src", "href")] + [tag] * (
            tag in ("script", "link")
        )

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


@pytest.mark.parametrize("plan", [tiny_plan(), tiny_plan(stages=1, data=1, model=1), tiny_plan(stages=4, devices=8)])
def test_html_is_whole_and_self_contained(plan):
    for text in (explain(plan)._repr_html_(), plan._repr_html_(), render_page(explain(plan))):
        parser = _Balance()
        parser.feed(text)
        assert not parser.open and not parser.outside
        svg = ElementTree.fromstring(text[text.index("<svg") : text.index("</svg>") + 6])
        bars = [element for element in svg.iter() if element.tag.endswith("rect")]
        assert len(bars) == 2 * plan.microbatches * len(plan.stages)


def test_names_are_escaped():
    text = render_html(explain(replace(tiny_plan(), name="<script>alert(1)</script>")))
    assert "<script" not in text


def test_many_actions_are_not_drawn():
    text = render_html(explain(tiny_plan(stages=4, devices=8, microbatches=512)))
    assert "4096 actions, too many to draw" in text and len(text) < 50_000
