"""The user's optimizer as staged programs: init and update, over the parts of leaves that stages hold.

It is traced on whole leaves and then cut (`frontend/optimizer.py`), so that norms and statistics of a leaf are those of
the whole leaf.

An update that cannot be cut so (it loops, say) may still treat every layer alone. That is tried on a small leaf; where
it holds, parts are leaves of their own to the optimizer.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import jax

from costmodel.errors import InputError
from planner.frontend.cut_leaves import Cut, cut_program, part_name
from planner.frontend.optimizer import cut_update, traced_optimizer, treats_layers_alone
from planner.frontend.task import TrainingTask
from planner.lowering.stage import HeldParameter
from planner.lowering.staged import ANYWHERE, StagedProgram, stage_program


@dataclass(frozen=True)
class Part:
    """A trained leaf, or the part of it that one stage holds.

    Attributes:
        key: its name to the optimizer; name: of the parameter's value.
    """

    key: str
    name: str
    stage: int
    held: HeldParameter


def parts_of(stages: list[dict[str, HeldParameter]]) -> dict[str, Part]:
    """Parts by key. A leaf that several stages hold whole (tied) belongs to the first."""
    found: dict[str, Part] = {}
    for stage, held in enumerate(stages):
        for name, p in held.items():
            if not p.trained:
                continue
            if p.items is None:
                found.setdefault(name, Part(name, name, stage, p))
            else:
                split = any(name in other and other is not held for other in stages)
                key = part_name(name, stage) if split else name
                found[key] = Part(key, name, stage, p)
    return found


@dataclass(frozen=True, kw_only=True)
class OptimizerPrograms:
    """Init and update.

    Attributes:
        init: of parameters by part key. update: of ``param/key``, ``grad/key`` and state leaves by name.
        made: names of what init's outputs are; replaced: of what update's outputs replace. In their order.
        state: leaves of the optimizer state by name: shape and dtype.
        owner: state leaf name -> key of the part that it belongs to (None for step counts and the like).
    """

    init: StagedProgram
    update: StagedProgram
    made: tuple[str, ...]
    replaced: tuple[str, ...]
    state: dict[str, jax.ShapeDtypeStruct]
    owner: dict[str, str | None]


def optimizer_programs(task: TrainingTask, parts: Mapping[str, Part]) -> OptimizerPrograms:
    """The optimizer over parts.

    Raises:
        InputError: MP116, its update joins what stages hold in a way that they cannot do.
    """
    leaves: dict[str, list[Part]] = {}
    for part in parts.values():
        leaves.setdefault(part.name, []).append(part)
    try:
        programs = _programs(task, leaves)
        _ = programs.update.pieces, programs.init.pieces  # which refuse what is too large to cross stages
    except InputError:
        if not treats_layers_alone(task):
            raise
        programs = _programs(task, {part.key: [part] for part in parts.values()})
    return programs


def _programs(task: TrainingTask, leaves: Mapping[str, list[Part]]) -> OptimizerPrograms:
    cuts = {name: _cut(parts) for name, parts in leaves.items() if len(parts) > 1}
    optimizer = traced_optimizer(task, {name: _whole(parts) for name, parts in leaves.items()})
    program, state_cuts = cut_update(optimizer, cuts)
    owner: dict[str, str | None] = {}
    avals: dict[str, jax.ShapeDtypeStruct] = {}
    for i, (x, leaf) in enumerate(zip(optimizer.state, optimizer.owners, strict=True)):
        if i not in state_cuts:
            owner[f"state/{i}"] = None if leaf in cuts else leaf and leaves[leaf][0].key
            avals[f"state/{i}"] = x
            continue
        dim, bounds = state_cuts[i].dim, state_cuts[i].bounds
        for stage, (start, end) in bounds.items():
            name = part_name(f"state/{i}", stage)
            owner[name] = part_name(leaf, stage) if leaf in cuts else None
            avals[name] = jax.ShapeDtypeStruct((*x.shape[:dim], end - start, *x.shape[dim + 1 :]), x.dtype)
    parts = [part for some in leaves.values() for part in some]
    stages = {part.key: part.stage for part in parts}
    state_stages = {name: ANYWHERE if key is None else stages[key] for name, key in owner.items()}
    replaced = (*(f"param/{part.key}" for part in parts), *owner)
    owners = {f"{kind}/{key}": stage for key, stage in stages.items() for kind in ("param", "grad")} | state_stages
    start, _ = cut_program(optimizer.init, cuts, state_cuts)
    return OptimizerPrograms(
        init=stage_program(start, stages, list(state_stages.values())),
        update=stage_program(program, owners, [owners[name] for name in replaced]),
        made=tuple(owner),
        replaced=replaced,
        state=avals,
        owner=owner,
    )


def _cut(parts: list[Part]) -> Cut:
    return Cut(0, {part.stage: part.held.items for part in parts if part.held.items is not None})


def _whole(parts: list[Part]) -> jax.ShapeDtypeStruct:
    """The leaf that parts make up."""
    length = sum(part.held.shape[0] for part in parts) if len(parts) > 1 else None
    shape = parts[0].held.shape if length is None else (length, *parts[0].held.shape[1:])
    return jax.ShapeDtypeStruct(shape, parts[0].held.dtype)


__all__ = ["OptimizerPrograms", "Part", "optimizer_programs", "parts_of"]
