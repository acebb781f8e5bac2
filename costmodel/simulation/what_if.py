"""Which single improvement would shorten the step most, by simulating the step with it.

Only what is on the critical path can shorten the step, and by no more than the time that it loses there:

    W1  gain of part x taking q times its time  <=  (1 - q) * (seconds of x on the critical path)

So candidates are tried in the order of that bound until it falls below the best gains found. W1 holds where links are
private; with shared links an earlier message may even make others late.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from costmodel.simulate import Contention, simulate
from costmodel.simulation.changes import PARTS, Problem, scale_link, scale_stage
from costmodel.simulation.critical_path import critical_path
from costmodel.simulation.program import Program
from costmodel.simulation.result import Simulation

FASTER_LINK, FASTER_PART = 0.5, 0.7  # of its time: a link twice as fast, a part of a stage 30% faster


@dataclass(frozen=True, slots=True, kw_only=True)
class WhatIf:
    """One improvement.

    Args:
        what: such as ``link 1-2 twice as fast`` or ``F of stage 2 30% faster``.
        makespan_s: of the step with it.
        gain_s: how much shorter that is; below 0 if it is longer.
    """

    what: str
    makespan_s: float
    gain_s: float


def what_ifs(
    problem: Problem,
    simulation: Simulation,
    *,
    most: int = 6,
    contention: Contention | None = None,
    jitter: float = 0.0,
    seed: int = 0,
) -> tuple[WhatIf, ...]:
    """The improvements that shorten the step, best first.

    Args:
        problem: what was simulated.
        simulation: of it, with its timeline.
        most: how many to return at most; 0 tries none.
        contention, jitter, seed: as they were for `simulation`.
    """
    found: list[WhatIf] = []
    for bound_s, what, changed in _candidates(problem, simulation):
        if len(found) >= most and (not most or bound_s <= found[-1].gain_s):
            break
        program: Program = simulation.program
        makespan_s = simulate(
            program,
            changed.times,
            changed.sends,
            waits=changed.waits,
            contention=contention,
            jitter=jitter,
            seed=seed,
            keep_timeline=False,
        ).makespan_s
        gain_s = simulation.makespan_s - makespan_s
        if gain_s > 1e-9 * simulation.makespan_s:
            found.append(WhatIf(what=what, makespan_s=makespan_s, gain_s=gain_s))
            found = sorted(found, key=lambda entry: -entry.gain_s)[:most]
    return tuple(found)


def _candidates(problem: Problem, simulation: Simulation) -> Iterator[tuple[float, str, Problem]]:
    """(bound on the gain, words, changed problem), largest bound first."""
    links: dict[int, float] = {}
    parts: dict[tuple[int, str], float] = {}
    for segment in critical_path(simulation):
        time_s = segment.end_s - segment.start_s
        if segment.part == "send" and segment.action is not None:
            lower = segment.action.stage - (segment.action.kind == "B")
            links[lower] = links.get(lower, 0.0) + time_s
        elif segment.part in PARTS:
            stage = segment.action.stage if segment.action is not None else segment.actor.stage
            parts[stage, segment.part] = parts.get((stage, segment.part), 0.0) + time_s
    entries: list[tuple[float, int, int, str]] = []
    entries += [((1 - FASTER_LINK) * time_s, 0, stage, "") for stage, time_s in links.items()]
    entries += [((1 - FASTER_PART) * time_s, 1, stage, part) for (stage, part), time_s in parts.items()]
    for bound_s, kind, stage, part in sorted(entries, key=lambda entry: (-entry[0], entry[1:])):
        if kind == 0:
            changed = scale_link(problem, stage, FASTER_LINK)
            yield bound_s, f"link {stage}-{stage + 1} twice as fast", changed
        else:
            changed = scale_stage(problem, stage, FASTER_PART, part=part)
            if part == "B" and not simulation.program.split:  # its B is the whole backward
                changed = scale_stage(changed, stage, FASTER_PART, part="W")
            yield bound_s, f"{part} of stage {stage} 30% faster", changed
