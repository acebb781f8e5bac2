"""What a step is made of, on the group that ends last: computation, exposed communication by kind, bubble, optimizer.

P1  casts               microbatches * (forward + backward casts)          inside the group
P2  gradient_reduction  once a step, inside the group
P3  sends               end of the last action - the same with free sends  between stages, what no action hides
P4  group_exchange      once a step, between the groups of the stage
P5  tied_weights        once a step, between the stages that hold a parameter whole
P6  update_join         once a step, for what the optimizer joins of several stages
P7  bubble = step - computation - P1 to P6 - optimizer                     waiting for other stages and groups
"""

from collections.abc import Mapping
from dataclasses import dataclass

from costmodel.schedule.actions import Actor, Schedule
from costmodel.simulate import ActorUse, StageTimes, UpdateWait, simulate
from costmodel.simulation.ending import waits_of_actors
from planner.search.score import Score, exchange_seconds, tied_seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Breakdown:
    """Seconds that add up to the step."""

    compute_s: float
    exposed_s: dict[str, float]
    bubble_s: float
    optimizer_s: float


def breakdown(score: Score) -> Breakdown:
    """The parts of a score's step (P1 to P7); kinds of communication that the plan has not are left out."""
    layout, use = score.layout, score.simulation.last
    places = score.places[use.actor]  # several virtual stages, or its own
    costs, own = [score.groups[place].cost for place in places], [place.stage for place in places]
    runs = len(layout.stages[own[0]].groups[places[0].group].microbatches)
    exposed = {
        "casts": runs * sum(cost.forward_cast_s + cost.backward_cast_s for cost in costs),
        "gradient_reduction": sum(cost.once_s for cost in costs),
    }
    joined, tied = waits_of_actors(score.schedule, score.waits), tied_seconds(layout)
    between = {
        "sends": sends_s(score.schedule, score.times, joined, use) if len(layout.stages) > 1 else 0.0,
        "group_exchange": sum(exchange_seconds(layout, stage) for stage in own),
        "tied_weights": sum(tied[stage] for stage in own),
    }
    exposed |= {kind: time_s for kind, time_s in between.items() if time_s > 0.0}
    if use.actor.stage in joined:  # the wait for slower stages is part of the bubble
        exposed["update_join"] = joined[use.actor.stage].time_s
    compute_s = runs * sum(cost.forward_s + cost.backward_s for cost in costs)
    optimizer_s = sum(cost.update_s for cost in costs)
    rest_s = score.time_s - compute_s - sum(exposed.values()) - optimizer_s
    return Breakdown(compute_s=compute_s, exposed_s=exposed, bubble_s=max(0.0, rest_s), optimizer_s=optimizer_s)


def sends_s(
    schedule: Schedule, times: Mapping[Actor, StageTimes], waits: Mapping[int, UpdateWait], use: ActorUse
) -> float:
    """How much earlier a group's last action would end if all sends were free (P3).

    Args:
        use: what the group did with the sends as they are.
    """
    free = simulate(schedule, times, waits=waits, keep_timeline=False)
    return max(0.0, use.last_end_s - free.use(*use.actor).last_end_s)
