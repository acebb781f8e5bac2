"""Which bytes an op moves through memory on one device.

Neighbours that fuse share their traffic: an op that fuses is charged for reading what no fused neighbour made, and for
writing what leaves the fusion. An op that touches a part of a tensor is charged for the part: a gather for the rows
that it takes, an update in place for what it replaces. The backward pass reads the results' cotangents and writes those
of the operands; where a part was taken by index, a whole tensor of zeros is written and the part is added to it.

    B1  backward = times * forward                             ops that compute: `times` is backward FLOPs over forward
    B2  backward = cotangents of results + of operands         ops that move elements
    B3  cotangent of a part by index = whole + 2 * part        zeros, then the part read and written
    B4  cotangent of a part = whole, or the part where others read the tensor too: their cotangents are summed in one go
"""

from collections.abc import Mapping
from dataclasses import dataclass

from costmodel.graph import Op, Tensor
from costmodel.sharding import Strategy, operand_spec, result_spec, split_factor


@dataclass(frozen=True)
class Traffic:
    """Which tensors of a block go through memory: those that some unfused op reads or writes, and the block's outputs.

    Attributes:
        stored: names of tensors that are written to memory.
        shared: names that are read elsewhere too (by other ops, the backward pass, other blocks): no op replaces a part
            of them in place.
        several: names that more than one op reads.
        scattered: names of tensors whose cotangent goes through memory though they do not.
        fractions: of tensors that a fused reader takes a part of, the share that is ever computed.
    """

    tensors: Mapping[str, Tensor]
    stored: frozenset[str]
    shared: frozenset[str] = frozenset()
    several: frozenset[str] = frozenset()
    scattered: frozenset[str] = frozenset()
    fractions: Mapping[str, float] | None = None

    @staticmethod
    def of_block(ops: tuple[Op, ...], tensors: Mapping[str, Tensor], outputs: frozenset[str]) -> "Traffic":
        stored = set(outputs)
        for op in ops:
            if not op.fuses and op.work != "view":
                stored.update(name for name in (*op.inputs, *op.outputs) if name)
            else:
                stored.update(name for name in op.inputs if name and tensors[name].role != "activation")
        uses: dict[str, int] = {}
        for op in ops:
            for name in set(op.inputs):
                uses[name] = uses.get(name, 0) + 1
        several = {name for name, count in uses.items() if count > 1 and name in tensors}
        stored.update(several)
        shared = several | set(outputs)
        if any(op.touches for op in ops):
            shared.update(name for op in ops for name in op.saves)
            shared.update(tensors.keys() - {name for op in ops for name in op.outputs})
        scattered = {op.inputs[t.position] for op in ops for t in op.touches if t.by_index and t.position >= 0}
        kept = frozenset(stored)
        return Traffic(
            tensors=tensors,
            stored=kept,
            shared=frozenset(shared),
            several=frozenset(several),
            scattered=frozenset(scattered) - kept,
            fractions=_fractions(ops, tensors, kept),
        )

    def of(self, op: Op, strategy: Strategy, mesh: tuple[int, ...]) -> tuple[float, float]:
        """Bytes that one device reads and writes for an op."""
        parts = self._parts(op, strategy, mesh) if op.touches and not self._copies(op) else {}
        reads = sum(
            parts.get(i, self._bytes(op, i, strategy, mesh)) for i, name in enumerate(op.inputs) if name in self.stored
        )
        writes = sum(
            parts.get(~i, self._bytes(op, ~i, strategy, mesh))
            for i, name in enumerate(op.outputs)
            if name in self.stored
        )
        if self.fractions and len(op.outputs) == 1:
            reads *= self.fractions.get(op.outputs[0], 1.0)
        return reads, writes

    def backward(self, op: Op, strategy: Strategy, mesh: tuple[int, ...]) -> float:
        """Bytes that one device reads and writes for the cotangents of an op's operands (B1 to B4)."""
        if op.backward_flops and op.flops and not op.touches:
            return max(1.0, op.backward_flops / op.flops) * sum(self.of(op, strategy, mesh))
        parts = self._parts(op, strategy, mesh)
        updates = any(touch.position < 0 for touch in op.touches)
        total = 0.0
        for i, name in enumerate(op.outputs):
            if (name in self.stored or name in self.scattered) and self.tensors[name].needs_grad:
                total += parts.get(~i, self._bytes(op, ~i, strategy, mesh))
        by_index = {touch.position for touch in op.touches if touch.by_index}
        for i, name in enumerate(op.inputs):
            if not name or not self.tensors[name].needs_grad or not (name in self.stored or name in self.scattered):
                continue
            if i in parts and (updates or (i not in by_index and name in self.several)):
                total += parts[i]
            else:
                total += self._bytes(op, i, strategy, mesh) + (2 * parts[i] if i in by_index else 0.0)
        return total

    def alone(self, op: Op, strategy: Strategy, mesh: tuple[int, ...]) -> float:
        """Bytes that one device would move for an op that fuses with nothing."""
        everything = Traffic(self.tensors, frozenset((*op.inputs, *op.outputs)) - {""}, self.shared)
        return sum(everything.of(op, strategy, mesh))

    def _bytes(self, op: Op, position: int, strategy: Strategy, mesh: tuple[int, ...]) -> float:
        if position >= 0:
            name, spec = op.inputs[position], operand_spec(op, position, strategy)
        else:
            name, spec = op.outputs[~position], result_spec(op, ~position, strategy)
        return self.tensors[name].bytes / split_factor(spec, mesh) if name else 0.0

    def _parts(self, op: Op, strategy: Strategy, mesh: tuple[int, ...]) -> dict[int, float]:
        """Bytes of the parts that an op touches, by position."""
        return {
            touch.position: min(
                self._bytes(op, touch.position, strategy, mesh), self._bytes(op, touch.like, strategy, mesh)
            )
            for touch in op.touches
        }

    def _copies(self, op: Op) -> bool:
        """Whether an op that would update a tensor in place has to copy it first."""
        if all(touch.position >= 0 for touch in op.touches):
            return False
        taken = [op.inputs[touch.position] for touch in op.touches if touch.position >= 0]
        return any(name not in self.stored or name in self.shared for name in taken)


def has_backward(op: Op, tensors: Mapping[str, Tensor]) -> bool:
    """Whether the backward pass runs something for an op: a cotangent arrives, and some operand wants one."""
    return any(tensors[name].needs_grad for name in op.outputs) and any(
        tensors[name].needs_grad for name in op.inputs if name
    )


def _fractions(ops: tuple[Op, ...], tensors: Mapping[str, Tensor], stored: frozenset[str]) -> dict[str, float] | None:
    """Shares of tensors that never reach memory and that their one reader takes a part of."""
    found: dict[str, float] = {}
    for op in reversed(ops) if any(op.touches for op in ops) else ():
        whole = found.get(op.outputs[0], 1.0) if len(op.outputs) == 1 else 1.0
        parts = {
            touch.position: tensors[_name(op, touch.like)].bytes / max(1, tensors[_name(op, touch.position)].bytes)
            for touch in op.touches
            if touch.position >= 0 and _name(op, touch.position) and _name(op, touch.like)
        }
        for i, name in enumerate(op.inputs):
            share = whole * min(1.0, parts.get(i, 1.0))
            if name and name not in stored and share < 1.0:
                found[name] = share
    return found or None


def _name(op: Op, position: int) -> str:
    return op.inputs[position] if position >= 0 else op.outputs[~position]
