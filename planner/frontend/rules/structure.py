"""Primitives that rearrange elements. All are linear, none computes; a dim splits where it is taken whole.

A dim whose elements move along itself (reversed, concatenated, padded, cut) is fixed: its parts would have to travel
between devices, which is a cast and not a local program.
"""

import math
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp

from costmodel.graph import Dims, Touch, Work
from planner.frontend.flat import Equation, scalar_of
from planner.frontend.rules.base import Factorisation, Placement, Rule, register
from planner.frontend.rules.factors import FactorList, adds_up


def rearrangement(
    eqn: Equation,
    factors: FactorList,
    in_dims: Sequence[Dims],
    out_dims: Sequence[Dims],
    *,
    linear: Sequence[Sequence[int]] = ((0,),),
    residuals: tuple[tuple[int, ...], ...] = (),
    work: Work = "data",
    touches: tuple[Touch, ...] = (),
) -> Factorisation:
    """Facts of an op that only moves elements; `linear` holds where the elements can be added up."""
    return Factorisation(
        factors=factors.done(),
        in_dims=tuple(in_dims),
        out_dims=tuple(out_dims),
        linear=tuple(tuple(s) for s in linear) if adds_up(eqn.outputs[0]) else (),
        residuals=residuals,
        work=work,
        touches=touches,
    )


def common_factors(source: Sequence[int], target: Sequence[int], factors: FactorList) -> tuple[Dims, Dims]:
    """Factors of a reshape, as dims of its operand and of its result.

    Both shapes are walked from the major side. While one dim divides the other, the smaller is a shared factor. Where
    neither does, their greatest common divisor is still shared (it is the major part of both), and the rest belongs to
    one side only, up to the next place where dims of both sides end together.
    """
    dims: tuple[list[tuple[int, ...]], list[tuple[int, ...]]] = ([()] * len(source), [()] * len(target))
    if 0 in source:
        return tuple(dims[0]), tuple(dims[1])
    mixed = "the reshape mixes this dim with others"
    i, j, left, right = -1, -1, 1, 1  # current dims and what of them is not yet in a factor
    while True:
        while left == 1 and i + 1 < len(source):
            i, left = i + 1, source[i + 1]
        while right == 1 and j + 1 < len(target):
            j, right = j + 1, target[j + 1]
        if left == right == 1:
            return tuple(dims[0]), tuple(dims[1])
        shared = math.gcd(left, right)
        factor = factors.add(f"s{i}", shared)
        dims[0][i], dims[1][j] = dims[0][i] + factor, dims[1][j] + factor
        left, right = left // shared, right // shared
        if left == 1 or right == 1:
            continue
        dims[0][i] += factors.add(f"s{i}", left, fixed=mixed)
        dims[1][j] += factors.add(f"t{j}", right, fixed=mixed)
        while left != right:
            if left < right:
                i, left = i + 1, left * source[i + 1]
                dims[0][i] = factors.add(f"s{i}", source[i], fixed=mixed)
            else:
                j, right = j + 1, right * target[j + 1]
                dims[1][j] = factors.add(f"t{j}", target[j], fixed=mixed)
        left = right = 1


@register("reshape")
class Reshape(Rule):
    """Merges and splits dims; only the major factor of a merged dim splits."""

    def factorise(self, eqn: Equation) -> Factorisation:
        shape = eqn.in_shapes[0]
        order = eqn.params["dimensions"] or tuple(range(len(shape)))
        factors = FactorList()
        source, target = common_factors([shape[d] for d in order], eqn.out_shapes[0], factors)
        operand = [source[order.index(d)] for d in range(len(shape))]
        work: Work = "view" if list(order) == sorted(order) else "data"
        return rearrangement(eqn, factors, [tuple(operand)], [target], work=work)

    def local_params(self, eqn: Equation, place: Placement) -> dict[str, Any]:
        return {**eqn.params, "new_sizes": place.local_out(0, eqn.out_shapes[0]), "sharding": None}


@register("broadcast_in_dim")
class BroadcastInDim(Rule):
    """Dims that the operand lacks, or has with size one, are repeated."""

    def factorise(self, eqn: Equation) -> Factorisation:
        factors = FactorList()
        result = factors.dims(eqn.out_shapes[0])
        places = eqn.params["broadcast_dimensions"]
        operand = tuple(result[places[d]] if n > 1 else () for d, n in enumerate(eqn.in_shapes[0]))
        return rearrangement(eqn, factors, [operand], [result])

    def local_params(self, eqn: Equation, place: Placement) -> dict[str, Any]:
        return {**eqn.params, "shape": place.local_out(0, eqn.out_shapes[0]), "sharding": None}


@register("transpose")
class Transpose(Rule):
    """Dims change their order."""

    def factorise(self, eqn: Equation) -> Factorisation:
        factors = FactorList()
        operand = factors.dims(eqn.in_shapes[0])
        return rearrangement(eqn, factors, [operand], [tuple(operand[d] for d in eqn.params["permutation"])])


@register("squeeze")
class Squeeze(Rule):
    """Dims of size one go."""

    def factorise(self, eqn: Equation) -> Factorisation:
        factors = FactorList()
        operand = factors.dims(eqn.in_shapes[0])
        gone = {d % len(operand) for d in eqn.params["dimensions"]}
        result = tuple(dim for d, dim in enumerate(operand) if d not in gone)
        return rearrangement(eqn, factors, [operand], [result], work="view")


@register("rev")
class Rev(Rule):
    """The order of elements along some dims turns round."""

    def factorise(self, eqn: Equation) -> Factorisation:
        factors = FactorList()
        turned = eqn.params["dimensions"]
        dims = tuple(
            factors.add(f"d{d}", n, fixed="this dim is reversed" if d in turned else "")
            for d, n in enumerate(eqn.in_shapes[0])
        )
        return rearrangement(eqn, factors, [dims], [dims])


def along(shapes: Sequence[Sequence[int]], axis: int, factors: FactorList, reason: str) -> list[Dims]:
    """Dims of tensors that share all dims but `axis`, which is fixed and each tensor's own."""
    shared: list[tuple[int, ...]] = [() if d == axis else factors.add(f"d{d}", n) for d, n in enumerate(shapes[0])]
    tensors = []
    for shape in shapes:
        own = factors.add(f"d{axis}", shape[axis], fixed=reason)
        tensors.append(tuple(own if d == axis else dim for d, dim in enumerate(shared)))
    return tensors


@register("concatenate")
class Concatenate(Rule):
    """Operands side by side along one dim; a pending sum passes if all operands are pending."""

    def factorise(self, eqn: Equation) -> Factorisation:
        factors = FactorList()
        shapes = (*eqn.in_shapes, eqn.out_shapes[0])
        *operands, result = along(shapes, eqn.params["dimension"], factors, "this dim is concatenated")
        return rearrangement(eqn, factors, operands, [result], linear=(range(len(operands)),))


@register("split")
class Split(Rule):
    """Pieces of one dim."""

    def factorise(self, eqn: Equation) -> Factorisation:
        factors = FactorList()
        shapes = (eqn.in_shapes[0], *eqn.out_shapes)
        operand, *results = along(shapes, eqn.params["axis"], factors, "this dim is cut into pieces")
        return rearrangement(eqn, factors, [operand], results)


@register("stack")
class Stack(Rule):
    """Operands of one shape along a new dim."""

    def factorise(self, eqn: Equation) -> Factorisation:
        factors, axis = FactorList(), eqn.params["axis"]
        operand = factors.dims(eqn.in_shapes[0])
        new = factors.add("stack", len(eqn.inputs), fixed="this dim is stacked")
        result = (*operand[:axis], new, *operand[axis:])
        return rearrangement(eqn, factors, [operand] * len(eqn.inputs), [result], linear=(range(len(eqn.inputs)),))


@register("unstack")
class Unstack(Rule):
    """One result for each element of a dim."""

    def factorise(self, eqn: Equation) -> Factorisation:
        factors, axis = FactorList(), eqn.params["axis"]
        shape = eqn.in_shapes[0]
        operand = tuple(
            factors.add(f"d{d}", n, fixed="this dim is unstacked" if d == axis else "") for d, n in enumerate(shape)
        )
        return rearrangement(eqn, factors, [operand], [operand[:axis] + operand[axis + 1 :]] * len(eqn.outputs))


@register("tile")
class Tile(Rule):
    """Repeats of whole dims: the repeats are the major factor, so a tiled dim splits into groups of repeats."""

    def factorise(self, eqn: Equation) -> Factorisation:
        factors = FactorList()
        operand, result = [], []
        for d, (size, repeats) in enumerate(zip(eqn.in_shapes[0], eqn.params["reps"], strict=True)):
            outer = factors.add(f"repeat{d}", int(repeats))
            inner = factors.add(f"d{d}", size)
            operand.append(inner)
            result.append((*outer, *inner))
        return rearrangement(eqn, factors, [tuple(operand)], [tuple(result)])

    def local_params(self, eqn: Equation, place: Placement) -> dict[str, Any]:
        held, wanted = place.local_in(0, eqn.in_shapes[0]), place.local_out(0, eqn.out_shapes[0])
        reps = tuple(int(r) if n == 0 else w // n for n, w, r in zip(held, wanted, eqn.params["reps"], strict=True))
        return {**eqn.params, "reps": reps}


@register("pad")
class Pad(Rule):
    """Elements before, between and after those of a dim; negative padding cuts. The second operand is the padding."""

    def factorise(self, eqn: Equation) -> Factorisation:
        factors = FactorList()
        operand, result = [], []
        sizes = zip(eqn.in_shapes[0], eqn.out_shapes[0], eqn.params["padding_config"], strict=True)
        for d, (size, padded, config) in enumerate(sizes):
            if any(config):
                operand.append(factors.add(f"d{d}", size, fixed="this dim is padded"))
                result.append(factors.add(f"padded{d}", padded, fixed="this dim is padded"))
            else:
                operand.append(factors.add(f"d{d}", size))
                result.append(operand[-1])
        # Padding with zero adds nothing to a sum; other padding has to be a summand itself.
        linear = ((0,),) if scalar_of(eqn.inputs[1]) == 0 else ((0, 1),)
        return rearrangement(eqn, factors, [tuple(operand), ()], [tuple(result)], linear=linear)


@register("slice")
class Slice(Rule):
    """A static window; dims that are taken whole split."""

    def _whole(self, eqn: Equation) -> list[bool]:
        shape = eqn.in_shapes[0]
        strides = eqn.params["strides"] or (1,) * len(shape)
        window = zip(eqn.params["start_indices"], eqn.params["limit_indices"], strides, shape, strict=True)
        return [start == 0 and limit == n and stride == 1 for start, limit, stride, n in window]

    def factorise(self, eqn: Equation) -> Factorisation:
        factors = FactorList()
        operand, result = cut(eqn.in_shapes[0], eqn.out_shapes[0], self._whole(eqn), factors)
        return rearrangement(eqn, factors, [operand], [result], touches=(Touch(0, ~0),))

    def local_params(self, eqn: Equation, place: Placement) -> dict[str, Any]:
        held = place.local_in(0, eqn.in_shapes[0])
        limits = zip(self._whole(eqn), held, eqn.params["limit_indices"], strict=True)
        return {**eqn.params, "limit_indices": tuple(n if whole else int(limit) for whole, n, limit in limits)}


def cut(shape: Sequence[int], window: Sequence[int], whole: Sequence[bool], factors: FactorList) -> tuple[Dims, Dims]:
    """Dims of a tensor and of a window of it: a dim that is taken whole is shared, the others are each side's own."""
    outer, inner = [], []
    for d, (size, part, is_whole) in enumerate(zip(shape, window, whole, strict=True)):
        outer.append(factors.add(f"d{d}", size, fixed="" if is_whole else "only a part of this dim is taken"))
        inner.append(outer[-1] if is_whole else factors.add(f"window{d}", part, fixed="a part of a dim"))
    return tuple(outer), tuple(inner)


@register("dynamic_slice")
class DynamicSlice(Rule):
    """A window whose place is known at run time. Where it is a whole dim its start is clamped to zero."""

    def factorise(self, eqn: Equation) -> Factorisation:
        factors = FactorList()
        shape, window = eqn.in_shapes[0], eqn.out_shapes[0]
        operand, result = cut(shape, window, [n == w for n, w in zip(shape, window, strict=True)], factors)
        starts = tuple(range(1, len(eqn.inputs)))
        return rearrangement(
            eqn,
            factors,
            [operand, *([()] * len(starts))],
            [result],
            residuals=(starts,),
            touches=(Touch(0, ~0),),
        )

    def local_params(self, eqn: Equation, place: Placement) -> dict[str, Any]:
        return {**eqn.params, "slice_sizes": place.local_out(0, eqn.out_shapes[0])}


@register("dynamic_update_slice")
class DynamicUpdateSlice(Rule):
    """A window of the first operand is replaced by the second; both pend or neither."""

    def factorise(self, eqn: Equation) -> Factorisation:
        factors = FactorList()
        shape, window = eqn.in_shapes[:2]
        operand, update = cut(shape, window, [n == w for n, w in zip(shape, window, strict=True)], factors)
        starts = tuple(range(2, len(eqn.inputs)))
        return rearrangement(
            eqn,
            factors,
            [operand, update, *([()] * len(starts))],
            [operand],
            linear=((0, 1),),
            residuals=(starts, starts),
            touches=(Touch(0, 1), Touch(~0, 1)),
        )


@register("iota")
class Iota(Rule):
    """Counts along one dim; a device that holds a part of it starts at that part's offset."""

    def factorise(self, eqn: Equation) -> Factorisation:
        factors = FactorList()
        result = factors.dims(eqn.out_shapes[0])
        return rearrangement(eqn, factors, [], [result], linear=())

    def local_params(self, eqn: Equation, place: Placement) -> dict[str, Any]:
        return {**eqn.params, "shape": place.local_out(0, eqn.out_shapes[0]), "sharding": None}

    def local(self, eqn: Equation, place: Placement, args: list[Any]) -> list[Any]:
        (counts,) = super().local(eqn, place, args)
        dim = eqn.params["dimension"]
        factor = place.op.out_dims[0][dim]
        if not factor or place.parts(factor[0]) == 1:
            return [counts]
        offset = place.part_index(factor[0]) * counts.shape[dim]
        return [counts + jnp.asarray(offset).astype(counts.dtype)]


@register("empty", "empty2")
class Empty(Rule):
    """A buffer whose content does not matter: whole, as it costs nothing."""

    def factorise(self, eqn: Equation) -> Factorisation:
        factors = FactorList()
        fixed = "an empty buffer is made whole"
        result = tuple(factors.add(f"d{d}", n, fixed=fixed) for d, n in enumerate(eqn.out_shapes[0]))
        return rearrangement(eqn, factors, [()] * len(eqn.inputs), [result], linear=(), work="view")
