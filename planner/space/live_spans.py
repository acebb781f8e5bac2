"""When what a block has in memory is live: a walk over its kernels in the order in which they run.

A tensor in memory (`in_memory`) is live from the kernel that makes it to the last one that reads it, be it through ops
that are fused. Forward kernels come first, where they run at all (full remat, or a block whose backward pass follows
at once), then the backward pass of each in reverse. Parameters and their gradients are state and not counted here;
what a block keeps from its forward pass (`Decision.kept`) neither, where that ran long before. But

* T1 a layer of a scan takes its parameters, and what was kept for it, from stacks: a product reads a slice of its own;
* T2 among several devices XLA moves weight gradients behind all that the collectives wait for: cotangents and operands
  of a product with weights lie until the block's end;
* T3 weight gradients that are not made by then lie as what they are made of, if that is less than they are. (With
  meshes of several axes those of convolutions do in any case.)
* T4 a layer's forward pass writes what is kept to the stacks at its end;
* T5 the cotangents that norms of one sum take of it are made at once.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from planner.space.in_memory import BlockMemory
from planner.space.kernels import Floats, Value

Span = tuple[int, int, Value]  # first and last moment


@dataclass(frozen=True)
class Events:
    """Values that come to lie in memory (1) and go again (-1), in order of time: those that come first, at each moment.

    Attributes:
        values: their positions in `BlockKernels.values`.
    """

    values: NDArray[np.int64]
    signs: Floats

    def most(self, sizes: Floats) -> float:
        """The most bytes that are there at once, for bytes of each value."""
        return float((self.signs * sizes[self.values]).cumsum().max(initial=0.0))


@dataclass(frozen=True)
class Waits:
    """What lies there for the weight gradients of a block that has run backward (T3).

    Attributes:
        sources: what they are made of, as positions of values.
        scattered: they are scatters, whose results are there from their start.
        convolutions: some are of convolutions.
    """

    sources: NDArray[np.int64]
    scattered: bool
    convolutions: bool


@dataclass(frozen=True)
class BlockSpans(BlockMemory):
    """When what a block has in memory is live. Moment `at` is the forward pass of kernel `at`, moment
    ``2 * kernels - 1 - at`` its backward pass, ``2 * kernels`` the block's end."""

    def with_exponentials(self, exponentials: frozenset[Value]) -> "BlockSpans":
        """The same where these exponentials are in memory."""
        if exponentials == self.exponentials:
            return self
        if exponentials not in self._others:
            self._others[exponentials] = replace(self, exponentials=exponentials)
        return self._others[exponentials]

    @cached_property
    def as_whole(self) -> "BlockSpans":
        """The same where one program of a GPU has both passes of the block, which is no layer of a scan; itself where
        that makes no difference."""
        differs = self.softmaxes or any(kernel.costly for kernel in self.kernels)
        return replace(self, whole=True) if differs else self

    @cached_property
    def _others(self) -> dict[frozenset[Value], "BlockSpans"]:
        return {}

    @cached_property
    def _known(self) -> dict[tuple[object, ...], Events]:
        return {}

    def _back(self, at: int) -> int:
        return 2 * len(self.kernels) - 1 - at

    @property
    def _end(self) -> int:
        return 2 * len(self.kernels)

    def backward(self, kept: frozenset[str], *, rerun: bool, sliced: bool, several: bool) -> Events:
        """While the block runs backward.

        Args:
            kept: tensors that lie there anyway.
            rerun: the forward kernels run just before.
            sliced: the block is a layer of a scan (T1).
            several: the mesh has several devices (T2).
        """
        key = ("backward", kept, rerun, sliced, several)
        if key not in self._known:
            spans = self._backward_spans(kept, rerun=rerun, several=several)
            spans += self._slices(kept, rerun=rerun, several=several) if sliced else []
            self._known[key] = self._events(spans)
        return self._known[key]

    def forward(self, kept: frozenset[str]) -> Events:
        """While a layer runs forward, what it keeps included (T4)."""
        key = ("forward", kept)
        if key not in self._known:
            self._known[key] = self._events(self._forward_spans(kept))
        return self._known[key]

    def _events(self, spans: Iterable[Span]) -> Events:
        ordered = sorted((2 * begin, 2 * end + 1, self.values[value]) for begin, end, value in spans)
        begins, ends, values = np.array(ordered, dtype=np.int64).reshape(-1, 3).T
        order = np.argsort(np.concatenate((begins, ends)), kind="stable")
        return Events(np.tile(values, 2)[order], np.repeat((1.0, -1.0), len(values))[order])

    def _backward_spans(self, kept: frozenset[str], *, rerun: bool, several: bool) -> list[Span]:
        spans = [(*span, value) for value, span in self.cotangent_spans(several=several).items()]
        last = self._last_forward() if rerun else dict.fromkeys(self.in_memory, -1)
        for at, kernel in enumerate(self.kernels):
            if self.runs_backward(kernel):
                until = self._until(at, several=several)
                for root in (root for value in kernel.saves for root in self.roots.get(value, ())):
                    last[root] = max(last[root], until)
        for value in self.in_memory:
            if value[0] in kept or (not rerun and value in self.maker):
                continue
            begin = self.maker.get(value, 0) if rerun else len(self.kernels)
            if last[value] >= begin:
                spans.append((begin, last[value], value))
        return spans

    def _last_forward(self) -> dict[Value, int]:
        """The last forward kernel that reads each value in memory, the one that makes it where none does."""
        last = {value: self.maker.get(value, 0) for value in self.in_memory}
        for at, kernel in enumerate(self.kernels):
            for root in (root for value in kernel.reads for root in self.roots.get(value, ())):
                last[root] = max(last[root], at)
        return last

    def _slices(self, kept: frozenset[str], *, rerun: bool, several: bool) -> list[Span]:
        """T1."""
        found: list[Span] = []
        for at, kernel in enumerate(self.kernels):
            if not kernel.heavy or not self.runs_backward(kernel):
                continue
            back = self._back(at)
            for value in kernel.saves:
                if self.is_weight(value):
                    found += [(back, back, v) for v in self._made_of(value, rerun=rerun)]
                elif value[0] in kept and not rerun:
                    found.append((back, self._until(at, several=several), value))
        return found

    def _made_of(self, value: Value, *, rerun: bool) -> list[Value]:
        """A weight as a product takes it, and the slice and casts that it is made of; what a second forward pass made
        of the slice is counted there."""
        found: list[Value] = []
        while not self.is_stored(value):
            if value in self.in_memory and not rerun:
                found.append(value)
            sources = [v for v in self.kernels[self.maker[value]].reads if self.is_weight(v)]
            if rerun or not sources:
                return found
            value = sources[0]
        return [*found, value]

    @cached_property
    def _products(self) -> frozenset[int]:
        """Products with weights that get gradients."""
        return frozenset(at for at, kernel in enumerate(self.kernels) if kernel.heavy and self.trains(kernel))

    def _until(self, at: int, *, several: bool) -> int:
        """When the backward pass of a kernel is done with (T2)."""
        return self._end if several and at in self._products else self._back(at)

    def _forward_spans(self, kept: frozenset[str]) -> list[Span]:
        """What a layer keeps of ops that are fused is written to the stacks as it is computed, but for exponentials
        that other ops read."""
        last = self._last_forward()
        for value, at in self.maker.items():
            if value[0] in kept and self.kernels[at].exponential and self.readers.get(value):
                last[value] = at
        return [(self.maker.get(v, 0), len(self.kernels) if v[0] in kept else end, v) for v, end in last.items()]

    @cached_property
    def waits(self) -> Waits:
        """T3."""
        products = [self.kernels[at] for at in sorted(self._products)]
        operands = {
            root for kernel in products for v in kernel.reads if not self.is_weight(v) for root in self.roots.get(v, ())
        }
        sources = [self.values[v] for v in (*(made for kernel in products for made in kernel.makes), *sorted(operands))]
        return Waits(
            np.array(sources, dtype=np.int64),
            scattered=any(kernel.scatters and self.trains(kernel) for kernel in self.kernels),
            convolutions=any(kernel.convolves for kernel in products),
        )

    def cotangent_spans(self, *, several: bool) -> dict[Value, tuple[int, int]]:
        """From the backward pass of the last op that reads a value, or where what a norm's is made of is there (T5), to
        where its cotangent was used up."""
        if several not in self._cotangent_spans:
            used = self._used_up(several=several)
            self._cotangent_spans[several] = {
                value: (begin, max(begin, used.get(value, self._end)))
                for value, begin in self._cotangent_begins.items()
            }
        return self._cotangent_spans[several]

    @cached_property
    def _cotangent_spans(self) -> dict[bool, dict[Value, tuple[int, int]]]:
        return {}

    @cached_property
    def _cotangent_begins(self) -> dict[Value, int]:
        given: dict[Value, int] = {}
        for at in reversed(range(len(self.kernels))):
            for value in self.kernels[at].makes:
                given[value] = self._given(value, given)
        return {v: given[v] if v in self.normalised else self._begin(v) for v in self.cotangents}

    def _begin(self, value: Value) -> int:
        readers = self.readers.get(value, ())
        return self._back(max(readers)) if readers else len(self.kernels)

    def _given(self, value: Value, given: dict[Value, int]) -> int:
        """When the cotangents in memory that a value's is computed from are there."""
        latest = len(self.kernels)
        for at in self.readers.get(value, ()):
            kernel = self.kernels[at]
            if kernel.heavy or not kernel.fused:
                latest = max(latest, self._back(at))
                continue
            for made in kernel.makes:
                direct = made in self.cotangents and made not in self.normalised
                latest = max(latest, self._begin(made) if direct else given[made])
        return latest

    def _used_up(self, *, several: bool) -> dict[Value, int]:
        """When all that a value's cotangent goes into has been made."""
        found: dict[Value, int] = {}
        for at, kernel in enumerate(self.kernels):
            latest = self._until(at, several=several)
            if kernel.fused and not kernel.heavy:
                for other in kernel.reads:
                    if other not in self.differentiated:
                        continue
                    if other in self.cotangents:
                        latest = max(latest, self._back(min(self.readers[other])))
                    else:
                        latest = max(latest, found.get(other, self._end))
            found.update(dict.fromkeys(kernel.makes, latest))
        return found


__all__ = ["BlockSpans", "Events", "Waits"]
