"""The ops of a block as a compiler for GPUs and TPUs runs them: kernels, casts between specs among them."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from costmodel.graph import BlockClass, Op, Tensor
from costmodel.sharding import Spec, Strategy, cast, operand_spec, result_spec

Value = tuple[str, Spec]  # a tensor in one spec
Floats = NDArray[np.float64]
_HEAVY = ("matmul", "conv", "opaque")
_EXPONENTIAL = frozenset({"exp", "exp2", "expm1"})
_COSTLY = frozenset({"tanh", "erfc", "pow"})


@dataclass(frozen=True)
class Kernel:
    """An op, or a cast between specs.

    Attributes:
        reads, makes: values; `saves`: those that the backward pass reads.
        fused: leaves nothing in memory itself.
        heavy: takes its operands from memory: products, convolutions, collectives, ops that are not known.
        convolves, reduces, exponential: what it does. costly: its elements are not computed twice.
        rowwise: reduces the last dims of its operand. recasts: its result has the elements of its operand.
        scatters: its operand's cotangent is a scatter into zeros.
    """

    reads: tuple[Value, ...]
    makes: tuple[Value, ...]
    fused: bool
    heavy: bool
    saves: frozenset[Value] = frozenset()
    convolves: bool = False
    reduces: bool = False
    exponential: bool = False
    costly: bool = False
    rowwise: bool = False
    recasts: bool = False
    scatters: bool = False


@dataclass(frozen=True)
class BlockKernels:
    """The kernels of one block class under one assignment: the same for microbatches and mesh axes of any size.

    Attributes:
        cls: the class, of whose tensors no size is read but in `value_bytes`.
        inputs: spec in which the block takes each input.
        derived: tensors made of parameters alone.
        triton: whether the compiler makes Triton kernels of softmaxes and norms.
        whole: whether one program of a GPU has both passes of the block, which is no layer of a scan.
        fast: whether the device's memory is so fast that less is computed again.
    """

    cls: BlockClass
    kernels: tuple[Kernel, ...]
    inputs: Mapping[str, Spec]
    derived: frozenset[str]
    triton: bool = False
    whole: bool = False
    fast: bool = False

    @cached_property
    def values(self) -> dict[Value, int]:
        """Inputs, then what kernels make in order -> their positions."""
        return {value: at for at, value in enumerate(dict.fromkeys((*self.inputs.items(), *self.maker)))}

    @cached_property
    def _tensors(self) -> NDArray[np.int64]:
        """Of each value, the position of its tensor in the class."""
        order = {name: at for at, name in enumerate(self.cls.tensors)}
        return np.array([order[name] for name, _ in self.values], dtype=np.int64)

    @cached_property
    def _splits(self) -> NDArray[np.bool_]:
        """Which mesh axes split each value, (values, axes)."""
        return np.array([[code >= 0 for code in spec] for _, spec in self.values], dtype=bool)

    def value_bytes(self, cls: BlockClass, mesh: tuple[int, ...]) -> Floats:
        """Bytes of each value on one device.

        Args:
            cls: the class at some microbatch size.
            mesh: with the axes of the kernels' own.
        """
        parts = np.where(self._splits, np.array(mesh, dtype=np.int64), 1).prod(axis=1)
        return cls.tensor_bytes[self._tensors] / parts

    @cached_property
    def itemsizes(self) -> Floats:
        """Bytes of an element of each value."""
        return np.array([self.cls.tensors[name].itemsize for name, _ in self.values], dtype=np.float64)

    @cached_property
    def readers(self) -> dict[Value, list[int]]:
        """Value -> positions of the kernels that read it, in order."""
        found: dict[Value, list[int]] = {}
        for at, kernel in enumerate(self.kernels):
            for value in kernel.reads:
                found.setdefault(value, []).append(at)
        return found

    @cached_property
    def maker(self) -> dict[Value, int]:
        """Value -> position of the kernel that makes it; inputs have none."""
        return {value: at for at, kernel in enumerate(self.kernels) for value in kernel.makes}

    def is_stored(self, value: Value) -> bool:
        """Whether it is a parameter or a constant as the block takes it."""
        return self.cls.tensors[value[0]].role in ("param", "const")

    def is_weight(self, value: Value) -> bool:
        return self.is_stored(value) or value[0] in self.derived

    def needs_grad(self, value: Value) -> bool:
        return self.cls.tensors[value[0]].needs_grad

    @cached_property
    def differentiated(self) -> frozenset[Value]:
        """Values that get a cotangent and are no weights."""
        return frozenset(v for v in self.values if self.needs_grad(v) and not self.is_weight(v))

    def runs_backward(self, kernel: Kernel) -> bool:
        return any(self.needs_grad(v) for v in kernel.makes)

    def trains(self, kernel: Kernel) -> bool:
        """Whether it makes something of a weight and of what is no weight, and the weight gets a gradient of it."""
        weighted = any(self.is_weight(v) and self.needs_grad(v) for v in kernel.reads)
        return weighted and not all(self.is_weight(v) for v in kernel.makes)


def kernels_of(
    cls: BlockClass, mesh: tuple[int, ...], strategies: Mapping[str, Strategy], inputs: Mapping[str, Spec]
) -> tuple[Kernel, ...]:
    """The kernels of a block in order, each op after the casts of its operands.

    Args:
        strategies: of every op; inputs: spec in which the block takes each input.
    """
    made: dict[str, Spec] = dict(inputs)
    there: set[Value] = set(made.items())
    out: list[Kernel] = []
    for op in cls.ops:
        strategy, reads = strategies[op.name], []
        for i, name in enumerate(op.inputs):
            if not name:
                continue
            value = (name, operand_spec(op, i, strategy))
            source = (name, made.get(name, value[1]))
            if value not in there:
                there.add(value)
                moves = _moves(cls.tensors[name], source[1], value[1], mesh)
                out.append(Kernel((source,), (value,), fused=not moves, heavy=moves, recasts=True))
            reads.append(value)
        makes = [(name, result_spec(op, i, strategy)) for i, name in enumerate(op.outputs)]
        made.update(makes)
        there.update(makes)
        out.append(_kernel(op, tuple(reads), tuple(makes)))
    return tuple(out)


def _moves(tensor: Tensor, source: Spec, target: Spec, mesh: tuple[int, ...]) -> bool:
    """Whether a cast is a collective."""
    steps = cast(tensor.shape, tensor.itemsize, source, target, mesh) or ()
    return any(step.forward for step in steps)


def names_in_memory(cls: BlockClass) -> frozenset[str]:
    """What lies in memory (L1 and L2 of `in_memory`) by name, before anything is split: casts aside."""
    found = {n for n in cls.outputs if n} | set(cls.inputs)
    for op in cls.ops:
        found.update(op.outputs if not _fused(op) else ())
        found.update(n for n in op.inputs if n and op.work in _HEAVY)
    return frozenset(found)


def _kernel(op: Op, reads: tuple[Value, ...], makes: tuple[Value, ...]) -> Kernel:
    specs = dict([*reads, *makes])
    return Kernel(
        reads,
        makes,
        fused=_fused(op),
        heavy=op.work in _HEAVY,
        saves=frozenset((n, specs[n]) for n in op.saves if n in specs),
        convolves=op.work == "conv",
        reduces=op.work == "reduce",
        exponential=op.primitive in _EXPONENTIAL,
        costly=op.primitive in _COSTLY,
        rowwise=op.work == "reduce" and op.out_dims[0] == op.in_dims[0][: len(op.out_dims[0])],
        recasts=op.work == "view" or op.primitive == "convert_element_type",
        scatters=any(t.by_index and t.position >= 0 for t in op.touches),
    )


def _fused(op: Op) -> bool:
    return (op.fuses or op.work == "view") and op.work != "reduce"


__all__ = ["BlockKernels", "Floats", "Kernel", "Value", "kernels_of", "names_in_memory"]
