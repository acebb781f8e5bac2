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

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

from costmodel.estimator import Pricing
from costmodel.graph import Parameter, Tensor
from costmodel.sharding import REPLICATED, VARYING, Spec, divides, split_factor


@dataclass(frozen=True, slots=True)
class Storage:
    """Specs of the value, the accumulated gradient and the optimizer state."""

    value: Spec
    gradient: Spec
    optimizer: Spec


@dataclass(frozen=True, slots=True)
class ParameterCost:
    """What storing a parameter one way and needing it another costs on one device.

    Attributes:
        forward_s, backward_s: each microbatch.
        once_s: gradient reduction and gather of the update, each step.
        collectives: (phase, kind, axis) of every collective.
    """

    forward_s: float
    backward_s: float
    once_s: float
    collectives: tuple[tuple[str, str, int], ...]


def storages(shape: Sequence[int], mesh: Sequence[int], trained: bool) -> tuple[Storage, ...]:
    """Every way to store a parameter of this (layer's) shape on a mesh."""
    dims = [d for d, n in enumerate(shape) if n > 1]
    per_axis: list[list[tuple[int, int, int]]] = []
    for size in mesh:
        fitting = [d for d in dims if shape[d] % size == 0]
        options = [(REPLICATED, REPLICATED, REPLICATED), *((d, d, d) for d in fitting)]
        if trained and fitting:
            # Which dim the state of a replicated parameter is cut at costs the same: the leading one that divides.
            options += [(REPLICATED, REPLICATED, fitting[0]), (REPLICATED, fitting[0], fitting[0])]
        per_axis.append(options)
    found = []
    for combination in product(*per_axis):
        one = Storage(*(tuple(codes[i] for codes in combination) for i in range(3)))
        if divides(shape, one.value, mesh) and divides(shape, one.gradient, mesh) and divides(shape, one.optimizer, mesh):
            found.append(one)
    return tuple(found)


def hoisted(value: Spec, needs: Sequence[Spec]) -> Spec:
    """The spec that a parameter has all step long: axes on which it is stored whole and every op varies are made
    varying once, so that their gradient is summed once a step."""
    return tuple(
        VARYING if code == REPLICATED and needs and all(need[axis] != REPLICATED for need in needs) else code
        for axis, code in enumerate(value)
    )


def parameter_cost(tensor: Tensor, storage: Storage, need: Spec, pricing: Pricing, *, trained: bool) -> ParameterCost:
    """Cost of one parameter tensor (one layer's) that is stored one way and needed another."""
    through = hoisted(storage.value, (need,))
    forward_s, backward_s = pricing.cast(tensor, through, need)
    if not math.isfinite(forward_s):
        return ParameterCost(math.inf, math.inf, math.inf, ())
    collectives: list[tuple[str, str, int]] = []
    once_s = 0.0
    gathers = any(s >= 0 and n < 0 for s, n in zip(storage.value, need, strict=True))
    if gathers and trained:
        backward_s += forward_s  # gathered again for the backward pass
    if trained:
        local = tensor.bytes / split_factor(storage.value, pricing.mesh)
        for axis, code in enumerate(storage.value):
            if code != REPLICATED or pricing.mesh[axis] == 1:
                continue
            reduces = through[axis] == VARYING
            if storage.gradient[axis] >= 0 and reduces:
                backward_s += _time(pricing, "reduce_scatter", local, axis)
                collectives.append(("backward", "reduce_scatter", axis))
            elif storage.optimizer[axis] >= 0 and reduces:
                once_s += _time(pricing, "reduce_scatter", local, axis)
                collectives.append(("once", "reduce_scatter", axis))
            elif reduces:
                once_s += _time(pricing, "all_reduce", local, axis)
                collectives.append(("once", "all_reduce", axis))
            if storage.optimizer[axis] >= 0:
                once_s += _time(pricing, "all_gather", local, axis)
                collectives.append(("once", "all_gather", axis))
    return ParameterCost(forward_s, backward_s, once_s, tuple(collectives))


def _time(pricing: Pricing, kind: str, size_bytes: float, axis: int) -> float:
    fixed, slope = pricing.casts.line(kind, axis)
    return fixed + slope * size_bytes


def state_bytes(parameter: Parameter, elements: int, storage: Storage, mesh: Sequence[int]) -> tuple[float, float, float]:
    """Bytes of value, gradient and optimizer state on one device, for `elements` elements of the parameter."""
    value = elements * parameter.itemsize / split_factor(storage.value, tuple(mesh))
    if not parameter.trained:
        return value, 0.0, 0.0
    gradient = elements * parameter.gradient_itemsize / split_factor(storage.gradient, tuple(mesh))
    optimizer = elements * parameter.optimizer_bytes_per_element / split_factor(storage.optimizer, tuple(mesh))
    return value, gradient, optimizer


def update_bytes(parameter: Parameter, elements: int, storage: Storage, mesh: Sequence[int]) -> float:
    """Bytes that the optimizer update reads and writes on one device: parameter and state both ways, gradient once."""
    if not parameter.trained:
        return 0.0
    each = 2 * parameter.itemsize + parameter.gradient_itemsize + 2 * parameter.optimizer_bytes_per_element
    return elements * each / split_factor(storage.optimizer, tuple(mesh))
