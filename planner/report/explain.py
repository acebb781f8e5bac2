"""A plan as an explanation: the same facts, put into the tables and sentences that reports show. No figure is new."""

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from costmodel.units import format_count, format_seconds
from planner.arguments import require_plan
from planner.check.device_memory import device_memory
from planner.device_stages import device_stages, stage_label
from planner.planfile.fingerprint import short_fingerprint
from planner.planfile.schema import Finding, GroupPlan, Plan
from planner.report.degrees import group_degrees, plan_degrees
from planner.report.device_names import device_runs
from planner.report.words import GLOSSARY, PROVENANCE_MEANINGS


@dataclass(frozen=True, slots=True, kw_only=True)
class StageRow:
    """One stage group: what it runs, where, how split, and what that costs a microbatch."""

    stage: int
    group: str
    blocks: tuple[str, ...]
    block_count: int
    kind: str
    devices: tuple[str, ...]
    mesh: tuple[tuple[str, int], ...]
    degrees: tuple[str, ...]
    remat: str
    microbatches: int
    forward_s: float
    backward_s: float
    once_s: float
    binds: bool  # the slowest group: the steady state runs at its pace


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryRow:
    """Bytes on each device of an actor, item by item, of all stages that its devices run; `stage` is the first of them,
    `label` as in `WarmUpRow`."""

    stage: int
    label: str
    group: str
    items: dict[str, int]
    total_bytes: int
    limit_bytes: int
    headroom_bytes: int
    in_flight: int


@dataclass(frozen=True, slots=True, kw_only=True)
class WarmUpRow:
    """Forwards that an actor of the schedule runs before its first backward; `label` as in a simulated step: ``0``,
    ``0+7`` where its devices run several stages."""

    stage: int
    label: str
    group: str
    warm_up: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SlackRow:
    """What the messages between two stages take one way, and how much later they may arrive (`Transfer.slack`)."""

    where: str
    delay_s: float
    free_s: float
    absorbs_s: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeRow:
    """A part of the step time."""

    part: str
    time_s: float
    share: float


@dataclass(frozen=True, slots=True, kw_only=True)
class CommunicationRow:
    """Communication of one group in one phase, or a transfer between stages, over the whole step."""

    where: str
    phase: str
    what: str
    time_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class BaselineRow:
    """A hand-written configuration and how much slower than the plan it is; `ratio` is None if it does not fit."""

    name: str
    description: str
    feasible: bool
    step_time_s: float | None
    ratio: float | None
    peak_memory_bytes: int | None
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """What `meshplan explain` says. `text` is for terminals, a notebook shows `_repr_html_`."""

    plan: Plan
    headline: tuple[str, ...]
    degrees: tuple[str, ...]
    stages: tuple[StageRow, ...]
    memory: tuple[MemoryRow, ...]
    warm_ups: tuple[WarmUpRow, ...]
    slack: tuple[SlackRow, ...]
    time: tuple[TimeRow, ...]
    communication: tuple[CommunicationRow, ...]
    baselines: tuple[BaselineRow, ...]
    certificate: tuple[str, ...]
    findings: tuple[Finding, ...]
    provenance: tuple[tuple[str, str, str], ...]
    glossary: tuple[tuple[str, str], ...]

    @property
    def text(self) -> str:
        """The whole explanation as plain text."""
        from planner.report.text import render_text

        return render_text(self)

    @property
    def summary(self) -> str:
        """One screen of it."""
        from planner.report.text import render_summary

        return render_summary(self)

    def _repr_html_(self) -> str:
        from planner.report.html import render_html

        return render_html(self)

    def __str__(self) -> str:
        return self.text

    def __repr__(self) -> str:
        return self.summary

    def to_plain(self) -> dict[str, Any]:
        """The tables as plain data, for JSON."""
        plain: dict[str, Any] = {"plan": self.plan.name}
        for name in ("headline", "degrees", "certificate"):
            plain[name] = list(getattr(self, name))
        for name in ("stages", "memory", "warm_ups", "slack", "time", "communication", "baselines"):
            plain[name] = [asdict(row) for row in getattr(self, name)]
        names = ("code", "severity", "message", "hint", "where")
        plain["findings"] = [{name: getattr(finding, name) for name in names} for finding in self.findings]
        plain["provenance"] = {figure: word for figure, word, _ in self.provenance}
        plain["glossary"] = dict(self.glossary)
        return plain


def explain(plan: Plan | str | Path) -> Explanation:
    """Tables and sentences about a plan or a plan file."""
    plan = require_plan(plan, "planner.explain(plan)")
    stages = tuple(_stage_rows(plan))
    return Explanation(
        plan=plan,
        headline=tuple(_headline(plan)),
        degrees=plan_degrees(plan),
        stages=stages,
        memory=tuple(sorted(_memory_rows(plan), key=lambda row: row.total_bytes - row.limit_bytes, reverse=True)),
        warm_ups=tuple(_warm_up_rows(plan)),
        slack=tuple(_slack_rows(plan)),
        time=tuple(_time_rows(plan)),
        communication=tuple(sorted(_communication_rows(plan), key=lambda row: -row.time_s)),
        baselines=tuple(_baseline_rows(plan)),
        certificate=tuple(_certificate(plan)),
        findings=plan.findings,
        provenance=tuple(
            (figure, word, PROVENANCE_MEANINGS.get(word, ""))
            for figure, word in sorted(plan.prediction.provenance.items())
        ),
        glossary=tuple(_glossary(plan, stages)),
    )


def _headline(plan: Plan) -> Iterator[str]:
    model, cluster, prediction = plan.model, plan.cluster, plan.prediction
    kinds = ", ".join(f"{count} x {kind}" for kind, count in cluster.kinds.items())
    yield f"{model.name} ({model.parameters:,} parameters, {model.block_count} blocks) on {cluster.name} ({kinds})"
    count = format_count(plan.microbatches, "microbatch", "microbatches")
    chunks = plan.schedule.chunks
    slices = f" in {chunks} chunks of the sequence" if chunks > 1 else ""
    yield (
        f"global batch {plan.global_batch} as {count} of {plan.microbatch_size}, "
        f"schedule {plan.schedule.name}{slices}, {len(plan.stages)} stage{'s' if len(plan.stages) > 1 else ''}"
    )
    rate = f"{prediction.examples_per_s:,.4g} examples/s"
    if prediction.tokens_per_s is not None:
        rate = f"{prediction.tokens_per_s:,.0f} tokens/s"
    parts = [f"predicted step time {format_seconds(prediction.step_time_s)}", rate]
    if prediction.mfu is not None:
        parts.append(f"{prediction.mfu:.1%} of the used devices' peak FLOP/s (MFU)")
    if prediction.price_per_step is not None:
        parts.append(f"price {prediction.price_per_step:.4g} a step")
    yield ", ".join(parts)
    used = sum(len(group.devices) for stage in plan.stages for group in stage.groups)
    if used < cluster.devices:
        yield f"{used} of {cluster.devices} devices are used"
    yield (
        f"model {short_fingerprint(model.fingerprint)}, cluster {short_fingerprint(cluster.fingerprint)}"
        + (f", profile {plan.profile}" if plan.profile else ", no profile")
    )  # fmt: skip


def _label(plan: Plan, stage: int, group: GroupPlan) -> str:
    return f"stage {stage}" + (f" {group.name}" if len(plan.stages[stage].groups) > 1 else "")


def _pace_s(group: GroupPlan) -> float:
    """Time that the group spends on its microbatches in a step."""
    return len(group.microbatches) * (group.time.forward_s + group.time.backward_s)


def _stage_rows(plan: Plan) -> Iterator[StageRow]:
    slowest_s = max((_pace_s(group) for at, stage in enumerate(plan.stages) for group in stage.groups), default=0.0)
    many = sum(len(stage.groups) for stage in plan.stages) > 1
    for at, stage in enumerate(plan.stages):
        for group in stage.groups:
            policies = list(dict.fromkeys(strategy.remat for strategy in group.strategies))
            yield StageRow(
                stage=at,
                group=group.name,
                blocks=stage.blocks,
                block_count=stage.block_count,
                kind=group.kind,
                devices=device_runs(group.devices),
                mesh=tuple((axis.name, axis.size) for axis in group.mesh),
                degrees=group_degrees(group),
                remat=policies[0] if len(policies) == 1 else "mixed" if policies else "none",
                microbatches=len(group.microbatches),
                forward_s=group.time.forward_s,
                backward_s=group.time.backward_s,
                once_s=group.time.once_s,
                binds=many and _pace_s(group) == slowest_s,
            )


def _memory_rows(plan: Plan) -> Iterator[MemoryRow]:
    parts = device_stages(plan)
    for memory in device_memory(plan):
        first = memory.places[0]
        yield MemoryRow(
            stage=first.stage,
            label=stage_label(parts, memory.actor.stage),
            group=plan.stages[first.stage].groups[first.group].name,
            items=memory.items,
            total_bytes=memory.total_bytes,
            limit_bytes=memory.limit_bytes,
            headroom_bytes=memory.limit_bytes - memory.total_bytes,
            in_flight=memory.in_flight,
        )


def _warm_up_rows(plan: Plan) -> Iterator[WarmUpRow]:
    """Of pipelines; counted where the plan does not state them."""
    if len(plan.stages) > 1:
        parts = device_stages(plan)
        for row in plan.schedule.actors:
            forwards = next((at for at, text in enumerate(row.actions.split()) if "F" not in text), None)
            warm_up = row.warm_up if row.warm_up is not None else forwards
            groups = plan.stages[row.stage].groups if row.stage < len(plan.stages) else ()
            name = groups[row.group].name if 0 <= row.group < len(groups) else str(row.group)
            label = stage_label(parts, row.stage) if row.stage in parts else str(row.stage)
            yield WarmUpRow(stage=row.stage, label=label, group=name, warm_up=warm_up or 0)


def _slack_rows(plan: Plan) -> Iterator[SlackRow]:
    for transfer in plan.transfers:
        if transfer.slack is not None:
            yield SlackRow(
                where=f"stage {transfer.from_stage} -> {transfer.to_stage}",
                delay_s=transfer.time_s,
                free_s=transfer.slack.free_s,
                absorbs_s=transfer.slack.absorbs_s,
            )


def _time_rows(plan: Plan) -> Iterator[TimeRow]:
    prediction = plan.prediction
    parts = [("compute", prediction.compute_s)]
    parts += [(f"exposed {kind}", time_s) for kind, time_s in sorted(prediction.exposed_communication_s.items())]
    parts += [("bubble", prediction.bubble_s), ("optimizer", prediction.optimizer_s)]
    rest_s = prediction.step_time_s - sum(time_s for _, time_s in parts)
    if abs(rest_s) > 1e-3 * prediction.step_time_s:
        parts.append(("other", rest_s))
    for part, time_s in parts:
        share = time_s / prediction.step_time_s if prediction.step_time_s > 0 else 0.0
        if time_s or part in ("compute", "bubble"):
            yield TimeRow(part=part, time_s=time_s, share=share)


def _communication_rows(plan: Plan) -> Iterator[CommunicationRow]:
    for at, stage in enumerate(plan.stages):
        for group in stage.groups:
            time, count, where = group.time, len(group.microbatches), _label(plan, at, group)
            phases = {"forward": time.forward_communication_s, "backward": time.backward_communication_s}
            for phase, time_s in phases.items():
                kinds = [
                    f"{number} {kind.removeprefix(phase).strip().replace(' ', ' over ', 1)}"
                    for kind, number in sorted(time.collectives.items())
                    if kind.startswith(phase) and number
                ]
                if kinds or time_s:
                    what = f"{', '.join(kinds) or 'collectives'}, {_each(count)}"
                    yield CommunicationRow(where=where, phase=phase, what=what, time_s=time_s * count)
            rest = [kind for kind in sorted(time.collectives) if not kind.startswith(("forward", "backward"))]
            if time.gradient_reduction_s or rest:
                what = (
                    ", ".join(f"{time.collectives[kind]} {kind}" for kind in rest) or "gradients summed over replicas"
                )
                yield CommunicationRow(where=where, phase="once", what=what, time_s=time.gradient_reduction_s)
    for transfer in plan.transfers:
        where = f"stage {transfer.from_stage} -> {transfer.to_stage}"
        what = f"{len(transfer.values)} value{'s' if len(transfer.values) != 1 else ''} ({transfer.bytes:,} B forward, "
        what += f"{transfer.gradient_bytes:,} B back), {_each(plan.microbatches)}"
        back = transfer.gradient_bytes / transfer.bytes if transfer.bytes else 0.0
        time_s = transfer.time_s * plan.microbatches * (1 + back)
        yield CommunicationRow(where=where, phase="transfer", what=what, time_s=time_s)


def _each(microbatches: int) -> str:
    return f"for each of {microbatches} microbatches" if microbatches != 1 else "for the one microbatch"


def _baseline_rows(plan: Plan) -> Iterator[BaselineRow]:
    step_s = plan.prediction.step_time_s
    for baseline in plan.baselines:
        time_s = baseline.step_time_s
        yield BaselineRow(
            name=baseline.name,
            description=baseline.description,
            feasible=baseline.feasible,
            step_time_s=time_s,
            ratio=time_s / step_s if time_s is not None and baseline.feasible and step_s > 0 else None,
            peak_memory_bytes=baseline.peak_memory_bytes,
            reason=baseline.reason,
        )


def _certificate(plan: Plan) -> Iterator[str]:
    certificate = plan.certificate
    bound, step = format_seconds(certificate.lower_bound_s), format_seconds(plan.prediction.step_time_s)
    if certificate.gap <= 1e-4:
        yield f"Optimal in the searched space by this cost model: no plan in it is faster than {bound}."
    else:
        yield (
            f"By this cost model no plan of the searched space is faster than {bound}; this one takes {step}, at most "
            f"{certificate.gap:.1%} of which could be saved (the gap)."
        )
    yield (
        f"Any plan at all needs at least {format_seconds(certificate.hardware_bound_s)}: the model's FLOPs at the rate "
        f"that all devices of the cluster reach together ({certificate.hardware_gap:.1%} of this plan's time is more)."
    )
    yield f"Status: {certificate.status}."
    if certificate.limit_fired:
        yield "A work limit stopped the search before its proof was complete: a larger limit may find a faster plan."
    yield from (f"{line[:1].upper()}{line[1:]}{'' if line.endswith('.') else '.'}" for line in certificate.space)
    check = plan.compile_check
    if check is None:
        yield "Not checked by a compiler: memory and communication are the cost model's."
    else:
        yield "Compiler check: " + ", ".join(f"{key} {value}" for key, value in sorted(check.items())) + "."


def _glossary(plan: Plan, stages: tuple[StageRow, ...]) -> Iterator[tuple[str, str]]:
    labels = {label.split("=")[0] for row in stages for label in row.degrees}
    used = {"stage", "block", "microbatch", "F", "B", "once", "remat", "bubble", "exposed", "gap"} | labels
    if len(plan.stages) > 1:
        used |= {"pp", "in flight"}
    if any(row.binds for row in stages):
        used.add("binds")
    used.add(plan.schedule.name)
    yield from ((word, meaning) for word, meaning in GLOSSARY.items() if word in used)
