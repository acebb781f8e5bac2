"""Whether a plan's step time and its parts are those of its schedule with the times of its stages (MP641)."""

import math
from collections.abc import Iterator

from costmodel.cluster import Cluster
from costmodel.errors import PlanError
from costmodel.schedule.actions import Schedule
from costmodel.simulate import ActorUse, simulate
from costmodel.units import format_seconds
from planner.check.finding import finding
from planner.plan_problem import problem_of
from planner.planfile.schema import Finding, Plan

TOLERANCE = 1e-3
_HINT = "a time, a transfer or the order of actions was edited, or the plan is of another version: plan again"


def step_follows(plan: Plan, cluster: Cluster) -> Iterator[Finding]:
    """MP641. Where the schedule cannot be run, or times are no times, other rules say so."""
    try:
        problem = problem_of(plan)
        step = simulate(problem.schedule, problem.times, problem.sends, waits=problem.waits, keep_timeline=False)
    except PlanError:
        return
    stated_s, found_s = plan.prediction.step_time_s, step.makespan_s
    if not math.isclose(stated_s, found_s, rel_tol=TOLERANCE):
        message = f"step_time_s is {format_seconds(stated_s)}, the schedule with the stages' times and transfers takes "
        yield finding("MP641", "prediction.step_time_s", f"{message}{format_seconds(found_s)}", _HINT)
        return
    for name, (stated_s, own_s) in _parts(plan, problem.schedule, step.last).items():
        if abs(stated_s - own_s) > TOLERANCE * found_s:
            message = f"{name} is {format_seconds(stated_s)}, on the stage that ends the step it is "
            yield finding("MP641", f"prediction.{name}", f"{message}{format_seconds(own_s)}", _HINT)


def _parts(plan: Plan, schedule: Schedule, last: ActorUse) -> dict[str, tuple[float, float]]:
    """Parts of the step, as stated, and as times of the group that ends it have them (`planner.breakdown`, P1, P2)."""
    actions = next(row.actions for row in schedule.actions if row.actor == last.actor)
    stages = sorted({action.stage for action in actions}) or [last.actor.stage]
    groups = [plan.stages[stage].groups[last.actor.group] for stage in stages]
    runs = len(groups[0].microbatches) * max(1, plan.schedule.chunks)  # times are those of a chunk, where there are any
    times = [group.time for group in groups]
    casts_s = runs * sum(time.forward_communication_s + time.backward_communication_s for time in times)
    prediction = plan.prediction
    return {
        "compute_s": (prediction.compute_s, runs * sum(time.forward_s + time.backward_s for time in times) - casts_s),
        "exposed_communication_s.casts": (prediction.exposed_communication_s.get("casts", casts_s), casts_s),
        "optimizer_s": (prediction.optimizer_s, sum(time.optimizer_s for time in times)),
    }


__all__ = ["step_follows"]
