"""Where a parameter, its gradient and its optimizer state may live: ZeRO-0 to 3, tensor parallel shards and mixes.

On each mesh axis a parameter is replicated, or replicated with its optimizer state split (ZeRO-1), with its gradient
split too (ZeRO-2), or split itself. What its ops need is their own choice; between the two lie these costs, with `m`
microbatches a step:

    stored      needed by ops        each microbatch                         once a step
    replicated  replicated           nothing                                 nothing
    replicated  varying or split     nothing (a slice)                       all-reduce of the gradient
      ZeRO-1                                                                 reduce-scatter, all-gather of the update
      ZeRO-2                         reduce-scatter of the gradient          all-gather of the update
    split at d  split at d           nothing                                 nothing
    split at d  varying              all-gather F, all-gather + reduce-scatter B     nothing (ZeRO-3)
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

from costmodel.estimator import Pricing
from costmodel.graph import Parameter, Tensor
from costmodel.sharding import REPLICATED, VARYING, Spec, divides, shifted, split_factor

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Storage:
    """Specs of the value, the accumulated gradient and the optimizer state."""

    value: Spec
    gradient: Spec
    optimizer: Spec


def whole_storage(axes: int) -> Storage:
    """Everything whole on every device."""
    whole = (REPLICATED,) * axes
    return Storage(whole, whole, whole)


def storages(
    shape: Sequence[int], mesh: Sequence[int], trained: bool, fixed: Mapping[int, int] = MappingProxyType({})
) -> tuple[Storage, ...]:
    """Every way to store a parameter of this (layer's) shape on a mesh.

    Args:
        fixed: mesh axis -> the one code that value, gradient and optimizer state may have on it.
    """
    dims = [d for d, n in enumerate(shape) if n > 1]
    per_axis: list[list[tuple[int, bool, bool]]] = []  # value's code, whether gradient and optimizer state are split
    for axis, size in enumerate(mesh):
        if axis in fixed:
            per_axis.append([(fixed[axis], fixed[axis] >= 0, fixed[axis] >= 0)])
            continue
        fitting = [d for d in dims if shape[d] % size == 0]
        options = [(REPLICATED, False, False), *((d, True, True) for d in fitting)]
        if trained and fitting:
            options += [(REPLICATED, False, True), (REPLICATED, True, True)]
        per_axis.append(options)
    found = []
    for combination in product(*per_axis):
        value = tuple(code for code, _, _ in combination)
        cut = _cut_state(shape, mesh, value, [optimizer for _, _, optimizer in combination])
        if cut is None:
            continue
        gradient = tuple(c if split else v for c, v, (_, split, _) in zip(cut, value, combination, strict=True))
        one = Storage(value, gradient, cut)
        if divides(shape, one.value, mesh) and divides(shape, one.gradient, mesh):
            found.append(one)
    return tuple(found)


def _cut_state(shape: Sequence[int], mesh: Sequence[int], value: Spec, split: Sequence[bool]) -> Spec | None:
    """The value's spec with each axis of `split` splitting some dim: the leading one that divides.

    Which dim it is costs the same, but for one: axes split a dim major to minor in mesh order, so an axis cannot be put
    before one that splits the value without gathering the value first.
    """
    cut = list(value)
    for axis, wanted in enumerate(split):
        if not wanted or value[axis] >= 0:
            continue
        later = value[axis + 1 :]
        fitting = (
            d
            for d, n in enumerate(shape)
            if n > 1 and d not in later and divides(shape, (*cut[:axis], d, *cut[axis + 1 :]), tuple(mesh))
        )
        dim = next(fitting, None)
        if dim is None:
            return None
        cut[axis] = dim
    return tuple(cut)


def hoisted(value: Spec, needs: Sequence[Spec]) -> Spec:
    """The spec that a parameter has all step long: axes on which it is stored whole and every op varies are made
    varying once, so that their gradient is summed once a step."""
    return tuple(
        VARYING if code == REPLICATED and needs and all(need[axis] != REPLICATED for need in needs) else code
        for axis, code in enumerate(value)
    )


def parameter_matrix(
    tensor: Tensor,
    options: Sequence[Storage],
    needs: Sequence[Spec],
    pricing: Pricing,
    *,
    trained: bool,
    leaf_share: float = 1.0,
) -> tuple[Floats, Floats, Floats]:
    """Seconds forward and backward of each microbatch, and once a step, for each way to store and each spec needed.

    Args:
        leaf_share: of one leaf that the tensor is (one layer of a stack): a leaf's gradient is reduced at once.
    """
    shape = (len(options), len(needs))
    forward, backward, once = np.empty(shape), np.empty(shape), np.zeros(shape)
    values = {}
    for i, storage in enumerate(options):
        values.setdefault(storage.value, []).append(i)
    for value, rows in values.items():
        local = tensor.bytes / split_factor(value, pricing.mesh)
        by_through: dict[Spec, list[int]] = {}
        for j, need in enumerate(needs):
            by_through.setdefault(hoisted(value, (need,)), []).append(j)
        for through, columns in by_through.items():
            ahead, back = pricing.cast_matrix(tensor, [through], [needs[j] for j in columns])
            forward[np.ix_(rows, columns)], backward[np.ix_(rows, columns)] = ahead, back
            possible = np.isfinite(ahead[0])
            for i in rows if trained else ():
                for phase, kind, axis in gradient_collectives(options[i], through, pricing.mesh):
                    total = once if phase == "once" else backward
                    total[i, columns] += np.where(possible, reduction_s(pricing, kind, axis, local, leaf_share), 0.0)
    return forward, backward, once


def whole_read_matrix(
    stack: Tensor, options: Sequence[Storage], needs: Sequence[Spec], pricing: Pricing
) -> tuple[Floats, Floats]:
    """Seconds forward and backward of each microbatch in which a block takes a whole stack whose items lie as `options`
    say. What the stack's gradient costs once is part of `parameter_matrix`, for the layers that read the items."""
    forward, backward = np.empty((len(options), len(needs))), np.empty((len(options), len(needs)))
    for i, storage in enumerate(options):
        for j, need in enumerate(needs):
            through = hoisted(shifted(storage.value, 1), (need,))
            ahead, back = pricing.cast_matrix(stack, [through], [need])
            forward[i, j], backward[i, j] = ahead[0, 0], back[0, 0]
    return forward, backward


def reduction_s(pricing: Pricing, kind: str, axis: int, size_bytes: float, leaf_share: float) -> float:
    """Seconds of a part of a leaf's reduction: its bytes, and its share of what any collective takes."""
    start_s = pricing.collective_s(kind, axis, 0.0)
    return pricing.collective_s(kind, axis, size_bytes) - (1.0 - leaf_share) * start_s


def gradient_collectives(storage: Storage, through: Spec, mesh: Sequence[int]) -> list[tuple[str, str, int]]:
    """Collectives of a leaf's gradient and its update: (``backward`` for each microbatch or ``once`` a step, kind,
    axis)."""
    found = []
    for axis, code in enumerate(storage.value):
        if code != REPLICATED or mesh[axis] == 1:
            continue
        reduces = through[axis] == VARYING
        if storage.gradient[axis] >= 0 and reduces:
            found.append(("backward", "reduce_scatter", axis))
        elif storage.optimizer[axis] >= 0 and reduces:
            found.append(("once", "reduce_scatter", axis))
        elif reduces:
            found.append(("once", "all_reduce", axis))
        if storage.optimizer[axis] >= 0:
            found.append(("once", "all_gather", axis))
    return found


def state_bytes(
    parameter: Parameter, elements: int, storage: Storage, mesh: Sequence[int]
) -> tuple[float, float, float]:
    """Bytes of value, gradient and optimizer state on one device, for `elements` elements of the parameter."""
    value = elements * parameter.itemsize / split_factor(storage.value, tuple(mesh))
    if not parameter.trained:
        return value, 0.0, 0.0
    gradient = elements * parameter.gradient_itemsize / split_factor(storage.gradient, tuple(mesh))
    optimizer = elements * parameter.optimizer_bytes_per_element / split_factor(storage.optimizer, tuple(mesh))
    return value, gradient, optimizer + parameter.optimizer_whole_bytes * elements / max(1, parameter.elements)


def arising_bytes(
    parameter: Parameter, elements: int, storage: Storage, mesh: Sequence[int], *, accumulates: bool, fuses: bool
) -> float:
    """Bytes on one device of a microbatch's gradient, beside the accumulator that it is added to.

    It arises split as the value is, whatever the accumulator's split: with ZeRO-2 whole. One that is not added to
    others is the accumulator, unless that is split further.

    Args:
        fuses: whether the compiler reuses memory leaf by leaf; the CPU's has what is left of all gradients after the
            first axis's reduce-scatter beside them.
    """
    if not parameter.trained or (not accumulates and storage.gradient == storage.value):
        return 0.0
    whole = elements * parameter.gradient_itemsize / split_factor(storage.value, tuple(mesh))
    scattered = (n for n, v, g in zip(mesh, storage.value, storage.gradient, strict=True) if v < 0 <= g)
    first = 0 if fuses else next(scattered, 0)
    return whole + (whole / first if first else 0.0)


def scattered_bytes(parameter: Parameter, elements: int, storage: Storage, mesh: Sequence[int]) -> float:
    """Bytes on one device of what the first reduce-scatter of a gradient makes, beside the gradient; 0 where there is
    none. Leaves are scattered one after another."""
    if not parameter.trained:
        return 0.0
    scattered = (n for n, v, o in zip(mesh, storage.value, storage.optimizer, strict=True) if v < 0 <= o)
    first = next(scattered, 0)
    whole = elements * parameter.gradient_itemsize / split_factor(storage.value, tuple(mesh))
    return whole / first if first else 0.0


def reduced_bytes(parameter: Parameter, elements: int, storage: Storage, mesh: Sequence[int]) -> float:
    """Bytes on one device of a gradient as the update takes it."""
    if not parameter.trained:
        return 0.0
    return elements * parameter.gradient_itemsize / split_factor(storage.optimizer, tuple(mesh))


def update_bytes(parameter: Parameter, elements: int, storage: Storage, mesh: Sequence[int]) -> float:
    """Bytes that the optimizer update reads and writes on one device: parameter and state both ways, gradient once."""
    if not parameter.trained:
        return 0.0
    each = 2 * parameter.itemsize + parameter.gradient_itemsize + 2 * parameter.optimizer_bytes_per_element
    whole = 2 * parameter.optimizer_whole_bytes * elements / max(1, parameter.elements)
    return elements * each / split_factor(storage.optimizer, tuple(mesh)) + whole
