"""Whether a plan says of every block, op, value and parameter of a captured model what running it needs (MP634)."""

from collections.abc import Iterator

import jax

from costmodel.errors import InputError, MismatchError
from planner.check.finding import finding, group_label, group_path, some
from planner.check.placement import groups_of
from planner.frontend.block_builder import BlockInstance
from planner.frontend.blocks import BlockClass
from planner.frontend.capture import Capture
from planner.planfile.names import expand_names
from planner.planfile.schema import BlockStrategy, Finding, GroupPlan, Plan, ValuePlan
from planner.planfile.specs import strategy_from_names

_HINT = "the plan was edited, or made for another model or version; plan again"


def missing_in_plan(plan: Plan, captured: Capture) -> tuple[Finding, ...]:
    """What the plan's strategies and parameters lack, or name and the model does not have."""
    return tuple(_missing(plan, captured))


def require_complete(plan: Plan, captured: Capture) -> None:
    """Raises MismatchError MP402 for a plan that leaves something out that running it needs."""
    blocks = [block.name for block in captured.blocks]
    named = [name for stage in plan.stages for name in expand_names(stage.blocks)]
    if named != blocks:
        differ = sorted(set(blocks) ^ set(named))
        message = f"the plan has {len(named)} blocks, the model {len(blocks)}; they differ in "
        message += some(differ) if differ else "their order"
        raise MismatchError("MP402", message, "the plan was made for another model; plan again")
    found = missing_in_plan(plan, captured)
    if found:
        more = f" (and {len(found) - 1} more)" if len(found) > 1 else ""
        raise MismatchError("MP402", f"{found[0].message}, at {found[0].where}{more}", found[0].hint)


def _missing(plan: Plan, captured: Capture) -> Iterator[Finding]:
    blocks = {block.name: block for block in captured.blocks}
    for stage, group, record in groups_of(plan):
        try:
            names = expand_names(plan.stages[stage].blocks)
        except InputError:
            continue
        own = [blocks[name] for name in names if name in blocks]
        label, path = group_label(plan, stage, group), group_path(stage, group)
        yield from _strategies(record, own, captured.classes, label, path)
        yield from _parameters(record, own, captured, label, path)


def _strategies(
    record: GroupPlan, own: list[BlockInstance], classes: dict[str, BlockClass], label: str, path: str
) -> Iterator[Finding]:
    stated = {strategy.block_class for strategy in record.strategies}
    for key, block in {block.cls.key: block for block in reversed(own)}.items():
        if key not in stated:
            message = f"{label} runs block {block.name} of class {key}, for which it has no strategy"
            yield finding("MP634", f"{path}.strategies", message, _HINT)
    axes = [axis.name for axis in record.mesh if axis.size > 1]
    for at, strategy in enumerate(record.strategies):
        where = f"{path}.strategies[{at}]"
        cls = classes.get(strategy.block_class)
        if cls is None:
            message = f"{label} has a strategy for block class {strategy.block_class}, which the model does not have"
            yield finding("MP634", f"{where}.block_class", message, _HINT)
            continue
        yield from _ops(strategy, cls, axes, label, where)
        inputs = {value.name for value in cls.program.inputs}
        yield from _values(strategy.inputs, cls, inputs, f"{label}: input", f"{where}.inputs")
        outputs = {getattr(operand, "name", "") for operand in cls.program.outputs} - {""}
        yield from _values(strategy.outputs, cls, outputs, f"{label}: output", f"{where}.outputs")


def _ops(strategy: BlockStrategy, cls: BlockClass, axes: list[str], label: str, where: str) -> Iterator[Finding]:
    for name, words in strategy.ops.items():
        if name not in cls.ops:
            message = f"{label} has a strategy for op {name}, which its block class does not have"
            yield finding("MP634", f"{where}.ops.{name}", message, _HINT)
            continue
        try:
            strategy_from_names(cls.ops[name], words, axes)
        except MismatchError as error:
            yield finding("MP634", f"{where}.ops.{name}", f"{label}: {error.message}", _HINT)


def _values(
    stated: dict[str, ValuePlan], cls: BlockClass, needed: set[str], what: str, where: str
) -> Iterator[Finding]:
    lost = sorted(needed - set(stated))
    if lost:
        yield finding("MP634", where, f"{what} {some(lost)} of block class {cls.key} has no spec", _HINT)
    unknown = sorted(set(stated) - set(cls.tensors))
    if unknown:
        message = f"{what} {some(unknown)} is none of block class {cls.key}"
        yield finding("MP634", f"{where}.{unknown[0]}", message, _HINT)
    for name, value in stated.items():
        shape = cls.tensors[name].shape if name in cls.tensors else None
        if shape is not None and len(value.dims) != len(shape):
            message = f"{what} {name} of shape {list(shape)} has a spec of {len(value.dims)} dims"
            yield finding("MP634", f"{where}.{name}", message, _HINT)


def _parameters(
    record: GroupPlan, own: list[BlockInstance], captured: Capture, label: str, path: str
) -> Iterator[Finding]:
    stated = {parameter.path: at for at, parameter in enumerate(record.parameters)}
    read = {source.value for block in own for source in block.inputs}
    leaves = jax.tree.leaves(captured.task.params)
    for name, info in captured.param_inputs.items():
        if name not in read:
            continue
        if info.path not in stated:
            message = f"{label} reads parameter {info.path}, which it does not hold"
            yield finding("MP634", f"{path}.parameters", message, _HINT)
            continue
        at = stated[info.path]
        parameter = record.parameters[at]
        facts = (("dtype", parameter.dtype, str(leaves[info.leaf].dtype)), ("trained", parameter.trained, info.trained))
        for field, planned, actual in facts:
            if planned != actual:
                message = f"{label}: {field} of parameter {info.path} is {planned}, the model's is {actual}"
                yield finding("MP634", f"{path}.parameters[{at}].{field}", message, _HINT)
