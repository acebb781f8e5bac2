"""What of a block lies in memory at all, and what is computed where it is read.

XLA's compilers for GPUs and TPUs fuse elementwise ops, broadcasts and the operands of reductions into the kernels that
read them: their results are never in memory. (The CPU's fuses little: `group_costs.group_live`.) In memory are

* L1 results of other ops, and what a collective makes or takes;
* L2 of elementwise results those that a matrix product, a convolution, a collective or the caller of the block takes;
* L3 cotangents likewise: those that such an op makes for an operand or takes for its result;
* L4 the exponentials of a softmax that more than its sum reads, where XLA makes Triton kernels: a kernel cannot hide
  what another one reads. Of long rows, or of very many, XLA computes them again from the scores instead. Outside
  of scans it does so whatever the rows, but where memory is as fast as an H20's or H200's, which never does;
* L5 the cotangent of what a norm makes, before its scale: it is reduced and passed on, by kernels of their own.

Outside of scans, what the backward pass reads is kept as XLA sees fit, whatever JAX calls residuals (`lying`):

* L6 a value is computed again from what in memory it was made of. One that is made of a reduction's result (a norm's)
  is so too, but where XLA makes Triton kernels and the reduction has too few rows to fill the GPU: up to two rows a
  multiprocessor both what a norm centres and what it divides are kept, up to four only the latter. Reductions of the
  last dims are no such;
* L7 for GPUs the results of costly ops (tanh, erfc, powers) are not computed again. They are in memory as they were
  computed, in float32 at least.

The bounds of L4 and L6 are those at which compiled programs were seen to change, the ops of L7 those that they were
seen to keep, for all GPUs alike.
"""

import math
from dataclasses import dataclass
from functools import cached_property

from planner.space.kernels import BlockKernels, Value

LONG_ROW = 1024  # elements of a softmax's row
MANY = 1 << 26  # elements of a softmax
ROWS = 2 * 132  # of a norm: two on each multiprocessor of an H100
FLOAT32 = 4  # bytes


@dataclass(frozen=True)
class BlockMemory(BlockKernels):
    """What of a block's values and cotangents is in memory."""

    @cached_property
    def in_memory(self) -> frozenset[Value]:
        """L1, L2, L4 and L7."""
        found = {item for item in self.inputs.items() if not self.is_stored(item)}
        for value, at in self.maker.items():
            lies = not self.kernels[at].fused or self._is_taken(value)
            if lies or self._is_softmax(value) or self._is_costly(value):
                found.add(value)
        return frozenset(found)

    def _is_taken(self, value: Value) -> bool:
        """L2."""
        return any(self.kernels[i].heavy for i in self.readers.get(value, ())) or value[0] in self.cls.outputs

    def _is_costly(self, value: Value) -> bool:
        """L7."""
        if not self.whole or value not in self.maker or self.is_weight(value):
            return False
        kernel = self.kernels[self.maker[value]]
        return kernel.costly and self.runs_backward(kernel)

    def bytes_of(self, value: Value) -> float:
        """As it lies in memory."""
        size, itemsize = super().bytes_of(value), self.cls.tensors[value[0]].itemsize
        wide = self._is_costly(value) and not self._is_taken(value)
        return size * max(1.0, FLOAT32 / itemsize) if wide else size

    def elements_of(self, value: Value) -> float:
        return super().bytes_of(value) / self.cls.tensors[value[0]].itemsize

    def _is_softmax(self, value: Value) -> bool:
        """L4."""
        kernel, readers = self.kernels[self.maker[value]], self.readers.get(value, ())
        if (
            (self.whole and not self.fast)
            or not self.triton
            or not kernel.exponential
            or value not in kernel.saves
            or len(readers) < 2
        ):
            return False
        rows = [self.elements_of(made) for at in readers if self.kernels[at].reduces for made in self.kernels[at].makes]
        elements = self.elements_of(value)
        few = self.whole or (elements <= MANY and elements / max(rows, default=1.0) <= LONG_ROW)
        return bool(rows) and few

    @cached_property
    def roots(self) -> dict[Value, frozenset[Value]]:
        """What in memory each value is computed from, itself if it is there; parameters aside."""
        found: dict[Value, frozenset[Value]] = {}
        for item in self.inputs.items():
            found[item] = frozenset() if self.is_stored(item) else frozenset({item})
        for kernel in self.kernels:
            below = frozenset().union(*(found.get(v, frozenset()) for v in kernel.reads))
            for value in kernel.makes:
                found[value] = frozenset({value}) if value in self.in_memory else below
        return found

    def _is_reduced(self, value: Value) -> bool:
        return value in self.maker and self.kernels[self.maker[value]].reduces

    @cached_property
    def cotangents(self) -> frozenset[Value]:
        """L3 and L5, those of parameters and of what is made of them alone left out."""
        leaving = {n for n in self.cls.outputs if n}
        found = set(self.normalised)
        for value in {*self.maker, *self.inputs.items()}:
            if not self.needs_grad(value) or self.is_weight(value):
                continue
            at = self.maker.get(value)
            taken = at is None or self.kernels[at].heavy
            made = any(self.kernels[i].heavy or self.kernels[i].scatters for i in self.readers.get(value, ()))
            if taken or made or value[0] in leaving:
                found.add(value)
        return frozenset(found)

    @cached_property
    def normalised(self) -> frozenset[Value]:
        """L5: values that are made of others and of a reduction of these, the last of each norm. The probabilities of a
        softmax are none: their cotangent is that which a product makes, cast."""
        found: set[Value] = set()
        last: dict[Value, bool] = {}  # whether nothing that reads a value is one
        cast: dict[Value, bool] = {}  # whether its cotangent is that of a product's operand
        for kernel in reversed(self.kernels):
            reads = [v for v in kernel.reads if self.needs_grad(v) and not self.is_weight(v)]
            small = [v for v in reads if self.roots[v] and all(map(self._is_reduced, self.roots[v]))]
            for value in kernel.makes:
                readers = [self.kernels[at] for at in self.readers.get(value, ())]
                cast[value] = all(k.heavy or (k.recasts and all(cast[v] for v in k.makes)) for k in readers)
                last[value] = not any(v in found for k in readers for v in k.makes)
                if kernel.fused and 0 < len(small) < len(reads) and last[value] and not cast[value]:
                    found.add(value)
        return frozenset(v for v in found if self.needs_grad(v) and not self.is_weight(v))

    def lying(self) -> dict[Value, float]:
        """What lies in memory of what the backward pass reads (L6), with its bytes; parameters aside."""
        found: set[Value] = set()
        for kernel in self.kernels:
            if self.runs_backward(kernel):
                for value in kernel.saves:
                    roots = self.roots.get(value, frozenset())
                    found.update(roots if self._made_again(value, roots) else {value})
        return {v: self.bytes_of(v) for v in sorted(found) if not self.is_weight(v)}

    def _made_again(self, value: Value, roots: frozenset[Value]) -> bool:
        """L6. What lies there of costly ops takes no part."""
        others = [root for root in roots if not self._is_costly(root)]
        reduced = [root for root in others if self._is_reduced(root)]
        if len(others) < 2 or not reduced:
            return True
        if len(reduced) == len(others):
            return False
        few = [self.elements_of(root) for root in reduced if not self.kernels[self.maker[root]].rowwise]
        rows = max(few) if self.triton and few else math.inf
        return rows > (ROWS if len(reduced) == 1 else 2 * ROWS)


__all__ = ["BlockMemory"]
