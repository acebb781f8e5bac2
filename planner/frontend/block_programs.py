"""The block classes of captured models as exported programs, for a profiler that knows nothing of captures.

Of each class, whole and on one device: F makes its results and what the backward pass keeps; the backward pass makes
all cotangents of it, or those of activations alone (B), so that W is the difference; the update is the optimizer's, of
the parameters that one block reads.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import export
from jax.extend.core import jaxpr_as_fun

from planner.frontend import jax_compat as jc
from planner.frontend.blocks import BlockClass
from planner.frontend.capture import Capture
from planner.frontend.flat import Constant, Program, Value
from planner.frontend.op_programs import index_bound
from profiles.blockbench import BlockProgram


def block_programs(
    captures: Capture | Iterable[Capture], *, platforms: Sequence[str] | None = None
) -> tuple[BlockProgram, ...]:
    """Programs of every block class.

    Args:
        captures: of one model at the microbatch sizes of interest.
        platforms: what to export for (``cpu``, ``cuda``, ``rocm``, ``tpu``); the default backend's if None.

    Returns:
        One entry a class and size. A class that does not export is there with its `problem`.
    """
    listed = (captures,) if isinstance(captures, Capture) else tuple(captures)
    return tuple(_program(one, key, platforms) for one in listed for key in one.classes)


def _program(capture: Capture, key: str, platforms: Sequence[str] | None) -> BlockProgram:
    cls = capture.classes[key]
    counts = Counter(block.cls.key for block in capture.blocks)
    values = [*cls.program.inputs, *(v for v in cls.program.outputs if isinstance(v, Value))]
    facts: dict[str, Any] = {
        "block_class": key,
        "name": next((block.name for block in capture.blocks if block.cls.key == key), key),
        "microbatch": capture.microbatch,
        "count": counts[key],
        "flops": cls.flops,
        "memory_bytes": sum(prod(v.shape) * jc.itemsize(v.aval.dtype) for v in values),
        "dtype": _dtype(cls),
        "below": _below(cls),
    }
    try:
        passes = _Passes(cls)
        forward, backward, activations = passes.exported(platforms)
        facts |= {"saved_bytes": passes.saved_bytes, "taken": tuple(passes.taken)}
    except Exception as error:  # whatever a primitive's tracing or lowering throws: the profile records it as a gap
        return BlockProgram(problem=_not_exported(error), **facts)
    try:
        update = _update(capture, cls, platforms)
    except Exception as error:  # the user's optimizer, given the parameters of one block alone
        return BlockProgram(
            forward=forward,
            backward=backward,
            backward_activations=activations,
            update_problem=_not_exported(error),
            **facts,
        )
    return BlockProgram(forward=forward, backward=backward, backward_activations=activations, update=update, **facts)


def _not_exported(error: Exception) -> str:
    text = str(error).strip().splitlines()
    return f"not exported: {type(error).__name__}: {text[0] if text else ''}"


def _dtype(cls: BlockClass) -> str:
    """That of the products; of the first floating input where there are none."""
    for equation in cls.program.equations:
        if cls.ops[equation.name].work in ("matmul", "conv"):
            return next(str(one.aval.dtype) for one in equation.inputs if isinstance(one, Value))
    floats = (str(v.aval.dtype) for v in cls.program.inputs if jnp.issubdtype(v.aval.dtype, jnp.floating))
    return next(floats, "float32")


def _below(cls: BlockClass) -> int:
    """What integers in a block stay below: the size of the smallest dim that is indexed, else 2."""
    bounds = [
        index_bound(e, 0) for e in cls.program.equations if e.primitive.name in ("gather", "scatter", "scatter-add")
    ]
    return min((bound for bound in bounds if bound > 1), default=2)


@dataclass(frozen=True, eq=False)
class _Leaf:
    """Something that the backward pass keeps: an input by its position, else a value that F makes, by its place."""

    input: int | None
    place: int


class _Passes:
    """F and the backward passes of a class.

    The forward pass is traced once, with its residuals as results: those that are inputs themselves are taken from the
    inputs again, not handed over.
    """

    def __init__(self, cls: BlockClass):
        self.program = cls.program
        self.raw = [_raw(value.aval) for value in cls.program.inputs]
        tensors = [cls.tensors[value.name] for value in cls.program.inputs]
        self.moving = [
            at
            for at, (tensor, value) in enumerate(zip(tensors, cls.program.inputs, strict=True))
            if tensor.needs_grad and jnp.issubdtype(value.aval.dtype, jnp.inexact)
        ]
        self.activations = [i for i, at in enumerate(self.moving) if tensors[at].role != "param"]
        self.cotangents = [
            jax.ShapeDtypeStruct(o.aval.shape, o.aval.dtype)
            for o in cls.program.outputs
            if isinstance(o, Value) and jnp.issubdtype(o.aval.dtype, jnp.inexact)
        ]
        self.tree: Any = None
        self.closed = jax.make_jaxpr(self._trace)(*self.raw)
        outs = self.closed.jaxpr.outvars
        first = len(self.program.outputs)
        places = {id(var): i for i, var in enumerate(self.closed.jaxpr.invars)}
        made: dict[int, int] = {}
        self.leaves = []
        for at, var in enumerate(outs[first:], first):
            given = places.get(id(var))
            self.leaves.append(_Leaf(given, at if given is not None else made.setdefault(id(var), at)))
        self.kept = sorted({leaf.place for leaf in self.leaves if leaf.input is None})
        read = {leaf.input for leaf in self.leaves if leaf.input is not None}
        self.taken = sorted(read)
        inputs = sum(
            jc.itemsize(tensors_aval.dtype) * prod(tensors_aval.shape)
            for at in self.taken
            if tensors[at].role != "param"
            for tensors_aval in (self.program.inputs[at].aval,)
        )
        self.saved_bytes = inputs + sum(outs[at].aval.dtype.itemsize * prod(outs[at].aval.shape) for at in self.kept)

    def _trace(self, *given: Any) -> list[Any]:
        given_list = list(given)

        def inexact(*moved: Any) -> tuple[list[Any], list[Any]]:
            for at, array in zip(self.moving, moved, strict=True):
                given_list[at] = array
            results = evaluate(self.program, given_list)
            return [one for one in results if jnp.issubdtype(one.dtype, jnp.inexact)], results

        if not self.moving:
            return evaluate(self.program, given_list)
        _, pull, results = jax.vjp(inexact, *[given_list[at] for at in self.moving], has_aux=True)
        leaves, self.tree = jax.tree.flatten(pull)
        return [*results, *leaves]

    def exported(self, platforms: Sequence[str] | None) -> tuple[bytes, bytes | None, bytes | None]:
        """F, the whole backward pass, and B."""
        first = len(self.program.outputs)
        run = jaxpr_as_fun(self.closed)

        def forward(*given: Any) -> list[Any]:
            results = run(*given)
            return [*results[:first], *(results[at] for at in self.kept)]

        def backward(wanted: Sequence[int]) -> Callable[..., list[Any]]:
            def pull_back(*given: Any) -> list[Any]:
                inputs = dict(zip(self.taken, given, strict=False))
                made = dict(zip(self.kept, given[len(self.taken) :], strict=False))
                cotangents = list(given[len(self.taken) + len(self.kept) :])
                leaves = [made[leaf.place] if leaf.input is None else inputs[leaf.input] for leaf in self.leaves]
                found = jax.tree.unflatten(self.tree, leaves)(cotangents)
                return [found[at] for at in wanted]

            return pull_back

        ahead = _serialised(forward, self.raw, platforms)
        if not self.moving or not self.cotangents:
            return ahead, None, None
        outs = self.closed.jaxpr.outvars
        arguments = [
            *(self.raw[at] for at in self.taken),
            *(jax.ShapeDtypeStruct(outs[at].aval.shape, outs[at].aval.dtype) for at in self.kept),
            *self.cotangents,
        ]
        whole = _serialised(backward(range(len(self.moving))), arguments, platforms)
        if not self.activations:
            return ahead, whole, None
        if len(self.activations) == len(self.moving):
            return ahead, whole, whole
        return ahead, whole, _serialised(backward(self.activations), arguments, platforms)


def evaluate(program: Program, given: Sequence[Any]) -> list[Any]:
    """Runs a block's program on arrays (PRNG keys as raw words); results likewise."""
    values: dict[Value, Any] = {
        value: jax.random.wrap_key_data(array, impl=jc.key_implementation(value.aval.dtype))
        if jc.is_key(value.aval.dtype)
        else array
        for value, array in zip(program.inputs, given, strict=True)
    }
    values |= {value: jc.array(array, value.aval) for value, array in program.constants.items()}

    def read(operand: Any) -> Any:
        if isinstance(operand, Value):
            return values[operand]
        assert isinstance(operand, Constant)
        return operand.value if jc.is_key(operand.aval.dtype) else jnp.asarray(operand.value, operand.aval.dtype)

    for equation in program.equations:
        results = jc.bind(equation.primitive, [read(one) for one in equation.inputs], equation.params)
        values.update(zip(equation.outputs, results, strict=True))
    outputs = [read(one) for one in program.outputs]
    return [jax.random.key_data(one) if jc.is_key(one.dtype) else one for one in outputs]


def _update(capture: Capture, cls: BlockClass, platforms: Sequence[str] | None) -> bytes | None:
    """The optimizer's update of the parameters that one block reads; None where it trains none."""
    params = {
        value.name: jax.ShapeDtypeStruct(value.aval.shape, value.aval.dtype)
        for value in cls.program.inputs
        if cls.tensors[value.name].role == "param" and cls.tensors[value.name].needs_grad
    }
    if not params:
        return None
    optimizer = capture.task.optimizer
    state = jax.eval_shape(optimizer.init, params)
    arguments, tree = jax.tree.flatten((params, params, state))

    def update(*leaves: Any) -> list[Any]:
        values, gradients, old = jax.tree.unflatten(tree, leaves)
        changes, new = optimizer.update(gradients, old, values)
        return jax.tree.leaves((optax.apply_updates(values, changes), new))

    return _serialised(update, arguments, platforms)


def _raw(aval: Any) -> jax.ShapeDtypeStruct:
    if jc.is_key(aval.dtype):
        return jax.eval_shape(jax.random.key_data, jax.ShapeDtypeStruct(aval.shape, aval.dtype))
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype)


def _serialised(function: Any, arguments: Sequence[Any], platforms: Sequence[str] | None) -> bytes:
    exported = export.export(jax.jit(function), platforms=None if platforms is None else list(platforms))
    return bytes(exported(*arguments).serialize())
