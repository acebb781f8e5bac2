"""From an equation and its rule to the `Op` that the planner prices."""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

from costmodel.graph import Factor, Op
from planner.frontend.flat import REGIONS, Equation, Operand, Value, scalar_of
from planner.frontend.rules.base import Factorisation, Rule, rule_for, run_on_shards

__all__ = ["op_from_equation", "op_key", "rule_for", "run_on_shards"]

_SHORT_DTYPES = {"float": "f", "bfloat": "bf", "uint": "u", "int": "i", "complex": "c", "bool": "b1"}


def op_from_equation(
    eqn: Equation, rule: Rule, needs_grad: Callable[[Value], bool], facts: Factorisation | None = None
) -> Op:
    """The op of one equation.

    Args:
        needs_grad: whether a cotangent reaches a value.
        facts: what ``rule.factorise(eqn)`` returned, where the caller has it already.
    """
    facts = facts or rule.factorise(eqn)
    whole_backward = facts.backward_flops
    wanted = [i for i, operand in enumerate(eqn.inputs) if isinstance(operand, Value) and needs_grad(operand)]
    return Op(
        name=eqn.name,
        primitive=eqn.primitive.name,
        inputs=tuple(operand.name if isinstance(operand, Value) else "" for operand in eqn.inputs),
        outputs=tuple(value.name for value in eqn.outputs),
        factors=_usable_factors(eqn, facts, needs_grad),
        in_dims=facts.in_dims,
        out_dims=facts.out_dims,
        linear=_linear_sets(eqn, facts),
        flops=facts.flops,
        backward_flops=facts.flops * len(wanted) if whole_backward is None else whole_backward * bool(wanted),
        saves=_saved_names(eqn, facts, wanted),
        work=facts.work,
        fuses=facts.fuses,
        source=eqn.source,
        known=getattr(rule, "known", True),
        key=op_key(eqn),
        scope=eqn.scopes[0].index if eqn.scopes else -1,
        touches=facts.touches,
        inside=facts.inside,
        inside_backward=facts.inside_backward if wanted else None,
        guessed_trips=facts.guessed_trips,
    )


def _linear_sets(eqn: Equation, facts: Factorisation) -> tuple[tuple[int, ...], ...]:
    """The linear sets without constants: those are whole on every device, so only zeros go along with summands."""
    found = []
    for positions in facts.linear:
        constants = [i for i in positions if not isinstance(eqn.inputs[i], Value)]
        summands = tuple(i for i in positions if i not in constants)
        if summands and all(scalar_of(eqn.inputs[i]) == 0.0 for i in constants):
            found.append(summands)
    return tuple(dict.fromkeys(found))


def _usable_factors(eqn: Equation, facts: Factorisation, needs_grad: Callable[[Value], bool]) -> tuple[Factor, ...]:
    """An all-reduced maximum has no derivative: where a result that lacks the factor needs one, it does not split."""

    def reduced_with_gradient(index: int) -> bool:
        results = zip(eqn.outputs, facts.out_dims, strict=True)
        return any(needs_grad(value) and all(index not in parts for parts in dims) for value, dims in results)

    reason = "a gradient crosses the result of an all-reduced maximum"
    usable: list[Factor] = []
    names: set[str] = set()
    for index, factor in enumerate(facts.factors):
        if factor.combine == "max" and reduced_with_gradient(index):
            factor = replace(factor, combine="none", splits=False, reason=reason)
        if factor.name in names:  # plans name factors, so names are unique within an op
            factor = replace(factor, name=f"{factor.name}_{index}")
        names.add(factor.name)
        usable.append(factor)
    return tuple(usable)


def _saved_names(eqn: Equation, facts: Factorisation, wanted: Sequence[int]) -> tuple[str, ...]:
    """Names of the tensors that the cotangent rules of the `wanted` operands read, each once, in order."""
    names: dict[str, None] = {}
    for position in wanted:
        for residual in facts.residuals[position] if position < len(facts.residuals) else ():
            source: Operand = eqn.inputs[residual] if residual >= 0 else eqn.outputs[~residual]
            if isinstance(source, Value):
                names[source.name] = None
    return tuple(names)


def _short(aval: Any) -> str:
    """``f32[8,16]``."""
    return f"{_short_dtype(aval.dtype)}[{','.join(map(str, aval.shape))}]"


@cache
def _short_dtype(dtype: Any) -> str:
    name = str(dtype)
    for word, short in _SHORT_DTYPES.items():
        if name.startswith(word):
            return short + name[len(word) :]
    return name


def op_key(eqn: Equation) -> str:
    """Key into a profile's op table: ``dot_general f32[8,16] f32[16,4] -> f32[8,4]``.

    Loops, branches and functions with custom derivatives have a digest of what is inside: ``scan#1f0c22ab f32[8] ...``.
    """
    operands = " ".join(_short(operand.aval) for operand in eqn.inputs)
    kind = eqn.primitive.name
    if kind in REGIONS:
        kind += f"#{hashlib.sha256(rule_for(kind).describe(eqn).encode()).hexdigest()[:8]}"
    return f"{kind} {operands} -> {' '.join(_short(value.aval) for value in eqn.outputs)}"
