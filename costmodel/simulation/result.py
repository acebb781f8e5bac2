"""What a simulation says."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import repeat

from costmodel.schedule.actions import Actor, Schedule
from costmodel.simulation.costs import Costs
from costmodel.simulation.messages import messages_of, strict_wires_s
from costmodel.simulation.program import Program
from costmodel.simulation.records import ActorUse, Ending, Message, TimelineEntry, UpdateWait


@dataclass(frozen=True, slots=True, kw_only=True)
class Simulation:
    """What a schedule does under given times.

    Args:
        makespan_s: end of the last parameter update.
        pipeline_s: end of the last action, before gradient reductions and updates.
        actors: one record an actor, in the schedule's order.
        endings: what each actor does once a step, in the same order.
        program, costs, waits: what was run, its prices, and what updates waited for.
        starts_s, ends_s: for each actor in the same order, of its actions in their order; empty if the timeline was not
            asked for.
        wires_s: when the output of each action began to occupy its link, where links are shared; empty if they are not.
    """

    makespan_s: float
    pipeline_s: float
    actors: tuple[ActorUse, ...]
    endings: tuple[Ending, ...]
    program: Program = field(repr=False, compare=False)
    costs: Costs = field(repr=False, compare=False)
    waits: Mapping[int, UpdateWait] = field(default_factory=dict, repr=False)
    starts_s: list[list[float]] = field(default_factory=list, repr=False)
    ends_s: list[list[float]] = field(default_factory=list, repr=False)
    wires_s: list[list[float]] = field(default_factory=list, repr=False)

    @property
    def schedule(self) -> Schedule:
        return self.program.schedule

    @property
    def timeline(self) -> tuple[TimelineEntry, ...]:
        """Every action, by actor in the schedule's order, then by time. Made anew at each call."""
        entries: list[TimelineEntry] = []
        for row, starts_s, ends_s in zip(self.schedule.actions, self.starts_s, self.ends_s):
            entries.extend(map(TimelineEntry._make, zip(repeat(row.actor), row.actions, starts_s, ends_s)))
        return tuple(entries)

    @property
    def messages(self) -> tuple[Message, ...]:
        """Everything that was sent, by sender, then in order. Made anew at each call; empty as the timeline is."""
        if not self.ends_s:
            return ()
        wires_s = self.wires_s or strict_wires_s(self.program, self.costs, self.ends_s)
        return messages_of(self.program, self.costs, self.ends_s, wires_s)

    @property
    def last(self) -> ActorUse:
        """The actor that ends the step; of several the one of the first stage and group."""
        return max(self.actors, key=lambda use: (use.step_end_s, -use.actor.stage, -use.actor.group))

    def use(self, stage: int, group: int = 0) -> ActorUse:
        """The record of one actor. Raises KeyError if the schedule has no such actor."""
        for use in self.actors:
            if use.actor == (stage, group):
                return use
        raise KeyError(Actor(stage, group))
