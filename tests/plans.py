"""Small, consistent plans and clusters made by hand, for tests of files, checks, reports and commands."""

import math

import msgspec

from costmodel.cluster import Cluster, parse_cluster
from costmodel.schedule.actions import Actor, format_actions
from costmodel.schedule.generate import gpipe, one_f_one_b, spread_shares
from costmodel.schedule.registry import FAMILIES, make_schedule
from costmodel.schedule.validate import in_flight
from costmodel.simulate import simulate
from planner.plan_problem import problem_of
from planner.planfile.fingerprint import cluster_fingerprint, fingerprint
from planner.planfile.names import compress_names
from planner.planfile.schema import (
    ActorPlan,
    BaselinePlan,
    BlockStrategy,
    Certificate,
    ClusterRecord,
    GroupPlan,
    MemoryPlan,
    MeshAxis,
    ModelRecord,
    ParameterPlan,
    Plan,
    Prediction,
    SchedulePlan,
    StagePlan,
    TiedParameter,
    TimePlan,
    Transfer,
    TransferLink,
    ValuePlan,
)

GIB = 1 << 30
HIDDEN, FFN, VOCABULARY = 64, 256, 1024
LARGE = {
    "name": "Large-80GB",
    "platform": "gpu",
    "peak_flops_per_s": {"float32": 2e13, "bfloat16": 3e14},
    "memory_bytes": 80 * GIB,
    "memory_bandwidth_bytes_per_s": 2e12,
}
SMALL = {**LARGE, "name": "Small-32GB", "memory_bytes": 32 * GIB, "peak_flops_per_s": {"float32": 1e13}}


def cluster_document(devices: int = 4) -> dict:
    """Two groups of one node each: `devices` large devices, and as many small ones."""
    fabric = {"intra": [{"span": devices, "bandwidth_bytes_per_s": 3e11, "latency_s": 3e-6}]}
    node = {"nodes": 1, "devices_per_node": devices, **fabric}
    return {
        "name": "mixed",
        "group": [
            {"name": "large", "device": LARGE, "price_per_device_hour": 2.0, **node},
            {"name": "small", "device": SMALL, **node},
        ],
        "link": [{"between": ["large", "small"], "bandwidth_bytes_per_s": 12.5e9, "latency_s": 3e-5}],
    }


def tiny_cluster(devices: int = 4) -> Cluster:
    return parse_cluster(cluster_document(devices), {})


def block_names(layers: int = 4) -> tuple[str, ...]:
    return ("embedding", *(f"layers[{i}]" for i in range(layers)), "head")


def tiny_plan(
    *,
    stages: int = 2,
    layers: int = 4,
    microbatches: int = 4,
    microbatch_size: int = 8,
    schedule: str = "1f1b",
    data: int = 2,
    model: int = 2,
    zero: int = 1,
    tied: bool = False,
    devices: int = 4,
    name: str = "tiny",
) -> Plan:
    """A plan of a small transformer on `tiny_cluster(devices)`: stage 0 on large devices, stage 1 on small ones, ...

    Args:
        data, model: mesh of every stage; ``data * model * ceil(stages / 2)`` is at most `devices`.
        zero: ZeRO level over the data axis, 0 to 3.
    """
    cluster = tiny_cluster(devices)
    names = block_names(layers)
    cuts = [len(names) * i // stages for i in range(stages + 1)]
    rows = (gpipe if schedule == "gpipe" else one_f_one_b)(stages, microbatches)
    peaks = list(in_flight(rows).values())
    tied_stages = tied and stages > 1
    stage_plans = tuple(
        _stage(names[cuts[i] : cuts[i + 1]], i, (data, model), zero, microbatches, peaks[i], tied_stages)
        for i in range(stages)
    )
    count = VOCABULARY * HIDDEN * (1 if tied else 2) + layers * HIDDEN * FFN
    shapes = {"embedding/table": (VOCABULARY, HIDDEN), "layers/w": (layers, HIDDEN, FFN)}
    if not tied:
        shapes["head/kernel"] = (HIDDEN, VOCABULARY)
    step_s, table_bytes, sent = 1.0, 4 * VOCABULARY * HIDDEN, 1 << 20  # the step's own time: `with_own_step`
    owner = TiedParameter(path="embedding/table", owner_stage=0, other_stages=(stages - 1,), bytes=table_bytes)
    used = [device for stage in stage_plans for group in stage.groups for device in group.devices]
    large = sum(device.startswith("large") for device in used)
    peak, price = large * 2e13 + (len(used) - large) * 1e13, 2.0 * large  # in float32; small devices have no price
    plan = Plan(
        schema_version=1,
        name=name,
        model=ModelRecord(
            name="tiny-transformer", fingerprint=fingerprint(["model", layers]), reduction="mean", parameters=count,
            trained_parameters=count, blocks=compress_names(names), block_count=len(names), spec="tiny", sequence=128,
            parameter_shapes=shapes,
            block_classes={
                fingerprint(kind): compress_names(n for n in names if n.split("[")[0] == kind)
                for kind in dict.fromkeys(n.split("[")[0] for n in names)
            },
        ),
        cluster=ClusterRecord(
            name=cluster.name, fingerprint=cluster_fingerprint(cluster), devices=cluster.device_count,
            kinds={"Large-80GB": devices, "Small-32GB": devices},
        ),
        global_batch=microbatches * microbatch_size,
        microbatch_size=microbatch_size,
        microbatches=microbatches,
        stages=stage_plans,
        transfers=tuple(
            Transfer(from_stage=i, to_stage=i + 1, values=(f"x.{i}",), bytes=sent, gradient_bytes=sent, time_s=1e-4)
            for i in range(stages - 1)
        ),
        tied=(owner,) if tied_stages else (),
        schedule=SchedulePlan(
            name=schedule,
            microbatches=microbatches,
            actors=tuple(
                ActorPlan(
                    stage=row.stage, group=row.group, actions=format_actions(row.actions), warm_up=row.warm_up
                )
                for row in rows.actions
            ),
        ),
        prediction=Prediction(
            step_time_s=step_s, compute_s=step_s, exposed_communication_s={}, bubble_s=0.0, optimizer_s=0.0,
            examples_per_s=microbatches * microbatch_size / step_s,
            tokens_per_s=128 * microbatches * microbatch_size / step_s, model_flops=0.41 * step_s * peak, mfu=0.41,
            price_per_step=price * step_s / 3600,
            peak_memory_bytes=max(group.memory.total_bytes for stage in stage_plans for group in stage.groups),
            provenance={"step_time_s": "interpolated", "memory": "fitted", "links": "datasheet"},
        ),
        certificate=Certificate(
            lower_bound_s=0.96 * step_s, gap=0.04, hardware_bound_s=0.4 * step_s, hardware_gap=0.6,
            space=("searched: every contiguous cut of 6 blocks", "not searched: splitting the sequence of attention"),
            status="feasible", limit_fired=False,
        ),
        baselines=(
            BaselinePlan(name="ddp", description="data parallel over all devices of the fastest kind", feasible=True,
                         step_time_s=0.08, peak_memory_bytes=20 * GIB),
            BaselinePlan(name="pipeline", description="one device a stage", feasible=False, step_time_s=None,
                         peak_memory_bytes=96 * GIB, reason="stage 0 needs 96 GiB of 80 GiB"),
        ),
        findings=(),
        versions={"meshplan": "0.1.0", "jax": "0.10.2"},
    )  # fmt: skip
    return with_own_step(plan)


def with_own_step(plan: Plan) -> Plan:
    """The plan with the step time that its schedule takes, and all figures that follow from it."""
    problem = problem_of(plan)
    step = simulate(problem.schedule, problem.times, problem.sends, waits=problem.waits)
    last = max(step.actors, key=lambda use: (use.step_end_s, -use.actor.stage, -use.actor.group)).actor
    row = next(row for row in problem.schedule.actions if row.actor == last)
    groups = [plan.stages[stage].groups[last.group] for stage in sorted({action.stage for action in row.actions})]
    runs, times = len(groups[0].microbatches), [group.time for group in groups]
    exposed = {
        "casts": runs * sum(time.forward_communication_s + time.backward_communication_s for time in times),
        "gradient_reduction": sum(time.gradient_reduction_s for time in times),
    }
    compute_s = runs * sum(time.forward_s + time.backward_s for time in times) - exposed["casts"]
    optimizer_s, scale = sum(time.optimizer_s for time in times), step.makespan_s / plan.prediction.step_time_s
    old, proof = plan.prediction, plan.certificate
    return msgspec.structs.replace(
        plan,
        prediction=msgspec.structs.replace(
            old,
            step_time_s=step.makespan_s,
            compute_s=compute_s,
            exposed_communication_s=exposed,
            bubble_s=step.makespan_s - compute_s - optimizer_s - sum(exposed.values()),
            optimizer_s=optimizer_s,
            examples_per_s=old.examples_per_s / scale,
            tokens_per_s=old.tokens_per_s and old.tokens_per_s / scale,
            model_flops=float(round(old.model_flops * scale)),
            price_per_step=old.price_per_step and old.price_per_step * scale,
        ),
        certificate=msgspec.structs.replace(
            proof,
            lower_bound_s=proof.lower_bound_s * scale,
            hardware_bound_s=proof.hardware_bound_s * scale,
        ),
    )


def plan_with_groups(**options) -> Plan:
    """`tiny_plan` whose last stage has two groups: the second has devices of its own and takes twice as long."""
    plan = tiny_plan(**options)
    last = plan.stages[-1]
    first = last.groups[0]
    shares = spread_shares((2 * plan.microbatches // 3, plan.microbatches - 2 * plan.microbatches // 3))
    time = msgspec.structs.replace(first.time, forward_s=2 * first.time.forward_s, backward_s=2 * first.time.backward_s)
    groups = (
        msgspec.structs.replace(first, name="near", microbatches=shares[0]),
        msgspec.structs.replace(
            first, name="far", microbatches=shares[1], time=time, devices=tuple(f"small/1/{i}" for i in range(4))
        ),
    )
    stages = (*plan.stages[:-1], msgspec.structs.replace(last, groups=groups))
    rows = one_f_one_b(len(stages), plan.microbatches, [tuple(g.microbatches for g in s.groups) for s in stages])
    actors = tuple(
        ActorPlan(stage=r.stage, group=r.group, actions=format_actions(r.actions), warm_up=r.warm_up)
        for r in rows.actions
    )
    schedule = msgspec.structs.replace(plan.schedule, name="1f1b", actors=actors)
    return msgspec.structs.replace(plan, stages=stages, schedule=schedule)


def looped_plan(schedule: str, *, homes: int = 2, chunks: int = 2, microbatches: int = 4, alike: bool = True) -> Plan:
    """`tiny_plan` of ``homes * chunks`` stages under a looped schedule, on the devices of its first `homes` stages.

    Args:
        alike: whether all devices are large ones, or those of every second stage small ones.
    """
    parameters = {} if FAMILIES[schedule].chunks == 2 else {"chunks": chunks}
    rows = make_schedule(schedule, homes, microbatches, **parameters)
    plan = tiny_plan(stages=homes * chunks, layers=homes * chunks, microbatches=microbatches, devices=16)
    peaks, stages = in_flight(rows), []
    for at, stage in enumerate(plan.stages):
        group, home = stage.groups[0], rows.homes[at]
        at_home = plan.stages[home].groups[0]
        kind, devices = at_home.kind, at_home.devices
        if alike:
            kind, devices = "Large-80GB", tuple(f"large/0/{4 * home + i}" for i in range(4))
        held = peaks[Actor(home, 0)] // chunks or 1
        saved = held * group.memory.saved_per_microbatch_bytes
        memory = msgspec.structs.replace(
            group.memory,
            saved_bytes=saved,
            in_flight=held,
            total_bytes=group.memory.total_bytes - group.memory.saved_bytes + saved,
            limit_bytes=80 * GIB,
        )
        own = msgspec.structs.replace(group, kind=kind, devices=devices, memory=memory)
        stages.append(msgspec.structs.replace(stage, groups=(own,)))
    actors = tuple(
        ActorPlan(stage=r.stage, group=r.group, actions=format_actions(r.actions), warm_up=r.warm_up)
        for r in rows.actions
    )
    named = msgspec.structs.replace(plan.schedule, name=schedule, actors=actors)
    return msgspec.structs.replace(plan, stages=tuple(stages), schedule=named)


def with_uneven_transfers(plan: Plan) -> Plan:
    """The plan with transfers of which no two, nor two directions of one, have the same bytes, time or rate."""
    transfers = []
    for i, transfer in enumerate(plan.transfers):
        forward, backward = (2 + 3 * i) << 20, (1 + 5 * i) << 18
        link = TransferLink(
            from_group=0,
            to_group=0,
            activation_s=1e-3 * (1 + i),
            gradient_s=5e-3 / (1 + i) ** 2,
            latency_s=1e-5 * (2 + i),
        )
        time_s = link.activation_s + link.latency_s
        transfers.append(
            msgspec.structs.replace(transfer, bytes=forward, gradient_bytes=backward, time_s=time_s, links=(link,))
        )
    return msgspec.structs.replace(plan, transfers=tuple(transfers))


def _stage(
    names: tuple[str, ...], index: int, mesh: tuple[int, int], zero: int, microbatches: int, in_flight: int, tied: bool
) -> StagePlan:
    group = "large" if index % 2 == 0 else "small"
    count = mesh[0] * mesh[1]
    first = index // 2 * count
    layers = sum(name.startswith("layers") for name in names)
    parameters, axes = _parameters(names, layers, zero, tied), dict(zip(("data", "model"), mesh, strict=True))
    held = sum(
        4 * math.prod(one.shape) // math.prod(axes[axis] for dim in one.value for axis in dim) for one in parameters
    )
    memory = [held, GIB, 4 * GIB, in_flight * GIB // 2, GIB // 4, 0, GIB]
    return StagePlan(
        blocks=compress_names(names),
        block_count=len(names),
        groups=(
            GroupPlan(
                name=f"{group}-{index}",
                kind="Large-80GB" if group == "large" else "Small-32GB",
                devices=tuple(f"{group}/0/{first + i}" for i in range(count)),
                mesh=(MeshAxis(name="data", size=mesh[0]), MeshAxis(name="model", size=mesh[1])),
                microbatches=tuple(range(microbatches)),
                strategies=tuple(_strategy(kind) for kind in dict.fromkeys(name.split("[")[0] for name in names)),
                parameters=parameters,
                memory=MemoryPlan(
                    parameters_bytes=memory[0], gradients_bytes=memory[1], arising_bytes=0, optimizer_bytes=memory[2],
                    inputs_bytes=0, update_bytes=0,
                    saved_bytes=memory[3], transient_bytes=memory[4], buffers_bytes=memory[5], reserve_bytes=memory[6],
                    total_bytes=sum(memory), limit_bytes=(80 if group == "large" else 32) * GIB, in_flight=in_flight,
                    saved_per_microbatch_bytes=GIB // 2,
                ),
                time=TimePlan(
                    forward_s=0.002 + 0.001 * index, backward_s=0.004 + 0.002 * index, once_s=0.003,
                    forward_communication_s=0.0005, backward_communication_s=0.001, gradient_reduction_s=0.002,
                    optimizer_s=0.001,
                    collectives={"forward all_reduce model": 2 * layers, "backward all_reduce model": 2 * layers}
                    | ({"forward all_gather data": layers} if zero == 3 else {}),
                ),
            ),
        ),
    )  # fmt: skip


def _strategy(kind: str) -> BlockStrategy:
    activation = ValuePlan(dims=(("data",), (), ()), varying=("model",))
    return BlockStrategy(
        block_class=fingerprint(kind),
        ops={"dot_general.0": {"data": "b", "model": "n"}, "dot_general.1": {"data": "b", "model": "k"}},
        inputs={"x": activation},
        outputs={"y": activation},
        remat="full" if kind == "layers" else "none",
    )


def _parameters(names: tuple[str, ...], layers: int, zero: int, tied: bool) -> tuple[ParameterPlan, ...]:
    found = []
    if "embedding" in names or (tied and "head" in names):
        found.append(_parameter("embedding/table", (VOCABULARY, HIDDEN), ("model", ""), zero))
    if layers:
        found.append(_parameter("layers/w", (layers, HIDDEN, FFN), ("", "", "model"), zero))
    if "head" in names and not tied:
        found.append(_parameter("head/kernel", (HIDDEN, VOCABULARY), ("", "model"), zero))
    return tuple(found)


def _parameter(path: str, shape: tuple[int, ...], axes: tuple[str, ...], zero: int) -> ParameterPlan:
    plain = tuple((axis,) if axis else () for axis in axes)
    dim = max(d for d, axis in enumerate(axes) if not axis)
    split = tuple(("data",) if d == dim else spec for d, spec in enumerate(plain))
    return ParameterPlan(
        path=path, shape=shape, dtype="float32", gradient_dtype="float32", value=split if zero > 2 else plain,
        gradient=split if zero > 1 else plain, optimizer=split if zero > 0 else plain,
        reduced_over=("data",) if zero < 2 else (),
    )  # fmt: skip
