"""Whether every split of a parameter or value can be made, and whether any large parameter is split too little."""

import math
import re
from collections.abc import Iterator
from itertools import chain

from costmodel.cluster import Cluster
from costmodel.documents import suggestion
from costmodel.units import format_bytes
from planner.check.finding import finding, group_label, group_path
from planner.check.placement import groups_of
from planner.planfile.schema import Finding, GroupPlan, Plan

REPLICATED_SHARE = 0.02
"""Share of a device's memory from which on a replicated parameter is reported."""

_BITS = re.compile(r"[a-z]+(\d+)")


def splits_divide(plan: Plan, cluster: Cluster) -> Iterator[Finding]:
    """MP607: unknown axes, an axis used twice, a dim that does not divide (with the nearest sizes that do)."""
    for stage, group, record in groups_of(plan):
        label, sizes = group_label(plan, stage, group), {axis.name: axis.size for axis in record.mesh}
        for at, parameter in enumerate(record.parameters):
            where = group_path(stage, group, f"parameters[{at}]")
            for role in ("value", "gradient", "optimizer"):
                dims = getattr(parameter, role)
                what = f"{label}: {role} of parameter {parameter.path} (shape {list(parameter.shape)})"
                yield from _split(what, f"{where}.{role}", parameter.shape, dims, sizes)
            what = f"{label}: reduced_over of {parameter.path}"
            yield from _axes(what, f"{where}.reduced_over", parameter.reduced_over, sizes)
        yield from _strategies(record, label, group_path(stage, group), sizes)


def _strategies(record: GroupPlan, label: str, path: str, sizes: dict[str, int]) -> Iterator[Finding]:
    for at, strategy in enumerate(record.strategies):
        where = f"{path}.strategies[{at}]"
        for op, axes in strategy.ops.items():
            yield from _axes(f"{label}: strategy of op {op}", f"{where}.ops.{op}", tuple(axes), sizes)
        for side, values in (("inputs", strategy.inputs), ("outputs", strategy.outputs)):
            for name, value in values.items():
                used = (*chain(*value.dims), *value.varying, *value.partial)
                yield from _axes(f"{label}: spec of {name}", f"{where}.{side}.{name}", used, sizes)


def _split(
    what: str, where: str, shape: tuple[int, ...], dims: tuple[tuple[str, ...], ...], sizes: dict[str, int]
) -> Iterator[Finding]:
    if len(dims) != len(shape):
        yield finding("MP607", where, f"{what} has {len(dims)} entries for {len(shape)} dims", "one entry a dim")
        return
    bad = list(_axes(what, where, tuple(chain(*dims)), sizes))
    if bad:
        yield from bad
        return
    for dim, (size, axes) in enumerate(zip(shape, dims, strict=True)):
        parts = math.prod(sizes[axis] for axis in axes)
        if parts > 1 and size % parts:
            text = " x ".join(f"{axis}={sizes[axis]}" for axis in axes)
            below, above = size // parts * parts, -(-size // parts) * parts
            near = f"{below} or {above}" if below else f"{above}"
            message = f"{what}: dim {dim} of size {size} does not divide by {text} = {parts} (remainder {size % parts})"
            hint = f"the nearest sizes that divide are {near}; or split by {_degree(size, parts)}"
            yield finding("MP607", where, message, hint)


def _degree(size: int, parts: int) -> str:
    """The divisor of `size` nearest to `parts`, or their common one where none is near."""
    near = (n for d in range(min(parts, 4096)) for n in (parts - d, parts + d) if size % n == 0)
    return str(next(near, math.gcd(size, parts)))


def _axes(what: str, where: str, axes: tuple[str, ...], sizes: dict[str, int]) -> Iterator[Finding]:
    for axis in dict.fromkeys(axes):
        if axis not in sizes:
            hint = suggestion(axis, sizes, "the mesh has") if sizes else "the group's mesh has no axes"
            yield finding("MP607", where, f"{what} names axis {axis!r}, which the mesh does not have", hint)
        elif axes.count(axis) > 1:
            message = f"{what} uses axis {axis!r} {axes.count(axis)} times"
            yield finding("MP607", where, message, "an axis splits one dim")


def large_replicated(plan: Plan, cluster: Cluster) -> Iterator[Finding]:
    """MP623: what each device holds of the parameter, how many copies there are, and what splitting would free."""
    for stage, group, record in groups_of(plan):
        sizes = {axis.name: axis.size for axis in record.mesh}
        for at, parameter in enumerate(record.parameters):
            parts = max(math.prod(sizes.get(axis, 1) for axis in chain(*parameter.value)), 1)
            total = math.prod(parameter.shape) * itemsize(parameter.dtype)
            local, copies = total // parts, len(record.devices) // parts
            if copies < 2 or local < REPLICATED_SHARE * record.memory.limit_bytes or local < 1 << 20:
                continue
            message = f"{group_label(plan, stage, group)}: parameter {parameter.path} ({format_bytes(total)}) is held "
            message += f"{copies} times, {format_bytes(local)} on each of {len(record.devices)} devices"
            freed = format_bytes(local - local // copies)
            hint = f"splitting it would free {freed} a device; right as it is if memory is plentiful"
            yield finding("MP623", group_path(stage, group, f"parameters[{at}].value"), message, hint)


def itemsize(dtype: str) -> int:
    """Bytes of one element: `itemsize("bfloat16")` is 2; keys count as two words."""
    if dtype == "bool":
        return 1
    match = _BITS.match(dtype)
    return max(1, int(match[1]) // 8) if match else 8
