"""Whether a plan's devices, meshes and transfers exist on a cluster."""

import math
from collections.abc import Iterator

from costmodel.cluster import Cluster
from costmodel.documents import nearest
from costmodel.schedule.actions import Actor
from planner.check.finding import finding, group_label, group_path, some
from planner.check.timetable import actors_of
from planner.planfile.fingerprint import cluster_fingerprint, short_fingerprint
from planner.planfile.schema import Finding, GroupPlan, Plan, Transfer


def cluster_matches(plan: Plan, cluster: Cluster) -> Iterator[Finding]:
    """MP600: same devices and links as planned for; where only rates differ, the plan runs but not as predicted."""
    actual = cluster_fingerprint(cluster)
    if actual == plan.cluster.fingerprint:
        return
    counts: dict[str, int] = {}
    for device in cluster.devices:
        counts[device.kind.name] = counts.get(device.kind.name, 0) + 1
    got = f"{cluster.name!r} ({_kinds(counts)}; {short_fingerprint(actual)})"
    planned = f"{plan.cluster.name!r} ({_kinds(plan.cluster.kinds)}; {short_fingerprint(plan.cluster.fingerprint)})"
    yield finding(
        "MP600", "cluster.fingerprint", f"the plan was made for cluster {planned}, this is {got}",
        "predicted times and the lower bound hold for the planned cluster only; plan again to get this one's",
    )  # fmt: skip


def devices_exist(plan: Plan, cluster: Cluster) -> Iterator[Finding]:
    """MP601."""
    known = cluster.device_by_id
    for stage, group, record in groups_of(plan):
        missing = [device for device in record.devices if device not in known]
        if missing:
            at = record.devices.index(missing[0])
            hint = f"its groups are {some([f'{g.name} (nodes 0-{g.nodes - 1})' for g in cluster.groups])}"
            near = [name for name in nearest(missing[0], known, limit=1) if name.startswith(missing[0].split("/")[0])]
            if near:
                hint += f"; the nearest device is {near[0]}"
            message = f"{group_label(plan, stage, group)}: {len(missing)} of {len(record.devices)} devices are not in "
            message += f"cluster {cluster.name!r}: {some(missing)}"
            yield finding("MP601", group_path(stage, group, f"devices[{at}]"), message, hint)


def devices_used_once(plan: Plan, cluster: Cluster) -> Iterator[Finding]:
    """MP602. Virtual stages of one actor share its devices."""
    first: dict[str, tuple[int, int]] = {}
    actors = actors_of(plan)
    for stage, group, record in groups_of(plan):
        for at, device in enumerate(record.devices):
            owner = first.setdefault(device, (stage, group)) if device not in first else first[device]
            if owner == (stage, group) and record.devices.index(device) == at:
                continue
            same = record.devices == plan.stages[owner[0]].groups[owner[1]].devices
            if owner != (stage, group) and same and actors[Actor(stage, group)] == actors[Actor(*owner)]:
                continue
            here, there = group_label(plan, stage, group), group_label(plan, *owner)
            message = f"device {device} is used by {there} and again by {here}"
            yield finding(
                "MP602", group_path(stage, group, f"devices[{at}]"), message, "give each group devices of its own"
            )


def devices_of_kind(plan: Plan, cluster: Cluster) -> Iterator[Finding]:
    """MP603: one executable cannot span kinds."""
    known = cluster.device_by_id
    for stage, group, record in groups_of(plan):
        found: dict[str, list[str]] = {}
        for device in record.devices:
            if device in known and known[device].kind.name != record.kind:
                found.setdefault(known[device].kind.name, []).append(device)
        for kind, devices in found.items():
            message = f"{group_label(plan, stage, group)} is planned for {record.kind}, but {some(devices)} "
            message += f"{'is' if len(devices) == 1 else 'are'} of kind {kind} in cluster {cluster.name!r}"
            where = group_path(stage, group, f"devices[{record.devices.index(devices[0])}]")
            yield finding("MP603", where, message, "a group has devices of one kind; plan again for this cluster")


def meshes_fit(plan: Plan, cluster: Cluster) -> Iterator[Finding]:
    """MP604."""
    for stage, group, record in groups_of(plan):
        where, label = group_path(stage, group, "mesh"), group_label(plan, stage, group)
        names = [axis.name for axis in record.mesh]
        text = " x ".join(f"{axis.name}={axis.size}" for axis in record.mesh) or "no axes"
        if not record.devices:
            yield finding("MP604", group_path(stage, group, "devices"), f"{label} has no devices")
        elif any(axis.size < 1 for axis in record.mesh) or len(set(names)) < len(names):
            yield finding("MP604", where, f"{label}: the mesh {text} has an empty axis or one name twice")
        elif (size := math.prod(axis.size for axis in record.mesh)) != len(record.devices):
            message = f"{label}: the mesh {text} has {size} places, the group has {len(record.devices)} devices"
            yield finding("MP604", where, message, "the product of the axis sizes is the number of devices")


def links_exist(plan: Plan, cluster: Cluster) -> Iterator[Finding]:
    """MP605: for groups of neighbouring stages that share a microbatch, and for the groups of one stage."""
    missing: set[tuple[str, str]] = set()
    for stage, group, record in groups_of(plan):
        partners = list(plan.stages[stage].groups[group + 1 :])
        if stage + 1 < len(plan.stages):
            own = set(record.microbatches)
            partners += [other for other in plan.stages[stage + 1].groups if own & set(other.microbatches)]
        for other in partners:
            pair = _unlinked(cluster, record, other)
            if pair is None or pair in missing:
                continue
            missing.add(pair)
            message = f"{group_label(plan, stage, group)} hands values to {other.name!r}, but cluster {cluster.name!r} "
            message += f"has no link between {pair[0]!r} and {pair[1]!r}"
            hint = f'add [[link]] with between = ["{pair[0]}", "{pair[1]}"] to the cluster file'
            if pair[0] == pair[1]:
                hint = f"give group {pair[0]!r} an inter = {{ ... }} in the cluster file"
            yield finding("MP605", group_path(stage, group, "devices"), message, hint)


def transfers_lead_on(plan: Plan, cluster: Cluster) -> Iterator[Finding]:
    """MP616."""
    count = len(plan.stages)
    for at, transfer in enumerate(plan.transfers):
        ends = (transfer.from_stage, transfer.to_stage)
        if not leads_on(transfer, count):
            message = f"a transfer leads from stage {ends[0]} to stage {ends[1]} of {count} stages"
            yield finding("MP616", f"transfers[{at}]", message, "values that skip a stage pass through it")
        else:
            yield from _links_lead_on(plan, at, transfer)
    joined = {(transfer.from_stage, transfer.to_stage) for transfer in plan.transfers}
    for stage in range(count - 1):
        if (stage, stage + 1) not in joined:
            yield finding("MP616", "transfers", f"nothing is handed from stage {stage} to stage {stage + 1}")


def _links_lead_on(plan: Plan, at: int, transfer: Transfer) -> Iterator[Finding]:
    """That each link of a transfer joins groups that there are, and no others join the same."""
    counts = tuple(len(plan.stages[stage].groups) for stage in (transfer.from_stage, transfer.to_stage))
    seen: set[tuple[int, int]] = set()
    for index, link in enumerate(transfer.links):
        ends = (link.from_group, link.to_group)
        where = f"transfers[{at}].links[{index}]"
        if not all(0 <= end < count for end, count in zip(ends, counts, strict=True)):
            message = f"a link leads between groups {ends[0]} and {ends[1]} of stages with {counts[0]} and {counts[1]}"
            yield finding("MP616", where, message)
        elif ends in seen:
            message = (
                f"the transfer from stage {transfer.from_stage} has two links between groups {ends[0]} and {ends[1]}"
            )
            yield finding("MP616", where, message)
        seen.add(ends)


def leads_on(transfer: Transfer, stages: int) -> bool:
    """Whether a transfer leads from one of so many stages to the next."""
    return 0 <= transfer.from_stage == transfer.to_stage - 1 < stages - 1


def groups_of(plan: Plan) -> Iterator[tuple[int, int, GroupPlan]]:
    """(stage, group, record) of every stage group."""
    for stage, record in enumerate(plan.stages):
        for group, group_record in enumerate(record.groups):
            yield stage, group, group_record


def _unlinked(cluster: Cluster, one: GroupPlan, other: GroupPlan) -> tuple[str, str] | None:
    """Names of two cluster groups that the stage groups need a link between and that have none."""
    known = cluster.device_by_id
    nodes: tuple[dict[str, set[int]], ...] = ({}, {})
    for side, record in zip(nodes, (one, other), strict=True):
        for device in (known[name] for name in record.devices if name in known):
            side.setdefault(device.group, set()).add(device.node)
    for source, source_nodes in nodes[0].items():
        for target, target_nodes in nodes[1].items():
            if source == target and len(source_nodes | target_nodes) == 1:
                continue
            try:
                cluster.group_link(source, target)
            except KeyError:
                return source, target
    return None


def _kinds(counts: dict[str, int]) -> str:
    return ", ".join(f"{count} x {kind}" for kind, count in counts.items()) or "no devices"
