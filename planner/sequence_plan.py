"""A plan whose sequences run in chunks, from a 1F1B plan of the same stages.

Stages, devices and strategies are those that were found for whole microbatches. What each chunk takes is priced as
everything is, op by op, at the shapes that the chunk has (`frontend.chunks`): its attention reads the keys and values
up to its own, so that later chunks take longer.

    F(j) = F · ops(j) / ops + casts(j) + rest        ops: forward seconds of all ops of a stage, whole and of chunk j
    B(j) = the same backward, and once more what each microbatch adds to the gradients

Casts that belong to no op (between blocks, of gradients that are scattered at once) are charged to each chunk in full.
Memory: each unit in flight is counted as the largest chunk, with the slices that it hands to later chunks; what its
backward needs is what its program keeps, traced on the plan's mesh.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import msgspec

from costmodel.errors import InfeasibleError
from costmodel.estimator import Pricing
from costmodel.graph import Op, Tensor, derived_from_parameters
from costmodel.schedule.actions import Actor
from costmodel.schedule.sequence import sequence_chunks
from costmodel.schedule.validate import in_flight
from costmodel.sharding import Spec, Strategy, operand_spec, result_spec
from costmodel.simulate import ActorUse, simulate
from costmodel.traffic import Traffic
from costmodel.units import format_bytes, format_seconds
from planner.assemble import schedule_record
from planner.breakdown import sends_s
from planner.check.device_memory import MEMORY_ITEMS
from planner.frontend.blocks import BlockClass
from planner.frontend.capture import Capture
from planner.frontend.flat import Value
from planner.lowering.chunk_pipeline import ChunkedTrainer
from planner.lowering.chunk_programs import ChunkPrograms
from planner.lowering.compile import abstract_trainer
from planner.lowering.placement import ClassPlacement
from planner.plan_problem import problem_of
from planner.plan_slack import with_slack
from planner.planfile.schema import (
    Certificate,
    Finding,
    GroupPlan,
    MemoryPlan,
    Plan,
    Prediction,
    TimePlan,
    Transfer,
)
from planner.search.score import GroupScore, Score
from planner.space.backward import done_again

replaced = msgspec.structs.replace


@dataclass(frozen=True)
class _Seconds:
    """Of some blocks on one device: ops forward and backward, casts forward and backward."""

    forward_s: float = 0.0
    backward_s: float = 0.0
    forward_cast_s: float = 0.0
    backward_cast_s: float = 0.0

    def __add__(self, other: "_Seconds") -> "_Seconds":
        return _Seconds(
            self.forward_s + other.forward_s,
            self.backward_s + other.backward_s,
            self.forward_cast_s + other.forward_cast_s,
            self.backward_cast_s + other.backward_cast_s,
        )


def in_chunks(plan: Plan, score: Score, captured: Capture, chunks: int) -> Plan:
    """The plan with each sequence in chunks.

    Args:
        plan: under 1f1b; score: what it was made of; captured: its model, at its microbatch.
        chunks: slices of each sequence.

    Raises:
        InputError: MP166 or MP167, the sequence cannot be cut. InfeasibleError: MP201, it does not fit.
    """
    shares = [[group.microbatches for group in stage.groups] for stage in plan.stages]
    made = sequence_chunks(len(plan.stages), plan.microbatches, chunks, shares)
    cut = replaced(plan, schedule=schedule_record(made.name, made, chunks))
    if chunks == 1:
        return cut
    trainer = abstract_trainer(cut, captured.task)
    assert isinstance(trainer, ChunkedTrainer)
    flying = in_flight(made)
    stages = []
    for s, stage in enumerate(plan.stages):
        groups = []
        for g, group in enumerate(stage.groups):
            actor = Actor(s, g)
            pricing = score.layout.stages[s].groups[g].decision.space.pricing
            time = _time(group.time, score.groups[actor], pricing, trainer, actor)
            memory = _memory(group, score.groups[actor], trainer, actor, flying[actor])
            groups.append(replaced(group, time=time, memory=memory))
        stages.append(replaced(stage, groups=tuple(groups)))
    transfers = tuple(_transfer(t, trainer) for t in plan.transfers)
    cut = replaced(cut, stages=tuple(stages), transfers=transfers)
    _require_fitting(cut)
    prediction = _prediction(cut, plan)
    flops, whole = _flops(trainer, plan)
    cut = replaced(
        cut, prediction=prediction, certificate=_certificate(plan.certificate, prediction, chunks, flops / whole)
    )
    return with_slack(replaced(cut, findings=(*cut.findings, *_slower(cut, plan))))


def _slower(cut: Plan, whole: Plan) -> Iterator[Finding]:
    """MP159, where whole sequences on the same stages take less time."""
    there, here = cut.prediction, whole.prediction
    if there.step_time_s <= here.step_time_s:
        return
    saved = here.peak_memory_bytes - there.peak_memory_bytes
    memory = f"need {format_bytes(abs(saved))} {'more' if saved > 0 else 'less'} a device"
    yield Finding(
        code="MP159",
        severity="note",
        message=f"{cut.schedule.chunks} chunks of each sequence make the step "
        f"{there.step_time_s / here.step_time_s - 1.0:.0%} slower ({format_seconds(there.step_time_s)}) than whole "
        f"sequences under 1f1b on the same stages ({format_seconds(here.step_time_s)}), which {memory}",
        hint="plan with --schedule 1f1b if that fits, or with fewer chunks: each takes as many kernels as a sequence",
    )


def _time(time: TimePlan, own: GroupScore, pricing: Pricing, trainer: ChunkedTrainer, actor: Actor) -> TimePlan:
    """Times of a unit, on average over chunks, and what each takes of it."""
    cost = own.cost
    originals = {b.name: b.cls for b in trainer.feed.capture.blocks}
    of_chunk = [trainer.of_chunk[actor, j] for j in range(trainer.chunks)]
    each = [_seconds_of(pricing, own, [b.cls for b in own.micro.stage.blocks]) for own in of_chunk]
    whole = _seconds_of(pricing, of_chunk[0], [originals[b.name] for b in of_chunk[0].micro.stage.blocks])
    scale = cost.forward_s / whole.forward_s if whole.forward_s else 1.0
    back_scale = min(cost.backward_s / whole.backward_s, scale) if whole.backward_s else 1.0
    added_s = max(0.0, cost.backward_s - whole.backward_s * back_scale)  # to the gradients, by each chunk
    ahead_rest_s = max(0.0, cost.forward_cast_s - whole.forward_cast_s)
    back_rest_s = max(0.0, cost.backward_cast_s - whole.backward_cast_s)
    ahead_casts = [ahead_rest_s + one.forward_cast_s for one in each]
    back_casts = [back_rest_s + one.backward_cast_s for one in each]
    ahead = [one.forward_s * scale + cast_s for one, cast_s in zip(each, ahead_casts, strict=True)]
    back = [one.backward_s * back_scale + added_s + cast_s for one, cast_s in zip(each, back_casts, strict=True)]
    forward_s, backward_s = _mean(ahead), _mean(back)
    return replaced(
        time,
        forward_s=forward_s,
        backward_s=backward_s,
        forward_communication_s=_mean(ahead_casts),
        backward_communication_s=_mean(back_casts),
        weight_s=min(backward_s, time.weight_s / trainer.chunks),
        collectives={name: count for name, count in sorted(trainer.written_collectives(actor).items()) if count},
        chunk_forward=tuple(x / forward_s if forward_s else 1.0 for x in ahead),
        chunk_backward=tuple(x / backward_s if backward_s else 1.0 for x in back),
    )


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _seconds_of(pricing: Pricing, programs: ChunkPrograms, classes: Sequence[BlockClass]) -> _Seconds:
    """Of blocks of these classes, whole ones or a chunk's, on the programs' group."""
    by_key = {cls.key: cls for cls in classes}
    known = {key: _seconds(pricing, cls, programs.placement.of_class(key)) for key, cls in by_key.items()}
    return sum((known[cls.key] for cls in classes), _Seconds())


def _seconds(pricing: Pricing, cls: BlockClass, placed: ClassPlacement) -> _Seconds:
    ops, tensors = tuple(cls.ops.values()), cls.tensors
    outputs = frozenset(o.name for o in cls.program.outputs if isinstance(o, Value))
    traffic, derived = Traffic.of_block(ops, tensors, outputs), derived_from_parameters(ops, tensors)
    full = placed.remat == "full"
    again = done_again(ops, tensors, derived, full=full).runs
    forward_s = backward_s = 0.0
    for op in ops:
        cost = pricing.op(op, placed.strategies[op.name], tensors, traffic)
        forward_s += cost.forward_s
        backward_s += cost.backward_s + again.get(op.name, 0) * cost.forward_s
    ahead_s, back_s = _cast_seconds(pricing, ops, tensors, placed.strategies, placed.inputs)
    return _Seconds(forward_s, backward_s, ahead_s, back_s + (ahead_s if full else 0.0))


def _cast_seconds(
    pricing: Pricing,
    ops: Iterable[Op],
    tensors: Mapping[str, Tensor],
    strategies: Mapping[str, Strategy],
    inputs: Mapping[str, Spec],
) -> tuple[float, float]:
    """Of the casts inside a block, each value once for each spec in which ops take it."""
    have, seen, ahead_s, back_s = dict(inputs), set[tuple[str, Spec]](), 0.0, 0.0
    for op in ops:
        for i, name in enumerate(op.inputs):
            want = operand_spec(op, i, strategies[op.name])
            if name in have and have[name] != want and (name, want) not in seen:
                seen.add((name, want))
                forward_s, backward_s = pricing.cast(tensors[name], have[name], want)
                ahead_s += forward_s
                back_s += backward_s
        for i, name in enumerate(op.outputs):
            have[name] = result_spec(op, i, strategies[op.name])
    return ahead_s, back_s


def _memory(group: GroupPlan, own: GroupScore, trainer: ChunkedTrainer, actor: Actor, flying: int) -> MemoryPlan:
    memory, microbatches = group.memory, len(group.microbatches)
    saved = trainer.held_bytes(actor)
    # The gradients of a chunk lie beside the sum, of which a step of one whole microbatch has none.
    arising = memory.arising_bytes + (memory.gradients_bytes if microbatches == 1 else 0)
    passing = flying * saved + memory.transient_bytes + memory.buffers_bytes
    update = max(0, math.ceil(own.update_peak_bytes) - memory.gradients_bytes - arising - passing)
    cut = replaced(memory, arising_bytes=arising, saved_bytes=flying * saved, update_bytes=update)
    return replaced(
        cut,
        total_bytes=sum(getattr(cut, f"{name}_bytes") for name in MEMORY_ITEMS),
        in_flight=flying,
        saved_per_microbatch_bytes=saved,
        until_weights_bytes=0,
        made_for_weights_bytes=0,
    )


def _transfer(transfer: Transfer, trainer: ChunkedTrainer) -> Transfer:
    """What one chunk hands over: its slice of what is cut, all of what is not."""
    seen = trainer.of_chunk[(transfer.from_stage, 0), 0].micro.stage.capture.values
    bytes_ = sum(seen[n].bytes for n in transfer.values)
    back = sum(seen[n].bytes for n in transfer.values if seen[n].needs_grad)
    ahead_share = bytes_ / transfer.bytes if transfer.bytes else 1.0
    back_share = back / transfer.gradient_bytes if transfer.gradient_bytes else 1.0
    links = tuple(
        replaced(link, activation_s=link.activation_s * ahead_share, gradient_s=link.gradient_s * back_share)
        for link in transfer.links
    )
    time_s = max((link.activation_s + link.latency_s for link in links), default=transfer.time_s * ahead_share)
    return replaced(transfer, bytes=bytes_, gradient_bytes=back, time_s=time_s, links=links)


def _require_fitting(plan: Plan) -> None:
    for s, stage in enumerate(plan.stages):
        for group in stage.groups:
            memory = group.memory
            if memory.total_bytes > memory.limit_bytes:
                raise InfeasibleError(
                    "MP201",
                    f"stage {s} needs {format_bytes(memory.total_bytes)} a device with {memory.in_flight} chunks in "
                    f"flight, {group.kind} has {format_bytes(memory.limit_bytes)}",
                    "use more stages, another number of chunks, or a smaller microbatch",
                )


def _prediction(plan: Plan, whole: Plan) -> Prediction:
    """Step time by simulation, and its parts as `planner.breakdown` has them."""
    problem = problem_of(plan)
    found = simulate(problem.schedule, problem.times, problem.sends, waits=problem.waits, keep_timeline=False)
    step_s = found.makespan_s
    use = found.last
    group = plan.stages[use.actor.stage].groups[use.actor.group]
    time, units = group.time, len(group.microbatches) * plan.schedule.chunks
    casts_s = time.forward_communication_s + time.backward_communication_s
    exposed = {"casts": units * casts_s, "gradient_reduction": time.gradient_reduction_s}
    if len(plan.stages) > 1:
        between_s = sends_s(problem.schedule, problem.times, problem.waits, use)
        exposed |= {"sends": between_s} if between_s else {}
    kind = "group_exchange" if len(plan.stages[use.actor.stage].groups) > 1 else "tied_weights"
    exposed |= {kind: time.exchange_s} if time.exchange_s else {}
    exposed |= _join(plan, use)
    compute_s = units * (time.forward_s + time.backward_s - casts_s)
    rest_s = step_s - compute_s - sum(exposed.values()) - time.optimizer_s
    before = whole.prediction
    tokens = before.tokens_per_s / before.examples_per_s if before.tokens_per_s is not None else None
    return replaced(
        before,
        step_time_s=step_s,
        compute_s=compute_s,
        exposed_communication_s=exposed,
        bubble_s=max(0.0, rest_s),
        optimizer_s=time.optimizer_s,
        examples_per_s=plan.global_batch / step_s,
        tokens_per_s=None if tokens is None else tokens * plan.global_batch / step_s,
        mfu=None if before.mfu is None else before.mfu * before.step_time_s / step_s,
        price_per_step=None if before.price_per_step is None else before.price_per_step * step_s / before.step_time_s,
        peak_memory_bytes=max(g.memory.total_bytes for stage in plan.stages for g in stage.groups),
    )


def _join(plan: Plan, use: ActorUse) -> dict[str, float]:
    waits = [join.time_s for join in plan.update_joins if join.stage == use.actor.stage]
    return {"update_join": sum(waits)} if waits else {}


def _flops(trainer: ChunkedTrainer, plan: Plan) -> tuple[float, float]:
    """FLOPs of a microbatch's ops, of all chunks and of the whole."""
    originals = {b.name: b.cls for b in trainer.feed.capture.blocks}
    chunked = whole = 0.0
    for s in range(len(plan.stages)):
        for j in range(trainer.chunks):
            for block in trainer.of_chunk[(s, 0), j].micro.stage.blocks:
                chunked += sum(op.flops + op.backward_flops for op in block.cls.ops.values())
                if j == 0:
                    whole += sum(op.flops + op.backward_flops for op in originals[block.name].ops.values())
    return chunked, whole


def _certificate(before: Certificate, prediction: Prediction, chunks: int, share: float) -> Certificate:
    """What holds for any schedule of the model: chunks do `share` of the FLOPs, as hidden scores are not computed."""
    bound_s = min(before.hardware_bound_s * min(1.0, share), prediction.step_time_s)
    gap = 1.0 - bound_s / prediction.step_time_s
    return replaced(
        before,
        lower_bound_s=bound_s,
        gap=gap,
        hardware_bound_s=bound_s,
        hardware_gap=gap,
        space=(
            *before.space,
            f"schedule sequence-chunks: the stages found for 1f1b, whose sequences then run in {chunks} chunks",
        ),
        status="feasible",
    )


__all__ = ["in_chunks"]
