"""The passes of a block class as exported programs of one device.

Layers that the model runs in a loop are timed in one: parameters are then slices of stacks, and what the backward pass
keeps and the gradients it makes are written to stacks, which costs copies wherever a compiler cannot write in place.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import jaxpr_as_fun

from planner.frontend import jax_compat as jc
from planner.frontend.blocks import BlockClass
from planner.frontend.flat import Constant, Program, Value
from planner.frontend.op_programs import serialised


@dataclass(frozen=True)
class LayerLoop:
    """A scan over equal blocks.

    Attributes:
        kinds, reverse: as in `block_builder.Run`.
        length: blocks, two or more.
    """

    kinds: tuple[str, ...]
    length: int
    reverse: bool = False

    @property
    def carries(self) -> int:
        return self.kinds.count("carry")

    def run(self, program: Program, given: Sequence[Any]) -> list[Any]:
        """The last block's carries, and the stacks of what each block makes beside them."""

        def of(kind: str) -> list[Any]:
            return [one for one, its in zip(given, self.kinds, strict=True) if its == kind]

        def body(state: list[Any], xs: list[Any]) -> tuple[list[Any], list[Any]]:
            sources = {"const": iter(consts), "carry": iter(state), "stacked": iter(xs)}
            outs = evaluate(program, [next(sources[kind]) for kind in self.kinds])
            return outs[: self.carries], outs[self.carries :]

        consts = of("const")
        last, stacks = lax.scan(body, of("carry"), of("stacked"), length=self.length, reverse=self.reverse)
        return [*last, *stacks]

    def inputs(self, each: Sequence[jax.ShapeDtypeStruct]) -> list[jax.ShapeDtypeStruct]:
        """What the loop takes where a block takes `each`."""
        return [self._stack(one) if kind == "stacked" else one for one, kind in zip(each, self.kinds, strict=True)]

    def outputs(self, each: Sequence[jax.ShapeDtypeStruct]) -> list[jax.ShapeDtypeStruct]:
        """What the loop makes where a block makes `each`."""
        return [*each[: self.carries], *(self._stack(one) for one in each[self.carries :])]

    def _stack(self, one: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((self.length, *one.shape), one.dtype)


@dataclass(frozen=True, eq=False)
class _Leaf:
    """Something that the backward pass keeps: an input by its position, else a value that F makes, by its place."""

    input: int | None
    place: int


class Passes:
    """F and the backward passes of a class, or of a loop over blocks of it.

    The forward pass is traced once, with its residuals as results: those that are inputs themselves are taken from the
    inputs again, not handed over.
    """

    def __init__(self, cls: BlockClass, loop: LayerLoop | None = None):
        self.program, self.loop = cls.program, loop
        self.raw = [_raw(value.aval) for value in cls.program.inputs]
        made = [_raw(operand.aval) for operand in cls.program.outputs]
        if loop is not None:
            self.raw, made = loop.inputs(self.raw), loop.outputs(made)
        tensors = [cls.tensors[value.name] for value in cls.program.inputs]
        self.moving = [
            at
            for at, (tensor, value) in enumerate(zip(tensors, cls.program.inputs, strict=True))
            if tensor.needs_grad and jnp.issubdtype(value.aval.dtype, jnp.inexact)
        ]
        self.activations = [i for i, at in enumerate(self.moving) if tensors[at].role != "param"]
        self.pulled = [
            at
            for at, operand in enumerate(cls.program.outputs)
            if isinstance(operand, Value) and jnp.issubdtype(operand.aval.dtype, jnp.inexact)
        ]
        self.cotangents = [made[at] for at in self.pulled]
        self.tree: Any = None
        self.closed = jax.make_jaxpr(self._trace)(*self.raw)
        outs = self.closed.jaxpr.outvars
        first = len(self.program.outputs)
        places = {id(var): i for i, var in enumerate(self.closed.jaxpr.invars)}
        handed: dict[int, int] = {}
        self.leaves = []
        for at, var in enumerate(outs[first:], first):
            given = places.get(id(var))
            self.leaves.append(_Leaf(given, at if given is not None else handed.setdefault(id(var), at)))
        self.kept = sorted({leaf.place for leaf in self.leaves if leaf.input is None})
        read = {leaf.input for leaf in self.leaves if leaf.input is not None}
        self.taken = sorted(read)
        read_again = [self.raw[at] for at in self.taken if tensors[at].role != "param"]
        self.saved_bytes = sum(one.dtype.itemsize * prod(one.shape) for one in read_again)
        self.saved_bytes += sum(outs[at].aval.dtype.itemsize * prod(outs[at].aval.shape) for at in self.kept)

    def _run(self, given: Sequence[Any]) -> list[Any]:
        return evaluate(self.program, given) if self.loop is None else self.loop.run(self.program, given)

    def _trace(self, *given: Any) -> list[Any]:
        given_list = list(given)

        def inexact(*moved: Any) -> tuple[list[Any], list[Any]]:
            for at, array in zip(self.moving, moved, strict=True):
                given_list[at] = array
            results = self._run(given_list)
            return [results[at] for at in self.pulled], results

        if not self.moving:
            return self._run(given_list)
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

        ahead = serialised(forward, self.raw, platforms)
        if not self.moving or not self.cotangents:
            return ahead, None, None
        outs = self.closed.jaxpr.outvars
        arguments = [
            *(self.raw[at] for at in self.taken),
            *(jax.ShapeDtypeStruct(outs[at].aval.shape, outs[at].aval.dtype) for at in self.kept),
            *self.cotangents,
        ]
        whole = serialised(backward(range(len(self.moving))), arguments, platforms)
        if not self.activations:
            return ahead, whole, None
        if len(self.activations) == len(self.moving):
            return ahead, whole, whole
        return ahead, whole, serialised(backward(self.activations), arguments, platforms)


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


def _raw(aval: Any) -> jax.ShapeDtypeStruct:
    if jc.is_key(aval.dtype):
        return jax.eval_shape(jax.random.key_data, jax.ShapeDtypeStruct(aval.shape, aval.dtype))
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype)
