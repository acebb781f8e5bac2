"""A layout of one group a stage as the schedule generators see it: times, delays and memory in activations.

What a microbatch holds from F to B and what it holds from B to W have another ratio on each stage, generators know one
ratio R for all. A stage's unit of memory is then the least that is no less than the former, and R times which is no
less than the latter, so that nothing is counted too small; R is chosen such that the tightest stage has most room. What
is made of it is scored exactly afterwards.
"""

from math import inf

from costmodel.schedule.actions import Actor
from costmodel.schedule.straight import StraightCosts
from planner.search.score import LayoutCosts


def caps_of(costs: LayoutCosts) -> tuple[float, ...]:
    """Most microbatches between F and B that each stage may hold beside all else; may be below 1, even below 0."""
    saved = [costs.blocks[Actor(stage, 0)].saved_bytes for stage in range(len(costs.layout.stages))]
    return _caps(_rooms_bytes(costs), saved)


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
    caps, ratio = _split_caps(costs) if split else (caps_of(costs), 0.0)
    return StraightCosts(
        forward_s=tuple(t.forward_s for t in times),
        backward_s=tuple(t.backward_s for t in times),
        weight_s=tuple(t.weight_s for t in times),
        send_s=tuple(wire_s + link.latency_s for wire_s, link in zip(occupied_s, links, strict=True)),
        wire_s=tuple(occupied_s),
        memory_cap=tuple(max(0.0, cap) for cap in caps),
        memory_delta=(1.0, ratio - 1.0, -ratio) if split else (1.0, -1.0, 0.0),
    )


def _split_caps(costs: LayoutCosts) -> tuple[tuple[float, ...], float]:
    """Caps in units of memory, and R."""
    places = [Actor(stage, 0) for stage in range(len(costs.layout.stages))]
    saved = [costs.blocks[place].saved_bytes for place in places]
    until, made = ([held[place] for place in places] for held in (costs.until_weights_bytes, costs.made_bytes))
    rooms = [room - beside for room, beside in zip(_rooms_bytes(costs), made, strict=True)]
    ratios = {late / early for early, late in zip(saved, until, strict=True) if early > 0.0 and late > 0.0} | {1.0}
    found = [
        (_caps(rooms, [max(early, late / ratio) for early, late in zip(saved, until, strict=True)]), ratio)
        for ratio in sorted(ratios)
    ]
    return max(found, key=lambda option: min(option[0]))


def _rooms_bytes(costs: LayoutCosts) -> list[float]:
    """What each stage has for activations."""
    rooms = []
    for stage, choice in enumerate(costs.layout.stages):
        place = Actor(stage, 0)
        cost, kind = costs.blocks[place], choice.groups[0].decision.space.pricing.kind
        taken = kind.reserve_bytes + cost.state_bytes + cost.transient_bytes + costs.buffer_bytes[place]
        rooms.append(kind.memory_bytes - taken)
    return rooms


def _caps(rooms: list[float], units: list[float]) -> tuple[float, ...]:
    return tuple(
        room / unit if unit > 0.0 else inf if room >= 0.0 else 0.0 for room, unit in zip(rooms, units, strict=True)
    )


__all__ = ["caps_of", "delays_s", "straight_costs"]
