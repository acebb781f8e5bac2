"""From a scored layout to the plan document."""

import math
from collections.abc import Mapping

from costmodel.cluster import Cluster
from costmodel.compute import utilisation_peak
from costmodel.graph import ModelGraph, Parameter, Tensor, matmul_flops
from costmodel.kernels import op_dtype
from costmodel.schedule.actions import Actor, Schedule, format_actions
from costmodel.sharding import PARTIAL, REPLICATED, VARYING, Spec, shifted
from planner.breakdown import breakdown
from planner.plan_slack import with_slack
from planner.planfile.fingerprint import cluster_fingerprint, fingerprint
from planner.planfile.names import compress_names
from planner.planfile.schema import (
    SCHEMA_VERSION,
    ActorPlan,
    BaselinePlan,
    BlockStrategy,
    Certificate,
    ClusterRecord,
    Finding,
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
    UpdateJoin,
)
from planner.planfile.specs import dims_of, strategy_names, value_from_spec
from planner.search.layout import GroupChoice, Layout, StageChoice, crossing_bytes, held_parameters
from planner.search.score import GroupScore, Score, sends_of, tied_parameters


def model_record(
    graph: ModelGraph, *, reduction: str, spec: str | None = None, sequence: int | None = None
) -> ModelRecord:
    """What a plan keeps of the model that it was made for.

    The fingerprint covers every op with its shapes, numbers and nested programs (canonical hashes of the blocks): it
    holds for the microbatch size of the graph alone.
    """
    facts = graph.params.values()
    shapes = {name: p.shape for name, p in graph.params.items()}
    names = [b.name for b in graph.blocks]
    payload = {
        "parameters": {
            n: [list(p.shape), p.dtype, p.trained, _optimizer_bytes_per_element(p)] for n, p in graph.params.items()
        },
        "blocks": [[b.name, b.class_key] for b in graph.blocks],
        "microbatch": graph.microbatch,
        "reduction": reduction,
    }
    return ModelRecord(
        name=graph.name,
        fingerprint=fingerprint(payload),
        reduction=reduction,
        parameters=sum(p.elements for p in facts),
        trained_parameters=sum(p.elements for p in facts if p.trained),
        blocks=compress_names(names),
        block_count=len(names),
        spec=spec,
        sequence=sequence,
        parameter_shapes=shapes,
        block_classes={
            key: compress_names(b.name for b in graph.blocks if b.class_key == key)
            for key in dict.fromkeys(b.class_key for b in graph.blocks)
        },
    )


def _optimizer_bytes_per_element(p: Parameter) -> float:
    return p.optimizer_bytes_per_element + p.optimizer_whole_bytes / max(1, p.elements)


def assemble_plan(
    score: Score,
    *,
    name: str,
    model: ModelRecord,
    certificate: Certificate,
    baselines: tuple[BaselinePlan, ...],
    findings: tuple[Finding, ...],
    versions: Mapping[str, str],
    tokens_per_example: int | None,
    provenance: Mapping[str, str],
    profile: str | None = None,
) -> Plan:
    """The document of a layout."""
    layout = score.layout
    graph, cluster = layout.graph, layout.cluster
    stages = tuple(
        StagePlan(
            blocks=compress_names(b.name for b in graph.blocks[stage.start : stage.stop]),
            block_count=stage.stop - stage.start,
            groups=tuple(_group(layout, stage, g, score.groups[Actor(s, i)]) for i, g in enumerate(stage.groups)),
        )
        for s, stage in enumerate(layout.stages)
    )
    plan = Plan(
        schema_version=SCHEMA_VERSION,
        name=name,
        model=model,
        cluster=cluster_record(cluster),
        global_batch=graph.microbatch * layout.microbatches,
        microbatch_size=graph.microbatch,
        microbatches=layout.microbatches,
        stages=stages,
        transfers=_transfers(layout),
        tied=_tied(layout),
        update_joins=tuple(
            UpdateJoin(stage=s, waits_for=tuple(sorted(wait.stages)), time_s=wait.time_s)
            for s, wait in score.waits.items()
        ),
        schedule=schedule_record(score.layout.schedule, score.schedule),
        prediction=_prediction(score, tokens_per_example, provenance),
        certificate=certificate,
        baselines=baselines,
        findings=findings,
        versions=dict(versions),
        profile=profile,
    )
    return with_slack(plan)


def cluster_record(cluster: Cluster) -> ClusterRecord:
    kinds: dict[str, int] = {}
    for device in cluster.devices:
        kinds[device.kind.name] = kinds.get(device.kind.name, 0) + 1
    return ClusterRecord(
        name=cluster.name, fingerprint=cluster_fingerprint(cluster), devices=len(cluster.devices), kinds=kinds
    )


def _group(layout: Layout, stage: StageChoice, group: GroupChoice, score: GroupScore) -> GroupPlan:
    decision, graph = group.decision, layout.graph
    names, mesh = decision.space.pricing.axis_names, decision.space.mesh
    classes = dict.fromkeys(b.class_key for b in graph.blocks[stage.start : stage.stop])
    cost = score.cost
    return GroupPlan(
        name=group.pool,
        kind=group.devices[0].kind.name,
        devices=tuple(d.id for d in group.devices),
        mesh=tuple(MeshAxis(name=n, size=size) for n, size in zip(names, mesh, strict=True))
        or (MeshAxis(name="device", size=1),),
        microbatches=group.microbatches,
        strategies=tuple(_block_strategy(group, key) for key in classes),
        parameters=tuple(
            _parameter(group, graph, name, items)
            for name, items in held_parameters(graph, stage.start, stage.stop).items()
        ),
        memory=_memory(score),
        time=TimePlan(
            forward_s=cost.forward_s + cost.forward_cast_s,
            backward_s=cost.backward_s + cost.backward_cast_s,
            once_s=cost.once_s + cost.update_s,
            forward_communication_s=cost.forward_cast_s,
            backward_communication_s=cost.backward_cast_s,
            gradient_reduction_s=cost.once_s,
            exchange_s=score.exchange_s,
            optimizer_s=cost.update_s,
            weight_s=cost.weight_s,
            collectives={
                f"{phase} {kind} {names[axis]}": round(count)
                for (phase, kind, axis), count in sorted(cost.collectives.items())
                if round(count)
            },
        ),
    )


def _block_strategy(group: GroupChoice, key: str) -> BlockStrategy:
    decision = group.decision
    cls, names = decision.space.graph.classes[key], decision.space.pricing.axis_names
    ops = {op.name: strategy_names(op, decision.op_strategies[key][op.name], names) for op in cls.ops}

    def values(specs: Mapping[str, Spec]) -> dict:  # type: ignore[type-arg]
        return {n: value_from_spec(s, len(cls.tensors[n].shape), names) for n, s in specs.items()}

    return BlockStrategy(
        block_class=key,
        ops={n: words for n, words in ops.items() if words},
        inputs=values(decision.input_specs[key]),
        outputs=values(decision.output_specs[key]),
        remat=decision.setting.remat,
    )


def _parameter(group: GroupChoice, graph: ModelGraph, name: str, items: tuple[int, int] | None) -> ParameterPlan:
    facts, storage = graph.params[name], group.decision.storage[name]
    names = group.decision.space.pricing.axis_names
    shape = facts.shape if items is None else (items[1] - items[0], *facts.shape[1:])
    by = len(shape) - len(group.decision.parameter_nodes[name].tensor.shape)
    through = _hoisted_somewhere(group, graph, name)

    def dims(spec: Spec) -> tuple[tuple[str, ...], ...]:
        return dims_of(shifted(spec, by), len(shape), names)

    return ParameterPlan(
        path=facts.path,
        shape=shape,
        dtype=facts.dtype,
        gradient_dtype=facts.gradient_dtype,
        value=dims(storage.value),
        gradient=dims(storage.gradient),
        optimizer=dims(storage.optimizer),
        reduced_over=tuple(
            n
            for n, v, h in zip(names, storage.value, through, strict=True)
            if facts.trained and v == REPLICATED and h == VARYING
        ),
        trained=facts.trained,
    )


def _hoisted_somewhere(group: GroupChoice, graph: ModelGraph, name: str) -> Spec:
    """The spec of a parameter through the step."""
    for block in graph.blocks:
        for i, source in enumerate(block.inputs):
            if source.value == name:
                cls = graph.classes[block.class_key]
                return group.decision.input_specs[block.class_key][cls.inputs[i]]
    raise KeyError(name)


def _memory(score: GroupScore) -> MemoryPlan:
    cost = score.cost
    items = {
        "parameters_bytes": math.ceil(cost.parameter_bytes),
        "gradients_bytes": math.ceil(cost.gradient_bytes),
        "arising_bytes": math.ceil(cost.arising_bytes),
        "optimizer_bytes": math.ceil(cost.optimizer_bytes),
        "inputs_bytes": math.ceil(cost.inputs_bytes),
        "saved_bytes": math.ceil(score.saved_bytes),
        "transient_bytes": math.ceil(cost.transient_bytes),
        "buffers_bytes": math.ceil(score.buffers_bytes),
        "update_bytes": math.ceil(score.update_bytes),
        "reserve_bytes": score.reserve_bytes,
    }
    return MemoryPlan(
        **items,
        total_bytes=sum(items.values()),
        limit_bytes=score.limit_bytes,
        in_flight=score.in_flight,
        saved_per_microbatch_bytes=math.ceil(cost.saved_bytes),
        until_weights_bytes=math.ceil(score.until_weights_bytes),
        made_for_weights_bytes=math.ceil(score.made_bytes),
    )


def _transfers(layout: Layout) -> tuple[Transfer, ...]:
    sends = sends_of(layout)
    out = []
    for s, values in enumerate(layout.crossings):
        forward, backward = crossing_bytes(layout.graph, values)
        time_s = max(t.activation_s + t.latency_s for (a, _), t in sends.items() if a.stage == s)
        out.append(
            Transfer(
                from_stage=s,
                to_stage=s + 1,
                values=values,
                bytes=forward,
                gradient_bytes=backward,
                time_s=time_s,
                links=tuple(
                    TransferLink(
                        from_group=one.group,
                        to_group=other.group,
                        activation_s=send.activation_s,
                        gradient_s=send.gradient_s,
                        latency_s=send.latency_s,
                    )
                    for (one, other), send in sends.items()
                    if one.stage == s
                ),
            )
        )
    return tuple(out)


def _tied(layout: Layout) -> tuple[TiedParameter, ...]:
    return tuple(
        TiedParameter(
            path=layout.graph.params[name].path,
            owner_stage=stages[0],
            other_stages=stages[1:],
            bytes=layout.graph.params[name].elements * layout.graph.params[name].itemsize,
        )
        for name, stages in tied_parameters(layout).items()
    )


def schedule_record(name: str, schedule: Schedule, chunks: int = 1) -> SchedulePlan:
    """The action lists of a plan; `chunks` of each sequence, where they are units."""
    return SchedulePlan(
        name=name,
        microbatches=schedule.microbatches,
        actors=tuple(
            ActorPlan(stage=a.stage, group=a.group, actions=format_actions(a.actions), warm_up=a.warm_up)
            for a in schedule.actions
        ),
        chunks=chunks,
    )


def _prediction(score: Score, tokens_per_example: int | None, provenance: Mapping[str, str]) -> Prediction:
    layout = score.layout
    step_s, parts = score.time_s, breakdown(score)
    examples = layout.graph.microbatch * layout.microbatches
    flops = layout.graph.step_flops * layout.microbatches
    groups = [g for stage in layout.stages for g in stage.groups]
    devices = {d.id: d for g in groups for d in g.devices}.values()
    rated = {d.kind.name: g.decision.space.pricing.kind for g in groups for d in g.devices}
    dtype = main_dtype(layout.graph)
    peak = sum(utilisation_peak(dtype, d.kind, rated[d.kind.name]) for d in devices)
    price = sum(layout.cluster.group(d.group).price_per_device_hour or 0.0 for d in devices)
    return Prediction(
        step_time_s=step_s,
        compute_s=parts.compute_s,
        exposed_communication_s=parts.exposed_s,
        bubble_s=parts.bubble_s,
        optimizer_s=parts.optimizer_s,
        examples_per_s=examples / step_s,
        tokens_per_s=examples * tokens_per_example / step_s if tokens_per_example else None,
        model_flops=flops,
        mfu=flops / (step_s * peak) if peak else None,
        price_per_step=price * step_s / 3600 if price else None,
        peak_memory_bytes=max(math.ceil(size) for size in score.device_bytes.values()),
        provenance=dict(provenance),
    )


def main_dtype(graph: ModelGraph) -> str:
    """The dtype that most matrix-product FLOPs run in."""
    work: dict[str, float] = {}
    for block in graph.blocks:
        cls = graph.classes[block.class_key]
        for op in cls.ops:
            for dtype, flops in matmul_flops(op, op_dtype(op, cls.tensors)).items():
                work[dtype] = work.get(dtype, 0.0) + flops
    return max(sorted(work), key=lambda d: work[d]) if work else "float32"


__all__ = ["PARTIAL", "Tensor", "assemble_plan", "cluster_record", "main_dtype", "model_record"]
