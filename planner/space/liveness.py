"""What is live on a device while a block runs: a walk over its kernels in the order in which they run.

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

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

from planner.space.in_memory import BlockMemory
from planner.space.kernels import Value

Span = tuple[int, int, float]  # first and last moment, bytes


@dataclass(frozen=True)
class BlockLiveness(BlockMemory):
    """When what a block has in memory is live. Moment `at` is the forward pass of kernel `at`, moment
    ``2 * kernels - 1 - at`` its backward pass, ``2 * kernels`` the block's end."""

    def _back(self, at: int) -> int:
        return 2 * len(self.kernels) - 1 - at

    @property
    def _end(self) -> int:
        return 2 * len(self.kernels)

    def peak_bytes(self, *, rerun: bool, kept: Iterable[str] = (), sliced: bool = False) -> float:
        """The most that is live at once while the block runs backward.

        Args:
            rerun: the forward kernels run just before.
            kept: tensors that lie there anyway.
            sliced: the block is a layer of a scan (T1).
        """
        lying = frozenset(kept)
        spans = [(*span, self.bytes_of(value)) for value, span in self._cotangent_spans.items()]
        last = self._last_forward() if rerun else dict.fromkeys(self.in_memory, -1)
        for at, kernel in enumerate(self.kernels):
            if self.runs_backward(kernel):
                until = self._end if at in self._deferred else self._back(at)
                for root in (root for value in kernel.saves for root in self.roots.get(value, ())):
                    last[root] = max(last[root], until)
        for value in self.in_memory:
            if value[0] in lying or (not rerun and value in self.maker):
                continue
            begin = self.maker.get(value, 0) if rerun else len(self.kernels)
            if last[value] >= begin:
                spans.append((begin, last[value], self.bytes_of(value)))
        if sliced:
            spans += self._slices(lying, rerun=rerun)
        return _most(spans)

    def _last_forward(self) -> dict[Value, int]:
        """The last forward kernel that reads each value in memory, the one that makes it where none does."""
        last = {value: self.maker.get(value, 0) for value in self.in_memory}
        for at, kernel in enumerate(self.kernels):
            for root in (root for value in kernel.reads for root in self.roots.get(value, ())):
                last[root] = max(last[root], at)
        return last

    def _slices(self, lying: frozenset[str], *, rerun: bool) -> list[Span]:
        """T1."""
        found: list[Span] = []
        for at, kernel in enumerate(self.kernels):
            if not kernel.heavy or not self.runs_backward(kernel):
                continue
            back = self._back(at)
            for value in kernel.saves:
                if self.is_weight(value):
                    found += [(back, back, self.bytes_of(v)) for v in self._made_of(value, rerun=rerun)]
                elif value[0] in lying and not rerun:
                    found.append((back, self._end if at in self._deferred else back, self.bytes_of(value)))
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
    def _deferred(self) -> frozenset[int]:
        """T2: products with weights whose gradients come last."""
        if all(size == 1 for size in self.mesh):
            return frozenset()
        return frozenset(at for at, kernel in enumerate(self.kernels) if kernel.heavy and self.trains(kernel))

    def forward_bytes(self, kept: Iterable[str]) -> float:
        """The most that is live at once while a layer runs forward, what it keeps included (T4). What it keeps of ops
        that are fused is written to the stacks as it is computed, but for exponentials that other ops read."""
        keeps, last = frozenset(kept), self._last_forward()
        for value, at in self.maker.items():
            if value[0] in keeps and self.kernels[at].exponential and self.readers.get(value):
                last[value] = at
        spans = [
            (self.maker.get(v, 0), len(self.kernels) if v[0] in keeps else end, self.bytes_of(v))
            for v, end in last.items()
        ]
        return _most(spans)

    def waiting_bytes(self, gradients: float) -> float:
        """What lies there for the weight gradients of a block that has run backward (T3).

        Args:
            gradients: bytes of the weight gradients.
        """
        if self.scatters_weights:
            return gradients
        products = [kernel for kernel in self.kernels if kernel.heavy and self.trains(kernel)]
        operands = {
            root for kernel in products for v in kernel.reads if not self.is_weight(v) for root in self.roots.get(v, ())
        }
        sources = sum(self.bytes_of(v) for kernel in products for v in kernel.makes)
        sources += sum(self.bytes_of(v) for v in sorted(operands))
        late = sum(size > 1 for size in self.mesh) > 1 and any(kernel.convolves for kernel in products)
        return sources if late else min(gradients, sources)

    @property
    def scatters_weights(self) -> bool:
        """Whether a weight's gradient is a scatter, whose result is there from its start."""
        return any(kernel.scatters and self.trains(kernel) for kernel in self.kernels)

    @cached_property
    def _cotangent_spans(self) -> dict[Value, tuple[int, int]]:
        """From the backward pass of the last op that reads a value, or where what a norm's is made of is there (T5), to
        where its cotangent was used up."""
        given: dict[Value, int] = {}
        for at in reversed(range(len(self.kernels))):
            for value in self.kernels[at].makes:
                given[value] = self._given(value, given)
        used = self._used_up
        return {
            v: (begin := given[v] if v in self.normalised else self._begin(v), max(begin, used.get(v, self._end)))
            for v in self.cotangents
        }

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

    @cached_property
    def _used_up(self) -> dict[Value, int]:
        """When all that a value's cotangent goes into has been made."""
        found: dict[Value, int] = {}
        for at, kernel in enumerate(self.kernels):
            latest = self._end if at in self._deferred else self._back(at)
            if kernel.fused and not kernel.heavy:
                for other in kernel.reads:
                    if not self.needs_grad(other) or self.is_weight(other):
                        continue
                    if other in self.cotangents:
                        latest = max(latest, self._back(min(self.readers[other])))
                    else:
                        latest = max(latest, found.get(other, self._end))
            found.update(dict.fromkeys(kernel.makes, latest))
        return found


def _most(spans: Sequence[Span]) -> float:
    """The largest sum of sizes of spans (begin, end inclusive, size) that overlap."""
    events = sorted([(begin, 0, size) for begin, _, size in spans] + [(end, 1, -size) for _, end, size in spans])
    now = most = 0.0
    for _, _, size in events:
        now += size
        most = max(most, now)
    return most


__all__ = ["BlockLiveness"]
