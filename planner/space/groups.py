"""Ops that share one search variable, and the strategies of such a group.

An op that does real work (a matrix product, a reduction, a gather) is a group of its own. Elementwise ops, views and
broadcasts follow the value they work on: a group is such a chain, with one strategy for all, such that no cast is
needed inside. Casts happen only between groups, on the values that one makes and another reads.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

from costmodel.graph import Op, Tensor
from costmodel.sharding import Spec, Strategy
from planner.space.assignments import Codes, axis_assignments


@dataclass(frozen=True)
class Group:
    """Ops with one strategy.

    Attributes:
        reads: names of tensors made outside the group that it reads.
        makes: names of all tensors that it makes.
        exports: those that are read outside the group or leave the block.
    """

    ops: tuple[Op, ...]
    reads: tuple[str, ...]
    makes: tuple[str, ...]
    exports: tuple[str, ...]

    @property
    def name(self) -> str:
        heaviest = max(self.ops, key=lambda op: (op.flops, op.name))
        return heaviest.name if len(self.ops) == 1 else f"{heaviest.name}+{len(self.ops) - 1}"


@dataclass(frozen=True)
class GroupStrategy:
    """One joint strategy of a group: each op's, each read tensor's required spec, each export's spec."""

    ops: tuple[Strategy, ...]
    needs: tuple[Spec, ...]
    gives: tuple[Spec, ...]


def follows(op: Op) -> bool:
    """Whether an op can share the variable of the value that it works on."""
    return (op.fuses or op.work == "view") and not any(
        factor.combine in ("sum", "max")
        and any(index not in {f for parts in dims for f in parts} for dims in op.out_dims)
        for index, factor in enumerate(op.factors)
    )


def group_ops(ops: Sequence[Op], tensors: dict[str, Tensor], outputs: frozenset[str]) -> tuple[Group, ...]:
    """Partitions a block's ops. Program order of the first op of each group is kept."""
    home: dict[str, int] = {}  # tensor -> group
    members: list[list[Op]] = []
    consumers: dict[str, list[Op]] = {}
    for op in ops:
        for name in set(op.inputs):
            consumers.setdefault(name, []).append(op)
    waiting: dict[str, Op] = {}  # cheap producers that join their only reader

    def absorb(op: Op, group: int) -> None:
        for name in op.inputs:
            if name in waiting:
                producer = waiting.pop(name)
                absorb(producer, group)
        members[group].append(op)
        home.update(dict.fromkeys(op.outputs, group))

    for op in ops:
        if not follows(op):
            members.append([])
            for name in op.inputs:  # a broadcast in front of a heavy op stays on its own
                if name in waiting:
                    producer = waiting.pop(name)
                    members[-1].append(producer)
                    home.update(dict.fromkeys(producer.outputs, len(members) - 1))
                    members.append([])
            absorb(op, len(members) - 1)
            continue
        candidates = [name for name in op.inputs if name in home and follows(members[home[name]][0])]
        candidates = [n for n in candidates if tensors[n].bytes * 4 >= max(tensors[o].bytes for o in op.outputs)]
        if candidates:
            absorb(op, home[max(candidates, key=lambda n: (tensors[n].needs_grad, tensors[n].bytes, n))])
            continue
        readers = {c.name for name in op.outputs for c in consumers.get(name, ())}
        if (
            len(readers) == 1
            and not any(name in outputs for name in op.outputs)
            and len(op.outputs) == 1
            and not any(name in home for name in op.inputs)
        ):
            waiting[op.outputs[0]] = op
            continue
        members.append([])
        absorb(op, len(members) - 1)
    for op in list(waiting.values()):
        members.append([op])
    order = {op.name: i for i, op in enumerate(ops)}
    groups = []
    used_by: dict[str, set[int]] = {}
    filled = [sorted(m, key=lambda op: order[op.name]) for m in members if m]
    for i, group in enumerate(filled):
        for op in group:
            for name in op.inputs:
                used_by.setdefault(name, set()).add(i)
    for i, group in enumerate(filled):
        makes = tuple(name for op in group for name in op.outputs)
        made = set(makes)
        reads = tuple(dict.fromkeys(name for op in group for name in op.inputs if name and name not in made))
        exports = tuple(n for n in makes if n in outputs or used_by.get(n, set()) - {i})
        groups.append(Group(tuple(group), reads, makes, exports))
    return tuple(sorted(groups, key=lambda g: order[g.ops[0].name]))


def group_strategies(group: Group, mesh: Sequence[int], tensors: dict[str, Tensor]) -> tuple[GroupStrategy, ...]:
    """Every strategy of the group on a mesh: the product of the axes' assignments where all splits divide."""
    sizes = {size: axis_assignments(group, size, tensors) for size in set(mesh)}
    found: dict[tuple[tuple[Spec, ...], tuple[Spec, ...]], GroupStrategy] = {}
    for axes in product(*(sizes[size] for size in mesh)):
        needs, gives = _specs([a.needs for a in axes], group.reads), _specs([a.gives for a in axes], group.exports)
        if (needs, gives) not in found:
            strategies = _specs([a.ops for a in axes], group.ops)
            if all(_divides(op, s, mesh) for op, s in zip(group.ops, strategies, strict=True)):
                found[needs, gives] = GroupStrategy(strategies, needs, gives)
    return tuple(found.values())


def _specs(axes: Sequence[Codes], of: Sequence[object]) -> tuple[Spec, ...]:
    """Codes by axis, turned into one spec for each of `of`."""
    return tuple(zip(*axes, strict=True)) if axes else ((),) * len(of)


def _divides(op: Op, strategy: Strategy, mesh: Sequence[int]) -> bool:
    parts: dict[int, int] = {}
    for axis, code in enumerate(strategy):
        if code >= 0:
            parts[code] = parts.get(code, 1) * mesh[axis]
    return all(op.factors[f].size % n == 0 for f, n in parts.items())
