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

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from planner.space.kernels import BlockKernels, Floats, Value

LONG_ROW = 1024  # elements of a softmax's row
MANY = 1 << 26  # elements of a softmax
ROWS = 2 * 132  # of a norm: two on each multiprocessor of an H100
FLOAT32 = 4  # bytes


@dataclass(frozen=True)
class Uncertain:
    """A value of which its size says whether it is computed again for the backward pass (L6): where the largest of
    `reduced`, results of reductions, has more elements than `bound`."""

    value: Value
    roots: frozenset[Value]
    reduced: tuple[Value, ...]
    bound: int


@dataclass(frozen=True)
class BlockMemory(BlockKernels):
    """What of a block's values and cotangents is in memory.

    Attributes:
        exponentials: those of `softmaxes` that are in memory.
    """

    exponentials: frozenset[Value] = frozenset()

    @cached_property
    def softmaxes(self) -> dict[Value, tuple[Value, ...]]:
        """Exponentials that may be in memory (L4) -> what reductions make of them, an element a row."""
        found: dict[Value, tuple[Value, ...]] = {}
        if not self.triton or (self.whole and not self.fast):
            return found
        for value in (v for kernel in self.kernels if kernel.exponential for v in kernel.makes if v in kernel.saves):
            readers = [self.kernels[at] for at in self.readers.get(value, ())]
            rows = tuple(made for reader in readers if reader.reduces for made in reader.makes)
            if len(readers) > 1 and rows:
                found[value] = rows
        return found

    def exponentials_of(self, elements: Floats) -> frozenset[Value]:
        """L4: the `softmaxes` that are in memory where values have so many elements on a device."""
        found: set[Value] = set()
        for value, rows in self.softmaxes.items():
            own = elements[self.values[value]]
            if self.whole or (own <= MANY and own / max(elements[self.values[row]] for row in rows) <= LONG_ROW):
                found.add(value)
        return frozenset(found)

    @cached_property
    def in_memory(self) -> frozenset[Value]:
        """L1, L2, L4 and L7."""
        found = {item for item in self.inputs.items() if not self.is_stored(item)} | self.exponentials
        for value, at in self.maker.items():
            if not self.kernels[at].fused or self._is_taken(value) or self._is_costly(value):
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

    @cached_property
    def widths(self) -> Floats:
        """Bytes of each value as it lies in memory, over its own: L7."""
        wide = np.array([self._is_costly(value) and not self._is_taken(value) for value in self.values], dtype=bool)
        return np.where(wide, np.maximum(1.0, FLOAT32 / self.itemsizes), 1.0)

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
        for value in self.differentiated:
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
            reads = [v for v in kernel.reads if v in self.differentiated]
            small = sum(self._is_made_of_reduced(v) for v in reads) if kernel.fused else 0
            for value in kernel.makes:
                readers = [self.kernels[at] for at in self.readers.get(value, ())]
                cast[value] = all(k.heavy or (k.recasts and all(cast[v] for v in k.makes)) for k in readers)
                last[value] = not any(v in found for k in readers for v in k.makes)
                if 0 < small < len(reads) and last[value] and not cast[value]:
                    found.add(value)
        return frozenset(found & self.differentiated)

    def _is_made_of_reduced(self, value: Value) -> bool:
        """Whether all that it is computed from is results of reductions."""
        return bool(self.roots[value]) and all(map(self._is_reduced, self.roots[value]))

    @cached_property
    def _saves(self) -> tuple[frozenset[Value], tuple[Uncertain, ...]]:
        """What lies in memory of what the backward pass reads (L6) whatever its size, and what depends on that."""
        found: set[Value] = set()
        uncertain: list[Uncertain] = []
        for value in (v for kernel in self.kernels if self.runs_backward(kernel) for v in kernel.saves):
            roots = self.roots.get(value, frozenset())
            others = [root for root in roots if not self._is_costly(root)]  # costly ops' results take no part
            reduced = [root for root in others if self._is_reduced(root)]
            few = tuple(root for root in reduced if not self.kernels[self.maker[root]].rowwise)
            if len(others) < 2 or not reduced:
                found.update(roots)
            elif len(reduced) == len(others):
                found.add(value)
            elif self.triton and few:
                uncertain.append(Uncertain(value, roots, few, ROWS if len(reduced) == 1 else 2 * ROWS))
            else:
                found.update(roots)
        return frozenset(found), tuple(uncertain)

    def lying(self, elements: Floats) -> list[Value]:
        """What lies in memory of what the backward pass reads (L6), parameters aside, where values have so many
        elements on a device."""
        always, uncertain = self._saves
        found = set(always)
        for one in uncertain:
            rows = max(elements[self.values[root]] for root in one.reduced)
            found.update(one.roots if rows > one.bound else {one.value})
        return sorted(v for v in found if not self.is_weight(v))


__all__ = ["BlockMemory"]
