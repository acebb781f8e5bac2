"""Which schedule a layout runs: layouts are found as for 1F1B (GPipe, if that is asked for), then tried under others.

A straight schedule (one range of blocks a stage) keeps the layout's stages and changes the order of their actions. A
looped one (interleaved, breadth-first, layer-major, the V-shapes) gives each stage several ranges: the blocks are cut
again for its virtual stages, each with the devices and the decision of the stage that runs it. Every variant is scored
like any layout: exact memory, and the step time by simulation. What cannot beat the best plan known is not scored:

* V1  a straight variant takes no less than the bound E3 of `costmodel.pipeline`, with W apart where it splits
  backwards; GPipe also no less than E2.
* V2  with T(a) the least time of a whole step of the whole model on group a's devices alone, all groups together do at
  most Σ 1 / T(a) steps a second, however blocks are cut (B2 of `bounds`).
"""

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from costmodel.errors import InputError
from costmodel.pipeline import gpipe_time_s, pipeline_lower_bound_s
from costmodel.schedule.actions import Actor, Schedule
from costmodel.schedule.early_backward import warm_ups_for_delays
from costmodel.schedule.generate import one_f_one_b
from costmodel.schedule.registry import FAMILIES, ScheduleFamily, make_schedule, schedule_family
from costmodel.schedule.validate import in_flight
from planner.search.layout import Layout, StageChoice
from planner.search.schedule_costs import caps_of, delays_s
from planner.search.score import LayoutCosts, Score, score
from planner.search.virtual_stages import balanced_stops, homes, most_stages

USUAL = ("1f1b", "gpipe", "hetero-1f1b", "zb-h1")
"""Tried where no schedule is asked for."""

EVERY = (*USUAL, "dapple-pb", "zb-h2", "interleaved", "breadth-first", "zb-v", "v-half", "v-min")
"""Tried for ``auto``: all but dapple-pa, which is 1f1b, and layer-major, which is breadth-first in the most chunks."""

ANY_STAGES = ("1f1b", "gpipe", "dapple-pa", "dapple-pb")
"""Schedules that also say how one stage runs; the others are for two stages or more."""

CHUNKS = (2, 3, 4, 6, 8)
"""Virtual stages a stage that are tried where a schedule leaves them open."""

LONG = 60_000
"""Actions of a schedule beyond which no more chunks are tried."""


def tried_schedules(asked: str | None) -> tuple[str, ...]:
    """Names of the schedules that a request is searched over.

    Args:
        asked: a name, ``auto`` for all, None for the usual ones.

    Raises:
        InputError: MP146 for a name that there is not.
    """
    if asked is None or asked == "auto":
        return USUAL if asked is None else EVERY
    return (schedule_family(asked).name,)


def describe_schedules(asked: str | None) -> str:
    """What was searched of schedules, in words."""
    names = tried_schedules(asked)
    if len(names) == 1:
        return f"schedule {names[0]}"
    made = ", and schedules made for the costs of the best stages" if asked == "auto" else ""
    return f"stages cut as for 1f1b, under the best of the schedules {', '.join(names)}{made}"


def runs_groups(asked: str | None) -> bool:
    """Whether stages may have several groups."""
    return any("shares" in FAMILIES[name].optional for name in tried_schedules(asked))


def least_bubble(asked: str | None) -> float:
    """Of p equal stages, in times of p - 1 microbatches, what a step takes longer at least: all of it with whole
    backwards; where W fills the rest, the forwards before the last stage's first (a quarter, under remat); nothing that
    can be relied on where stages have several ranges of blocks."""
    families = [FAMILIES[name] for name in tried_schedules(asked)]
    if any(family.chunks != 1 for family in families):
        return 0.0
    return 0.25 if any(family.splits_backward for family in families) else 1.0


def least_stages(asked: str | None) -> int:
    """Stages that a plan must have for a schedule that was asked for."""
    return 1 if asked is None or asked == "auto" or asked in ANY_STAGES else 2


def require_stages(asked: str | None, least: int, most: int, cuts: int, *, chunks: int | None = None) -> int:
    """The least number of stages that a schedule can have.

    Args:
        least, most: that devices, blocks and pins allow.
        cuts: into how many (virtual) stages the model can be cut.
        chunks: virtual stages a stage, where a schedule leaves them open; None takes the fewest.

    Raises:
        InputError: MP164, there is no such number.
    """
    wanted = max(least, least_stages(asked))
    if asked is None or asked == "auto":
        return wanted
    if most < wanted:
        have = f"{most} stage" + ("s" if most != 1 else "")
        message = f"schedule {asked} needs a pipeline of at least {wanted} stages, and there can be {have}"
        raise InputError("MP164", message, "allow more stages, devices or blocks, or use 1f1b or gpipe")
    family = schedule_family(asked)
    fixed = {} if chunks is None else {"chunks": chunks}
    virtual = wanted if family.chunks == "layers" else family.virtual_stages(wanted, **fixed)
    if virtual > cuts:
        message = f"schedule {asked} on {wanted} stages runs {virtual} virtual stages, the model can be cut into {cuts}"
        less = "ask for fewer stages" + ("" if chunks is None else f" or fewer than {chunks} parts of each")
        raise InputError("MP164", message, f"{less}, or for a schedule of one range of blocks a stage")
    return wanted


def sized_for(asked: str | None) -> tuple[str, ...]:
    """Schedules for whose memory stages are made: the one that is asked for; else 1F1B and, where others miss memory on
    the stages that come of that, ZB-H1; for ``auto`` also the one that holds least."""
    if asked is None:
        return ("1f1b", "zb-h1")
    return ("1f1b", "zb-h1", "v-min") if asked == "auto" else (asked,)


def held_by_place(name: str, stages: int, microbatches: int) -> tuple[int, ...]:
    """Microbatches whose activations a stage holds under a schedule, for the last stage, the one before it, …; of a
    looped one, in activations of all of a stage's chunks."""
    if name in ("1f1b", "hetero-1f1b"):
        return tuple(min(place, microbatches) for place in range(1, stages + 1))
    family = schedule_family(name)
    if family.chunks == "layers":
        return (microbatches,) * stages
    peaks = in_flight(make_schedule(name, stages, microbatches))
    chunks = family.virtual_stages(stages) // stages
    held = [-(-peaks[Actor(stage, 0)] // chunks) for stage in reversed(range(stages))]
    return tuple(np.maximum.accumulate(held).tolist())


def under_schedules(layout: Layout, asked: str | None, best_s: float, *, chunks: int | None = None) -> Iterator[Score]:
    """The layout under each schedule that the request allows, those left out that take no less than `best_s` by V1 or
    V2. Where none is asked for, or ``auto``, 1F1B comes first and is always there.

    Args:
        layout: one entry a stage; its own schedule does not matter.
        chunks: virtual stages a stage, where a schedule leaves them open; None tries `CHUNKS`.
    """
    costs = LayoutCosts(layout=layout)
    names = tried_schedules(asked)
    if len(layout.stages) == 1:
        if least_stages(asked) == 1:
            yield score(replace(layout, schedule=names[0]), costs)
        return
    several = any(len(stage.groups) > 1 for stage in layout.stages)
    for name in names:
        family = schedule_family(name)
        if several and len(names) > 1 and "shares" not in family.optional:
            continue
        plain = several and family.chunks == 1  # the bounds and caps of straight schedules are for one group a stage
        for variant in [replace(layout, schedule=name)] if plain else _variants(layout, family, costs, asked, chunks):
            always = variant.schedule == "1f1b" or len(names) == 1 or plain
            if always or _least_s(variant, costs) < best_s:
                found = score(variant, costs if len(variant.stages) == len(layout.stages) else None)
                best_s = min(best_s, found.time_s) if found.feasible else best_s
                yield found


def _variants(
    layout: Layout, family: ScheduleFamily, costs: LayoutCosts, asked: str | None, chunks: int | None
) -> Iterator[Layout]:
    """The layout under a family; several for chunk counts that are open, none where it does not apply."""
    stages, microbatches = len(layout.stages), layout.microbatches
    if family.name == "hetero-1f1b":
        windows = _windows(costs)
        if asked == family.name or max(windows) > 1:
            actions = one_f_one_b(stages, microbatches, windows=windows).actions
            made = Schedule(name=family.name, microbatches=microbatches, actions=actions)
            yield replace(layout, schedule=family.name, actions=made)
    elif family.name == "gpipe":
        held = all(microbatches <= cap for cap in caps_of(costs))
        if held or asked == family.name:
            yield replace(layout, schedule=family.name)
    elif family.chunks == 1:
        yield replace(layout, schedule=family.name)
    else:
        yield from _looped(layout, family, CHUNKS if chunks is None else (chunks,))


def _windows(costs: LayoutCosts) -> tuple[int, ...]:
    """1F1B's windows with the extra forwards that hide slow links, as far as memory allows."""
    stages = len(costs.layout.stages)
    caps = caps_of(costs)
    if any(cap < stages - stage for stage, cap in enumerate(caps)):
        return (1,) * stages
    times = costs.times(split=False)
    each_s = [times[Actor(s, 0)].forward_s + times[Actor(s, 0)].backward_s for s in range(stages)]
    return warm_ups_for_delays(each_s, delays_s(costs), memory_cap=caps).windows


def _looped(layout: Layout, family: ScheduleFamily, counts: tuple[int, ...]) -> Iterator[Layout]:
    """The blocks cut again for the virtual stages of a looped schedule; `counts` of them a stage where that is open."""
    stages, most = len(layout.stages), most_stages(layout.graph)
    if family.chunks == "layers":
        tried = [{"layers": most - most % stages}]
    else:
        tried = [{"chunks": chunks} for chunks in counts] if family.chunks == "chunks" else [{}]
    for parameters in tried:
        virtual = family.virtual_stages(stages, **parameters)
        if not stages <= virtual <= most or (virtual == stages and family.chunks != "layers"):
            return
        shares = [tuple(group.microbatches for group in stage.groups) for stage in layout.stages]
        actions = make_schedule(family.name, stages, layout.microbatches, shares=shares, **parameters)
        home = homes(actions)
        groups = [layout.stages[stage].groups for stage in home]
        m = layout.microbatches
        shared = [[(len(g.microbatches) / m, g.decision) for g in own] for own in groups]
        stops = balanced_stops(layout.graph, shared, home=home)
        cut = [
            StageChoice(start=start, stop=stop, groups=own)
            for start, stop, own in zip([0, *stops[:-1]], stops, groups, strict=True)
        ]
        yield replace(layout, schedule=family.name, stages=tuple(cut), actions=actions)
        if sum(len(row.actions) for row in actions.actions) > LONG:
            return


def _least_s(variant: Layout, costs: LayoutCosts) -> float:
    """V1 of a variant with the stages of `costs`, V2 of one with others."""
    m, stages = variant.microbatches, len(costs.layout.stages)
    if len(variant.stages) != stages:
        rate = sum(1.0 / group.decision.bound_s for stage in costs.layout.stages for group in stage.groups)
        return 1.0 / rate
    split = schedule_family(variant.schedule).splits_backward
    times = [costs.times(split=split)[Actor(stage, 0)] for stage in range(stages)]
    sends = [costs.sends[Actor(stage, 0), Actor(stage + 1, 0)] for stage in range(stages - 1)]
    forward_s, backward_s = [t.forward_s for t in times], [t.backward_s for t in times]
    there_s = [send.activation_s + send.latency_s for send in sends]
    back_s = [send.gradient_s + send.latency_s for send in sends]
    step_s = [t.reduce_s + t.exchange_s + t.update_s for t in times]
    weight_s = [t.weight_s for t in times]
    bound_s = float(pipeline_lower_bound_s(forward_s, backward_s, m, there_s, back_s, weight_s=weight_s, step_s=step_s))
    if variant.schedule == "gpipe":
        occupied_s, returned_s = [send.activation_s for send in sends], [send.gradient_s for send in sends]
        bound_s = max(bound_s, float(gpipe_time_s(forward_s, backward_s, m, occupied_s, returned_s)))
    return bound_s


__all__ = [
    "ANY_STAGES",
    "EVERY",
    "USUAL",
    "describe_schedules",
    "held_by_place",
    "least_bubble",
    "least_stages",
    "require_stages",
    "runs_groups",
    "sized_for",
    "tried_schedules",
    "under_schedules",
]
