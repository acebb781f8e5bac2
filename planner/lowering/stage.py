"""One stage's local program: its blocks, run with one device's shards of parameters and values.

Equal blocks that came from a scan run as a scan over their slice of the stacked parameters; others one by one.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from costmodel.graph import Source
from costmodel.sharding import REPLICATED, VARYING, Spec, cast, shifted
from planner.frontend import jax_compat as jc
from planner.frontend.capture import BlockInstance, Capture, Run
from planner.frontend.flat import Value
from planner.lowering.casts import apply_cast
from planner.lowering.placement import GroupPlacement
from planner.lowering.split_backward import border
from planner.lowering.spmd import LocalProgram
from planner.planfile.specs import spec_from_dims

Placed = tuple[Any, Spec]  # one device's part, and its spec


@dataclass(frozen=True)
class HeldParameter:
    """A parameter leaf as a stage holds it.

    Attributes:
        name: its value name; leaf: its place in the task's pytree.
        items: the slice of the leading dim that the stage holds, or None for the whole leaf.
        value: spec between steps; hoisted: spec during the step; optimizer: spec of update and optimizer state;
            gradient: spec of the accumulated gradient; cotangent: spec in which a microbatch's gradient arises.
    """

    name: str
    leaf: int
    trained: bool
    items: tuple[int, int] | None
    shape: tuple[int, ...]
    dtype: Any
    value: Spec
    hoisted: Spec
    gradient: Spec
    optimizer: Spec

    @property
    def cotangent(self) -> Spec:
        return cotangent_of(self.hoisted)

    @property
    def accumulated(self) -> Spec:
        """Spec of the accumulator: where the plan splits the gradient, each microbatch's is scattered (ZeRO-2)."""
        return tuple(g if g >= 0 else c for g, c in zip(self.gradient, self.cotangent, strict=True))


def cotangent_of(spec: Spec) -> Spec:
    """Spec of a value's cotangent: that of a varying value is a pending sum and the other way round."""
    return tuple({VARYING: -3, -3: VARYING}.get(code, code) for code in spec)


@dataclass(frozen=True)
class StageProgram:
    """The blocks of one stage on one group.

    Attributes:
        splits: whether its backward is split into B and W.
    """

    capture: Capture
    placement: GroupPlacement
    blocks: tuple[BlockInstance, ...]
    splits: bool = False

    @cached_property
    def _made(self) -> set[str]:
        return {s.value for b in self.blocks for s in b.outputs}

    @cached_property
    def held(self) -> dict[str, HeldParameter]:
        """Parameters of this stage by value name."""
        found: dict[str, HeldParameter] = {}
        infos = self.capture.inputs
        for name, info in infos.items():
            if info.role != "param":
                continue
            uses = [(b, i, s) for b in self.blocks for i, s in enumerate(b.inputs) if s.value == name]
            if not uses:
                continue
            items = [s.index for _, _, s in uses]
            tensor = self.capture.values[name]
            span = None if None in items else (min(items), max(items) + 1)  # type: ignore[type-var]
            shape = tensor.shape if span is None else (span[1] - span[0], *tensor.shape[1:])
            stored = self.placement.parameters[info.path]
            names = self.placement.axis_names
            value, gradient, optimizer = (
                spec_from_dims(d, names) for d in (stored.value, stored.gradient, stored.optimizer)
            )
            block, i, source = uses[0]
            hoisted = self._class_input(block, i, source)
            leaf = jax.tree.leaves(self.capture.task.params)[info.leaf]
            found[name] = HeldParameter(
                name, info.leaf, info.trained, span, shape, leaf.dtype, value, hoisted, gradient, optimizer
            )
        return found

    def _class_input(self, block: BlockInstance, position: int, source: Source) -> Spec:
        """Spec in which a block's class takes an input, in the dims of the whole value."""
        spec = self.placement.of_class(block.cls.key).inputs[block.cls.program.inputs[position].name]
        return shifted(spec, 1) if source.index is not None else spec

    @cached_property
    def incoming(self) -> dict[str, Spec]:
        """Values made by earlier stages (or model inputs other than parameters), with the spec in which they arrive."""
        found: dict[str, Spec] = {}
        for b in self.blocks:
            for i, source in enumerate(b.inputs):
                if (
                    source.value not in self._made
                    and source.value not in found
                    and source.value not in self.capture.param_inputs
                ):
                    found[source.value] = self._class_input(b, i, source)
        return found

    @cached_property
    def _marks(self) -> bool:
        """Whether values between blocks are marked, so that B makes their cotangents: a stage that receives nothing
        with a cotangent would have no B."""
        arriving = [self.capture.values[n] for n in self.incoming]
        return self.splits and not any(t.needs_grad and t.role == "activation" for t in arriving)

    def _between(self, name: str, x: Any) -> Any:
        """A value as it goes from block to block."""
        moves = self._marks and self.capture.values[name].needs_grad and jnp.issubdtype(x.dtype, jnp.inexact)
        return border(x) if moves else x

    def run(self, env: dict[str, Placed]) -> None:
        """Runs all blocks; `env` holds parameters (hoisted) and incoming values by name, and gets what the blocks
        make."""
        at = 0
        while at < len(self.blocks):
            block = self.blocks[at]
            if block.run < 0:
                self._single(block, env)
                at += 1
                continue
            end = at
            while end < len(self.blocks) and self.blocks[end].run == block.run:
                end += 1
            self._layers(self.blocks[at:end], self.capture.runs[block.run], env)
            at = end

    def _local(self, block: BlockInstance, targets: Sequence[Spec | None] | None) -> Any:
        """The class's program as a function of one device's inputs, wrapped in the planned remat."""
        cls, placed = block.cls, self.placement.of_class(block.cls.key)
        full = placed.remat == "full"
        weights = {v.name for v in cls.program.inputs if cls.tensors[v.name].role == "param"}
        local = LocalProgram(
            program=cls.program,
            ops=cls.ops,
            strategies=placed.strategies,
            mesh=self.placement.sizes,
            axis_names=self.placement.axis_names,
            tensors=cls.tensors,
            regather=frozenset() if full else frozenset(weights),
            again=frozenset() if full else placed.again,
        )
        specs = [placed.inputs[v.name] for v in cls.program.inputs]
        out_specs: list[Spec] = []

        def run(*args: Any) -> list[Any]:
            outs, got = local(args, specs, targets)
            out_specs[:] = got
            return outs

        return (jax.checkpoint(run) if full else run), specs, out_specs

    def _single(self, block: BlockInstance, env: dict[str, Placed]) -> None:
        run, specs, out_specs = self._local(block, None)
        args = [self._input(s, spec, env) for s, spec in zip(block.inputs, specs, strict=True)]
        outs = run(*args)
        for source, x, spec in zip(block.outputs, outs, out_specs, strict=True):
            if source.index is None:
                env[source.value] = (self._between(source.value, x), spec)

    def _input(self, source: Source, spec: Spec, env: dict[str, Placed]) -> Any:
        """One device's part of a block input in the class's spec."""
        x, have = self._lookup(source.value, env)
        if source.index is None:
            return self._cast(source.value, x, have, spec)
        item = x[source.index - self._first_item(source.value)]
        shape = self.capture.values[source.value].shape[1:]
        return cast_on(item, shape, self.capture.values[source.value].itemsize, shifted(have, -1), spec, self.placement)

    def _first_item(self, name: str) -> int:
        """Index of the first item of a stack that this stage has."""
        held = self.held.get(name)
        return held.items[0] if held is not None and held.items is not None else 0

    def _lookup(self, name: str, env: dict[str, Placed]) -> Placed:
        if name not in env:
            value = next(v for v in self.capture.program.constants if v.name == name)
            env[name] = (jnp.asarray(self.capture.program.constants[value]), self.placement.whole)
        return env[name]

    def _cast(self, name: str, x: Any, have: Spec, want: Spec) -> Any:
        tensor = self.capture.values[name]
        return cast_on(x, tensor.shape, tensor.itemsize, have, want, self.placement)

    def _layers(self, blocks: Sequence[BlockInstance], run: Run, env: dict[str, Placed]) -> None:
        first, last = blocks[0], blocks[-1]
        cls = first.cls
        carry = [i for i, k in enumerate(run.kinds) if k == "carry"]
        specs_in = [self.placement.of_class(cls.key).inputs[v.name] for v in cls.program.inputs]
        # A carry leaves each layer as the next one takes it; stacked results leave as they come.
        targets: list[Spec | None] = [
            *(specs_in[i] for i in carry),
            *([None] * (len(cls.program.outputs) - len(carry))),
        ]
        step, specs, out_specs = self._local(first, targets)
        lowest = (
            min(
                b.inputs[i].index
                for b in blocks
                for i in range(len(run.kinds))
                if run.kinds[i] == "stacked" and b.inputs[i].index is not None
            )
            if "stacked" in run.kinds
            else 0
        )
        count = len(blocks)
        consts, state, stacked = [], [], []
        for i, (kind, source) in enumerate(zip(run.kinds, first.inputs, strict=True)):
            if kind != "stacked":
                (consts if kind == "const" else state).append(self._input(Source(source.value), specs[i], env))
                continue
            x, have = self._lookup(source.value, env)
            offset = self._first_item(source.value)
            if x.shape[0] != count:  # whole stacks stay the arrays they are, so that backward gets them as parameters
                x = lax.slice_in_dim(x, lowest - offset, lowest - offset + count, axis=0)
            stacked.append(self._cast_stacked(source.value, x, count, have, shifted(specs[i], 1)))

        def body(state_: list[Any], xs: list[Any]) -> tuple[list[Any], list[Any]]:
            outs = step(*consts, *state_, *xs)
            handed = [self._between(s.value, x) for s, x in zip(last.outputs, outs[: len(carry)], strict=False)]
            return handed, outs[len(carry) :]

        final, results = lax.scan(body, state, stacked, length=count, reverse=run.reverse)
        for j, x in enumerate(final):
            env[last.outputs[j].value] = (x, specs_in[carry[j]])
        for j, x in enumerate(results):
            source = last.outputs[len(carry) + j]
            env[source.value] = (x, shifted(out_specs[len(carry) + j], 1))

    def _cast_stacked(self, name: str, x: Any, count: int, have: Spec, want: Spec) -> Any:
        tensor = self.capture.values[name]
        return cast_on(x, (count, *tensor.shape[1:]), tensor.itemsize, have, want, self.placement)


def cast_on(x: Any, shape: tuple[int, ...], itemsize: int, have: Spec, want: Spec, placement: GroupPlacement) -> Any:
    """One device's part of a value, cast on a group's mesh."""
    if have == want:
        return x
    steps = cast(shape, itemsize, have, want, placement.sizes)
    assert steps is not None, (shape, have, want)
    return apply_cast(x, steps, placement.axis_names, placement.sizes)


def is_invariant(spec: Spec) -> bool:
    return all(code == REPLICATED for code in spec)


def hoist(held: Mapping[str, HeldParameter], params: Mapping[str, Any], placement: GroupPlacement) -> dict[str, Any]:
    """Parameters as the step uses them: varying once, where their gradient is summed once."""
    out = {}
    for name, p in held.items():
        axes = [
            a
            for a, v, h in zip(placement.axis_names, p.value, p.hoisted, strict=True)
            if v == REPLICATED and h == VARYING
        ]
        out[name] = jc.to_varying(params[name], axes)
    return out


__all__ = ["HeldParameter", "StageProgram", "Value", "hoist", "is_invariant", "shifted"]
