"""What is live on a device while a block runs backward: a walk over its ops in the order in which they run.

XLA's compilers for GPUs and TPUs fuse elementwise ops, broadcasts and the operands of reductions into the kernels that
read them: their results are never in memory. (The CPU's fuses little: `group_costs.group_live`.) In memory are

* L1 results of other ops, and what a collective makes or takes;
* L2 of elementwise results those that a matrix product, a convolution, a collective or the caller of the block takes;
* L3 cotangents likewise: those that such an op makes for an operand or takes for its result.

A tensor is live from the op that makes it to the last op that reads it, be it through ops that are fused; forward ops
come first, where they run at all (full remat, or a block whose backward pass follows at once), then the backward pass
of each in reverse. Parameters and their gradients are state and not counted here; what a block keeps from its forward
pass (`Decision.kept`) neither, where that ran long before.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from costmodel.graph import BlockClass, Op
from costmodel.sharding import Spec, Strategy, cast, operand_spec, result_spec, split_factor

Value = tuple[str, Spec]  # a tensor in one spec
_HEAVY = ("matmul", "conv", "opaque")


@dataclass
class _Kernel:
    """An op, or a cast between specs. `reads` and `makes` are values; `fused` ops leave nothing in memory themselves;
    a `heavy` one takes its operands from memory."""

    reads: list[Value]
    makes: list[Value]
    fused: bool
    heavy: bool
    saves: frozenset[Value] = frozenset()
    scatters: bool = False


@dataclass(frozen=True)
class BlockLiveness:
    """The ops of one block class under one assignment.

    Attributes:
        strategies: of every op; inputs: spec in which the block takes each input.
        derived: tensors made of parameters alone.
    """

    cls: BlockClass
    mesh: tuple[int, ...]
    strategies: Mapping[str, Strategy]
    inputs: Mapping[str, Spec]
    derived: frozenset[str]

    @cached_property
    def kernels(self) -> list[_Kernel]:
        """Ops in order, each after the casts of its operands."""
        made: dict[str, Spec] = dict(self.inputs)
        there: set[Value] = set(made.items())
        out: list[_Kernel] = []
        for op in self.cls.ops:
            strategy, reads = self.strategies[op.name], []
            for i, name in enumerate(op.inputs):
                if not name:
                    continue
                value = (name, operand_spec(op, i, strategy))
                source = (name, made.get(name, value[1]))
                if value not in there:
                    there.add(value)
                    moves = self._moves(name, source[1], value[1])
                    out.append(_Kernel([source], [value], fused=not moves, heavy=moves, saves=frozenset()))
                reads.append(value)
            makes = [(name, result_spec(op, i, strategy)) for i, name in enumerate(op.outputs)]
            made.update(makes)
            there.update(makes)
            specs = dict([*reads, *makes])
            out.append(
                _Kernel(
                    reads,
                    makes,
                    fused=_fused(op),
                    heavy=op.work in _HEAVY,
                    saves=frozenset((n, specs[n]) for n in op.saves if n in specs),
                    scatters=any(t.by_index and t.position >= 0 for t in op.touches),
                )
            )
        return out

    def _moves(self, name: str, source: Spec, target: Spec) -> bool:
        tensor = self.cls.tensors[name]
        steps = cast(tensor.shape, tensor.itemsize, source, target, self.mesh) or ()
        return any(step.forward for step in steps)

    def bytes_of(self, value: Value) -> float:
        return self.cls.tensors[value[0]].bytes / split_factor(value[1], self.mesh)

    def _stored(self, name: str) -> bool:
        return self.cls.tensors[name].role in ("param", "const")

    @cached_property
    def readers(self) -> dict[Value, list[int]]:
        found: dict[Value, list[int]] = {}
        for at, kernel in enumerate(self.kernels):
            for value in kernel.reads:
                found.setdefault(value, []).append(at)
        return found

    @cached_property
    def maker(self) -> dict[Value, int]:
        return {value: at for at, kernel in enumerate(self.kernels) for value in kernel.makes}

    @cached_property
    def in_memory(self) -> frozenset[Value]:
        """L1 and L2."""
        leaving = {n for n in self.cls.outputs if n}
        found = set()
        for value, at in self.maker.items():
            taken = any(self.kernels[i].heavy for i in self.readers.get(value, ()))
            if not self.kernels[at].fused or taken or value[0] in leaving:
                found.add(value)
        found.update(item for item in self.inputs.items() if not self._stored(item[0]))
        return frozenset(found)

    def roots(self, value: Value) -> frozenset[Value]:
        """What in memory a value is computed from, itself if it is there; parameters aside."""
        return self._roots[value]

    @cached_property
    def _roots(self) -> dict[Value, frozenset[Value]]:
        found: dict[Value, frozenset[Value]] = {}
        for name, spec in self.inputs.items():
            found[name, spec] = frozenset() if self._stored(name) else frozenset({(name, spec)})
        for kernel in self.kernels:
            below = frozenset().union(*(found.get(v, frozenset()) for v in kernel.reads))
            for value in kernel.makes:
                found[value] = frozenset({value}) if value in self.in_memory else below
        return found

    def _differentiable(self, value: Value) -> bool:
        return self.cls.tensors[value[0]].needs_grad

    def _weight(self, value: Value) -> bool:
        return self._stored(value[0]) or value[0] in self.derived

    @cached_property
    def cotangents(self) -> frozenset[Value]:
        """L3, those of parameters and of what is made of them alone left out."""
        leaving = {n for n in self.cls.outputs if n}
        found = set()
        for value in {*self.maker, *self.inputs.items()}:
            if not self._differentiable(value) or self._weight(value):
                continue
            at = self.maker.get(value)
            taken = at is None or self.kernels[at].heavy
            made = any(self.kernels[i].heavy or self.kernels[i].scatters for i in self.readers.get(value, ()))
            if taken or made or value[0] in leaving:
                found.add(value)
        return frozenset(found)

    def lying(self) -> dict[Value, float]:
        """What lies in memory of what the backward pass reads, with its bytes; parameters aside."""
        found: set[Value] = set()
        for kernel in self.kernels:
            if any(self._differentiable(v) for v in kernel.makes):
                for value in kernel.saves:
                    roots = self._roots.get(value, frozenset())
                    found.update(roots if len(roots) == 1 else {value})
        return {v: self.bytes_of(v) for v in sorted(found) if not self._weight(v)}

    def peak_bytes(self, *, rerun: bool, kept: Iterable[str] = ()) -> float:
        """The most that is live at once.

        Args:
            rerun: the forward ops run just before the backward pass.
            kept: tensors that lie there anyway.
        """
        count, lying = len(self.kernels), frozenset(kept)
        spans: list[tuple[int, int, float]] = []
        last = dict.fromkeys(self.in_memory, count if rerun else -1)
        for at, kernel in enumerate(self.kernels):
            back = 2 * count - 1 - at
            for value in kernel.reads if rerun else ():
                for root in self._roots.get(value, ()):
                    last[root] = max(last[root], at)
            if any(self._differentiable(v) for v in kernel.makes):
                for value in kernel.saves:
                    for root in self._roots.get(value, ()):
                        last[root] = max(last[root], back)
        for value in self.in_memory:
            if value[0] in lying or (not rerun and value in self.maker):
                continue
            begin = self.maker.get(value, 0) if rerun else count
            if last[value] >= begin:
                spans.append((begin, last[value], self.bytes_of(value)))
        spans += [(*self._life(value), self.bytes_of(value)) for value in self.cotangents]
        return _most(spans)

    def _life(self, value: Value) -> tuple[int, int]:
        """From the backward pass of the last op that reads a value to where its cotangent was used up."""
        count, readers = len(self.kernels), self.readers.get(value, ())
        begin = 2 * count - 1 - max(readers) if readers else count
        return begin, max(begin, self._used_up(value))

    def _used_up(self, value: Value) -> int:
        count, at = len(self.kernels), self.maker.get(value)
        if at is None:
            return 2 * count
        kernel, latest = self.kernels[at], 2 * count - 1 - at
        if kernel.heavy or not kernel.fused:
            return latest
        for other in kernel.reads:
            if not self._differentiable(other) or self._weight(other):
                continue
            if other in self.cotangents:
                latest = max(latest, 2 * count - 1 - min(self.readers[other]))
            else:
                latest = max(latest, self._used_up(other))
        return latest


def names_in_memory(cls: BlockClass) -> frozenset[str]:
    """L1 and L2 by name, before anything is split: casts aside."""
    found = {n for n in cls.outputs if n} | set(cls.inputs)
    for op in cls.ops:
        found.update(op.outputs if not _fused(op) else ())
        found.update(n for n in op.inputs if n and op.work in _HEAVY)
    return frozenset(found)


def _fused(op: Op) -> bool:
    return (op.fuses or op.work == "view") and op.work != "reduce"


def _most(spans: Sequence[tuple[int, int, float]]) -> float:
    """The largest sum of sizes of spans (begin, end inclusive, size) that overlap."""
    events = sorted([(begin, 0, size) for begin, _, size in spans] + [(end, 1, -size) for _, end, size in spans])
    now = most = 0.0
    for _, _, size in events:
        now += size
        most = max(most, now)
    return most


__all__ = ["BlockLiveness", "names_in_memory"]
