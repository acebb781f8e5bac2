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

Nothing casts to PARTIAL, and VARYING does not cast back to REPLICATED: a planner never needs either. Where no gradient
crosses a tensor the backward column is not run, and costs nothing.
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

CastKind = Literal["slice", "all_gather", "reduce_scatter", "all_reduce", "all_to_all", "vary"]


@dataclass(frozen=True, slots=True)
class CastStep:
    """One step of a cast on one mesh axis.

    Attributes:
        kind: the forward operation; ``vary`` marks REPLICATED -> VARYING.
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
        return "" if self.kind in ("slice", "vary") else self.kind

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
        return {"reduce_scatter": "all_gather", "all_to_all": "all_to_all"}[self.kind]


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


def split_factor(spec: Spec, mesh: Sequence[int]) -> int:
    """Number of distinct parts that the spec cuts a tensor into."""
    parts = 1
    for axis, code in enumerate(spec):
        if code >= 0:
            parts *= mesh[axis]
    return parts


def cast(shape: tuple[int, ...], itemsize: int, source: Spec, target: Spec, mesh: tuple[int, ...]) -> tuple[CastStep, ...] | None:
    """The steps from one spec to another, or None where no cast exists.

    Reductions that scatter come first, then slices, exchanges, gathers and all-reduces, so that collectives see the
    smallest tensors; dims that several axes split are opened from the minor axis and closed again.
    """
    return _cast(shape, itemsize, source, target, mesh)


@lru_cache(maxsize=1 << 16)
def _cast(shape: tuple[int, ...], itemsize: int, source: Spec, target: Spec, mesh: tuple[int, ...]) -> tuple[CastStep, ...] | None:
    current = list(source)
    steps: list[CastStep] = []
    axes = range(len(mesh))
    for axis in axes:
        a, b = source[axis], target[axis]
        if mesh[axis] == 1:
            if b == PARTIAL and a != PARTIAL:
                return None
            continue
        if a != b and (b == PARTIAL or (a == VARYING and b == REPLICATED)):
            return None
    if not divides(shape, target, mesh):
        return None

    def full_bytes(skip: int) -> int:
        count = itemsize
        for size in local_shape(shape, tuple(REPLICATED if x == skip else c for x, c in enumerate(current)), mesh):
            count *= size
        return count

    def step(kind: CastKind, axis: int, code: int, **facts: int | bool) -> None:
        before = full_bytes(axis) if kind != "all_to_all" else full_bytes(-1)
        steps.append(CastStep(kind, axis, full_bytes=before, **facts))  # type: ignore[arg-type]
        current[axis] = code

    def closed_behind(axis: int, dim: int) -> bool:
        """Axes after `axis` already split `dim`: splitting by `axis` now would put it in the wrong order."""
        return any(current[later] == dim for later in axes if later > axis)

    def gather(axis: int, code: int) -> None:
        step("all_gather", axis, code, dim=current[axis], invariant=code == REPLICATED)

    # Axes of size one change their code for free.
    for axis in axes:
        if mesh[axis] == 1:
            current[axis] = target[axis]
    # Open every dim whose axes change under later axes that stay: gather those minor axes (they close again below).
    for axis in axes:
        a, b = current[axis], target[axis]
        changed_dims = {d for d in (a, b) if d >= 0 and a != b}
        for later in reversed(axes):
            if later > axis and current[later] in changed_dims and target[later] == current[later]:
                gather(later, VARYING)
    for axis in axes:  # scatter pending sums
        if current[axis] == PARTIAL and target[axis] >= 0 and not closed_behind(axis, target[axis]):
            step("reduce_scatter", axis, target[axis], dim=target[axis])
    for axis in axes:  # slices, major first
        if current[axis] in (REPLICATED, VARYING) and target[axis] >= 0 and not closed_behind(axis, target[axis]):
            step("slice", axis, target[axis], dim=target[axis], invariant=current[axis] == REPLICATED)
    for axis in reversed(axes):  # exchanges: only the minor-most axis of a dim can move, only to become minor-most
        a, b = current[axis], target[axis]
        if a >= 0 and b >= 0 and a != b and not closed_behind(axis, a) and not closed_behind(axis, b):
            probe = [*current]
            probe[axis] = b
            if divides(shape, tuple(probe), mesh):
                step("all_to_all", axis, b, dim=b, from_dim=a)
    for axis in reversed(axes):  # gathers, minor first
        a, b = current[axis], target[axis]
        if a >= 0 and a != b:
            gather(axis, b if b < 0 else VARYING)
    for axis in axes:  # all that is left to close or reduce
        a, b = current[axis], target[axis]
        if a == PARTIAL:
            if b >= 0:
                step("reduce_scatter", axis, b, dim=b)
            else:
                step("all_reduce", axis, b, invariant=b == REPLICATED)
        elif a != b and b >= 0:
            step("slice", axis, b, dim=b, invariant=a == REPLICATED)
        elif a == REPLICATED and b == VARYING:
            step("vary", axis, VARYING)
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
    dims = ["+".join(n for n, code in zip(axis_names, spec, strict=True) if code == d) or "-" for d in range(len(tensor.shape))]
    pending = [n for n, code in zip(axis_names, spec, strict=True) if code == PARTIAL]
    return f"[{', '.join(dims)}]" + (f" partial({', '.join(pending)})" if pending else "")
