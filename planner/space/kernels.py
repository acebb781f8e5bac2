"""The ops of a block as a compiler for GPUs and TPUs runs them: kernels, casts between specs among them."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from costmodel.graph import BlockClass, Op
from costmodel.sharding import Spec, Strategy, cast, operand_spec, result_spec, split_factor

Value = tuple[str, Spec]  # a tensor in one spec
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
    """The kernels of one block class under one assignment.

    Attributes:
        strategies: of every op; inputs: spec in which the block takes each input.
        derived: tensors made of parameters alone.
        triton: whether the compiler makes Triton kernels of softmaxes and norms.
        whole: whether one program of a GPU has both passes of the block, which is no layer of a scan.
        fast: whether the device's memory is so fast that less is computed again.
    """

    cls: BlockClass
    mesh: tuple[int, ...]
    strategies: Mapping[str, Strategy]
    inputs: Mapping[str, Spec]
    derived: frozenset[str]
    triton: bool = False
    whole: bool = False
    fast: bool = False

    @cached_property
    def kernels(self) -> tuple[Kernel, ...]:
        """In order, each op after the casts of its operands."""
        made: dict[str, Spec] = dict(self.inputs)
        there: set[Value] = set(made.items())
        out: list[Kernel] = []
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
                    out.append(Kernel((source,), (value,), fused=not moves, heavy=moves, recasts=True))
                reads.append(value)
            makes = [(name, result_spec(op, i, strategy)) for i, name in enumerate(op.outputs)]
            made.update(makes)
            there.update(makes)
            out.append(_kernel(op, tuple(reads), tuple(makes)))
        return tuple(out)

    def _moves(self, name: str, source: Spec, target: Spec) -> bool:
        tensor = self.cls.tensors[name]
        steps = cast(tensor.shape, tensor.itemsize, source, target, self.mesh) or ()
        return any(step.forward for step in steps)

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

    def bytes_of(self, value: Value) -> float:
        return self.cls.tensors[value[0]].bytes / split_factor(value[1], self.mesh)

    def is_stored(self, value: Value) -> bool:
        """Whether it is a parameter or a constant as the block takes it."""
        return self.cls.tensors[value[0]].role in ("param", "const")

    def is_weight(self, value: Value) -> bool:
        return self.is_stored(value) or value[0] in self.derived

    def needs_grad(self, value: Value) -> bool:
        return self.cls.tensors[value[0]].needs_grad

    def runs_backward(self, kernel: Kernel) -> bool:
        return any(self.needs_grad(v) for v in kernel.makes)

    def trains(self, kernel: Kernel) -> bool:
        """Whether it makes something of a weight and of what is no weight, and the weight gets a gradient of it."""
        weighted = any(self.is_weight(v) and self.needs_grad(v) for v in kernel.reads)
        return weighted and not all(self.is_weight(v) for v in kernel.makes)


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


__all__ = ["BlockKernels", "Kernel", "Value", "names_in_memory"]
