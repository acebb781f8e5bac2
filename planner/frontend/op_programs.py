"""The ops of captured models as exported programs, for a profiler that knows nothing of captures.

For each distinct `Op.key` one equation is exported whole, on one device: its value, and where the model needs
cotangents of it, its value with them. Heavy ops only: products, convolutions, gathers, scatters, sorts and loops of any
size; elementwise and reducing ops from a megabyte on. Views and random bits are left out.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
from jax import export

from costmodel.graph import Op
from planner.frontend import jax_compat as jc
from planner.frontend.blocks import BlockClass
from planner.frontend.capture import Capture
from planner.frontend.flat import Constant, Equation, Value
from profiles.opbench import OpProgram

SMALLEST_BYTES = 1 << 20
"""Elementwise ops and reductions that move less are left to the roofline."""

MOST_PROGRAMS = 48

_BALANCE = 10.0
"""FLOPs that take about as long as a byte of traffic, for ranking only."""


@dataclass(frozen=True, eq=False)
class _Use:
    equation: Equation
    op: Op
    cls: BlockClass
    microbatch: int
    memory_bytes: int


def op_programs(
    captures: Capture | Iterable[Capture],
    *,
    platforms: Sequence[str] | None = None,
    most: int = MOST_PROGRAMS,
    smallest_bytes: int = SMALLEST_BYTES,
) -> tuple[OpProgram, ...]:
    """Programs of the heavy ops, heaviest first.

    Args:
        captures: of one model at the microbatch sizes of interest: keys hold shapes.
        platforms: what to export for (``cpu``, ``cuda``, ``rocm``, ``tpu``); the default backend's if None.
        most: how many keys to export.
        smallest_bytes: what an elementwise op or a reduction must move to be exported.

    Returns:
        One program a key. An op that does not export is there with its `problem`.
    """
    listed = (captures,) if isinstance(captures, Capture) else tuple(captures)
    counts: Counter[str] = Counter()
    first: dict[str, _Use] = {}
    for size, block in ((one.microbatch, block) for one in listed for block in one.blocks):
        for equation in block.cls.program.equations:
            op = block.cls.ops[equation.name]
            memory_bytes = _moved_bytes(equation)
            if _is_heavy(op, memory_bytes, smallest_bytes):
                counts[op.key] += 1
                first.setdefault(op.key, _Use(equation, op, block.cls, size, memory_bytes))

    def weight(key: str) -> float:
        use = first[key]
        return counts[key] * max(use.op.flops, _BALANCE * use.memory_bytes)

    ranked = sorted(first, key=lambda key: (-weight(key), key))[:most]
    return tuple(_program(key, first[key], counts[key], platforms) for key in ranked)


def _is_heavy(op: Op, memory_bytes: int, smallest_bytes: int) -> bool:
    if op.work in ("view", "random") or not any(op.inputs):
        return False
    return memory_bytes >= smallest_bytes or (op.work in ("matmul", "conv", "data", "opaque") and not op.fuses)


def _moved_bytes(equation: Equation) -> int:
    operands = [one for one in equation.inputs if isinstance(one, Value)]
    return sum(prod(one.shape) * jc.itemsize(one.aval.dtype) for one in (*operands, *equation.outputs))


def _program(key: str, use: _Use, count: int, platforms: Sequence[str] | None) -> OpProgram:
    facts = {
        "key": key,
        "count": count,
        "microbatch": use.microbatch,
        "flops": use.op.flops,
        "memory_bytes": use.memory_bytes,
        "dtype": next(str(one.aval.dtype) for one in use.equation.inputs if isinstance(one, Value)),
    }
    try:
        forward, backward = export_op(use.equation, _wanted(use), platforms)
    except Exception as error:
        # Whatever a primitive's tracing or lowering throws: the profile records it as a gap.
        text = str(error).strip().splitlines()
        problem = f"not exported: {type(error).__name__}: {text[0] if text else ''}"
        return OpProgram(problem=problem, **facts)
    return OpProgram(forward=forward, forward_backward=backward, below=_below(use.equation), **facts)


def _wanted(use: _Use) -> tuple[int, ...]:
    """Operands whose cotangents the model needs."""
    tensors = use.cls.tensors
    if not any(tensors[value.name].needs_grad for value in use.equation.outputs):
        return ()
    return tuple(
        at
        for at, operand in enumerate(use.equation.inputs)
        if isinstance(operand, Value)
        and tensors[operand.name].needs_grad
        and jnp.issubdtype(operand.aval.dtype, jnp.inexact)
    )


def export_op(
    equation: Equation, wanted: Sequence[int], platforms: Sequence[str] | None = None
) -> tuple[bytes, bytes | None]:
    """One equation as two serialised programs of its operands that are values.

    Args:
        wanted: operands whose cotangents the second program gives.
        platforms: what to export for.

    Returns:
        ``operands -> results``; and ``(operands, cotangents of inexact results) -> (results, cotangents of wanted)`` or
        None where none is wanted. Constants stand inside; PRNG keys are arguments and results as raw words.
    """
    places = [at for at, operand in enumerate(equation.inputs) if isinstance(operand, Value)]
    dtypes = {at: equation.inputs[at].aval.dtype for at in places}
    keys = {at: jc.key_implementation(dtype) for at, dtype in dtypes.items() if jc.is_key(dtype)}

    def run(*given: Any) -> list[Any]:
        operands = [_constant(one) if isinstance(one, Constant) else None for one in equation.inputs]
        for at, array in zip(places, given, strict=True):
            operands[at] = jax.random.wrap_key_data(array, impl=keys[at]) if at in keys else array
        results = jc.bind(equation.primitive, operands, equation.params)
        return [jax.random.key_data(one) if jc.is_key(one.dtype) else one for one in results]

    def run_backward(*given: Any) -> list[Any]:
        operands, cotangents = list(given[: len(places)]), given[len(places) :]
        moving = [places.index(at) for at in wanted]

        def inexact(*moved: Any) -> tuple[list[Any], list[Any]]:
            for at, array in zip(moving, moved, strict=True):
                operands[at] = array
            results = run(*operands)
            return [one for one in results if jnp.issubdtype(one.dtype, jnp.inexact)], results

        _, pull, results = jax.vjp(inexact, *[operands[at] for at in moving], has_aux=True)
        return [*results, *pull(list(cotangents))]

    arguments = [_abstract(equation.inputs[at].aval) for at in places]
    forward = serialised(run, arguments, platforms)
    if not wanted:
        return forward, None
    cotangents = [_abstract(one.aval) for one in equation.outputs if jnp.issubdtype(one.aval.dtype, jnp.inexact)]
    return forward, serialised(run_backward, [*arguments, *cotangents], platforms)


def serialised(function: Any, arguments: Sequence[Any], platforms: Sequence[str] | None) -> bytes:
    """A function of such arguments as an exported program; for the default backend where `platforms` is None."""
    exported = export.export(jax.jit(function), platforms=None if platforms is None else list(platforms))
    return bytes(exported(*arguments).serialize())


def _constant(operand: Constant) -> Any:
    if jc.is_key(operand.aval.dtype):
        return operand.value
    return jnp.asarray(operand.value, operand.aval.dtype)


def _abstract(aval: Any) -> jax.ShapeDtypeStruct:
    """An argument's shape and dtype; a PRNG key's as its raw words."""
    if jc.is_key(aval.dtype):
        return jax.eval_shape(jax.random.key_data, jax.ShapeDtypeStruct(aval.shape, aval.dtype))
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype)


def _below(equation: Equation) -> tuple[int, ...]:
    """What integer operands stay below: for indices the size of the dims that they index, else 2."""
    indexed = {"gather": (0, 1), "scatter": (0, 1), "scatter-add": (0, 1), "scatter_add": (0, 1)}
    table, index = indexed.get(equation.primitive.name, (0, -1))
    bounds = []
    for at, operand in enumerate(equation.inputs):
        if isinstance(operand, Value):
            bounds.append(index_bound(equation, table) if at == index else 2)
    return tuple(bounds)


def index_bound(equation: Equation, table: int) -> int:
    """What the indices of a gather or scatter stay below; `table` is the position of what they index."""
    numbers = equation.params["dimension_numbers"]
    dims = getattr(numbers, "start_index_map", None) or getattr(numbers, "scatter_dims_to_operand_dims", ())
    shape = equation.inputs[table].aval.shape
    return min((shape[dim] for dim in dims), default=2)
