"""The joint strategies of a group's ops on one mesh axis, without a cast inside.

Ops are taken in program order. Those that share no tensor yet (a mask made of constants beside the scores that it will
mask) are parts of their own, each with its own table of assignments: parts meet at the op that reads both, where only
what agrees is joined, so that small constants follow whatever the large tensors want. From outside an assignment is no
more than its **interface**: the codes of what the group reads and exports. Of those alike from outside, and to the ops
to come, the one is kept that splits most bytes. So nothing is lost but what another assignment does as well for less,
unless a group has more interfaces than are kept; `_Search.pruned` says which are dropped then.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product
from typing import TYPE_CHECKING

from costmodel.graph import Op, Tensor
from costmodel.sharding import REPLICATED, VARYING, axis_choices, operand_spec, result_spec

if TYPE_CHECKING:
    from planner.space.groups import Group

AXIS_LIMIT = 24  # assignments kept for one axis of one group; more than any group of the built-in models has
PART_LIMIT = 4 * AXIS_LIMIT  # while ops are still to come
LARGE = 0.125  # share of the bytes of the largest tensor at the group's border from which another one counts as large
Codes = tuple[int, ...]  # one strategy code an op, or one spec code a tensor, on one mesh axis


@dataclass(frozen=True, slots=True)
class AxisAssignment:
    """Codes on one mesh axis: of each op's strategy, and of the specs that the group reads and exports."""

    ops: Codes
    needs: Codes
    gives: Codes


@dataclass(frozen=True, slots=True)
class _Partial:
    """An assignment of the ops of one part.

    Attributes:
        codes: of the ops, in program order.
        place: numbers of the choices of the first assignment alike, in the same order: what is found is sorted by it.
        tensors: codes of those that the part reads, and of those that it made and that are still of use.
        split: (bytes that the split ops read and write, number of split ops).
    """

    codes: Codes
    place: tuple[int, ...]
    tensors: dict[str, int]
    split: tuple[int, int]


@dataclass(frozen=True, slots=True)
class _Part:
    """Ops (their positions in the group) that tensors connect, their assignments, and what they read or made."""

    ops: tuple[int, ...]
    found: list[_Partial]
    names: frozenset[str] = frozenset()


@dataclass(frozen=True)
class _Search:
    """The assignments of one group on an axis of `size` devices; `tensors` has what its ops read and make."""

    group: "Group"
    size: int
    tensors: Mapping[str, Tensor]

    @cached_property
    def last_use(self) -> dict[str, int]:
        """Position of the last op that reads a tensor; tensors that no op reads have none."""
        return {name: at for at, op in enumerate(self.group.ops) for name in op.inputs}

    @cached_property
    def border(self) -> frozenset[str]:
        """What is seen from outside."""
        return frozenset((*self.group.reads, *self.group.exports))

    @cached_property
    def foremost(self) -> tuple[str, ...]:
        """The largest tensor that the group exports and the largest that it reads."""
        sides = [self.by_bytes(names) for names in (self.group.exports, self.group.reads)]
        return tuple(dict.fromkeys(names[0] for names in sides if names))

    @cached_property
    def large(self) -> tuple[str, ...]:
        """The other large tensors at the border, largest first."""
        names = self.by_bytes(self.border)
        least = LARGE * max((self.tensors[n].bytes for n in names), default=0)
        return tuple(n for n in names if self.tensors[n].bytes >= least and n not in self.foremost)

    def by_bytes(self, names: Iterable[str]) -> list[str]:
        return sorted(names, key=lambda n: (-self.tensors[n].bytes, n))

    def run(self) -> list[_Partial]:
        parts: list[_Part] = []
        for at, op in enumerate(self.group.ops):
            near, apart = [], []
            for part in parts:
                (apart if part.names.isdisjoint(op.inputs) else near).append(part)
            parts = [*apart, self.with_op(at, near)]
        whole = _side_by_side(parts)
        return self.pruned(self.distinct(whole.found, len(self.group.ops)), AXIS_LIMIT, len(self.group.ops))

    def with_op(self, at: int, parts: Sequence[_Part]) -> _Part:
        """The parts that an op reads from, as one, with the op."""
        op = self.group.ops[at]
        moved = sum(self.tensors[name].bytes for name in {*op.inputs, *op.outputs} if name)
        found: list[_Partial] = []
        for number, code in enumerate(axis_choices(op, self.size)):
            needs, gives = _codes(op, code)
            own = _Partial((code,), (number,), {}, (moved, 1) if code >= 0 else (0, 0))
            fitting = [
                _Part(p.ops, [one for one in p.found if self.joined(op, needs, one.tensors) is not None]) for p in parts
            ]
            for one in _side_by_side([*fitting, _Part((at,), [own])]).found:
                state = self.joined(op, needs, one.tensors)
                if state is not None:
                    found.append(replace(one, tensors={**state, **dict(zip(op.outputs, gives, strict=True))}))
        names = frozenset(filter(None, (*op.inputs, *op.outputs))).union(*(p.names for p in parts))
        ops = tuple(sorted((at, *(i for p in parts for i in p.ops))))
        return _Part(ops, self.pruned(self.distinct(found, at), PART_LIMIT, at), names)

    def joined(self, op: Op, needs: Codes, state: Mapping[str, int]) -> dict[str, int] | None:
        """A part's tensor codes with those of an op's operands, or None where they would need a cast."""
        new = dict(state)
        for name, need in zip(op.inputs, needs, strict=True):
            if not name:
                continue
            have = new.setdefault(name, need)
            free = have == REPLICATED and need == VARYING and not self.tensors[name].needs_grad
            if have != need and not free:
                return None
        return new

    def distinct(self, found: Sequence[_Partial], at: int) -> list[_Partial]:
        """Of those alike once the op at `at` is in, the one that splits most bytes; in the order of their places.

        Alike are those with equal codes of what ops to come use and the same interface. Without a gradient it makes no
        difference from outside whether an operand counts as replicated or varying.
        """
        kept: dict[tuple[tuple[str, int], ...], _Partial] = {}
        for one in sorted(found, key=lambda one: one.place):
            state = {n: c for n, c in one.tensors.items() if n in self.border or self.last_use.get(n, -1) > at}
            alike = tuple(sorted((name, self.outside(name, code, at)) for name, code in state.items()))
            have = kept.get(alike)
            if have is None or one.split > have.split:
                kept[alike] = replace(one, tensors=state, place=one.place if have is None else have.place)
        return list(kept.values())

    def outside(self, name: str, code: int, at: int) -> int:
        """A tensor's code as far as it matters after the op at `at`."""
        read = name in self.group.reads and self.last_use[name] <= at
        return REPLICATED if read and code == VARYING and not self.tensors[name].needs_grad else code

    def pruned(self, found: list[_Partial], limit: int, at: int) -> list[_Partial]:
        """At most `limit`, in the order given.

        First comes the first, which replicates everything. Then, for every way in which ops to come may use this part,
        those that split most bytes: with each code of the largest export and of the largest read, over all, and with
        each split of the other large tensors at the border. What ops to come allow depends on the codes of what they
        use alone, and split bytes add up, so for each of these codes what splits most bytes in the whole group is among
        what is kept, as long as these are no more than `limit`. The rest are those that split most bytes.
        """
        if len(found) <= limit:
            return found
        ranking = sorted(range(len(found)), key=lambda i: (-found[i].split[0], -found[i].split[1], i))
        used = [tuple(sorted((n, c) for n, c in f.tensors.items() if self.last_use.get(n, -1) > at)) for f in found]
        chosen = {0: None}
        for name in (*self.foremost, "", *self.large):
            best: dict[tuple[int | None, tuple[tuple[str, int], ...]], int] = {}
            for i in ranking:
                code = found[i].tensors.get(name)
                if name not in self.large or (code is not None and code >= 0):
                    best.setdefault((code, used[i]), i)
            chosen.update(dict.fromkeys(best.values()))
        chosen.update(dict.fromkeys(ranking))
        return [found[i] for i in sorted(list(chosen)[:limit])]


def _side_by_side(parts: Sequence[_Part]) -> _Part:
    """Parts that share no tensor as one, with every assignment of each beside every one of the others."""
    at = [op for part in parts for op in part.ops]
    order = sorted(range(len(at)), key=at.__getitem__)
    found = []
    for ones in product(*(part.found for part in parts)):
        codes, place = [c for one in ones for c in one.codes], [c for one in ones for c in one.place]
        split = sum(one.split[0] for one in ones), sum(one.split[1] for one in ones)
        tensors = {name: code for one in ones for name, code in one.tensors.items()}
        found.append(_Partial(tuple(codes[i] for i in order), tuple(place[i] for i in order), tensors, split))
    return _Part(tuple(at[i] for i in order), found, frozenset().union(*(part.names for part in parts)))


def _codes(op: Op, code: int) -> tuple[Codes, Codes]:
    """Codes of the operands and of the results of an op under a strategy code."""
    needs = tuple(operand_spec(op, i, (code,))[0] for i in range(len(op.inputs)))
    return needs, tuple(result_spec(op, i, (code,))[0] for i in range(len(op.outputs)))


def axis_assignments(group: "Group", size: int, tensors: Mapping[str, Tensor]) -> tuple[AxisAssignment, ...]:
    """Joint strategies of the group's ops on one axis of `size` devices: one for each interface.

    Where there are more than `AXIS_LIMIT`, those that split most bytes, among them the best with each split of each
    large tensor that the group reads or exports.
    """
    return tuple(
        AxisAssignment(
            one.codes,
            tuple(one.tensors[n] for n in group.reads),
            tuple(one.tensors[n] for n in group.exports),
        )
        for one in _Search(group, size, tensors).run()
    )
