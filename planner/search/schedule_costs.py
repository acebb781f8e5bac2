"""A layout of one group a stage as the schedule generators see it: times, delays and memory in activations.

The unit of a stage's memory is what it keeps of one microbatch between F and B. Between B and W a microbatch may hold
more (what B recomputed under remat is W's input): R times as much on the stage where that ratio is largest, and
synthesis counts R on all stages, which is never too little. What it makes is scored exactly afterwards.
"""

from math import inf

from costmodel.schedule.actions import Actor
from costmodel.schedule.straight import StraightCosts
from planner.search.score import LayoutCosts


def caps_of(costs: LayoutCosts, *, split: bool) -> tuple[float, ...]:
    """Most activations of one microbatch that each stage may hold beside all else; may be below 1, even below 0.

    Args:
        split: whether what is kept for W counts, on stages that keep nothing for B.
    """
    caps = []
    for stage, choice in enumerate(costs.layout.stages):
        place = Actor(stage, 0)
        cost, kind = costs.blocks[place], choice.groups[0].decision.space.pricing.kind
        room = kind.memory_bytes - kind.reserve_bytes - cost.state_bytes - cost.transient_bytes
        room -= costs.buffer_bytes[place]
        unit = cost.saved_bytes or (costs.until_weights_bytes[place] if split else 0.0)
        caps.append(room / unit if unit > 0.0 else inf if room >= 0.0 else 0.0)
    return tuple(caps)


def delays_s(costs: LayoutCosts) -> tuple[float, ...]:
    """One-way delay of each link: half of a microbatch's way there and back."""
    links = (costs.sends[Actor(s, 0), Actor(s + 1, 0)] for s in range(len(costs.layout.stages) - 1))
    return tuple((link.activation_s + link.gradient_s) / 2 + link.latency_s for link in links)


def straight_costs(costs: LayoutCosts, *, split: bool) -> StraightCosts:
    """What a synthesis takes. The slower direction of a link stands for both.

    Args:
        split: whether weight gradients are actions of their own.

    Raises:
        InputError: MP147 for a time that is not finite.
    """
    stages = range(len(costs.layout.stages))
    times = [costs.times(split=split)[Actor(s, 0)] for s in stages]
    links = [costs.sends[Actor(s, 0), Actor(s + 1, 0)] for s in stages[:-1]]
    occupied_s = [max(link.activation_s, link.gradient_s) for link in links]
    caps = caps_of(costs, split=split)
    ratio = max(
        (
            costs.until_weights_bytes[place] / cost.saved_bytes
            for place, cost in costs.blocks.items()
            if cost.saved_bytes > 0.0
        ),
        default=1.0,
    )
    return StraightCosts(
        forward_s=tuple(t.forward_s for t in times),
        backward_s=tuple(t.backward_s for t in times),
        weight_s=tuple(t.weight_s for t in times),
        send_s=tuple(wire_s + link.latency_s for wire_s, link in zip(occupied_s, links, strict=True)),
        wire_s=tuple(occupied_s),
        memory_cap=tuple(max(0.0, cap) for cap in caps),
        memory_delta=(1.0, ratio - 1.0, -ratio) if split else (1.0, -1.0, 0.0),
    )


__all__ = ["caps_of", "delays_s", "straight_costs"]
