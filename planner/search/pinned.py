"""Layouts whose stages a user (or a baseline) fixed: devices and microbatch shares are given, strategies are solved."""

from collections.abc import Sequence
from dataclasses import dataclass

from costmodel.cluster import Cluster, Device
from costmodel.errors import InfeasibleError, InputError
from costmodel.schedule.generate import spread_shares
from costmodel.schedule.registry import schedule_family
from planner.search.candidates import Candidates
from planner.search.layout import GroupChoice, Layout, StageChoice
from planner.search.meshes import Mesh, meshes, pool_devices
from planner.search.score import Score, score
from planner.search.virtual_stages import balanced_stops, homes
from planner.search.windows import windows
from planner.space.decision import Decision


@dataclass(frozen=True, kw_only=True)
class GroupPin:
    """Devices of one cluster group for a stage.

    Attributes:
        devices: how many; share: relative share of the stage's microbatches; mesh: axis sizes, None to choose.
    """

    pool: str
    devices: int
    share: int = 1
    mesh: Mesh | None = None


@dataclass(frozen=True, kw_only=True)
class StagePin:
    """A stage's groups, and the number of blocks it has (None to balance)."""

    groups: tuple[GroupPin, ...]
    blocks: int | None = None


def take_devices(cluster: Cluster, pins: Sequence[StagePin]) -> list[list[tuple[Device, ...]]]:
    """Devices of every group: windows of their pools (`planner.search.windows`).

    Raises:
        InputError: a group has fewer devices than the pins ask for.
    """
    pools = {g.name: pool_devices(cluster, g.name) for g in cluster.groups}
    asked: dict[str, list[tuple[int, int, int]]] = {name: [] for name in pools}
    for s, stage in enumerate(pins):
        for g, group in enumerate(stage.groups):
            if group.pool not in pools:
                raise InputError(
                    "MP160", f"stage {s} is pinned to group {group.pool!r}; the cluster has {', '.join(pools)}", ""
                )
            left = len(pools[group.pool]) - sum(count for _, _, count in asked[group.pool])
            if left < group.devices:
                raise InputError(
                    "MP160",
                    f"stage {s} is pinned to {group.devices} devices of {group.pool!r}, {left} are left",
                    "pin fewer devices",
                )
            asked[group.pool].append((s, g, group.devices))
    taken: dict[tuple[int, int], tuple[Device, ...]] = {}
    for name, asks in asked.items():
        found = windows(pools[name], [count for _, _, count in asks])
        taken.update({(s, g): window for (s, g, _), window in zip(asks, found, strict=True)})
    return [[taken[s, g] for g in range(len(stage.groups))] for s, stage in enumerate(pins)]


def pinned_layout(
    candidates: Candidates,
    pins: Sequence[StagePin],
    *,
    microbatch: int,
    microbatches: int,
    schedule: str,
    nearest: bool = False,
) -> Score:
    """The best layout found under pins: each group's mesh with the fastest decision, blocks balanced over the stages.

    Args:
        nearest: a group whose devices nothing fits takes what needs least memory, so that the score says by how much
            it misses.

    Raises:
        InfeasibleError: no decision of some group fits its devices.
    """
    cluster, graph = candidates.cluster, candidates.graph_of(microbatch)
    devices = take_devices(cluster, pins)
    stages = len(pins)
    home = _homes(schedule, pins, microbatches)
    in_flight = microbatches if schedule == "gpipe" else min(stages, microbatches)
    chosen: list[list[Decision]] = []
    for s, stage in enumerate(pins):
        row = []
        for pin in stage.groups:
            pool = cluster.group(pin.pool)
            several = [pin.mesh] if pin.mesh is not None else list(meshes(pin.devices, pool.devices_per_node))
            setting = {"microbatches": microbatches, "stages": stages, "in_flight": in_flight}
            options = [d for mesh in several for d in candidates.both(pool, mesh, microbatch, **setting)]
            if not options and nearest:
                least = candidates.nearest_of(pool, several, microbatch, **setting)
                options = [least] if least is not None else []
            if not options:
                raise InfeasibleError(
                    "MP201",
                    f"stage {s} does not fit {pin.devices} devices of {pin.pool}",
                    "pin more devices or a smaller microbatch",
                )
            best = min(options, key=lambda d: d.time_s)
            row.append(candidates.on_devices(best, pool, devices[s][len(row)]))
        chosen.append(row)
    pins, chosen, devices = [pins[s] for s in home], [chosen[s] for s in home], [devices[s] for s in home]
    shares = [spread_shares(_counts([p.share for p in stage.groups], microbatches)) for stage in pins]
    stops = balanced_stops(
        graph,
        [
            [(p.share / sum(q.share for q in stage.groups), d) for p, d in zip(stage.groups, row, strict=True)]
            for stage, row in zip(pins, chosen, strict=True)
        ],
        [stage.blocks for stage in pins],
        home,
    )
    layout = Layout(
        graph=graph,
        transfers=candidates.transfers,
        schedule=schedule,
        microbatches=microbatches,
        stages=tuple(
            StageChoice(
                start=0 if s == 0 else stops[s - 1],
                stop=stops[s],
                groups=tuple(
                    GroupChoice(
                        pool=p.pool, devices=devices[s][g], decision=chosen[s][g], microbatches=tuple(shares[s][g])
                    )
                    for g, p in enumerate(stage.groups)
                ),
            )
            for s, stage in enumerate(pins)
        ),
    )
    return score(layout)


def _homes(schedule: str, pins: Sequence[StagePin], microbatches: int) -> list[int]:
    """For each (virtual) stage of a schedule, the pin that runs it."""
    family = schedule_family(schedule)
    if family.chunks == 1:
        return list(range(len(pins)))
    if any(pin.blocks is not None for pin in pins):
        message = f"schedule {schedule} runs several ranges of blocks a stage, a number of blocks is pinned"
        raise InputError("MP160", message, "pin devices only")
    return homes(family.generate(len(pins), microbatches))


def _counts(shares: Sequence[int], total: int) -> tuple[int, ...]:
    """Whole microbatches in proportion to the shares, the rest to the largest."""
    whole = [total * s // sum(shares) for s in shares]
    order = sorted(range(len(shares)), key=lambda i: -shares[i])
    for k in range(total - sum(whole)):
        whole[order[k % len(order)]] += 1
    return tuple(whole)


__all__ = ["GroupPin", "StagePin", "pinned_layout", "take_devices"]
