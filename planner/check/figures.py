"""Whether a plan's predicted figures can be true: memory within limits, sums that add up, bounds below times."""

import math
from collections.abc import Iterator

from costmodel.cluster import Cluster
from costmodel.schedule.actions import Actor
from costmodel.units import format_bytes, format_seconds
from planner.check.device_memory import MEMORY_ITEMS, device_bytes
from planner.check.finding import finding, group_label, group_path, some
from planner.check.placement import groups_of
from planner.check.sharding import itemsize
from planner.planfile.schema import Finding, GroupPlan, MemoryPlan, ParameterPlan, Plan

ROUNDING = 1e-6


def memory_fits(plan: Plan, cluster: Cluster) -> Iterator[Finding]:
    """MP620, with the largest items; the limit is the plan's or, if smaller, that of the cluster's device."""
    needs = device_bytes(plan)
    for stage, group, record in groups_of(plan):
        if (stage, group) not in needs:
            continue
        total, memory = needs[Actor(stage, group)], record.memory
        limit, source = memory.limit_bytes, "the plan's limit"
        for device in (cluster.device_by_id[name] for name in record.devices if name in cluster.device_by_id):
            if device.kind.memory_bytes < limit:
                limit, source = device.kind.memory_bytes, f"the memory of {device.kind.name}"
        if total <= limit:
            continue
        over = format_bytes(total - limit)
        message = f"{group_label(plan, stage, group)} needs {format_bytes(total)} a device, {source} is "
        message += f"{format_bytes(limit)}: {over} too much ({_largest(memory)})"
        hint = "plan again for this cluster: more stages or devices, a smaller microbatch, or remat"
        yield finding("MP620", group_path(stage, group, "memory.total_bytes"), message, hint)


def memory_adds_up(plan: Plan, cluster: Cluster) -> Iterator[Finding]:
    """MP621."""
    for stage, group, record in groups_of(plan):
        memory, label = record.memory, group_label(plan, stage, group)
        items = {name: getattr(memory, f"{name}_bytes") for name in MEMORY_ITEMS}
        where = group_path(stage, group, "memory")
        negative = [name for name, count in items.items() if count < 0]
        if negative:
            yield finding("MP621", where, f"{label}: negative memory for {some(negative)}")
        elif sum(items.values()) != memory.total_bytes:
            message = f"{label}: items of memory add up to {sum(items.values())} bytes, "
            message += f"total_bytes is {memory.total_bytes}"
            yield finding("MP621", f"{where}.total_bytes", message)
        held = _held_bytes(record)
        if held is not None and not held - 1 <= memory.parameters_bytes <= held + 1:
            message = f"{label}: parameters_bytes is {memory.parameters_bytes}, its parameters as they are split take "
            yield finding("MP621", f"{where}.parameters_bytes", f"{message}{held:.0f} bytes on each device")
    worst = max(device_bytes(plan).values(), default=0)
    if plan.stages and plan.prediction.peak_memory_bytes != worst:
        message = f"peak_memory_bytes is {plan.prediction.peak_memory_bytes}, the worst group needs {worst}"
        yield finding("MP621", "prediction.peak_memory_bytes", message)


def _held_bytes(record: GroupPlan) -> float | None:
    """Bytes of a group's parameters on one of its devices; None where they name axes that the mesh does not have."""
    sizes = {axis.name: axis.size for axis in record.mesh}
    total = 0.0
    for parameter in record.parameters:
        axes = [axis for dim in parameter.value for axis in dim]
        if any(sizes.get(axis, 0) < 1 for axis in axes):
            return None  # MP604 and MP607 say so
        total += math.prod(parameter.shape) * itemsize(parameter.dtype) / math.prod(sizes[axis] for axis in axes)
    return total


def tied_owned(plan: Plan, cluster: Cluster) -> Iterator[Finding]:
    """MP624."""
    for at, tie in enumerate(plan.tied):
        where = f"tied[{at}]"
        stages = (tie.owner_stage, *tie.other_stages)
        outside = [str(stage) for stage in stages if not 0 <= stage < len(plan.stages)]
        if outside:
            message = f"tied parameter {tie.path} names stage {some(outside)} of {len(plan.stages)} stages"
            yield finding("MP624", where, message)
            continue
        if not tie.other_stages or len(set(stages)) < len(stages):
            message = f"tied parameter {tie.path} is owned by stage {tie.owner_stage} and read by "
            message += f"{list(tie.other_stages)}"
            yield finding("MP624", where, message, "the owner and the readers are different stages")
        whole = plan.model.parameter_shapes.get(tie.path)
        dtype = next((p.dtype for p in _held(plan, tie.owner_stage) if p.path == tie.path), None)
        if whole is not None and dtype is not None and tie.bytes != math.prod(whole) * itemsize(dtype):
            message = f"tied parameter {tie.path}: bytes is {tie.bytes}, the parameter has "
            yield finding("MP624", f"{where}.bytes", f"{message}{math.prod(whole) * itemsize(dtype)}")
        for stage in sorted(set(stages)):
            if not all(any(p.path == tie.path for p in group.parameters) for group in plan.stages[stage].groups):
                role = "owner" if stage == tie.owner_stage else "reader"
                message = f"the {role} of tied parameter {tie.path}, stage {stage}, does not hold it"
                yield finding("MP624", where, message)
    tied = {tie.path for tie in plan.tied}
    for path, stages in _shared_unstacked(plan).items():
        if path not in tied:
            message = f"parameter {path} is held by stages {some([str(s) for s in stages])} and has no owner"
            hint = "a parameter that several stages read has one owner, who updates it"
            yield finding("MP624", "tied", message, hint)


def _held(plan: Plan, stage: int) -> tuple[ParameterPlan, ...]:
    """Parameters of a stage; its groups hold copies."""
    groups = plan.stages[stage].groups
    return groups[0].parameters if groups else ()


def _shared_unstacked(plan: Plan) -> dict[str, list[int]]:
    """Parameters that several stages hold whole, by the model's recorded shapes."""
    holders: dict[str, list[int]] = {}
    for at in range(len(plan.stages)):
        for parameter in _held(plan, at):
            if parameter.shape == plan.model.parameter_shapes.get(parameter.path) and parameter.trained:
                holders.setdefault(parameter.path, []).append(at)
    return {path: stages for path, stages in holders.items() if len(stages) > 1}


def prediction_finite(plan: Plan, cluster: Cluster) -> Iterator[Finding]:
    """MP625."""
    prediction = plan.prediction
    positive = {"step_time_s": prediction.step_time_s, "compute_s": prediction.compute_s}
    positive |= {"examples_per_s": prediction.examples_per_s, "model_flops": prediction.model_flops}
    positive |= {"tokens_per_s": prediction.tokens_per_s, "mfu": prediction.mfu}
    for name, value in positive.items():
        if value is not None and not (math.isfinite(value) and value > 0):
            message = f"{name} is {value}, it must be finite and above 0"
            yield finding("MP625", f"prediction.{name}", message)
    if prediction.mfu is not None and prediction.mfu > 1:
        yield finding("MP625", "prediction.mfu", f"mfu is {prediction.mfu:.3g}: above the devices' peak rate")
    price = prediction.price_per_step
    if price is not None and not (math.isfinite(price) and price >= 0):
        message = f"price_per_step is {price}, it must be finite and not negative"
        yield finding("MP625", "prediction.price_per_step", message)
    others = {"bubble_s": prediction.bubble_s, "optimizer_s": prediction.optimizer_s}
    others |= {f"exposed_communication_s.{kind}": time_s for kind, time_s in prediction.exposed_communication_s.items()}
    for name, value in others.items():
        if not (math.isfinite(value) and value >= 0):
            yield finding("MP625", f"prediction.{name}", f"{name} is {value}, it must be finite and not negative")
    for stage, group, record in groups_of(plan):
        for name in (name for name in record.time.__struct_fields__ if name.endswith("_s")):
            value = getattr(record.time, name)
            if not (math.isfinite(value) and value >= 0):
                message = f"{group_label(plan, stage, group)}: {name} is {value}, it must be finite and not negative"
                yield finding("MP625", group_path(stage, group, f"time.{name}"), message)
        negative = [name for name, count in record.time.collectives.items() if count < 0]
        if negative:
            message = f"{group_label(plan, stage, group)}: a negative number of collectives: {some(negative)}"
            yield finding("MP625", group_path(stage, group, "time.collectives"), message)
        for name in (
            "limit_bytes",
            "in_flight",
            "saved_per_microbatch_bytes",
            "until_weights_bytes",
            "made_for_weights_bytes",
        ):
            if getattr(record.memory, name) < 0:
                message = f"{group_label(plan, stage, group)}: {name} is {getattr(record.memory, name)}"
                yield finding("MP625", group_path(stage, group, f"memory.{name}"), message)
    for at, baseline in enumerate(plan.baselines):
        time_s = baseline.step_time_s
        if (baseline.feasible and time_s is None) or (time_s is not None and not 0 < time_s < math.inf):
            message = f"the baseline {baseline.name} takes {time_s} s, it must be finite and above 0"
            yield finding("MP625", f"baselines[{at}].step_time_s", message)
    for at, transfer in enumerate(plan.transfers):
        if not (
            math.isfinite(transfer.time_s) and transfer.time_s >= 0 <= transfer.bytes and transfer.gradient_bytes >= 0
        ):
            message = (
                f"transfer from stage {transfer.from_stage}: {transfer.bytes} bytes, {transfer.gradient_bytes} back, "
            )
            yield finding("MP625", f"transfers[{at}]", f"{message}{transfer.time_s} s: none may be negative")
        slack = (
            {} if transfer.slack is None else {"free_s": transfer.slack.free_s, "absorbs_s": transfer.slack.absorbs_s}
        )
        for name, time_s in slack.items():
            if time_s is not None and not (math.isfinite(time_s) and time_s >= 0):
                message = f"transfer from stage {transfer.from_stage}: {name} is {time_s}, it must be finite and not "
                yield finding("MP625", f"transfers[{at}].slack.{name}", f"{message}negative")
        for index, link in enumerate(transfer.links):
            times = {"activation_s": link.activation_s, "gradient_s": link.gradient_s, "latency_s": link.latency_s}
            for name, time_s in times.items():
                if not (math.isfinite(time_s) and time_s >= 0):
                    message = f"transfer from stage {transfer.from_stage}: {name} is {time_s}, it must be finite and "
                    yield finding("MP625", f"transfers[{at}].links[{index}].{name}", f"{message}not negative")
    for at, join in enumerate(plan.update_joins):
        if not (math.isfinite(join.time_s) and join.time_s >= 0):
            message = f"the update of stage {join.stage} waits {join.time_s} s, it must be finite and not negative"
            yield finding("MP625", f"update_joins[{at}].time_s", message)


def certificate_consistent(plan: Plan, cluster: Cluster) -> Iterator[Finding]:
    """MP626: bounds are positive and not above the time; gaps follow from them."""
    certificate, step_s = plan.certificate, plan.prediction.step_time_s
    bounds = (
        ("lower_bound_s", certificate.lower_bound_s, "gap", certificate.gap),
        ("hardware_bound_s", certificate.hardware_bound_s, "hardware_gap", certificate.hardware_gap),
    )
    for name, bound_s, gap_name, gap in bounds:
        if not (math.isfinite(bound_s) and bound_s >= 0):
            yield finding("MP626", f"certificate.{name}", f"{name} is {bound_s}, it must be finite and not negative")
        elif bound_s > step_s * (1 + ROUNDING):
            message = f"{name} is {format_seconds(bound_s)}, above the predicted step time {format_seconds(step_s)}"
            hint = "a bound above the plan proves nothing; please report it"
            yield finding("MP626", f"certificate.{name}", message, hint)
        elif step_s > 0 and not abs(gap - (1 - bound_s / step_s)) <= 1e-4:
            message = f"{gap_name} is {gap:.4f}, but 1 - {name} / step_time_s is {1 - bound_s / step_s:.4f}"
            yield finding("MP626", f"certificate.{gap_name}", message)

    proven = certificate.lower_bound_s >= step_s * (1 - 1e-4)
    if certificate.status == "optimal" and not proven:
        message = f"the status is 'optimal', but the lower bound leaves a gap of {certificate.gap:.4f}"
        yield finding("MP626", "certificate.status", message)
    elif certificate.status == "feasible" and certificate.lower_bound_s >= step_s:
        message = "the status is 'feasible', but the lower bound is the plan's own time"
        yield finding("MP626", "certificate.status", message)


def _largest(memory: MemoryPlan) -> str:
    items = sorted(((getattr(memory, f"{name}_bytes"), name) for name in MEMORY_ITEMS), reverse=True)
    return ", ".join(f"{name} {format_bytes(count)}" for count, name in items[:3] if count)
