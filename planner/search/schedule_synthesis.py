"""`planner.synthesize_schedule`: a pipeline schedule made for given costs, from plain lists."""

from collections.abc import Sequence
from math import inf

from costmodel.schedule.actions import require_positive
from costmodel.schedule.straight import StraightCosts
from costmodel.schedule.synthesize import SynthesizedSchedule, synthesize
from planner.search.schedule_solver import solve_words


def synthesize_schedule(
    *,
    forward_s: Sequence[float],
    backward_s: Sequence[float],
    weight_s: Sequence[float] | None = None,
    microbatches: int,
    send_s: Sequence[float] | float | None = None,
    wire_s: Sequence[float] | float | None = None,
    memory_cap: Sequence[float] | float | None = None,
    memory_delta: Sequence[float] | None = None,
    optimizer_s: Sequence[float] | None = None,
    global_norm_s: float = 0.0,
    post_validation: bool = False,
) -> SynthesizedSchedule:
    """The best schedule found for a straight pipeline, with a proven bound on what any schedule could reach.

    Args:
        forward_s, backward_s, weight_s: F, B (activation gradient) and W (weight gradient) of one microbatch on each
            stage. Without `weight_s` a backward is one action, and `backward_s` is all of it.
        microbatches: m.
        send_s: one-way delay of each link, of activations and of gradients alike; one number for all; None if sends
            are free.
        wire_s: the part of it for which a message occupies its link, in its direction, so that the next one waits; one
            number for all; None if messages overlap.
        memory_cap: most activations of one microbatch that each stage may hold; one number for all; None for no limit.
        memory_delta: what F, B and W add to the activations held, by default (1, 0, -1): whole until W, or, without
            `weight_s`, (1, -1, 0). (1, -0.5, -0.5) if half of it is free after B.
        optimizer_s: each stage's optimizer step.
        global_norm_s: a reduction over all stages that every optimizer step waits for.
        post_validation: let stages step without waiting for each other, and validate the norm afterwards: then the
            longest stage span is minimised instead of the makespan.

    Returns:
        The schedule (`.actions`, one list a stage), `.makespan_s`, `.longest_stage_span_s`, `.peak_activations`,
        `.lower_bound_s`, `.gap`. Never slower than any fixed schedule within the caps. The same input gives the same
        schedule.

    Raises:
        InputError: MP143 if a count is below 1 or lists have different lengths, MP147 for a time that is negative or
            not finite, MP149 if no schedule fits the caps, with the least that works.

    Example:
        >>> made = synthesize_schedule(forward_s=[1, 1], backward_s=[1, 1], weight_s=[1, 1], microbatches=4)
        >>> (made.makespan_s, made.longest_stage_span_s, made.gap)
        (13.0, 12.0, 0.0)
    """
    p = len(forward_s)
    require_positive("stages", p)
    require_positive("microbatches", microbatches)
    microbatches = int(microbatches)
    caps = inf if memory_cap is None else memory_cap
    sends = 0.0 if send_s is None else send_s
    wires = 0.0 if wire_s is None else wire_s
    if memory_delta is None:
        memory_delta = (1.0, -1.0, 0.0) if weight_s is None else (1.0, 0.0, -1.0)
    costs = StraightCosts(
        forward_s=_floats(forward_s),
        backward_s=_floats(backward_s),
        weight_s=_floats([0.0] * p if weight_s is None else weight_s),
        send_s=(float(sends),) * (p - 1) if isinstance(sends, int | float) else _floats(sends),
        wire_s=(float(wires),) * (p - 1) if isinstance(wires, int | float) else _floats(wires),
        memory_cap=(float(caps),) * p if isinstance(caps, int | float) else _floats(caps),
        memory_delta=_floats(memory_delta),  # pyright: ignore[reportArgumentType]
    )
    return synthesize(
        costs,
        microbatches,
        optimizer_s=optimizer_s,
        global_norm_s=global_norm_s,
        post_validation=post_validation,
        solver=solve_words,
    )


def _floats(values: Sequence[float]) -> tuple[float, ...]:
    return tuple(map(float, values))
