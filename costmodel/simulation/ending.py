"""The end of a step: gradients are reduced in each group and exchanged between the groups of a stage; where the
optimizer joins values of several stages, updates wait for them; then parameters are updated.
"""

from collections.abc import Mapping

from costmodel.schedule.actions import Schedule
from costmodel.simulation.costs import Costs, check_times
from costmodel.simulation.program import Program
from costmodel.simulation.records import Ending, UpdateWait


def endings_of(
    program: Program,
    costs: Costs,
    ends_s: list[float],
    waits: Mapping[int, UpdateWait],
    reductions: list[tuple[float, float]] | None = None,
) -> tuple[Ending, ...]:
    """What each actor does after its actions.

    Args:
        program: what was run.
        costs: of it.
        ends_s: end of each actor's last action.
        waits: by stage, what its update waits for besides its own gradients.
        reductions: (start, end) of each actor's own reduction, where something decided already; else it begins at the
            end of the last action.

    Raises:
        InputError: MP147 if the time of a wait is negative or not finite.
    """
    for stage, wait in waits.items():
        check_times(wait, f"update of stage {stage}")
    rows = program.schedule.actions
    if reductions is None:
        reductions = [
            (end_s, end_s + sum(stage.reduce_s for stage in stages.values()))
            for end_s, stages in zip(ends_s, costs.stages)
        ]
    met_s: dict[int, float] = {}
    for row, (_, end_s) in zip(rows, reductions):
        met_s[row.stage] = max(met_s.get(row.stage, 0.0), end_s)
    exchanged_s = [
        met_s[row.stage] + sum(stage.exchange_s for stage in stages.values()) for row, stages in zip(rows, costs.stages)
    ]
    ready_s: dict[int, float] = {}
    for row, end_s in zip(rows, exchanged_s):
        ready_s[row.stage] = max(ready_s.get(row.stage, 0.0), end_s)
    endings = []
    for row, reduction, exchanged, stages in zip(rows, reductions, exchanged_s, costs.stages):
        begun, wait = exchanged, waits.get(row.stage)
        if wait is not None:
            begun = max(begun, max(ready_s.get(stage, 0.0) for stage in wait.stages) + wait.time_s)
        endings.append(
            Ending(
                reduce_start_s=reduction[0],
                reduce_end_s=reduction[1],
                exchange_start_s=met_s[row.stage],
                exchange_end_s=exchanged,
                update_start_s=begun,
                update_end_s=begun + sum(stage.update_s for stage in stages.values()),
            )
        )
    return tuple(endings)


def waits_of_actors(schedule: Schedule, waits: Mapping[int, UpdateWait]) -> dict[int, UpdateWait]:
    """Waits of (virtual) stages as those of the stages of actors that run them, by which a simulation takes them."""
    return waits_at_homes(schedule.homes, waits)


def waits_at_homes(homes: Mapping[int, int], waits: Mapping[int, UpdateWait]) -> dict[int, UpdateWait]:
    """The same, with the stage of the actors of each stage given; a stage that is not there is its own."""
    found: dict[int, UpdateWait] = {}
    for stage, wait in waits.items():
        stages, other = frozenset(homes.get(s, s) for s in wait.stages), found.get(homes.get(stage, stage))
        found[homes.get(stage, stage)] = UpdateWait(
            stages=stages | (other.stages if other else frozenset()),
            time_s=max(wait.time_s, other.time_s if other else 0.0),
        )
    return found
