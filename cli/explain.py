"""`meshplan explain`: a plan file in words and tables."""

import json

import click

from cli.options import json_option, output_option
from cli.output import emit, emit_report

HEADINGS = (
    "Stages",
    "Step time",
    "Memory per device, worst first",
    "Communication in a step, longest first",
    "Baselines, by the same cost model",
    "Certificate",
    "Findings",
    "Where the figures come from",
    "Words",
)


@click.command("explain", short_help="Show what a plan does, what it costs and how good it is proven to be.")
@click.argument("plan_file", metavar="PLAN")
@click.option("--summary", is_flag=True, help="One screen only.")
@click.option("--timeline", is_flag=True, help="The schedule as a grid of time.")
@click.option("--html", is_flag=True, help="An HTML page instead of text.")
@json_option
@output_option("the explanation")
def command(plan_file: str, summary: bool, timeline: bool, html: bool, as_json: bool, output: str | None) -> None:
    """Show what a plan does, what it costs and how good it is proven to be.

    PLAN is a plan file. Neither JAX nor devices are needed.
    """
    if sum((summary, timeline, html, as_json)) > 1:
        raise click.UsageError("give one of --summary, --timeline, --html, --json")
    import planner

    plan = planner.load_plan(plan_file)
    explanation = planner.explain(plan)
    if as_json:
        emit(json.dumps(explanation.to_plain(), indent=1) + "\n", output)
    elif html:
        from planner.report.html import render_page

        emit(render_page(explanation), output)
    elif timeline:
        from planner.report.timeline import render_timeline

        emit(render_timeline(plan), output)
    else:
        emit_report(explanation.summary + "\n" if summary else explanation.text, output, HEADINGS)
