"""Which single improvement would shorten the step most, by simulating the step with it.

Only what is on the critical path can shorten the step, and by no more than the time that it loses there:

    W1  gain of part x taking q times its time  <=  (1 - q) * (seconds of x on the critical path)

So candidates are tried in the order of that bound until it falls below the best gains found, MOST_TRIES at most. W1
holds where links are private; with shared links an earlier message may even make others late.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice

from costmodel.simulate import Contention, simulate
from costmodel.simulation.changes import PARTS, Problem, scale_link, scale_stage
from costmodel.simulation.critical_path import Segment
from costmodel.simulation.program import Program
from costmodel.simulation.result import Simulation

FASTER_LINK, FASTER_PART = 0.5, 0.7  # of its time: a link twice as fast, a part of a stage 30% faster
MOST_TRIES = 24


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
    path: tuple[Segment, ...],
    *,
    most: int = 6,
    contention: Contention | None = None,
    jitter: float = 0.0,
    seed: int = 0,
    stage_name: Callable[[int], str] = str,
    link_name: Callable[[tuple[int, int]], str] = "{0[0]}-{0[1]}".format,
) -> tuple[WhatIf, ...]:
    """The improvements that shorten the step, best first.

    Args:
        problem: what was simulated.
        simulation: of it.
        path: its critical path.
        most: how many to return at most; 0 tries none.
        contention, jitter, seed: as they were for `simulation`.
        stage_name, link_name: how to name a stage of actors, and the link between two, lower first.
    """
    found: list[WhatIf] = []
    names = stage_name, link_name
    for bound_s, what, changed in islice(_candidates(problem, path, simulation.program.split, names), MOST_TRIES):
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


def _candidates(
    problem: Problem,
    path: tuple[Segment, ...],
    split: bool,
    names: tuple[Callable[[int], str], Callable[[tuple[int, int]], str]],
) -> Iterator[tuple[float, str, Problem]]:
    """(bound on the gain, words, changed problem), largest bound first."""
    links: dict[tuple[int, int], float] = {}
    parts: dict[tuple[int, str], float] = {}
    for segment in path:
        time_s = segment.end_s - segment.start_s
        if segment.part == "send" and segment.target is not None:
            low, high = sorted((segment.actor.stage, segment.target.stage))
            links[low, high] = links.get((low, high), 0.0) + time_s
        elif segment.part in PARTS:
            key = (segment.actor.stage, segment.part)
            parts[key] = parts.get(key, 0.0) + time_s
    entries: list[tuple[float, int, int, int, str]] = []
    entries += [((1 - FASTER_LINK) * time_s, 0, *ends, "") for ends, time_s in links.items()]
    entries += [((1 - FASTER_PART) * time_s, 1, stage, 0, part) for (stage, part), time_s in parts.items()]
    for bound_s, kind, stage, other, part in sorted(entries, key=lambda entry: (-entry[0], entry[1:])):
        if kind == 0:
            changed = scale_link(problem, (stage, other), FASTER_LINK)
            yield bound_s, f"link {names[1]((stage, other))} twice as fast", changed
        else:
            changed = scale_stage(problem, stage, FASTER_PART, part=part)
            if part == "B" and not split:  # its B is the whole backward
                changed = scale_stage(changed, stage, FASTER_PART, part="W")
            yield bound_s, f"{part} of stage {names[0](stage)} 30% faster", changed
