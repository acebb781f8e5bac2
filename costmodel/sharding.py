"""How a tensor lies on a mesh, and the casts that change it.

A **spec** has one code per mesh axis:

    REPLICATED  equal on every device of the axis; so is its cotangent
    VARYING     equal values, but each device's cotangent is only a summand of the true one
    PARTIAL     each device holds a summand of the value; its cotangent is equal everywhere
    d >= 0      dim d is split over the axis; so is its cotangent's

These are JAX's varying-axes types made precise: REPLICATED is an invariant value, the others vary. **Each cast is one
JAX collective with a known transpose, and the transpose is its backward cost:**

    cast                    forward          backward        bytes moved: of the tensor that is whole on the axis
    REPLICATED -> VARYING   nothing          all_reduce
    REPLICATED -> d         slice            all_gather
    VARYING    -> d         slice            nothing (each device pads its own summand)
    d          -> VARYING   all_gather       reduce_scatter
    d          -> REPLICATED all_gather      slice
    PARTIAL    -> REPLICATED all_reduce      nothing
    PARTIAL    -> VARYING   all_reduce       all_reduce
    PARTIAL    -> d         reduce_scatter   all_gather
    d          -> e         all_to_all       all_to_all
    VARYING    -> REPLICATED all_reduce      nothing         of one device's copy, the others' masked to zero

Nothing casts to PARTIAL. Where no gradient crosses a tensor the backward column is not run, and costs nothing.
Axes that split one dim do so major to minor in mesh order.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from costmodel.graph import Dims, Op, Tensor

REPLICATED, VARYING, PARTIAL = -1, -2, -3
Spec = tuple[int, ...]
Strategy = tuple[int, ...]  # per mesh axis: a factor index, REPLICATED, VARYING, or PASS - i for linear set i
PASS = -3

CastKind = Literal["slice", "all_gather", "reduce_scatter", "all_reduce", "all_to_all", "vary", "settle"]


@dataclass(frozen=True, slots=True)
class CastStep:
    """One step of a cast on one mesh axis.

    Attributes:
        kind: the forward operation; ``vary`` marks REPLICATED -> VARYING, ``settle`` is VARYING -> REPLICATED.
        axis: index of the mesh axis.
        dim: the dim that is split, gathered or scattered; for all_to_all the dim that becomes split.
        from_dim: for all_to_all, the dim that was split.
        invariant: the result (or for slice the operand) is REPLICATED on the axis.
        full_bytes: bytes, on one device, of the tensor that is whole on this axis (all_to_all: the local operand).
    """

    kind: CastKind
    axis: int
    dim: int = -1
    from_dim: int = -1
    invariant: bool = False
    full_bytes: int = 0

    @property
    def forward(self) -> str:
        """Collective of the forward pass, or '' where none is needed."""
        return {"slice": "", "vary": "", "settle": "all_reduce"}.get(self.kind, self.kind)

    @property
    def backward(self) -> str:
        """Collective of the backward pass (the transpose), or ''."""
        if self.kind == "vary":
            return "all_reduce"
        if self.kind == "slice":
            return "all_gather" if self.invariant else ""
        if self.kind == "all_gather":
            return "" if self.invariant else "reduce_scatter"
        if self.kind == "all_reduce":
            return "" if self.invariant else "all_reduce"
        return {"reduce_scatter": "all_gather", "all_to_all": "all_to_all", "settle": ""}[self.kind]


def local_shape(shape: Sequence[int], spec: Spec, mesh: Sequence[int]) -> tuple[int, ...]:
    """Shape of one device's part. Raises ValueError where an axis does not divide its dim."""
    out = list(shape)
    for axis, code in enumerate(spec):
        if code >= 0:
            if out[code] % mesh[axis]:
                raise ValueError(f"dim {code} of {tuple(shape)} does not divide by mesh {tuple(mesh)} under {spec}")
            out[code] //= mesh[axis]
    return tuple(out)


def divides(shape: Sequence[int], spec: Spec, mesh: Sequence[int]) -> bool:
    """Whether every split of `spec` divides its dim."""
    for dim, size in enumerate(shape):
        parts = 1
        for axis, code in enumerate(spec):
            if code == dim:
                parts *= mesh[axis]
        if size % parts:
            return False
    return True


def shifted(spec: Spec, by: int) -> Spec:
    """A spec of the value with `by` leading dims more (or, below zero, less)."""
    return tuple(code + by if code >= 0 else code for code in spec)


def split_factor(spec: Spec, mesh: Sequence[int]) -> int:
    """Number of distinct parts that the spec cuts a tensor into."""
    parts = 1
    for axis, code in enumerate(spec):
        if code >= 0:
            parts *= mesh[axis]
    return parts


def cast(
    shape: tuple[int, ...], itemsize: int, source: Spec, target: Spec, mesh: tuple[int, ...]
) -> tuple[CastStep, ...] | None:
    """The steps from one spec to another, or None where no cast exists.

    Slices come first, then reductions that scatter, all-reduces, exchanges and gathers, so that collectives see the
    smallest tensors. Axes that split one dim lie major to minor, so only the last of them can be opened: where an axis
    changes below others, those are opened from the minor end and closed again.
    """
    return _cast(shape, itemsize, source, target, mesh)


@lru_cache(maxsize=1 << 16)
def _cast(
    shape: tuple[int, ...], itemsize: int, source: Spec, target: Spec, mesh: tuple[int, ...]
) -> tuple[CastStep, ...] | None:
    current = list(source)
    steps: list[CastStep] = []
    axes = range(len(mesh))
    for axis in axes:
        a, b = source[axis], target[axis]
        if mesh[axis] == 1:
            if b == PARTIAL and a != PARTIAL:
                return None
            current[axis] = b  # one device: every code means the same
        elif a != b and b == PARTIAL:
            return None
    if not divides(shape, target, mesh):
        return None

    def step(kind: CastKind, axis: int, code: int, dim: int = -1, from_dim: int = -1, invariant: bool = False) -> None:
        whole = [*current] if kind == "all_to_all" else [*current[:axis], REPLICATED, *current[axis + 1 :]]
        count = itemsize
        for size in local_shape(shape, tuple(whole), mesh):
            count *= size
        steps.append(CastStep(kind, axis, dim, from_dim, invariant, count))
        current[axis] = code

    def in_order_before(axis: int, dim: int) -> bool:
        """Earlier axes split `dim` exactly where they do in the target."""
        return all((current[a] == dim) == (target[a] == dim) for a in axes if a < axis)

    def may_close(axis: int) -> bool:
        """Splitting the target's dim by `axis` now puts it in its final place, all before it there and none behind."""
        dim = target[axis]
        return dim >= 0 and in_order_before(axis, dim) and all(current[a] != dim for a in axes if a > axis)

    def close(kind: CastKind, sources: tuple[int, ...]) -> None:
        for axis in axes:
            if current[axis] in sources and may_close(axis):
                step(kind, axis, target[axis], dim=target[axis], invariant=current[axis] == REPLICATED)

    close("slice", (REPLICATED, VARYING))
    close("reduce_scatter", (PARTIAL,))
    close("slice", (REPLICATED, VARYING))  # those that lie behind a scatter on the same dim
    for axis in axes:
        a, b = current[axis], target[axis]
        if a == PARTIAL and b in (REPLICATED, VARYING):
            step("all_reduce", axis, b, invariant=b == REPLICATED)
        elif a == REPLICATED and b == VARYING:
            step("vary", axis, b)
        elif a == VARYING and b == REPLICATED:
            step("settle", axis, b)
    for axis in reversed(axes):  # open, minor first
        a, b = current[axis], target[axis]
        if a < 0 or (a == b and in_order_before(axis, a)):
            continue
        if a != b and may_close(axis):
            step("all_to_all", axis, b, dim=b, from_dim=a)
        else:
            code = b if b in (REPLICATED, VARYING) else VARYING
            step("all_gather", axis, code, dim=a, invariant=code == REPLICATED)
    for axis in axes:  # what had to wait for an opening, major first
        if current[axis] != target[axis]:
            kind: CastKind = "reduce_scatter" if current[axis] == PARTIAL else "slice"
            step(kind, axis, target[axis], dim=target[axis], invariant=current[axis] == REPLICATED)
    return tuple(steps)


def major_factor(op: Op, dims: Dims, dim: int) -> int:
    """The factor that a split of this dim would split: the first of size above one, or -1."""
    return next((f for f in dims[dim] if op.factors[f].size > 1), -1)


def _position(op: Op, dims: Dims, factor: int) -> int | None:
    """Dim that a split of `factor` splits in a tensor; -1 where the tensor lacks it; None where it is not major."""
    for dim, parts in enumerate(dims):
        if factor in parts:
            return dim if major_factor(op, dims, dim) == factor else None
    return -1


def axis_choices(op: Op, size: int) -> tuple[int, ...]:
    """Strategy codes that one mesh axis of `size` devices may take for this op."""
    if not op.known:
        return (REPLICATED,)  # run whole, on invariant operands: its derivative may not bear varying ones
    choices = [REPLICATED, VARYING]
    for index, factor in enumerate(op.factors):
        if not factor.splits or factor.size % size or factor.size == 1:
            continue
        places = [_position(op, dims, index) for dims in (*op.in_dims, *op.out_dims)]
        if any(place is None for place in places):
            continue
        missing = any(place == -1 for place in places[len(op.in_dims) :])
        if missing and factor.combine == "none":
            continue
        choices.append(index)
    for i, _ in enumerate(op.linear):
        choices.append(PASS - i)
    return tuple(choices)


def operand_spec(op: Op, position: int, strategy: Strategy) -> Spec:
    """Spec that operand `position` must have under `strategy`."""
    return tuple(_operand_code(op, position, code) for code in strategy)


def _operand_code(op: Op, position: int, code: int) -> int:
    if code <= PASS:
        return PARTIAL if position in op.linear[PASS - code] else VARYING
    if code < 0:
        return code
    dim = _position(op, op.in_dims[position], code)
    return VARYING if dim == -1 or dim is None else dim


def result_spec(op: Op, position: int, strategy: Strategy) -> Spec:
    """Spec that result `position` has under `strategy`."""
    codes = []
    for code in strategy:
        if code <= PASS:
            codes.append(PARTIAL)
        elif code < 0:
            codes.append(code)
        else:
            dim = _position(op, op.out_dims[position], code)
            combined = {"sum": PARTIAL, "max": REPLICATED, "same": VARYING, "none": VARYING}[op.factors[code].combine]
            codes.append(combined if dim == -1 or dim is None else dim)
    return tuple(codes)


def strategies(op: Op, mesh: Sequence[int]) -> tuple[Strategy, ...]:
    """Every legal strategy on a mesh: the product of the axes' choices where splits of one factor divide together."""
    out: list[Strategy] = [()]
    for size in mesh:
        choices = axis_choices(op, size) if size > 1 else (REPLICATED,)
        out = [(*done, choice) for done in out for choice in choices]
    legal = []
    for strategy in out:
        parts: dict[int, int] = {}
        for axis, code in enumerate(strategy):
            if code >= 0:
                parts[code] = parts.get(code, 1) * mesh[axis]
        if all(op.factors[f].size % n == 0 for f, n in parts.items()):
            legal.append(strategy)
    return tuple(legal)


def local_fraction(op: Op, strategy: Strategy, mesh: Sequence[int]) -> float:
    """Share of the op's loop that one device runs."""
    share = 1.0
    for axis, code in enumerate(strategy):
        if code >= 0:
            share /= mesh[axis]
    return share


def internal_reductions(op: Op, strategy: Strategy) -> tuple[int, ...]:
    """Mesh axes over which the op itself all-reduces its results (``combine='max'``)."""
    return tuple(axis for axis, code in enumerate(strategy) if code >= 0 and op.factors[code].combine == "max")


def describe(spec: Spec, tensor: Tensor, axis_names: Sequence[str]) -> str:
    """``[data, -, model] partial(x)``, for reports."""
    dims = [
        "+".join(n for n, code in zip(axis_names, spec, strict=True) if code == d) or "-"
        for d in range(len(tensor.shape))
    ]
    pending = [n for n, code in zip(axis_names, spec, strict=True) if code == PARTIAL]
    return f"[{', '.join(dims)}]" + (f" partial({', '.join(pending)})" if pending else "")
