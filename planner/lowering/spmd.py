"""The interpreter: a captured program walked with one device's shards, every planned cast written as its collective.

It runs inside a fully manual ``jax.shard_map``; JAX differentiates what it writes, so the backward collectives are the
transposes that `costmodel.sharding` prices. A value is cast once for each spec that its consumers need.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from costmodel.errors import LoweringError
from costmodel.graph import Op, Tensor, derived_from_parameters
from costmodel.sharding import REPLICATED, CastStep, Spec, Strategy, cast, operand_spec, result_spec
from planner.frontend import jax_compat as jc
from planner.frontend.flat import Constant, Equation, Program, Value
from planner.frontend.rules.base import Placement, rule_for, run_on_shards
from planner.lowering.casts import apply_cast

Versions = dict[Spec, Any]  # the same value in every spec that it was cast to so far


@dataclass(frozen=True, kw_only=True)
class LocalProgram:
    """One device's program.

    Attributes:
        strategies: op name -> strategy; ops left out are replicated on every axis.
        tensors: of the program; needed with `regather`.
        regather: names of inputs (all parameters) whose casts and gathers are not kept for the backward pass but run
            again. Empty where a remat around the whole program does so anyway.
        again: names of equations whose results are not kept either; what they are made of is.
        fixed: axes that are no mesh axes (`Placement.fixed`).
    """

    program: Program
    ops: Mapping[str, Op]
    strategies: Mapping[str, Strategy]
    mesh: tuple[int, ...]
    axis_names: tuple[str, ...]
    tensors: Mapping[str, Tensor] = field(default_factory=dict)
    regather: frozenset[str] = frozenset()
    again: frozenset[str] = frozenset()
    fixed: Mapping[str, int] = field(default_factory=dict)

    def __call__(
        self, args: Sequence[Any], specs: Sequence[Spec], targets: Sequence[Spec | None] | None = None
    ) -> tuple[list[Any], list[Spec]]:
        """Runs the program.

        Args:
            args: one device's part of each input.
            specs: the spec of each input.
            targets: the spec to cast each output to, None (or no list) for as it comes.

        Returns:
            one device's part of each output, and the outputs' specs.
        """
        env = {v.name: {spec: x} for v, x, spec in zip(self.program.inputs, args, specs, strict=True)}
        source = {v.name: spec for v, spec in zip(self.program.inputs, specs, strict=True)}
        for value, array in self.program.constants.items():
            source[value.name] = (REPLICATED,) * len(self.mesh)
            env[value.name] = {source[value.name]: jnp.asarray(array)}
        self._run(self.program.equations, 0, env, source)
        outs, out_specs = [], []
        for i, operand in enumerate(self.program.outputs):
            target = targets[i] if targets else None
            if isinstance(operand, Constant):
                spec: Spec = (REPLICATED,) * len(self.mesh)
                x = jnp.asarray(operand.value, operand.aval.dtype)
                if target is not None and target != spec:
                    x, spec = self._cast(x, operand, spec, target), target
            else:
                spec = source[operand.name] if target is None else target
                x = self._fetch(operand, spec, env, source)
            outs.append(x)
            out_specs.append(spec)
        return outs, out_specs

    def _run(
        self, equations: Sequence[Equation], depth: int, env: dict[str, Versions], source: dict[str, Spec]
    ) -> None:
        at = 0
        while at < len(equations):
            equation = equations[at]
            if len(equation.scopes) <= depth:
                self._one(equation, env, source)
                at += 1
                continue
            end = at
            while (
                end < len(equations)
                and len(equations[end].scopes) > depth
                and equations[end].scopes[depth] is equation.scopes[depth]
            ):
                end += 1
            self._scope(equations[at:end], depth, env, source)
            at = end

    def _scope(
        self, equations: Sequence[Equation], depth: int, env: dict[str, Versions], source: dict[str, Spec]
    ) -> None:
        """Runs a region that the user wrapped in ``jax.checkpoint``, wrapped again."""
        scope = equations[0].scopes[depth]
        made = {v.name for e in equations for v in e.outputs}
        read = {o.name for e in equations for o in e.inputs if isinstance(o, Value)} - made
        needs = sorted(
            {root for name in read for root in (self._roots[name] if name in self._lazy_makers else (name,))}
        )

        def region(inner: dict[str, Versions]) -> dict[str, Any]:
            local = {name: dict(versions) for name, versions in inner.items()}
            self._run(equations, depth + 1, local, source)
            return {name: local[name][source[name]] for name in sorted(made)}

        wrapped = jax.checkpoint(region, prevent_cse=scope.prevent_cse, policy=scope.policy)
        results = wrapped({name: env[name] for name in needs})
        env.update({name: {source[name]: x} for name, x in results.items()})

    def _one(self, equation: Equation, env: dict[str, Versions], source: dict[str, Spec]) -> None:
        if equation.name in self._lazy:
            return
        op, strategy, targets = self._placed(equation)
        again = [isinstance(o, Value) and o.name in self._weights for o in equation.inputs]
        if any(again):
            results = self._with_weights(equation, again, targets, env, source)
        else:
            operands = [self._operand(o, t, env, source) for o, t in zip(equation.inputs, targets, strict=True)]
            results = self._apply(equation, operands)
        self._record(equation, op, strategy, results, env, source)

    def _placed(self, equation: Equation) -> tuple[Op, Strategy, list[Spec]]:
        op = self.ops[equation.name]
        strategy = self.strategies.get(equation.name, (REPLICATED,) * len(self.mesh))
        return op, strategy, [operand_spec(op, i, strategy) for i in range(len(equation.inputs))]

    def _apply(self, equation: Equation, operands: list[Any]) -> list[Any]:
        op, strategy, _ = self._placed(equation)
        place = Placement(op=op, strategy=strategy, mesh=self.mesh, axis_names=self.axis_names, fixed=self.fixed)
        return run_on_shards(equation, rule_for(equation.primitive.name), place, operands)

    def _record(
        self,
        equation: Equation,
        op: Op,
        strategy: Strategy,
        results: list[Any],
        env: dict[str, Versions],
        source: dict[str, Spec],
    ) -> None:
        for i, (value, x) in enumerate(zip(equation.outputs, results, strict=True)):
            spec = result_spec(op, i, strategy)
            self._check(equation, value, x, spec)
            source[value.name] = spec
            env[value.name] = {spec: x}

    def _with_weights(
        self,
        equation: Equation,
        again: list[bool],
        targets: list[Spec],
        env: dict[str, Versions],
        source: dict[str, Spec],
    ) -> list[Any]:
        """Runs an op that reads weights. Their casts and gathers sit inside a remat whose other inputs are kept, so
        that
        only they run again for the backward pass (the op's result is not needed there, so it is not recomputed)."""
        roots = sorted({root for o, g in zip(equation.inputs, again, strict=True) if g for root in self._roots[o.name]})  # type: ignore[union-attr]
        others = [
            None if g else self._operand(o, t, env, source)
            for o, t, g in zip(equation.inputs, targets, again, strict=True)
        ]

        def run(weights: dict[str, Any], operands: list[Any]) -> list[Any]:
            inner: dict[str, Versions] = {name: {source[name]: x} for name, x in weights.items()}
            specs = {name: source[name] for name in weights}

            def make(value: Value) -> None:
                if value.name in inner:
                    return
                maker = self._lazy_makers[value.name]
                op, strategy, needs = self._placed(maker)
                args = []
                for o, t in zip(maker.inputs, needs, strict=True):
                    if isinstance(o, Value):
                        make(o)
                    args.append(self._operand(o, t, inner, specs))
                self._record(maker, op, strategy, self._apply(maker, args), inner, specs)

            args = []
            for o, t, x, g in zip(equation.inputs, targets, operands, again, strict=True):
                if g:
                    assert isinstance(o, Value)
                    make(o)
                    x = self._fetch(o, t, inner, specs)
                args.append(x)
            return self._apply(equation, args)

        return jax.checkpoint(run)({name: env[name][source[name]] for name in roots}, others)

    @cached_property
    def _lazy_makers(self) -> dict[str, Equation]:
        """Value -> the equation that makes it of parameters alone, where `regather` asks not to keep it."""
        derived = derived_from_parameters(self.ops.values(), self.tensors) if self.regather else frozenset()
        kept = {o.name for o in self.program.outputs if isinstance(o, Value)}
        return {
            v.name: e
            for e in self.program.equations
            for v in e.outputs
            if (v.name in derived or e.name in self.again) and v.name not in kept
        }

    @cached_property
    def _lazy(self) -> set[str]:
        return {e.name for e in self._lazy_makers.values()}

    @cached_property
    def _roots(self) -> dict[str, frozenset[str]]:
        """Weight, or value that is not kept -> the values that it is made of again: parameters, or what is kept."""
        roots = {name: frozenset({name}) for name in self.regather}
        for e in self.program.equations:
            if e.name in self._lazy:
                of = frozenset().union(*(roots.get(o.name, {o.name}) for o in e.inputs if isinstance(o, Value)))
                roots.update((v.name, of) for v in e.outputs)
        return roots

    @cached_property
    def _weights(self) -> frozenset[str]:
        return frozenset(self._roots)

    def _check(self, equation: Equation, value: Value, x: Any, spec: Spec) -> None:
        shape = tuple(n for n in value.shape)
        expected = list(shape)
        for axis, code in enumerate(spec):
            if code >= 0:
                expected[code] //= self.mesh[axis]
        if tuple(x.shape) != tuple(expected):
            raise LoweringError(
                "MP501",
                f"{equation.name} ({equation.source}) made {tuple(x.shape)} on one device, planned {tuple(expected)}",
                "this is a defect of the rule for this primitive; please report it",
            )

    def _operand(
        self, operand: Value | Constant, target: Spec, env: dict[str, Versions], source: dict[str, Spec]
    ) -> Any:
        if isinstance(operand, Constant):
            return operand.value
        return self._fetch(operand, target, env, source)

    def _fetch(self, operand: Value, target: Spec, env: dict[str, Versions], source: dict[str, Spec]) -> Any:
        versions = env[operand.name]
        if target not in versions:
            versions[target] = self._cast(versions[source[operand.name]], operand, source[operand.name], target)
        return versions[target]

    def _cast(self, x: Any, operand: Value | Constant, spec: Spec, target: Spec) -> Any:
        steps = cast(operand.shape, jc.itemsize(operand.aval.dtype), spec, target, self.mesh)
        if steps is None:
            raise LoweringError(
                "MP502",
                f"no cast takes {operand!r} from {spec} to {target} on mesh {self.mesh}",
                "this is a defect of the plan; please report it",
            )
        for step in steps:
            name = self.axis_names[step.axis]
            x = (
                self._fixed(x, step, operand)
                if name in self.fixed
                else apply_cast(x, [step], self.axis_names, self.mesh)
            )
        return x

    def _fixed(self, x: Any, step: CastStep, operand: Value | Constant) -> Any:
        """A step of a cast on an axis whose parts run one after the other: nothing comes from other parts."""
        if step.kind == "vary":
            return x
        if step.kind != "slice":
            raise LoweringError("MP502", f"{operand!r} would need what other parts along the axis have", "")
        part, at = int(x.shape[step.dim] // self.mesh[step.axis]), self.fixed[self.axis_names[step.axis]]
        return lax.slice_in_dim(x, at * part, (at + 1) * part, axis=step.dim)
