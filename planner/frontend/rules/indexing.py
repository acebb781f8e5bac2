"""Gather and scatter.

Dims of the index array, batching dims, and window dims that are taken whole are parallel. An indexed dim (the rows of
an embedding table) splits too: a device shifts the indices by the start of its part, and those that fall outside of it
are out of bounds there, which JAX's fill-or-drop mode turns into zeros (gather: a pending sum) or drops (scatter). What
was out of bounds of the whole is clamped or kept out of bounds before the shift, so every mode keeps its meaning.
"""

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax

from costmodel.graph import Touch
from planner.frontend import jax_compat as jc
from planner.frontend.flat import Equation
from planner.frontend.rules.base import Factorisation, Placement, Residual, Rule, elements, register
from planner.frontend.rules.factors import FactorList, adds_up, is_inexact

CLIP = lax.GatherScatterMode.CLIP
DROP = lax.GatherScatterMode.FILL_OR_DROP
PROMISE = lax.GatherScatterMode.PROMISE_IN_BOUNDS
SHIFTABLE = (CLIP, DROP, PROMISE)

PART_OF_DIM = "only a part of this dim is taken"
WINDOW = "a part of a dim"


def _index_dims(
    shape: Sequence[int], factors: FactorList, batching: Sequence[int], **facts: Any
) -> list[tuple[int, ...]]:
    """Factors of an index array's dims; `facts` are those of dims that the operand does not share."""
    dims = [
        factors.add(f"batch{i}" if i in batching else f"index{i}", n, **({} if i in batching else facts))
        for i, n in enumerate(shape[:-1])
    ]
    return [*dims, factors.add("coordinates", shape[-1], fixed="the coordinates of one index")]


def _part(place: Placement, dim: tuple[int, ...]) -> bool:
    """Whether a dim with these factors is split."""
    return bool(dim) and place.parts(dim[0]) > 1


def _shifted(indices: Any, limits: Sequence[int], offsets: Sequence[Any], clamp: bool) -> Any:
    """Indices as seen by a device that holds a part of the indexed dims.

    Args:
        limits: per coordinate, the largest start index in the whole operand.
        offsets: per coordinate, where the device's part begins.
        clamp: move what is out of bounds of the whole to the bound. Otherwise it stays out of bounds, one beyond at
            most, so that the shift cannot overflow.
    """
    info = jnp.iinfo(indices.dtype)
    wide = jnp.int64 if info.bits == 64 else jnp.int32
    columns = []
    for c, (limit, offset) in enumerate(zip(limits, offsets, strict=True)):
        low, high = (0, limit) if clamp else (-1, limit + 1)
        column = jnp.clip(indices[..., c], max(low, int(info.min)), min(high, int(info.max)))
        columns.append(column.astype(wide) - jnp.asarray(offset, wide))
    return jnp.stack(columns, axis=-1)


def _sorted(eqn: Equation) -> bool:
    """Whether shifted indices are still sorted: bounding one coordinate may change the order of pairs."""
    return bool(eqn.params["indices_are_sorted"]) and eqn.in_shapes[1][-1] == 1


@register("gather")
class Gather(Rule):
    """Windows of the first operand at the places that the second names."""

    def factorise(self, eqn: Equation) -> Factorisation:
        numbers, sizes = eqn.params["dimension_numbers"], eqn.params["slice_sizes"]
        operand, indices = eqn.in_shapes
        factors = FactorList()
        index = _index_dims(indices, factors, numbers.start_indices_batching_dims)
        batching = dict(zip(numbers.operand_batching_dims, numbers.start_indices_batching_dims, strict=True))
        if not adds_up(eqn.inputs[0]):
            fixed = "values of this dtype have no sum"
        elif eqn.params["mode"] not in SHIFTABLE:
            fixed = "no rule for this mode"
        else:
            fixed = ""
        source: list[tuple[int, ...]] = []
        windows: list[tuple[int, ...]] = []
        for d, n in enumerate(operand):
            if d in batching:
                source.append(index[batching[d]])
            elif d in numbers.collapsed_slice_dims:
                chosen = d in numbers.start_index_map
                source.append(factors.add(f"row{d}", n, combine="sum", fixed=fixed if chosen else PART_OF_DIM))
            elif sizes[d] == n:
                source.append(factors.add(f"d{d}", n))
                windows.append(source[-1])
            else:
                source.append(factors.add(f"d{d}", n, fixed=PART_OF_DIM))
                windows.append(factors.add(f"window{d}", sizes[d], fixed=WINDOW))
        along, beside = iter(windows), iter(index[:-1])
        result = tuple(next(along if d in numbers.offset_dims else beside) for d in range(len(eqn.out_shapes[0])))
        return Factorisation(
            factors=factors.done(),
            in_dims=(tuple(source), tuple(index)),
            out_dims=(result,),
            linear=((0,),) if adds_up(eqn.inputs[0]) and self._keeps_sums(eqn) else (),
            residuals=((1,),),
            work="data",
            touches=(Touch(0, ~0, by_index=True),),
        )

    def _keeps_sums(self, eqn: Equation) -> bool:
        """What fills places out of bounds must be its own sum over devices: zero, or not a number."""
        if eqn.params["mode"] != DROP:
            return True
        fill = self._fill(eqn)
        return bool(fill == 0 or fill != fill)

    def _fill(self, eqn: Equation) -> Any:
        """What stands for elements out of bounds, JAX's default where the user named none."""
        if eqn.params["fill_value"] is not None:
            return eqn.params["fill_value"]
        if is_inexact(eqn.outputs[0]):
            return float("nan")
        dtype = eqn.outputs[0].aval.dtype
        return jnp.iinfo(dtype).min if jnp.issubdtype(dtype, jnp.signedinteger) else jnp.iinfo(dtype).max

    def local(self, eqn: Equation, place: Placement, args: list[Any]) -> list[Any]:
        operand, indices = args
        shape = eqn.in_shapes[0]
        dims = place.op.in_dims[0]
        numbers = eqn.params["dimension_numbers"]
        whole_sizes = eqn.params["slice_sizes"]
        # Where a window takes a whole dim, it takes one device's whole part.
        taken = zip(place.local_in(0, shape), shape, whole_sizes, strict=True)
        sizes = tuple(part if n == size else size for part, n, size in taken)
        rows = [d for d in numbers.collapsed_slice_dims if _part(place, dims[d])]
        if not rows:
            return jc.bind(eqn.primitive, args, {**eqn.params, "slice_sizes": sizes})
        limits = [shape[d] - whole_sizes[d] for d in numbers.start_index_map]
        offsets = [place.part_index(dims[d][0]) * operand.shape[d] if d in rows else 0 for d in numbers.start_index_map]
        fills = eqn.params["mode"] == DROP
        shifted = _shifted(indices, limits, offsets, clamp=not fills)
        params = {**eqn.params, "slice_sizes": sizes, "mode": DROP, "fill_value": 0, "indices_are_sorted": _sorted(eqn)}
        (found,) = jc.bind(eqn.primitive, [operand, shifted], params)
        fill = self._fill(eqn) if fills else 0
        if fill == 0:
            return [found]
        asked = _shifted(indices, limits, [0] * len(limits), clamp=False)
        inside = jnp.all((asked >= 0) & (asked <= jnp.asarray(limits)), axis=-1)
        first = sum(place.part_index(dims[d][0]) for d in rows) == 0
        missing = jnp.where(first, jnp.asarray(fill, found.dtype), jnp.zeros((), found.dtype))
        return [jnp.where(jnp.expand_dims(inside, numbers.offset_dims), found, missing)]


class Scatter(Rule):
    """Windows of the first operand, at the places that the second names, meet the updates of the third.

    Args:
        adds: updates are added: a device may hold some of the updates, and its result is a summand.
        residuals: per operand, what its cotangent reads.
        linear: operand sets in which the op is jointly linear.
    """

    def __init__(
        self,
        *,
        adds: bool = False,
        residuals: tuple[tuple[Residual, ...], ...],
        linear: tuple[tuple[int, ...], ...] = (),
    ):
        self.adds, self.residuals, self.linear = adds, residuals, linear

    def factorise(self, eqn: Equation) -> Factorisation:
        numbers = eqn.params["dimension_numbers"]
        operand, indices, updates = eqn.in_shapes
        factors = FactorList()
        summable = adds_up(eqn.outputs[0])
        apart = {"combine": "sum"} if self.adds and summable else {"fixed": "updates may meet at one place"}
        index = _index_dims(indices, factors, numbers.scatter_indices_batching_dims, **apart)
        batching = dict(zip(numbers.operand_batching_dims, numbers.scatter_indices_batching_dims, strict=True))
        fixed = "" if eqn.params["mode"] in SHIFTABLE else "no rule for this mode"
        target: list[tuple[int, ...]] = []
        windows: list[tuple[int, ...]] = []
        window_sizes = iter([updates[d] for d in numbers.update_window_dims])
        for d, n in enumerate(operand):
            if d in batching:
                target.append(index[batching[d]])
            elif d in numbers.inserted_window_dims:
                chosen = d in numbers.scatter_dims_to_operand_dims
                target.append(factors.add(f"row{d}", n, fixed=fixed if chosen else PART_OF_DIM))
            elif (size := next(window_sizes)) == n:
                target.append(factors.add(f"d{d}", n))
                windows.append(target[-1])
            else:
                target.append(factors.add(f"d{d}", n, fixed=PART_OF_DIM))
                windows.append(factors.add(f"window{d}", size, fixed=WINDOW))
        along, beside = iter(windows), iter(index[:-1])
        update = tuple(next(along if d in numbers.update_window_dims else beside) for d in range(len(updates)))
        return Factorisation(
            factors=factors.done(),
            in_dims=(tuple(target), tuple(index), update),
            out_dims=(tuple(target),),
            linear=self.linear_sets(eqn) if summable else (),
            residuals=self.residuals,
            flops=elements(updates),
            work="data",
            fuses=False,
            touches=(Touch(0, 2), Touch(~0, 2)),
        )

    def linear_sets(self, eqn: Equation) -> tuple[tuple[int, ...], ...]:
        """The linear sets of this equation, if its values can be added up."""
        return self.linear

    def local(self, eqn: Equation, place: Placement, args: list[Any]) -> list[Any]:
        operand, indices, updates = args
        numbers = eqn.params["dimension_numbers"]
        params = dict(eqn.params)
        dims = place.op.in_dims[0]
        apart = [
            dim[0] for dim in place.op.in_dims[1] if _part(place, dim) and place.op.factors[dim[0]].combine == "sum"
        ]
        if apart:
            # The operand counts once in the sum over devices.
            first = sum(place.part_index(factor) for factor in apart) == 0
            operand = jnp.where(first, operand, jnp.zeros((), operand.dtype))
        rows = [d for d in numbers.inserted_window_dims if _part(place, dims[d])]
        if rows:
            coordinates = numbers.scatter_dims_to_operand_dims
            limits = [eqn.in_shapes[0][d] - self._window(eqn, d) for d in coordinates]
            offsets = [place.part_index(dims[d][0]) * operand.shape[d] if d in rows else 0 for d in coordinates]
            indices = _shifted(indices, limits, offsets, clamp=params["mode"] == CLIP)
            params |= {"mode": DROP, "indices_are_sorted": _sorted(eqn)}
        return jc.bind(eqn.primitive, [operand, indices, updates], params)

    def _window(self, eqn: Equation, dim: int) -> int:
        """Size of an update's window along an operand dim, in the whole."""
        numbers = eqn.params["dimension_numbers"]
        absent = {*numbers.inserted_window_dims, *numbers.operand_batching_dims}
        if dim in absent:
            return 1
        position = sum(d not in absent for d in range(dim))
        return int(eqn.in_shapes[2][numbers.update_window_dims[position]])


class Overwrite(Scatter):
    """Updates replace elements, or a function changes them in place (``at[].apply``)."""

    def linear_sets(self, eqn: Equation) -> tuple[tuple[int, ...], ...]:
        # Where updates meet, which one wins is open, so summands on two devices might not belong together.
        return self.linear if eqn.params["unique_indices"] and eqn.params["update_jaxpr"] is None else ()


register("scatter-add", "scatter-sub")(Scatter(adds=True, residuals=((), (), (1,)), linear=((0, 2),)))
register("scatter")(Overwrite(residuals=((1,), (), (1,)), linear=((0, 2),)))
register("scatter-mul")(Scatter(residuals=((1, 2), (), (0, 1)), linear=((0,),)))
register("scatter-max", "scatter-min")(Scatter(residuals=((0, 1, 2, ~0), (), (0, 1, 2, ~0))))
