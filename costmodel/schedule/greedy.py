"""List scheduling of straight pipelines with true costs: whenever a stage is free it runs what a policy prefers."""

from dataclasses import dataclass
from heapq import heappop, heappush
from math import inf

from costmodel.schedule.straight import ROUNDING, StraightCosts, Word


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """What a free stage prefers.

    Args:
        limits: most microbatches between F and B on each stage.
        forward_first: per stage, whether a forward that can run goes before a backward that can, until the limit.
        patience: per stage, a W starts only if it delays the next known arrival by no more than this share of its time.
    """

    limits: tuple[int, ...]
    forward_first: tuple[bool, ...]
    patience: tuple[float, ...]


def list_schedule(costs: StraightCosts, microbatches: int, policy: Policy) -> tuple[tuple[Word, ...], list[float]]:
    """Words that keep within the memory caps, and when each stage ends; every cap is at least `costs.least_cap`.

    Never stuck: the oldest microbatch in flight can always go on to the last stage and back, as each stage takes
    microbatches in order, and a stage out of memory has a W to run or waits for a microbatch that is ahead.
    """
    p, m, last = costs.stages, microbatches, costs.stages - 1
    forward_s, backward_s, weight_s, send_s = costs.forward_s, costs.backward_s, costs.weight_s, costs.send_s
    wires_s = costs.wires_s
    delta_f, delta_b, delta_w = costs.memory_delta
    extra_b = max(delta_b, 0.0)
    room_f = [cap + ROUNDING - delta_f - extra_b for cap in costs.memory_cap]
    room_b = [cap + ROUNDING - extra_b for cap in costs.memory_cap]
    arrived = [[inf] * (m + 1) for _ in range(p)]
    returned = [[inf] * (m + 1) for _ in range(p)]
    arrived[0] = [0.0] * m + [inf]
    done_f, done_b, done_w, held, free = [0] * p, [0] * p, [0] * p, [0.0] * p, [0.0] * p
    words = [bytearray() for _ in range(p)]
    forward_first, patience, limits = policy.forward_first, policy.patience, policy.limits
    fused = costs.fused
    events: list[tuple[float, int]] = [(0.0, 0)]
    while events:
        now, s = heappop(events)
        if now < free[s]:
            continue
        f, b, w = done_f[s], done_b[s], done_w[s]
        next_f = arrived[s][f] if f - b < limits[s] and held[s] <= room_f[s] else inf
        next_b = returned[s][b] if held[s] <= room_b[s] else inf
        if next_b <= now and not (forward_first[s] and next_f <= now):
            end = now + backward_s[s]
            words[s].append(1)
            done_b[s] = b + 1
            held[s] += delta_b
            if s:
                at = end + send_s[s - 1]
                if b and returned[s - 1][b - 1] + wires_s[s - 1] > at:  # the link is occupied
                    at = returned[s - 1][b - 1] + wires_s[s - 1]
                returned[s - 1][b] = at
                heappush(events, (at, s - 1))
        elif next_f <= now:
            end = now + forward_s[s]
            words[s].append(0)
            done_f[s] = f + 1
            held[s] += delta_f
            if s < last:
                at = end + send_s[s]
                if f and arrived[s + 1][f - 1] + wires_s[s] > at:
                    at = arrived[s + 1][f - 1] + wires_s[s]
                arrived[s + 1][f] = at
                heappush(events, (at, s + 1))
            else:
                returned[s][f] = end
        elif w < b and not fused:
            soon = next_f if next_f < next_b else next_b
            if now + weight_s[s] * (1.0 - patience[s]) > soon + ROUNDING * soon:
                heappush(events, (soon, s))
                continue
            end = now + weight_s[s]
            words[s].append(2)
            done_w[s] = w + 1
            held[s] += delta_w
        else:
            continue  # an arrival wakes the stage
        free[s] = end
        heappush(events, (end, s))
    return tuple(bytes(word) for word in words), free
