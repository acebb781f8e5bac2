"""Executes every strategy of every rule and compares it with the unsharded op, forward and backward.

`check_rule(fn, *args)` traces `fn`, and for every equation, mesh and legal strategy runs the rule's local program
inside a manual shard_map on fake devices. What one device holds is made on the host from the meaning of the spec codes
alone (`parts_of`, `whole_of`), so the check shares no code with the casts:

    value       REPLICATED equal, one type-invariant copy    VARYING equal    PARTIAL random summands    d split
    cotangent   REPLICATED equal, one type-invariant copy    VARYING random summands    PARTIAL equal    d split
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from costmodel.graph import Op
from costmodel.sharding import (
    PARTIAL,
    REPLICATED,
    VARYING,
    Spec,
    local_shape,
    operand_spec,
    result_spec,
    strategies,
)
from planner.frontend import jax_compat as jc
from planner.frontend.flat import Constant, Equation, Program, Value, flatten
from planner.frontend.ops import op_from_equation, rule_for, run_on_shards
from planner.frontend.rules.base import Placement, Rule

AXES = ("x", "y", "z")
BATCH = 64  # strategies compiled together
FAST_COMPILE = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}


def parts_of(whole: np.ndarray, ndim: int, spec: Spec, mesh: Sequence[int], summands: int, rng: Any) -> np.ndarray:
    """What each device holds, stacked on one leading dim an axis (of size one where the code is REPLICATED).

    Args:
        ndim: number of dims that the spec speaks of; trailing ones (the words of PRNG keys) are never split.
        summands: the code under which devices hold random summands; the other special codes hold equal values.
    """
    lead = tuple(1 if code == REPLICATED else n for code, n in zip(spec, mesh, strict=True))
    pending = tuple(axis for axis, code in enumerate(spec) if code == summands)
    count = math.prod(mesh[axis] for axis in pending)
    terms = _random_summands(whole, count, rng) if pending else [whole]
    shape = local_shape(whole.shape[:ndim], spec, mesh)
    out = np.empty((*lead, *shape, *whole.shape[ndim:]), whole.dtype)
    for place in np.ndindex(lead):
        term = np.ravel_multi_index([place[a] for a in pending], [mesh[a] for a in pending]) if pending else 0
        out[place] = terms[int(term)][_window(shape, spec, mesh, place)]
    return out


def whole_of(
    parts: np.ndarray, ndim: int, spec: Spec, mesh: Sequence[int], summands: int, **tolerance: float
) -> np.ndarray:
    """Undoes `parts_of`: sums the summands, joins the splits, and asserts that what should be equal is equal."""
    naxes = len(mesh)
    for axis, code in enumerate(spec):
        if code == summands:
            parts = parts.sum(axis=axis, keepdims=True, dtype=parts.dtype)
        elif code < 0 and parts.shape[axis] > 1:
            first = np.take(parts, [0], axis=axis)
            np.testing.assert_allclose(
                parts, np.broadcast_to(first, parts.shape), **tolerance, err_msg="devices differ"
            )
            parts = first
    shape = parts.shape[naxes : naxes + ndim]
    full = [n * math.prod(mesh[a] for a, code in enumerate(spec) if code == d) for d, n in enumerate(shape)]
    out = np.empty((*full, *parts.shape[naxes + ndim :]), parts.dtype)
    for place in np.ndindex(parts.shape[:naxes]):
        out[_window(shape, spec, mesh, place)] = parts[place]
    return out


def _window(shape: Sequence[int], spec: Spec, mesh: Sequence[int], place: Sequence[int]) -> tuple[slice, ...]:
    """The part of the whole that the device at `place` holds; axes that split one dim go major to minor."""
    out = []
    for dim, size in enumerate(shape):
        index = 0
        for axis, code in enumerate(spec):
            if code == dim:
                index = index * mesh[axis] + place[axis]
        out.append(slice(index * size, (index + 1) * size))
    return tuple(out)


def _random_summands(whole: np.ndarray, count: int, rng: Any) -> list[np.ndarray]:
    assert whole.dtype != bool, "a boolean cannot be a pending sum: the rule's linear set or combine is wrong"
    if np.issubdtype(whole.dtype, np.integer):
        terms = [rng.integers(0, 100, whole.shape).astype(whole.dtype) for _ in range(count - 1)]
    else:
        terms = [_random_like(whole, rng) for _ in range(count - 1)]
    return [*terms, (whole - sum(terms[1:], terms[0]) if terms else whole).astype(whole.dtype)]


def _random_like(like: np.ndarray, rng: Any) -> np.ndarray:
    out = rng.standard_normal(like.shape)
    if np.issubdtype(like.dtype, np.complexfloating):
        out = out + 1j * rng.standard_normal(like.shape)
    return np.asarray(out).astype(like.dtype)


def is_differentiable(aval: Any) -> bool:
    return not jc.is_key(aval.dtype) and jnp.issubdtype(aval.dtype, jnp.inexact)


def raw(value: Any) -> np.ndarray:
    """A value as plain numbers; PRNG keys as their words, one more dim."""
    value = jax.random.key_data(value) if jc.is_key(jnp.asarray(value).dtype) else value
    return np.asarray(value)


def typed(words: Any, aval: Any) -> Any:
    return (
        jax.random.wrap_key_data(words, impl=jax.random.key_impl(jnp.empty(0, aval.dtype)))
        if jc.is_key(aval.dtype)
        else words
    )


@dataclass(frozen=True)
class Case:
    """One equation under one strategy, with what each device holds and what the whole op gives."""

    eqn: Equation
    rule: Rule
    place: Placement
    operands: list[np.ndarray]
    cotangents: list[np.ndarray]
    results: list[np.ndarray]
    gradients: list[np.ndarray]

    @property
    def tensors(self) -> list[int]:
        return [i for i, operand in enumerate(self.eqn.inputs) if isinstance(operand, Value)]

    @property
    def active(self) -> list[int]:
        """Operand positions that get a cotangent, where gradients are checked."""
        wanted = bool(self.cotangents)
        return [i for i in self.tensors if wanted and is_differentiable(self.eqn.inputs[i].aval)]

    @property
    def results_active(self) -> list[int]:
        return [i for i, value in enumerate(self.eqn.outputs) if is_differentiable(value.aval)]

    def spec_in(self, position: int) -> Spec:
        return operand_spec(self.place.op, position, self.place.strategy)

    def spec_out(self, position: int) -> Spec:
        return result_spec(self.place.op, position, self.place.strategy)

    def partition(self, spec: Spec) -> PartitionSpec:
        return PartitionSpec(*(None if code == REPLICATED else name for code, name in zip(spec, AXES, strict=False)))

    @property
    def in_specs(self) -> tuple[list[PartitionSpec], list[PartitionSpec]]:
        return (
            [self.partition(self.spec_in(i)) for i in self.tensors],
            [self.partition(self.spec_out(i)) for i in self.results_active] if self.cotangents else [],
        )

    @property
    def out_specs(self) -> tuple[list[PartitionSpec], list[PartitionSpec]]:
        return (
            [self.partition(self.spec_out(i)) for i in range(len(self.eqn.outputs))],
            [self.partition(self.spec_in(i)) for i in self.active],
        )

    def run(self, operands: Sequence[Any], cotangents: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        """The local program and its transpose on one device, inside shard_map."""
        naxes = len(self.place.mesh)
        held = {i: typed(x[(0,) * naxes], self.eqn.inputs[i].aval) for i, x in zip(self.tensors, operands, strict=True)}

        def local(*active: Any) -> list[Any]:
            given = {**held, **dict(zip(self.active, active, strict=True))}
            args = [o.value if isinstance(o, Constant) else given[i] for i, o in enumerate(self.eqn.inputs)]
            return run_on_shards(self.eqn, self.rule, self.place, args)

        def differentiable(*active: Any) -> tuple[list[Any], list[Any]]:
            results = local(*active)
            return [results[i] for i in self.results_active], results

        gradients: list[Any] = []
        if cotangents:
            _, pull, results = jax.vjp(differentiable, *(held[i] for i in self.active), has_aux=True)
            gradients = list(pull([c[(0,) * naxes] for c in cotangents]))
        else:
            results = local()
        for i, (result, value) in enumerate(zip(results, self.eqn.outputs, strict=True)):
            expected = local_shape(
                value.shape, tuple(c if c >= 0 else REPLICATED for c in self.spec_out(i)), self.place.mesh
            )
            assert result.shape == expected, f"result {i} has local shape {result.shape}, its spec states {expected}"
            assert result.dtype == value.aval.dtype, f"result {i} has dtype {result.dtype}, not {value.aval.dtype}"
        words = [jax.random.key_data(r) if jc.is_key(r.dtype) else r for r in results]
        return [w[(None,) * naxes] for w in words], [g[(None,) * naxes] for g in gradients]

    def compare(self, results: Sequence[Any], gradients: Sequence[Any], rtol: float) -> None:
        for i, (got, want) in enumerate(zip(results, self.results, strict=True)):
            self._close(np.asarray(got), want, self.spec_out(i), PARTIAL, self.eqn.outputs[i], rtol, f"result {i}")
        for i, got, want in zip(self.active, gradients, self.gradients, strict=True):
            self._close(
                np.asarray(got), want, self.spec_in(i), VARYING, self.eqn.inputs[i], rtol, f"cotangent of operand {i}"
            )

    def _close(self, parts: Any, want: Any, spec: Spec, summands: int, value: Any, rtol: float, what: str) -> None:
        want = _comparable(want)
        finite = want[np.isfinite(want)] if want.dtype.kind in "fc" else want.ravel()[:0]
        scale = max(1.0, float(np.abs(finite).max(initial=0.0)))
        tolerance = {"rtol": rtol, "atol": rtol * scale} if want.dtype.kind in "fc" else {"rtol": 0.0, "atol": 0.0}
        try:
            got = whole_of(_comparable(parts), len(value.shape), spec, self.place.mesh, summands, **tolerance)
            np.testing.assert_allclose(got, want, **tolerance)
        except AssertionError as error:
            raise AssertionError(f"{what} (spec {spec}) of {self.describe()}\n{error}") from None

    def describe(self) -> str:
        codes = {REPLICATED: "replicated", VARYING: "varying"}
        names = [
            codes.get(code)
            or (self.place.op.factors[code].name if code >= 0 else f"pass{self.place.op.linear[-3 - code]}")
            for code in self.place.strategy
        ]
        return f"{self.place.op.key} under {', '.join(names)} on mesh {self.place.mesh}"


def _comparable(array: np.ndarray) -> np.ndarray:
    """Low-precision floats as float32, which numpy can compare and sum."""
    known = array.dtype.kind in "biufc" and not jnp.issubdtype(array.dtype, jnp.floating)
    return array if known or array.dtype in (np.float32, np.float64) else array.astype(np.float32)


def operation(eqn: Equation) -> Callable[..., list[Any]]:
    """The unsharded op as a function of its tensor operands."""

    def run(*tensors: Any) -> list[Any]:
        given = iter(tensors)
        return jc.bind(
            eqn.primitive, [o.value if isinstance(o, Constant) else next(given) for o in eqn.inputs], eqn.params
        )

    return run


def evaluate(program: Program, args: Sequence[Any]) -> Iterator[tuple[Equation, list[Any], list[Any]]]:
    """Each equation with the values of its tensor operands and of its results."""
    values: dict[Value, Any] = {**program.constants, **dict(zip(program.inputs, args, strict=True))}
    for eqn in program.equations:
        tensors = [values[o] for o in eqn.inputs if isinstance(o, Value)]
        results = operation(eqn)(*tensors)
        values.update(zip(eqn.outputs, results, strict=True))
        yield eqn, tensors, results


def cases_of(eqn: Equation, tensors: list[Any], results: list[Any], mesh: tuple[int, ...], grads: bool) -> list[Case]:
    """Every strategy of one equation on one mesh."""
    rng = np.random.default_rng(0)
    rule = rule_for(eqn.primitive.name)
    outs = [i for i, value in enumerate(eqn.outputs) if is_differentiable(value.aval)]
    active = [i for i, o in enumerate(eqn.inputs) if isinstance(o, Value) and is_differentiable(o.aval)]
    grads = grads and bool(outs) and bool(active)
    cotangents: list[np.ndarray] = []
    gradients: list[np.ndarray] = []
    if grads:
        cotangents = [_random_like(np.asarray(results[i]), rng) for i in outs]
        positions = [i for i, o in enumerate(eqn.inputs) if isinstance(o, Value)]
        whole = dict(zip(positions, tensors, strict=True))

        def of_active(*values: Any) -> tuple[list[Any], list[Any]]:
            given = {**whole, **dict(zip(active, values, strict=True))}
            found = operation(eqn)(*(given[i] for i in positions))
            return [found[i] for i in outs], found

        # Some rules of differentiation also change the result (cholesky clears one triangle): compare like with like.
        _, pull, results = jax.vjp(of_active, *(whole[i] for i in active), has_aux=True)
        gradients = [np.asarray(g) for g in pull([jnp.asarray(c) for c in cotangents])]
    op = op_from_equation(eqn, rule, lambda value: grads and is_differentiable(value.aval))
    _check_op(op, eqn)
    cases = []
    for strategy in strategies(op, mesh):
        place = Placement(op=op, strategy=strategy, mesh=mesh, axis_names=AXES[: len(mesh)])
        case = Case(eqn, rule, place, [], [], [raw(r) for r in results], gradients)
        for position, tensor in zip(case.tensors, tensors, strict=True):
            ndim = len(eqn.inputs[position].shape)
            case.operands.append(parts_of(raw(tensor), ndim, case.spec_in(position), mesh, PARTIAL, rng))
        for position, cotangent in zip(outs, cotangents, strict=False):
            ndim = len(eqn.outputs[position].shape)
            case.cotangents.append(parts_of(cotangent, ndim, case.spec_out(position), mesh, VARYING, rng))
        cases.append(case)
    return cases


def _check_op(op: Op, eqn: Equation) -> None:
    """Facts that every rule must get right: factors multiply to the dims' sizes, and names refer to tensors."""
    for dims, shapes in ((op.in_dims, eqn.in_shapes), (op.out_dims, eqn.out_shapes)):
        assert len(dims) == len(shapes), f"{op.name}: {len(dims)} tensors have factors, {len(shapes)} exist"
        for tensor, shape in zip(dims, shapes, strict=True):
            assert len(tensor) == len(shape), f"{op.name}: {tensor} for shape {shape}"
            for parts, size in zip(tensor, shape, strict=True):
                product = math.prod(op.factors[f].size for f in parts)
                assert not parts or product == size, f"{op.name}: factors of a dim of {size} multiply to {product}"
    for factor in op.factors:
        assert factor.splits or factor.reason, f"{op.name}: factor {factor.name} does not split and states no reason"
    known = {*op.inputs, *op.outputs}
    assert "" not in op.saves and known.issuperset(op.saves), f"{op.name}: saves {op.saves}"


def run_cases(cases: Sequence[Case], mesh: tuple[int, ...], rtol: float) -> None:
    """Compiles the cases as one program, runs it and compares."""
    devices = jax.make_mesh(mesh, AXES[: len(mesh)], axis_types=(jax.sharding.AxisType.Auto,) * len(mesh))

    def every(inputs: Any) -> Any:
        out = []
        for case, (operands, cotangents) in zip(cases, inputs, strict=True):
            try:
                out.append(case.run(operands, cotangents))
            except Exception as error:
                error.add_note(f"while tracing {case.describe()}")
                raise
        return out

    program = jax.jit(
        jax.shard_map(
            every,
            mesh=devices,
            in_specs=([case.in_specs for case in cases],),
            out_specs=[case.out_specs for case in cases],
            check_vma=True,
        ),
        compiler_options=FAST_COMPILE,
    )
    inputs = [(case.operands, case.cotangents) for case in cases]
    for case, (results, gradients) in zip(cases, jax.device_get(program(inputs)), strict=True):
        case.compare(results, gradients, rtol)


def check_rule(
    fn: Callable[..., Any],
    *args: Any,
    grads: bool = True,
    meshes: Sequence[tuple[int, ...]] = ((2,), (3,), (2, 2)),
    rtol: float = 1e-5,
) -> int:
    """Checks every strategy of every equation of `fn`; the number of (equation, mesh, strategy) triples checked.

    Args:
        grads: also compare the cotangents of all float operands. Ops that all-reduce a maximum split more ways where no
            gradient is asked for: check those with ``grads=False`` too.
    """
    closed = jax.make_jaxpr(fn)(*args)
    flat = jax.tree.leaves(args)
    program = flatten(closed, [f"arg{i}" for i in range(len(flat))])
    steps = list(evaluate(program, [jnp.asarray(a) if not jc.is_key(jnp.asarray(a).dtype) else a for a in flat]))
    count = 0
    for mesh in meshes:
        cases = [
            case for eqn, tensors, results in steps for case in cases_of(eqn, tensors, results, tuple(mesh), grads)
        ]
        for start in range(0, len(cases), BATCH):
            run_cases(cases[start : start + BATCH], tuple(mesh), rtol)
        count += len(cases)
    return count
