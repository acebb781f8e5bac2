"""Ops that share one search variable, and the strategies of such a group.

An op that does real work (a matrix product, a reduction, a gather) is a group of its own. Elementwise ops, views and
broadcasts follow the value they work on: a group is such a chain, with one strategy for all, such that no cast is
needed inside. Casts happen only between groups, on the values that one makes and another reads.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

from costmodel.graph import Op, Tensor
from costmodel.sharding import (
    REPLICATED,
    VARYING,
    Spec,
    Strategy,
    axis_choices,
    operand_spec,
    result_spec,
)

AXIS_LIMIT = 24  # assignments kept for one axis of one group; more than any group of the built-in models has
Codes = tuple[int, ...]  # one strategy code an op of the group, on one mesh axis
_Partial = tuple[Codes, dict[str, int]]  # the ops so far, and the codes of their tensors


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


@dataclass(frozen=True, slots=True)
class AxisAssignment:
    """Codes on one mesh axis: of each op's strategy, and of the specs that the group reads and exports."""

    ops: Codes
    needs: Codes
    gives: Codes


def axis_assignments(group: Group, size: int, tensors: dict[str, Tensor]) -> tuple[AxisAssignment, ...]:
    """Joint strategies of the group's ops on one axis of `size` devices, without a cast inside.

    Of those that look alike from outside the one that splits most ops is kept. Where more than `AXIS_LIMIT` are left,
    those that split most.
    """
    partial: list[_Partial] = [((), {})]
    last_use = {name: at for at, op in enumerate(group.ops) for name in op.inputs}
    for at, op in enumerate(group.ops):
        choices = [(code, *_codes(op, code)) for code in axis_choices(op, size)]
        grown: list[_Partial] = []
        for codes, state in partial:
            for code, needs, gives in choices:
                new = _join(op, needs, gives, state, tensors)
                if new is not None:
                    grown.append(((*codes, code), new))
        live = {n for n in group.makes if n in group.exports or last_use.get(n, -1) > at}
        partial = _most_split(_distinct(grown, group.reads, live, tensors), 4 * AXIS_LIMIT)
    return tuple(
        AxisAssignment(codes, tuple(state[n] for n in group.reads), tuple(state[n] for n in group.exports))
        for codes, state in _most_split(partial, AXIS_LIMIT)
    )


def _distinct(
    found: list[_Partial], reads: Sequence[str], live: set[str], tensors: dict[str, Tensor]
) -> list[_Partial]:
    """One of those with the same codes of what is read and of what is yet to be used.

    Without a gradient it makes no difference whether an operand counts as replicated or varying.
    """
    kept: dict[tuple[tuple[str, int], ...], _Partial] = {}
    for one in found:
        key = []
        for name, code in one[1].items():
            if name in live:
                key.append((name, code))
            elif name in reads:
                key.append((name, REPLICATED if code == VARYING and not tensors[name].needs_grad else code))
        place = tuple(sorted(key))
        if place not in kept or _splits(one) > _splits(kept[place]):
            kept[place] = one
    return list(kept.values())


def _most_split(found: list[_Partial], limit: int) -> list[_Partial]:
    """At most `limit`, in the order given: the first (which replicates everything) and those that split most."""
    if len(found) <= limit:
        return found
    best = sorted(range(1, len(found)), key=lambda i: (-_splits(found[i]), i))[: limit - 1]
    return [found[i] for i in (0, *sorted(best))]


def _splits(one: _Partial) -> int:
    return sum(code >= 0 for code in one[0])


def _codes(op: Op, code: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    needs = tuple(operand_spec(op, i, (code,))[0] for i in range(len(op.inputs)))
    return needs, tuple(result_spec(op, i, (code,))[0] for i in range(len(op.outputs)))


def _join(
    op: Op, needs: Sequence[int], gives: Sequence[int], state: dict[str, int], tensors: dict[str, Tensor]
) -> dict[str, int] | None:
    """The group's tensor codes with one more op, or None where they would need a cast."""
    new = dict(state)
    for name, need in zip(op.inputs, needs, strict=True):
        if not name:
            continue
        have = new.setdefault(name, need)
        free = have == REPLICATED and need == VARYING and not tensors[name].needs_grad
        if have != need and not free:
            return None
    new.update(zip(op.outputs, gives, strict=True))
    return new


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
