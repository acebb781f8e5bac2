"""The slack of a plan's transfers: how much later their messages may arrive, from the plan's own schedule and times."""

import msgspec

from costmodel.simulation.slack import border_slacks
from planner.plan_problem import problem_of
from planner.planfile.schema import Plan, Slack

LONGEST = 1_000_000
"""Actions of a schedule times transfers beyond which slack is left out: looking for it would take many seconds."""


def with_slack(plan: Plan) -> Plan:
    """The plan with the slack of every transfer that goes to other devices.

    Raises:
        InputError: as `problem_of`, and MP148 if the schedule deadlocks.
    """
    problem = problem_of(plan)
    if len(plan.transfers) * sum(len(row.actions) for row in problem.schedule.actions) > LONGEST:
        return plan
    known = {
        slack.stage: Slack(free_s=slack.free_s, absorbs_s=slack.absorbs_s if slack.absorbs_s < float("inf") else None)
        for slack in border_slacks(problem)
    }
    transfers = (msgspec.structs.replace(t, slack=known.get(t.from_stage)) for t in plan.transfers)
    return msgspec.structs.replace(plan, transfers=tuple(transfers))


__all__ = ["with_slack"]
