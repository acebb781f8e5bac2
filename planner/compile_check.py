"""What compilers say of a plan: its programs compiled for the devices that it names, none of which need be attached.

Memory of a group is that of its worst program: what the program takes, and what lies on the device meanwhile (the
microbatches in flight, the optimizer's state while a microbatch runs), as the plan counts it. It is compared with the
plan's own figure without the reserve, and with the device's memory including it.

Collectives are compared by kind and mesh axis, for a step, in bytes: XLA joins several tensors into one instruction, or
even into one tensor, which leaves bytes as they are.
"""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from costmodel.device_kind import DeviceKind
from planner.frontend.task import TrainingTask
from planner.lowering.compile import Trainer, abstract_trainer
from planner.lowering.exported import ExportedProgram, exported_programs
from planner.lowering.one_stage import OneStageTrainer
from planner.lowering.written import phase_of
from planner.planfile.schema import GroupPlan, Plan
from profiles.compiled.oracle import Oracle, Request
from profiles.compiled.records import CompiledProgram, CompileFailure
from profiles.compiled.target import Target, cpu_target, target_of

Progress = Callable[[str, int, int], None]

_JOINED = re.compile(r"(?P<path>(?:.*/)?)\((?P<names>[^()]*:[^()]*)\)")


@dataclass(frozen=True)
class Moved:
    """Tensors that collectives of one kind on one axis move in a step, with their elements and bytes on one device."""

    tensors: int
    elements: int
    bytes: int


@dataclass(frozen=True, kw_only=True)
class CompiledPhase:
    """One program of a group: its phase, what it was asked of, what the compiler said, and bytes that lie on the device
    beside it."""

    phase: str
    source: ExportedProgram
    outcome: CompiledProgram | CompileFailure
    beside_bytes: int

    @property
    def total_bytes(self) -> int | None:
        """On a device while it runs; None without figures."""
        memory = self.outcome.memory if isinstance(self.outcome, CompiledProgram) else None
        return None if memory is None else memory.total_bytes + self.beside_bytes


@dataclass(frozen=True, kw_only=True)
class CompiledGroup:
    """Planned and compiled figures of one stage group.

    Attributes:
        kind: its device kind; substitute: why the CPU's compiler was asked in place of the kind's, empty if it was not.
        planned_bytes: what the plan says a device takes, in the terms of `memory_bytes`.
        outside_bytes: what the plan adds to that: the reserve and, in a pipeline, buffers and inputs.
        planned_collectives: of the plan's programs as written; compiled_collectives: None where they are not known.
    """

    stage: int
    group: int
    kind: str
    substitute: str
    phases: tuple[CompiledPhase, ...]
    planned_bytes: int
    outside_bytes: int
    limit_bytes: int
    planned_collectives: Mapping[str, Moved]
    compiled_collectives: Mapping[str, Moved] | None

    @property
    def worst(self) -> CompiledPhase | None:
        """The program during which a device holds most; None where any has no figures."""
        if not self.phases or any(p.total_bytes is None for p in self.phases):
            return None
        return max(self.phases, key=lambda p: p.total_bytes or 0)

    @property
    def memory_bytes(self) -> int | None:
        """What a device takes at its worst, without `outside_bytes`; None where a program has no figures."""
        return None if self.worst is None else self.worst.total_bytes

    @property
    def platform(self) -> str:
        """Whose compiler was asked: ``cuda``, ``tpu`` or ``cpu``; empty where none answered."""
        found = {p.outcome.platform for p in self.phases if isinstance(p.outcome, CompiledProgram)}
        return found.pop() if found else ""

    @property
    def failures(self) -> tuple[CompileFailure, ...]:
        found = (p.outcome for p in self.phases if isinstance(p.outcome, CompileFailure))
        return tuple(dict.fromkeys(found))

    @property
    def deviation(self) -> float | None:
        """Planned over compiled memory, less one."""
        return None if not self.memory_bytes else self.planned_bytes / self.memory_bytes - 1


def compile_groups(
    plan: Plan,
    task: TrainingTask,
    *,
    kinds: Mapping[str, DeviceKind],
    oracle: Oracle,
    options: Mapping[str, str | bool | int] | None = None,
    progress: Progress | None = None,
) -> tuple[CompiledGroup, ...]:
    """Compiles every program of a plan for its own device kinds.

    Args:
        task: the training task that the plan was made for.
        kinds: the plan's device kinds by name, as its cluster has them.
        oracle: `profiles.compiled.oracle.default_oracle()`, say.
        options: XLA compiler options, such as to keep collectives apart that XLA would join.
        progress: called with (what is being done, done, total).

    Returns:
        one record a stage group, in order; programs that could not be compiled are `CompileFailure`s in it.

    Raises:
        MismatchError: the plan was made for another model (MP402).
    """
    say = progress or (lambda what, done, total: None)
    say("lowering", 0, 1)
    trainer = abstract_trainer(plan, task)
    targets = {
        (s, g): _target(group, kinds, oracle)
        for s, stage in enumerate(plan.stages)
        for g, group in enumerate(stage.groups)
    }
    platforms = {plan.stages[s].groups[g].kind: target.platform for (s, g), (target, _) in targets.items()}
    programs = list(exported_programs(trainer, platforms.__getitem__))
    requests = [
        Request(
            program=p.program,
            identity=p.identity,
            target=targets[p.stage, p.group][0],
            donated=p.donated,
            axis_names=p.axis_names,
            sizes=p.sizes,
            options=options or {},
        )
        for p in programs
    ]
    outcomes = oracle.compile(requests, lambda done, total: say("compiling", done, total))
    return tuple(
        _group(plan, trainer, actor, why, [(p, o) for p, o in zip(programs, outcomes) if (p.stage, p.group) == actor])
        for actor, (_, why) in targets.items()
    )


def _target(group: GroupPlan, kinds: Mapping[str, DeviceKind], oracle: Oracle) -> tuple[Target, str]:
    """What a group's programs are compiled for, and why it is not its own kind, if it is not."""
    count = len(group.devices)
    nodes = len({d.rsplit("/", 1)[0] for d in group.devices})
    kind = kinds.get(group.kind)
    target = target_of(kind, count, nodes) if kind is not None else None
    if target is None:
        return cpu_target(count), f"no compiler can be told what {group.kind} is"
    if why := oracle.missing(target.platform):
        return cpu_target(count), why
    return target, ""


def _group(
    plan: Plan,
    trainer: Trainer,
    actor: tuple[int, int],
    substitute: str,
    found: Sequence[tuple[ExportedProgram, CompiledProgram | CompileFailure]],
) -> CompiledGroup:
    stage, g = actor
    group = plan.stages[stage].groups[g]
    memory, whole = group.memory, isinstance(trainer, OneStageTrainer)
    outside = memory.reserve_bytes + (0 if whole else memory.buffers_bytes + memory.inputs_bytes)
    beside = _beside(trainer, actor, group)
    shares = len(group.microbatches)
    return CompiledGroup(
        stage=stage,
        group=g,
        kind=group.kind,
        substitute=substitute,
        phases=tuple(
            CompiledPhase(phase=p.phase, source=p, outcome=outcome, beside_bytes=beside.get(p.phase, 0))
            for p, outcome in found
        ),
        planned_bytes=memory.total_bytes - outside,
        outside_bytes=outside,
        limit_bytes=memory.limit_bytes,
        planned_collectives=_planned(found, shares),
        compiled_collectives=_compiled(found, shares),
    )


def _beside(trainer: Trainer, actor: tuple[int, int], group: GroupPlan) -> Mapping[str, int]:
    """Bytes on a device that are no part of a phase's program, by phase."""
    if isinstance(trainer, OneStageTrainer):
        return {}
    m = group.memory
    waiting = (m.in_flight - 1) * trainer.held_bytes(actor)
    return {
        "forward": waiting + m.gradients_bytes + m.optimizer_bytes,
        "backward": waiting + m.optimizer_bytes,
        "reduce": m.parameters_bytes + m.optimizer_bytes,
    }


def _times(phase: str, shares: int) -> int:
    """Runs of a program in a step."""
    return shares if phase in ("forward", "backward") else 1


def _planned(found: Sequence[tuple[ExportedProgram, object]], shares: int) -> dict[str, Moved]:
    rows = (
        (f"{c.kind} {axis}", _times(p.phase, shares) * c.times, c.elements, c.bytes)
        for p, _ in found
        for c in p.written
        if c.phase
        for axis in c.axes
    )
    return _summed(rows)


def _compiled(
    found: Sequence[tuple[ExportedProgram, CompiledProgram | CompileFailure]], shares: int
) -> dict[str, Moved] | None:
    """Without what sums the loss and what the optimizer joins, where these are instructions of their own: joined with
    gradients they are counted with them."""
    rows: list[tuple[str, int, int, int]] = []
    for p, outcome in found:
        if not isinstance(outcome, CompiledProgram) or outcome.collectives is None:
            return None
        for c in outcome.collectives:
            if _of_plan(c.op_name):
                times = _times(p.phase, shares) * c.runs
                sizes = (times * c.arrays, c.elements // c.arrays, c.bytes // c.arrays)
                rows += [(f"{c.kind} {axis}", *sizes) for axis in c.axes]
    return _summed(rows)


def _of_plan(op_name: str) -> bool:
    """Whether a collective is one of the plan's, or was joined from several of which one is (``path/(one:other)``)."""
    joined = _JOINED.fullmatch(op_name)
    if joined is None:
        return bool(phase_of(op_name))
    return any(phase_of(f"{joined['path']}{name}") for name in joined["names"].split(":"))


def _summed(rows: Iterable[tuple[str, int, int, int]]) -> dict[str, Moved]:
    """Rows of name, times, and elements and bytes of each time."""
    found: dict[str, Moved] = {}
    for name, times, elements, size in rows:
        old = found.get(name, Moved(0, 0, 0))
        found[name] = Moved(old.tensors + times, old.elements + times * elements, old.bytes + times * size)
    return dict(sorted(found.items()))


__all__ = ["CompiledGroup", "CompiledPhase", "Moved", "compile_groups"]
