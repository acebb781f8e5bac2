"""Findings with the severity that their rule states."""

from planner.check.codes import RULE_BY_CODE
from planner.planfile.schema import Finding, Plan


def finding(code: str, where: str, message: str, hint: str = "") -> Finding:
    """A finding of the rule `code`; `where` is a path in the plan document, such as ``stages[1].groups[0].devices``."""
    return Finding(code=code, severity=RULE_BY_CODE[code].severity, message=message, hint=hint, where=where)


def group_path(stage: int, group: int, *parts: str) -> str:
    """`group_path(1, 0, "devices[3]")` is ``'stages[1].groups[0].devices[3]'``."""
    return ".".join((f"stages[{stage}].groups[{group}]", *parts))


def group_label(plan: Plan, stage: int, group: int) -> str:
    """``stage 1`` or, where the stage has several groups, ``stage 1 group 'v100'``; for messages."""
    groups = plan.stages[stage].groups
    return f"stage {stage}" if len(groups) == 1 else f"stage {stage} group {groups[group].name!r}"


def some(items: list[str], limit: int = 6) -> str:
    """The first few of a list of names, and how many more there are."""
    rest = len(items) - limit
    return ", ".join(items[:limit]) + (f" and {rest} more" if rest > 0 else "")
