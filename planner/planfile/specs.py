"""Specs and strategies as words: how a plan names what the interpreter and the search number."""

from collections.abc import Sequence

from costmodel.errors import MismatchError
from costmodel.graph import Op
from costmodel.sharding import PARTIAL, PASS, REPLICATED, VARYING, Spec, Strategy
from planner.planfile.schema import ValuePlan


def spec_from_value(plan: ValuePlan, axis_names: Sequence[str]) -> Spec:
    """The spec of a value as a plan states it."""
    codes = {name: dim for dim, names in enumerate(plan.dims) for name in names}
    codes |= dict.fromkeys(plan.varying, VARYING) | dict.fromkeys(plan.partial, PARTIAL)
    return tuple(codes.get(name, REPLICATED) for name in axis_names)


def value_from_spec(spec: Spec, dims: int, axis_names: Sequence[str]) -> ValuePlan:
    """The inverse of `spec_from_value`, for a tensor with `dims` dims."""
    pairs = list(zip(axis_names, spec, strict=True))
    return ValuePlan(
        dims=dims_of(spec, dims, axis_names),
        varying=tuple(n for n, code in pairs if code == VARYING),
        partial=tuple(n for n, code in pairs if code == PARTIAL),
    )


def dims_of(spec: Spec, dims: int, axis_names: Sequence[str]) -> tuple[tuple[str, ...], ...]:
    """For each dim the names of the axes that split it, major to minor."""
    return tuple(tuple(n for n, code in zip(axis_names, spec, strict=True) if code == d) for d in range(dims))


def spec_from_dims(dims: Sequence[Sequence[str]], axis_names: Sequence[str]) -> Spec:
    """The spec of a stored parameter."""
    codes = {name: dim for dim, names in enumerate(dims) for name in names}
    return tuple(codes.get(name, REPLICATED) for name in axis_names)


def strategy_from_names(op: Op, chosen: dict[str, str], axis_names: Sequence[str]) -> Strategy:
    """The strategy of an op from a plan's words.

    Raises:
        MismatchError: the plan names a factor that the op does not have.
    """
    words = {"replicated": REPLICATED, "varying": VARYING}
    words |= {f"pass {i}": PASS - i for i in range(len(op.linear))}
    words |= {f.name: i for i, f in enumerate(op.factors)}
    codes = []
    for axis in axis_names:
        word = chosen.get(axis, "replicated")
        if word not in words:
            legal = ", ".join(sorted(words))
            raise MismatchError(
                "MP402",
                f"the plan splits op {op.name} by {word!r} over axis {axis}; its choices are {legal}",
                "the plan was made for another model or version; plan again",
            )
        codes.append(words[word])
    return tuple(codes)


def strategy_names(op: Op, strategy: Strategy, axis_names: Sequence[str]) -> dict[str, str]:
    """The words of a strategy; axes on which the op is replicated are left out."""
    words = {}
    for axis, code in zip(axis_names, strategy, strict=True):
        if code != REPLICATED:
            words[axis] = (
                "varying" if code == VARYING else f"pass {PASS - code}" if code <= PASS else op.factors[code].name
            )
    return words
