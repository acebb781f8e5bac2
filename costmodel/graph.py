"""What a captured program is made of, without JAX: tensors, ops as sets of factors, and blocks.

An op is described by its **factors**: named loop dims with sizes. Each operand and result dim is an ordered list of
factors, major to minor, so a reshape that merges ``heads`` and ``head_dim`` keeps its meaning: only the major factor of
a dim can be split over devices. A matrix product ``bm,mn->bn`` has the factors b, m, n; m is in no result, so a split
of it leaves a pending sum.
"""

import math
from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

import numpy as np
from numpy.typing import NDArray

Role = Literal["param", "batch", "state", "rng", "const", "activation"]
Combine = Literal["sum", "max", "same", "none"]
Work = Literal["matmul", "conv", "elementwise", "reduce", "data", "view", "random", "opaque"]
Dims = tuple[tuple[int, ...], ...]  # one tuple of factor indices (major to minor) per tensor dim


@dataclass(frozen=True, slots=True)
class Tensor:
    """A value of the program.

    Attributes:
        shape: global shape, for one microbatch.
        needs_grad: a cotangent reaches it: a pending sum over its cotangents has to be reduced somewhere.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    itemsize: int
    role: Role = "activation"
    needs_grad: bool = False

    @property
    def bytes(self) -> int:
        count = self.itemsize
        for size in self.shape:
            count *= size
        return count


@dataclass(frozen=True, slots=True)
class Factor:
    """A loop dim of an op.

    Attributes:
        combine: what joins the shards where a result lacks this factor: ``sum`` leaves a pending sum, ``max`` is an
            all-reduce inside the op (of values that no gradient crosses), ``same`` means that every shard computes the
            same result anyway, ``none`` forbids the split.
        splits: False where the rule has no local program for a split (a sorted or convolved dim).
        reason: why it does not split, for reports.
    """

    name: str
    size: int
    combine: Combine = "none"
    splits: bool = True
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Touch:
    """A tensor of which an op reads or writes a part: the rows that a gather takes.

    Attributes:
        position: operand i as ``i``, result j as ``~j``. An op that touches a part of a result updates it in place.
        like: the operand or result that is as large as the part.
        by_index: data says which part, so its cotangent is scattered into zeros, by a kernel of its own.
    """

    position: int
    like: int
    by_index: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Inside:
    """What the programs inside a loop, branch or function do in one direction, all trips together, unsharded.

    Attributes:
        matmul_flops: of matrix products and convolutions, by dtype.
        launches: kernels.
        memory_bytes: read and written.
    """

    matmul_flops: tuple[tuple[str, float], ...] = ()
    launches: float = 0.0
    memory_bytes: float = 0.0

    def __add__(self, other: "Inside") -> "Inside":
        flops = dict(self.matmul_flops)
        for dtype, count in other.matmul_flops:
            flops[dtype] = flops.get(dtype, 0.0) + count
        return Inside(
            matmul_flops=tuple(sorted(flops.items())),
            launches=self.launches + other.launches,
            memory_bytes=self.memory_bytes + other.memory_bytes,
        )

    def times(self, trips: float) -> "Inside":
        """The same, run so many times."""
        return Inside(
            matmul_flops=tuple((dtype, count * trips) for dtype, count in self.matmul_flops),
            launches=self.launches * trips,
            memory_bytes=self.memory_bytes * trips,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Op:
    """One operation of a block.

    Attributes:
        name: unique in its block and stable across captures, ``dot_general.3``.
        inputs, outputs: tensor names. An input may repeat.
        in_dims, out_dims: factor indices of each dim of each operand and result.
        linear: sets of operand positions in which the op is jointly linear, the others held fixed: a pending sum may
            pass from all of such a set to the result (``add``: ``((0, 1),)``; ``mul``: ``((0,), (1,))``).
        flops: forward floating point operations, unsharded.
        backward_flops: of the backward pass, all operands that need a gradient together.
        saves: operands and results that the backward pass reads.
        keeps: what it reads besides, which the op itself makes (a mask, the square of a divisor): the tensor whose dims
            that has ('' where none does), its bytes, and whether it is the same whatever the operands (zeros).
        stored: the user's remat policy keeps the results.
        work: what kind of work it is, for the cost model. ``view`` ops cost nothing.
        fuses: elementwise-like: reads and writes of neighbours in one fused kernel.
        source: ``file.py:12 (function)`` of the user's line.
        known: False where no rule knew the primitive and it is planned as replicated.
        key: key into a profile's op table (kind, shape and dtype), filled by the frontend.
        scope: rematerialisation scope that the user wrote around it (the outermost), or -1.
        touches: operands and results of which it reads or writes a part.
        inside, inside_backward: of a loop, branch or function, what its programs do, forward and in the backward pass.
        guessed_trips: lines of the loops in it whose trip count is data: they are costed as one trip.
        guessed_saves: why JAX could not say what it keeps of the op, so that `saves` is what the rule states.
    """

    name: str
    primitive: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    factors: tuple[Factor, ...]
    in_dims: tuple[Dims, ...]
    out_dims: tuple[Dims, ...]
    linear: tuple[tuple[int, ...], ...] = ()
    flops: float = 0.0
    backward_flops: float = 0.0
    saves: tuple[str, ...] = ()
    keeps: tuple[tuple[str, int, bool], ...] = ()
    stored: bool = False
    work: Work = "elementwise"
    fuses: bool = False
    source: str = ""
    known: bool = True
    key: str = ""
    scope: int = -1
    touches: tuple[Touch, ...] = ()
    inside: Inside | None = None
    inside_backward: Inside | None = None
    guessed_trips: tuple[str, ...] = ()
    guessed_saves: str = ""


def matmul_flops(op: Op, dtype: str) -> dict[str, float]:
    """Forward FLOPs of matrix products by dtype; `dtype` is that of the op's first operand."""
    if op.work in ("matmul", "conv"):
        return {dtype: op.flops}
    return dict(op.inside.matmul_flops) if op.inside is not None else {}


@dataclass(frozen=True, slots=True)
class Source:
    """A program-wide value, or item `index` along its leading dim (a layer's slice of a stacked parameter)."""

    value: str
    index: int | None = None


@dataclass(frozen=True, kw_only=True)
class BlockClass:
    """What equal blocks share.

    Attributes:
        key: canonical hash.
        ops: in program order.
        tensors: every tensor by its name inside the class, inputs included.
        inputs: tensor names of the inputs; outputs: of the outputs ('' for a constant).
    """

    key: str
    ops: tuple[Op, ...]
    tensors: dict[str, Tensor]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]

    @cached_property
    def tensor_bytes(self) -> NDArray[np.int64]:
        """Bytes of each tensor, whole, in the order of `tensors`."""
        return np.array([tensor.bytes for tensor in self.tensors.values()], dtype=np.int64)

    @cached_property
    def ops_by_name(self) -> dict[str, Op]:
        return {op.name: op for op in self.ops}

    @property
    def flops(self) -> float:
        return sum(op.flops for op in self.ops)

    @property
    def backward_flops(self) -> float:
        return sum(op.backward_flops for op in self.ops)


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """A unit that the pipeline does not cut. `inputs` and `outputs` align with the class's."""

    name: str
    class_key: str
    inputs: tuple[Source, ...]
    outputs: tuple[Source, ...]


@dataclass(frozen=True, slots=True)
class Run:
    """Blocks ``start..stop-1``: equal layers of a scan, or one block."""

    key: str
    start: int
    stop: int
    layered: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameter:
    """Facts of one parameter leaf.

    Attributes:
        gradient_itemsize: bytes of one element of its gradient.
        optimizer_bytes_per_element: of optimizer state in the parameter's shape, which is split as the parameter's plan
            says. optimizer_whole_bytes: of its state in any other shape (factored moments), whole on every device.
    """

    path: str
    shape: tuple[int, ...]
    dtype: str
    itemsize: int
    trained: bool
    gradient_dtype: str
    gradient_itemsize: int
    optimizer_bytes_per_element: float
    optimizer_whole_bytes: int = 0

    @property
    def elements(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True, kw_only=True)
class UpdateJoins:
    """What the optimizer's update joins across parameters (the norm of all gradients, say).

    Attributes:
        reads: parameter -> parameters whose gradients its update reads besides its own; itself, where what becomes of
            some layers of a stack depends on the others' gradients.
        rounds: times, one after the other, that values of several parameters or layers come together.
        uncut: stacked parameter -> why stages cannot update parts of it.
    """

    reads: Mapping[str, frozenset[str]] = field(default_factory=dict)
    rounds: int = 0
    uncut: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class ModelGraph:
    """A captured training step at one microbatch size, without JAX.

    Attributes:
        microbatch: examples of one microbatch.
        blocks: in program order; every op is in exactly one.
        values: every value that crosses blocks, and every input, by name.
        batch_dims: of each batch leaf, the dim that splits into microbatches, or None.
        params: by value name.
        loss: names of the loss, or of the sum and the weight; '' for a constant.
        results: names of new state and aux leaves, which every device must end up with whole.
        carried: state leaf -> the value that replaces it for the next microbatch.
        joins: what the optimizer's update joins.
        optimizer_bytes: of optimizer state that belongs to no parameter (step counts, a state of all parameters in one
            vector), whole on every device.
    """

    name: str
    microbatch: int
    classes: dict[str, BlockClass]
    blocks: tuple[Block, ...]
    values: dict[str, Tensor]
    batch_dims: dict[str, int | None]
    params: dict[str, Parameter]
    loss: tuple[str, ...]
    results: tuple[str, ...]
    carried: Mapping[str, str] = field(default_factory=dict)
    joins: UpdateJoins = field(default_factory=UpdateJoins)
    optimizer_bytes: int = 0
    _held: dict[tuple[int, int], dict[str, tuple[int, bool]]] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )
    _runs: dict[tuple[int, int], tuple[Run, ...]] = field(default_factory=dict, init=False, repr=False, compare=False)
    _first: dict[tuple[int, int], dict[str, tuple[str, str]]] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    @cached_property
    def parameter_elements(self) -> int:
        """Of all parameters together."""
        return sum(p.elements for p in self.params.values())

    @cached_property
    def layered(self) -> frozenset[str]:
        """Classes whose blocks are layers of a scan: they read items of stacked parameters."""
        return frozenset(
            block.class_key
            for block in self.blocks
            if any(source.index is not None and source.value in self.params for source in block.inputs)
        )

    def held_elements(self, start: int, stop: int) -> Mapping[str, tuple[int, bool]]:
        """Parameters that blocks ``start..stop-1`` read: how many elements, and whether the leaf as a whole."""
        if (start, stop) not in self._held:
            items: dict[str, set[int | None]] = {}
            for block in self.blocks[start:stop]:
                for source in block.inputs:
                    if source.value in self.params:
                        items.setdefault(source.value, set()).add(source.index)
            self._held[start, stop] = {name: self._elements_of(name, own) for name, own in items.items()}
        return self._held[start, stop]

    def runs(self, start: int, stop: int) -> tuple[Run, ...]:
        """The runs of blocks ``start..stop-1``, in order."""
        if (start, stop) not in self._runs:
            found: list[Run] = []
            for at in range(start, stop):
                key = self.blocks[at].class_key
                layered = key in self.layered
                if found and layered and found[-1].key == key:
                    found[-1] = Run(key, found[-1].start, at + 1, True)
                else:
                    found.append(Run(key, at, at + 1, layered))
            self._runs[start, stop] = tuple(found)
        return self._runs[start, stop]

    def first_reads(self, start: int, stop: int) -> Mapping[str, tuple[str, str]]:
        """Batch and state leaves that blocks ``start..stop-1`` read -> (class, input) of the first reader."""
        if (start, stop) not in self._first:
            found: dict[str, tuple[str, str]] = {}
            for block in self.blocks[start:stop]:
                for name, source in zip(self.classes[block.class_key].inputs, block.inputs, strict=True):
                    value = self.values.get(source.value)
                    if value is not None and value.role in ("batch", "state"):
                        found.setdefault(source.value, (block.class_key, name))
            self._first[start, stop] = found
        return self._first[start, stop]

    def _elements_of(self, name: str, items: Set[int | None]) -> tuple[int, bool]:
        shape, whole = self.params[name].shape, None in items
        return self.params[name].elements if whole else math.prod(shape[1:]) * len(items), whole

    @property
    def forward_flops(self) -> float:
        return sum(self.classes[b.class_key].flops for b in self.blocks)

    @property
    def step_flops(self) -> float:
        """FLOPs of one microbatch's forward and backward pass, nothing recomputed."""
        return sum(self.classes[b.class_key].flops + self.classes[b.class_key].backward_flops for b in self.blocks)


def derived_from_parameters(ops: Iterable[Op], tensors: Mapping[str, Tensor]) -> frozenset[str]:
    """Names of tensors that fused ops and views make of parameters alone (a weight cast to bfloat16, a broadcast bias).

    They are never kept for the backward pass: their readers make them again from the parameter, gathering included.
    """
    derived: set[str] = set()
    for op in ops:
        names = [name for name in op.inputs if name]
        weights = [name for name in names if tensors[name].role == "param" or name in derived]
        if names and len(weights) == len(names) and (op.fuses or op.work == "view") and op.scope < 0:
            derived.update(op.outputs)
    return frozenset(derived)
