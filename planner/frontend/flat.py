"""A jaxpr with its calls inlined: one flat list of equations over named values.

Calls that only group (``jit``, ``closed_call``, ``remat``) disappear; a user's remat stays as a scope number on the
equations inside. Loops, branches and functions with custom derivatives stay single equations.
"""

import itertools
from collections import Counter
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from planner.frontend import jax_compat as jc

CUSTOM = {"custom_jvp_call", "custom_vjp_call"}
INLINED = {"jit", "pjit", "closed_call", "core_call", "custom_lin", "remat2", "remat", "checkpoint"}
Use = Literal["differentiated", "transposed", "run"]

# Primitives of packages that are functions of other primitives, with derivatives of their own (Equinox's writes into
# the
# buffers of its loops, Lineax's solvers): inlined where nothing is differentiated. Users may add theirs.
COMPOSITES = {"vprim", "select_if_vmap"}
REGIONS = frozenset({"scan", "while", "cond", *CUSTOM, *COMPOSITES})  # equations that hold programs


@dataclass(frozen=True, eq=False)
class Value:
    """A named value with its aval (`shape`, `dtype`)."""

    name: str
    aval: Any

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.aval.shape)

    def __repr__(self) -> str:
        return f"{self.name}:{self.aval.str_short()}"


@dataclass(frozen=True, eq=False)
class Constant:
    """A scalar literal. Captured arrays are values of their own, in `Program.constants`."""

    value: Any
    aval: Any

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.aval.shape)


Operand = Value | Constant


@dataclass(frozen=True, eq=False)
class Scope:
    """A region that the user wrapped in ``jax.checkpoint``."""

    index: int
    policy: Any
    prevent_cse: bool


@dataclass(frozen=True, eq=False)
class Equation:
    """One primitive applied to values.

    Attributes:
        scopes: the remat regions around it, outermost first.
        moving: of an equation that holds programs: which operands depend on what the loss is differentiated by; None
            where nobody has said, which counts as all floats.
        transposed: it stands in a derivative, which is linear in what moves and which JAX transposes.
        together: of such an equation: sets of places (``in`` or ``out``, position, dim) that split together where it
        stands.
        memo: what rules have found out about it. Renamed copies (`dataclasses.replace`) share it.
    """

    name: str
    primitive: Any
    inputs: tuple[Operand, ...]
    outputs: tuple[Value, ...]
    params: dict[str, Any]
    source: str
    scopes: tuple[Scope, ...] = ()
    moving: tuple[bool, ...] | None = None
    transposed: bool = False
    together: tuple[tuple[tuple[str, int, int], ...], ...] = ()
    memo: dict[str, Any] = field(default_factory=dict, repr=False)

    @property
    def in_shapes(self) -> tuple[tuple[int, ...], ...]:
        return tuple(operand.shape for operand in self.inputs)

    @property
    def out_shapes(self) -> tuple[tuple[int, ...], ...]:
        return tuple(value.shape for value in self.outputs)


@dataclass(frozen=True, eq=False)
class Program:
    """Inputs, equations in order, outputs; `constants` are captured arrays by the value that stands for them."""

    inputs: tuple[Value, ...]
    equations: tuple[Equation, ...]
    outputs: tuple[Operand, ...]
    constants: dict[Value, Any] = field(default_factory=dict)


@dataclass
class _Flattener:
    prefix: str
    inlined: set[str]
    counts: Counter = field(default_factory=Counter)
    scopes: itertools.count = field(default_factory=itertools.count)
    equations: list[Equation] = field(default_factory=list)
    constants: dict[Value, Any] = field(default_factory=dict)

    def run(
        self, jaxpr: Any, consts: Any, inputs: list[Operand], scopes: tuple[Scope, ...], caller: str = ""
    ) -> list[Operand]:
        """Adds a jaxpr's equations and returns its outputs.

        Args:
            caller: the user's line that calls it, for equations that tell none of their own: JAX traces its functions
                once, wherever that was.
        """
        env: dict[Any, Operand] = {}

        def read(atom: Any) -> Operand:
            return Constant(atom.val, atom.aval) if isinstance(atom, jc.Literal) else env[atom]

        for var, const in zip(jaxpr.constvars, consts, strict=True):
            if var.aval.shape:
                value = Value(f"{self.prefix}const.{len(self.constants)}", var.aval)
                self.constants[value] = const
                env[var] = value
            else:
                env[var] = Constant(const, var.aval)
        env.update(zip(jaxpr.invars, inputs, strict=True))
        for eqn in jaxpr.eqns:
            args = [read(atom) for atom in eqn.invars]
            name, source = eqn.primitive.name, jc.source_of(eqn) or caller
            if name in self.inlined:
                inner = _implementation(eqn) if name in COMPOSITES else jc.inner_jaxpr(eqn)
                around = scopes
                if name in ("remat2", "remat", "checkpoint"):
                    around = (*scopes, Scope(next(self.scopes), eqn.params["policy"], eqn.params["prevent_cse"]))
                results = self.run(inner.jaxpr, inner.consts, args, around, source)
            else:
                label = f"{self.prefix}{name}.{self.counts[name]}"
                self.counts[name] += 1
                if name == "scan":  # a loop's initial values are values, so that layers can hand them over
                    args = [self._lift(a) for a in args]
                results = [Value(label if i == 0 else f"{label}:{i}", v.aval) for i, v in enumerate(eqn.outvars)]
                self.equations.append(
                    Equation(label, eqn.primitive, tuple(args), tuple(results), dict(eqn.params), source, scopes)
                )
            env.update((var, value) for var, value in zip(eqn.outvars, results, strict=True) if not jc.is_drop(var))
        return [read(atom) for atom in jaxpr.outvars]

    def _lift(self, operand: Operand) -> Operand:
        if isinstance(operand, Value):
            return operand
        value = Value(f"{self.prefix}const.{len(self.constants)}", operand.aval)
        self.constants[value] = np.asarray(operand.value)
        return value


def _implementation(eqn: Any) -> Any:
    return jc.implementation(eqn.primitive, eqn.params, [v.aval for v in eqn.invars])


def flatten(closed: Any, input_names: list[str], prefix: str = "", *, use: Use = "differentiated") -> Program:
    """Flattens a closed jaxpr; equations that no output needs are dropped (effects are kept).

    Args:
        use: what JAX will do with the program. Functions with custom derivatives stay equations of their own where it
            is differentiated; a derivative that is only transposed has no use for theirs (and may call the very
            function that it belongs to), nor has a program that only runs.
    """
    inputs = [Value(name, var.aval) for name, var in zip(input_names, closed.jaxpr.invars, strict=True)]
    inlined = {"differentiated": INLINED, "transposed": INLINED | CUSTOM, "run": INLINED | CUSTOM | COMPOSITES}
    work = _Flattener(prefix, inlined[use])
    outputs = work.run(closed.jaxpr, closed.consts, list(inputs), ())
    return prune(Program(tuple(inputs), tuple(work.equations), tuple(outputs), work.constants))


def prune(program: Program) -> Program:
    """Without the equations that nothing needs."""
    needed = {value for value in program.outputs if isinstance(value, Value)}
    kept = []
    for equation in reversed(program.equations):
        effects = equation.params.get("effects") or getattr(equation.params.get("jaxpr"), "effects", None)
        if (
            effects
            or equation.primitive.name in ("debug_callback", "debug_print")
            or any(v in needed for v in equation.outputs)
        ):
            kept.append(equation)
            needed.update(operand for operand in equation.inputs if isinstance(operand, Value))
    constants = {value: array for value, array in program.constants.items() if value in needed}
    return Program(program.inputs, tuple(reversed(kept)), program.outputs, constants)


def scalar_of(operand: Operand) -> float | None:
    """The number behind a scalar constant, or None."""
    if isinstance(operand, Constant) and np.ndim(operand.value) == 0 and not jc.is_key(operand.aval.dtype):
        return float(np.asarray(operand.value).real)
    return None
