"""What a plan's step takes longer because messages share network cards, which its predicted time leaves out."""

from collections import Counter

from costmodel.simulate import Contention, simulate
from costmodel.units import format_seconds
from planner.plan_problem import problem_of, shared_nics
from planner.planfile.schema import Finding, Plan

LEAST_SHARE = 0.005
"""Of the step time; less is not worth a finding."""
WARN_SHARE = 0.05


def card_findings(plan: Plan) -> tuple[Finding, ...]:
    """MP197, where messages between several pairs of groups share the cards of a node and the step takes noticeably
    longer for it.

    Raises:
        InputError: as `problem_of`, and MP148 if the schedule deadlocks.
    """
    problem = problem_of(plan)
    cards = shared_nics(plan, problem.schedule)
    runs = problem.schedule.homes
    pairs = {
        (source._replace(stage=runs[source.stage]), target._replace(stage=runs[target.stage]))
        for edge in problem.sends or {}
        for source, target in (edge, edge[::-1])
    }
    users = Counter(card for pair in pairs for card in cards.get(pair, ()))
    if max(users.values(), default=0) < 2:
        return ()
    alone_s, together_s = (
        simulate(
            problem.schedule,
            problem.times,
            problem.sends,
            waits=problem.waits,
            contention=contention,
            keep_timeline=False,
        ).makespan_s
        for contention in (None, Contention(shared=cards))
    )
    share = together_s / alone_s - 1.0 if alone_s > 0.0 else 0.0
    if share < LEAST_SHARE:
        return ()
    nodes = sorted({card.rsplit(" ", 1)[0] for card, count in users.items() if count > 1})
    named = ", ".join(nodes[:3]) + (f" and {len(nodes) - 3} more" if len(nodes) > 3 else "")
    finding = Finding(
        code="MP197",
        severity="warning" if share >= WARN_SHARE else "note",
        message=f"the step time leaves out that messages share the network cards of a node ({named}): with them it is "
        f"{format_seconds(together_s)} instead of {format_seconds(alone_s)}, {share:.1%} more",
        hint="meshplan simulate --share-nics shows which messages wait; fewer stages on a node, or faster cards, share "
        "less",
        where="schedule",
    )
    return (finding,)


__all__ = ["card_findings"]
