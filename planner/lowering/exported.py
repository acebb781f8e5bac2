"""The programs of a plan as artefacts that another process can compile: nothing of them needs a device.

A plan of one stage with one group has one program, its step. Else every stage group has its forward, its backward (two,
where the schedule splits them), the gradient reduction, and, on the first group of a stage, the pieces of its update;
where sequences run in chunks, the forward and the backward of the last.
"""

import hashlib
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import jax
from jax import export

from planner.lowering.compile import Trainer
from planner.lowering.one_stage import OneStageTrainer
from planner.lowering.placement import ALONE, GroupPlacement
from planner.lowering.written import WrittenCollective, written_collectives


@dataclass(frozen=True, kw_only=True)
class ExportedProgram:
    """One program of a stage group.

    Attributes:
        phase: ``step``, ``forward``, ``backward``, ``reduce`` or ``update``.
        program: serialised `jax.export` artefact.
        identity: hash of what it computes, without the places in the source that called for it.
        donated: positions of the flat arguments that the program may write over.
        axis_names, sizes: of its mesh.
        written: its collectives, before any compiler saw them.
    """

    stage: int
    group: int
    phase: str
    program: bytes = field(repr=False)
    identity: str
    donated: tuple[int, ...]
    axis_names: tuple[str, ...]
    sizes: tuple[int, ...]
    written: tuple[WrittenCollective, ...]


def exported_programs(trainer: Trainer, platform_of: Callable[[str], str]) -> Iterator[ExportedProgram]:
    """Every program of a plan, stage by stage.

    Args:
        trainer: of `compile_plan` or, without devices, of `abstract_trainer`.
        platform_of: name of a device kind -> JAX platform to export for (``cuda``, ``tpu``, ``cpu``).
    """
    if isinstance(trainer, OneStageTrainer):
        yield _exported(0, 0, "step", trainer.compiled, trainer.abstract_arguments(), trainer.placement, platform_of)
        return
    for stage, group in sorted(trainer.programs):
        programs = trainer.heaviest((stage, group))
        named = [("reduce" if phase == "once" else phase, run, args) for phase, run, args in programs.calls()]
        if group == 0:
            named += [("update", run, arguments) for run, arguments in trainer.update_calls(stage)]
        for phase, run, arguments in named:
            yield _exported(stage, group, phase, run, arguments, programs.placement, platform_of)


_PLACE = re.compile(r'^#loc\d* = loc\("[^"]*":\d+:\d+.*$', re.MULTILINE)  # a line of a source file


def _identity(module: str) -> str:
    """Hash of a module's text with the names of its operations, without their places in the source."""
    return hashlib.sha256(_PLACE.sub("", module).encode()).hexdigest()


_PHASES = {"step": None, "reduce": "once", "update": "once"}


def _exported(
    stage: int,
    group: int,
    phase: str,
    run: Any,
    arguments: tuple[Any, ...],
    placement: GroupPlacement,
    platform_of: Callable[[str], str],
) -> ExportedProgram:
    traced = run.trace(*arguments)
    artefact = export.export(run, platforms=[platform_of(placement.plan.kind)])(*arguments)
    donated = [info.donated for info in jax.tree.leaves(traced.args_info)]
    return ExportedProgram(
        stage=stage,
        group=group,
        phase=phase,
        program=bytes(artefact.serialize()),
        identity=_identity(artefact.mlir_module()),
        donated=tuple(i for i, given in enumerate(donated) if given),
        axis_names=placement.axis_names or (ALONE,),
        sizes=placement.sizes or (1,),
        written=tuple(written_collectives(traced, _PHASES.get(phase, phase))),
    )


__all__ = ["ExportedProgram", "exported_programs"]
