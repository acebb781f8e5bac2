"""One rule, three uses: what a primitive's factors are, what it costs, and how it runs on shards.

A rule is registered for a primitive name::

    @register("reverse_it")
    class ReverseIt(Rule):
        def factorise(self, eqn): ...            # -> Factorisation: legal strategies, flops, what backward reads
        def local(self, eqn, place, args): ...   # -> results on one device's shards, inside shard_map

`factorise` is given the equation with global shapes. `local` is given one device's operands, already cast to the specs
that `costmodel.sharding.operand_spec` states for the strategy, and must return results as `result_spec` states: a
factor missing from a result with ``combine="sum"`` leaves that device's summand. JAX differentiates it.

A primitive without a rule is planned as replicated and reported (`unknown.py`).
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax.numpy as jnp
from jax import lax

from costmodel.graph import Dims, Factor, Inside, Op, Touch, Work
from costmodel.sharding import REPLICATED, Strategy, local_shape, operand_spec, result_spec
from planner.frontend import jax_compat as jc
from planner.frontend.canonical import describe_param
from planner.frontend.flat import Constant, Equation

Residual = int  # i >= 0: operand i; ~j (negative): result j


@dataclass(frozen=True, slots=True, kw_only=True)
class Factorisation:
    """What a rule knows of one equation.

    Attributes:
        in_dims, out_dims: per operand and result, the factor indices of each dim, major to minor; () for size-1 dims.
        linear: operand sets in which the op is jointly linear (see `costmodel.graph.Op`).
        residuals: per operand, what its cotangent rule reads: operand i as ``i``, result j as ``~j``.
        flops: forward floating point operations; backward_flops: of the whole backward pass, None where that is
            `flops` for each operand that needs a gradient.
        fuses: the compiler fuses it with its neighbours.
        touches: operands and results of which it reads or writes a part only.
        inside, inside_backward: of an equation that holds programs, what they do, forward and backward.
        guessed_trips: lines of the loops in those whose trip count is data.
    """

    factors: tuple[Factor, ...]
    in_dims: tuple[Dims, ...]
    out_dims: tuple[Dims, ...]
    linear: tuple[tuple[int, ...], ...] = ()
    residuals: tuple[tuple[Residual, ...], ...] = ()
    flops: float = 0.0
    backward_flops: float | None = None
    work: Work = "elementwise"
    fuses: bool = True
    touches: tuple[Touch, ...] = ()
    inside: Inside | None = None
    inside_backward: Inside | None = None
    guessed_trips: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """Where one device stands while an op runs on shards, inside shard_map.

    Attributes:
        fixed: axes that are no mesh axes but are run one part after the other, and the part that runs here. A prefix of
            (j + 1)/c of a dim is part 0 of c/(j + 1), a size that need not be whole.
    """

    op: Op
    strategy: Strategy
    mesh: tuple[int, ...]
    axis_names: tuple[str, ...]
    fixed: Mapping[str, int] = field(default_factory=dict)

    def axes_of(self, factor: int) -> tuple[str, ...]:
        """Names of the mesh axes that split `factor`, major to minor."""
        return tuple(name for name, code in zip(self.axis_names, self.strategy, strict=True) if code == factor)

    def parts(self, factor: int) -> int:
        """Number of parts that `factor` is split into."""
        return math.prod(n for n, code in zip(self.mesh, self.strategy, strict=True) if code == factor)

    def part_index(self, factor: int) -> Any:
        """Which part of `factor` this device holds (a traced int32; 0 where it is not split)."""
        index: Any = jnp.int32(0)
        for name, size, code in zip(self.axis_names, self.mesh, self.strategy, strict=True):
            if code == factor:
                index = index * size + (self.fixed[name] if name in self.fixed else lax.axis_index(name))
        return index

    def split_axes(self) -> tuple[str, ...]:
        """Mesh axes on which this op's values differ from device to device."""
        pairs = zip(self.axis_names, self.strategy, strict=True)
        return tuple(name for name, code in pairs if code != -1 and name not in self.fixed)

    def local_in(self, position: int, shape: Sequence[int]) -> tuple[int, ...]:
        """One device's shape of operand `position`, whose global shape is `shape`."""
        return local_shape(shape, operand_spec(self.op, position, self.strategy), self.mesh)

    def local_out(self, position: int, shape: Sequence[int]) -> tuple[int, ...]:
        """One device's shape of result `position`, whose global shape is `shape`."""
        spec = tuple(code if code >= 0 else -1 for code in result_spec(self.op, position, self.strategy))
        return local_shape(shape, spec, self.mesh)


class Rule:
    """Base: factors must be stated; the local program is the primitive itself with `local_params`."""

    def factorise(self, eqn: Equation) -> Factorisation:
        raise NotImplementedError

    def describe(self, eqn: Equation) -> str:
        """Text of what the equation does beside its operands; equal text means equal computation."""
        return describe_param(eqn.params)

    def local_params(self, eqn: Equation, place: Placement) -> dict[str, Any]:
        """The equation's parameters, with global shapes replaced by one device's."""
        return eqn.params

    def local(self, eqn: Equation, place: Placement, args: list[Any]) -> list[Any]:
        """Results on one device's shards."""
        return jc.bind(eqn.primitive, args, self.local_params(eqn, place))


REGISTRY: dict[str, Rule] = {}


def register(*names: str) -> Callable[[Any], Any]:
    """Registers a rule class (one instance) or instance for primitive names. Users may register their own."""

    def add(rule: Any) -> Any:
        instance = rule() if isinstance(rule, type) else rule
        for name in names:
            REGISTRY[name] = instance
        return rule

    return add


def identity_dims(shapes: Sequence[Sequence[int]], offset: int = 0) -> tuple[Dims, ...]:
    """Dims of tensors that all share one shape; size-1 dims carry no factor."""
    return tuple(tuple((offset + d,) if n > 1 else () for d, n in enumerate(shape)) for shape in shapes)


def factors_of(shape: Sequence[int], names: str = "") -> tuple[Factor, ...]:
    """One splittable parallel factor a dim."""
    return tuple(Factor(names[d] if d < len(names) else f"d{d}", int(n)) for d, n in enumerate(shape))


def elements(shape: Sequence[int]) -> float:
    return float(math.prod(shape))


def rule_for(primitive: str) -> Rule:
    """The rule registered for a primitive, or the fallback that keeps it whole."""
    return REGISTRY.get(primitive) or REGISTRY["unknown"]


def run_on_shards(eqn: Equation, rule: Rule, place: Placement, args: Sequence[Any]) -> list[Any]:
    """Runs an equation on one device's shards; the results have the types that `result_spec` states.

    Raw primitives ask for equal types of all operands. By the meaning of a strategy all tensors vary over the axes that
    it does not replicate; constants, and results made from nothing (iota), are marked so here.
    """
    axes = place.split_axes()
    typed = [
        jnp.asarray(arg, operand.aval.dtype)
        if isinstance(operand, Constant) and not jc.is_key(operand.aval.dtype)
        else arg
        for operand, arg in zip(eqn.inputs, args, strict=True)
    ]
    marked = [jc.to_varying(arg, axes) for arg in typed]
    results = rule.local(eqn, place, marked)
    out = []
    for position, result in enumerate(results):
        codes = zip(place.axis_names, result_spec(place.op, position, place.strategy), strict=True)
        varying = tuple(name for name, code in codes if code != REPLICATED and name not in place.fixed)
        out.append(jc.to_varying(result, varying))
    return out
