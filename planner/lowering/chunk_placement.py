"""What a plan says of a block, for the programs of its chunks.

An equation of a chunk splits over the mesh as that of the block does, by the same factor. Slices along the sequence,
and what earlier chunks hand over, lie as their reader takes them. What a rule or a guard adds follows its operands.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property

from costmodel.graph import Op
from costmodel.sharding import (
    PARTIAL,
    PASS,
    REPLICATED,
    VARYING,
    Spec,
    Strategy,
    divides,
    major_factor,
    operand_spec,
    result_spec,
)
from planner.frontend.blocks import BlockClass
from planner.frontend.chunks.rewrite import ChunkClass
from planner.frontend.flat import Equation, Value
from planner.lowering.placement import ClassPlacement, GroupPlacement
from planner.lowering.propagate import choose


@dataclass(frozen=True)
class ChunkPlacement(GroupPlacement):
    """One stage group while one chunk runs.

    Attributes:
        chunked: class of a chunk -> it, and the class of the block.
    """

    chunked: Mapping[str, tuple[ChunkClass, BlockClass]]

    def of_class(self, key: str) -> ClassPlacement:
        return self._placed[key] if key in self._placed else super().of_class(key)

    @cached_property
    def _placed(self) -> dict[str, ClassPlacement]:
        return {
            key: _Placing(self, found, block, super(ChunkPlacement, self).of_class(block.key)).run()
            for key, (found, block) in self.chunked.items()
        }


@dataclass
class _Placing:
    group: GroupPlacement
    found: ChunkClass
    block: BlockClass
    base: ClassPlacement

    def run(self) -> ClassPlacement:
        program, ops = self.found.cls.program, self.found.cls.ops
        whole = self.group.whole
        self.strategies: dict[str, Strategy] = {}
        given = self.base.inputs
        self.specs: dict[str, Spec] = {
            v.name: self._fitting(v.shape, given[v.name]) for v in program.inputs if v.name in given
        }
        for e in program.equations:
            op = ops[e.name]
            if e.name in self.found.original:
                strategy = self._as_planned(e, op)
            elif e.name in self.found.helpers:
                reader, position = self.found.helpers[e.name]
                original = self.block.ops[self.found.original.get(reader, reader)]
                wanted = operand_spec(original, position, self.base.strategies[original.name])
                strategy = self._for_reader(e, op, wanted)
                if e.name in self.found.joins:
                    for i, o in enumerate(e.inputs):
                        if isinstance(o, Value) and o.name in self.found.earlier:
                            self.specs[o.name] = operand_spec(op, i, strategy)
            else:
                strategy = self._following(e, op)
            self.strategies[e.name] = strategy
            for i, v in enumerate(e.outputs):
                self.specs[v.name] = result_spec(op, i, strategy)
        inputs = {v.name: self.specs.get(v.name, whole) for v in program.inputs}
        return replace(self.base, strategies=self.strategies, inputs=inputs, again=self.found.joins)

    def _as_planned(self, e: Equation, op: Op) -> Strategy:
        """The block's strategy. Where the chunk is too short for a split, all devices of the axis compute it; where it
        then has no pending sum to pass on, it has none."""
        planned = self.block.ops[self.found.original[e.name]]
        codes: list[int] = []
        for axis, code in enumerate(self.base.strategies[planned.name]):
            if code >= 0:
                code = self._same_factor(op, planned.factors[code].name, axis, codes)
            elif code <= PASS:
                pending = [self._spec(e.inputs[i])[axis] for i in op.linear[PASS - code]]
                code = code if all(have == PARTIAL for have in pending) else VARYING
            codes.append(code)
        return tuple(codes)

    def _same_factor(self, op: Op, name: str, axis: int, earlier: list[int]) -> int:
        code = next((i for i, f in enumerate(op.factors) if f.name == name), VARYING)
        parts = self.group.sizes[axis]
        for other, size in zip(earlier, self.group.sizes, strict=False):
            parts *= size if other == code else 1
        return code if code >= 0 and op.factors[code].size % parts == 0 else VARYING

    def _fitting(self, shape: tuple[int, ...], spec: Spec) -> Spec:
        """An input's spec without the splits for which the chunk is too short."""
        codes: list[int] = []
        for axis, code in enumerate(spec):
            found = (*codes, code, *(REPLICATED for _ in spec[axis + 1 :]))
            codes.append(code if divides(shape, found, self.group.sizes) else REPLICATED)
        return tuple(codes)

    def _for_reader(self, e: Equation, op: Op, wanted: Spec) -> Strategy:
        """Slices and joins: as the reader takes the result, the dim that is cut or joined excepted."""
        codes = []
        for axis, code in enumerate(wanted):
            if code == PARTIAL:
                pending = all(self._spec(o)[axis] == PARTIAL for o in e.inputs if isinstance(o, Value))
                codes.append(PASS if op.linear and pending else VARYING)
            elif code < 0:
                codes.append(code)
            else:
                factor = major_factor(op, op.out_dims[0], code)
                usable = (
                    factor >= 0 and op.factors[factor].splits and op.factors[factor].size % self.group.sizes[axis] == 0
                )
                codes.append(factor if usable else VARYING)
        return tuple(codes)

    def _following(self, e: Equation, op: Op) -> Strategy:
        have = [self._spec(o) for o in e.inputs]
        counts = [math.prod(o.shape) if isinstance(o, Value) else 1 for o in e.inputs]
        codes: list[int] = []
        for axis, size in enumerate(self.group.sizes):
            code = choose(op, [s[axis] for s in have], counts, size, self.group.sizes, codes)
            if code == REPLICATED and any(s[axis] != REPLICATED for s in have):
                code = VARYING
            codes.append(code)
        return tuple(codes)

    def _spec(self, operand: object) -> Spec:
        return self.specs.get(operand.name, self.group.whole) if isinstance(operand, Value) else self.group.whole
