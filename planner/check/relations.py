"""Whether a plan's predicted figures follow from each other, and from the facts of the cluster (MP640)."""

import math
from collections.abc import Iterator

from costmodel.cluster import Cluster
from costmodel.device_kind import PEAK_DTYPES, DeviceKind
from costmodel.errors import InputError
from costmodel.schedule.actions import Actor, Schedule
from costmodel.schedule.validate import held_bytes
from costmodel.units import format_bytes, format_seconds
from planner.check.finding import finding, group_label, group_path
from planner.check.placement import groups_of
from planner.check.timetable import schedule_of
from planner.planfile.fingerprint import cluster_fingerprint
from planner.planfile.schema import Finding, Plan

TOLERANCE = 1e-3
_HINT = "the figure was edited, or the plan was made by another version: plan again"


def figures_follow(plan: Plan, cluster: Cluster) -> Iterator[Finding]:
    """MP640."""
    prediction, step_s = plan.prediction, plan.prediction.step_time_s
    if not (math.isfinite(step_s) and step_s > 0):
        return  # MP625 says so
    parts = (prediction.compute_s, *prediction.exposed_communication_s.values(), prediction.bubble_s)
    total_s = sum((*parts, prediction.optimizer_s))
    if not _close(total_s, step_s):
        message = f"the parts of the step add up to {format_seconds(total_s)}, step_time_s is {format_seconds(step_s)}"
        yield finding("MP640", "prediction.step_time_s", message, _HINT)
    rate = plan.global_batch / step_s
    if not _close(prediction.examples_per_s, rate):
        message = f"examples_per_s is {prediction.examples_per_s:.6g}, global_batch / step_time_s is {rate:.6g}"
        yield finding("MP640", "prediction.examples_per_s", message, _HINT)
    if prediction.tokens_per_s is not None and rate > 0:
        tokens = prediction.tokens_per_s / rate
        whole = math.isfinite(tokens) and round(tokens) >= 1 and abs(tokens - round(tokens)) < 1e-6 * tokens
        if not whole:
            message = f"tokens_per_s is {tokens:.6g} times the examples per second, which is no whole number of tokens"
            yield finding("MP640", "prediction.tokens_per_s", message, _HINT)
    alone = len(tuple(groups_of(plan))) == 1  # one program computes some of what is kept again
    splits = not alone and any("W" in actor.actions for actor in plan.schedule.actors)
    if splits:
        yield from _held_until_weights(plan)
    for stage, group, record in groups_of(plan):
        time, memory = record.time, record.memory
        label, path = group_label(plan, stage, group), group_path(stage, group)
        if not _close(time.gradient_reduction_s + time.optimizer_s, time.once_s):
            message = f"{label}: once_s is {format_seconds(time.once_s)}, gradient reduction and optimizer take "
            message += format_seconds(time.gradient_reduction_s + time.optimizer_s)
            yield finding("MP640", f"{path}.time.once_s", message, _HINT)
        for phase in ("forward", "backward"):
            whole, part = getattr(time, f"{phase}_s"), getattr(time, f"{phase}_communication_s")
            if part > whole * (1 + TOLERANCE):
                message = f"{label}: {phase} communication takes {format_seconds(part)} of {format_seconds(whole)}"
                yield finding("MP640", f"{path}.time.{phase}_communication_s", message, _HINT)
        if time.weight_s > time.backward_s * (1 + TOLERANCE):
            message = f"{label}: weight gradients take {format_seconds(time.weight_s)} of backward's "
            yield finding("MP640", f"{path}.time.weight_s", f"{message}{format_seconds(time.backward_s)}", _HINT)
        most = memory.in_flight * memory.saved_per_microbatch_bytes
        least = 0 if alone else most - memory.in_flight
        if not splits and not least <= memory.saved_bytes <= most:
            message = f"{label}: saved_bytes is {format_bytes(memory.saved_bytes)}, {memory.in_flight} microbatches in "
            message += f"flight save {format_bytes(memory.saved_per_microbatch_bytes)} each"
            yield finding("MP640", f"{path}.memory.saved_bytes", message, _HINT)
    for at, transfer in enumerate(plan.transfers):
        slowest_s = max((link.activation_s + link.latency_s for link in transfer.links), default=transfer.time_s)
        if not _close(transfer.time_s, slowest_s):
            message = (
                f"transfer from stage {transfer.from_stage}: time_s is {format_seconds(transfer.time_s)}, its slowest "
            )
            yield finding("MP640", f"transfers[{at}].time_s", f"{message}link takes {format_seconds(slowest_s)}", _HINT)
    if cluster_fingerprint(cluster) == plan.cluster.fingerprint:
        yield from _of_cluster(plan, cluster)


def _held_until_weights(plan: Plan) -> Iterator[Finding]:
    """Activations where microbatches hold one size until B and another until W."""
    try:
        schedule = schedule_of(plan)
    except InputError:
        return  # MP615 says so
    known = {Actor(stage, group): record.memory for stage, group, record in groups_of(plan)}
    for row in schedule.actions:
        places = [Actor(stage, row.group) for stage in sorted({action.stage for action in row.actions})]
        if not all(place in known for place in places):
            continue  # MP615 says so
        if not any(known[place].until_weights_bytes for place in places):
            continue  # the plan does not say
        saved = {place: float(known[place].saved_per_microbatch_bytes) for place in places}
        until = {place: float(known[place].until_weights_bytes) for place in places}
        made = {place: float(known[place].made_for_weights_bytes) for place in places}
        own = Schedule(name=schedule.name, microbatches=schedule.microbatches, actions=(row,))
        most = sum(held_bytes(own, saved, until, made).values())
        claimed = sum(known[place].saved_bytes for place in places)
        rounding = 2 * len(row.actions)
        if not most - rounding <= claimed <= most + rounding:
            message = f"{group_label(plan, *places[0])}: saved_bytes is {format_bytes(claimed)}, what microbatches in "
            message += f"flight keep for their B and W comes to {format_bytes(most)}"
            yield finding("MP640", group_path(*places[0], "memory.saved_bytes"), message, _HINT)


def _of_cluster(plan: Plan, cluster: Cluster) -> Iterator[Finding]:
    """Figures that the cluster's facts decide; the cluster is the one that was planned for."""
    prediction, known = plan.prediction, cluster.device_by_id
    used = dict.fromkeys(name for _, _, record in groups_of(plan) for name in record.devices)
    devices = [known[name] for name in used if name in known]
    for stage, group, record in groups_of(plan):
        own = {known[name].kind.memory_bytes for name in record.devices if name in known}
        if own and record.memory.limit_bytes not in own:
            message = f"{group_label(plan, stage, group)}: limit_bytes is {format_bytes(record.memory.limit_bytes)}, "
            message += f"the memory of {record.kind} is {format_bytes(min(own))}"
            yield finding("MP640", group_path(stage, group, "memory.limit_bytes"), message, _HINT)
    if (mfu := prediction.mfu) is not None and mfu > 0:
        peaks = {sum(_peak(device.kind, dtype) for device in devices) for dtype in PEAK_DTYPES}
        rate = prediction.model_flops / prediction.step_time_s
        if not any(_close(mfu * peak, rate) for peak in peaks):
            near = min((rate / peak for peak in peaks if peak), key=lambda one: abs(one - mfu), default=0.0)
            message = f"mfu is {mfu:.4g}; model_flops in step_time_s on these devices are {near:.4g}"
            yield finding("MP640", "prediction.mfu", message, _HINT)


def _close(one: float, other: float) -> bool:
    return math.isclose(one, other, rel_tol=TOLERANCE, abs_tol=1e-15)


def _peak(kind: DeviceKind, dtype: str) -> float:
    """Rate of matrix products of a dtype, as `costmodel.compute` takes it (which is not light enough to import)."""
    peaks = kind.peak_flops_per_s
    unit = {"gpu": "tfloat32", "tpu": "bfloat16"}.get(kind.platform, dtype) if dtype == "float32" else dtype
    return peaks.get(unit, peaks["float32"])
