"""What the mesh axes of a stage group do, read off its parameter and activation specs: dp=4 zero=1 tp=2.

A plan states how every tensor is split; the customary names follow from that. An axis of size n is

    dp=n        if it splits the leading dim of the activations between blocks (the batch)
    ep=n        if it is a dp axis that splits parameters and exchanges activations by all_to_all instead of gathering
    tp=n        if it splits parameters, and not the batch
    sp          if it is a tp axis and activations between blocks are split over it too
    cp=n        if it splits a later dim of the activations, and no parameter
    copy=n      if it splits nothing: its devices repeat the same work

Axes of one name count together, n being the product of their sizes. Of a parameter, a dp axis splits

    zero=1      the optimizer state
    zero=2      and the gradient
    zero=3      and its value

``zero=1..3`` where that differs between parameters, ``zero=1 over 2, 3 over 8`` where it differs between dp axes.
"""

import math
from collections import Counter
from collections.abc import Sequence
from itertools import chain

from planner.planfile.schema import GroupPlan, MeshAxis, ParameterPlan, Plan

MINOR = 0.05
"""Levels with less than this share of the trained elements are not named: short vectors are often kept whole."""


def group_degrees(group: GroupPlan) -> tuple[str, ...]:
    """Labels of the group's axes in mesh order, such as ``("dp=4", "zero=1", "tp=2", "sp")``; none for one device."""
    axes = [axis for axis in group.mesh if axis.size > 1]
    words = {axis.name: _words(group, axis.name) for axis in axes}
    labels: list[str] = []
    for word in dict.fromkeys(chain.from_iterable(words.values())):
        named = [axis for axis in axes if word in words[axis.name]]
        if word == "sp":
            tensor = [axis for axis in axes if "tp" in words[axis.name]]
            labels.append("sp" if named == tensor else f"sp over {_size(named)}")
            continue
        labels.append(f"{word}={_size(named)}")
        if word == "dp":
            labels += _zero(group, named, [axis for axis in named if "ep" not in words[axis.name]])
    return tuple(labels)


def plan_degrees(plan: Plan) -> tuple[str, ...]:
    """Labels of the plan as a whole: ``pp=2`` for its stages."""
    return (f"pp={len(plan.stages)}",) if len(plan.stages) > 1 else ()


def _size(axes: Sequence[MeshAxis]) -> int:
    return math.prod(axis.size for axis in axes)


def _words(group: GroupPlan, axis: str) -> tuple[str, ...]:
    """Names of what one axis does."""
    activations = [
        value.dims
        for strategy in group.strategies
        for value in strategy.outputs.values()
        if any(axis in dim for dim in value.dims)
    ]
    splits_batch = any(axis in dims[0] for dims in activations) or _reduces_most(group, axis)
    splits_later = any(axis in chain(*dims[1:]) for dims in activations)
    splits_values = any(_level(parameter, axis) == 3 for parameter in _trained(group))
    if splits_batch:
        exchanges = {kind.split()[1] for kind in group.time.collectives if kind.split()[-1] == axis and " " in kind}
        by_expert = splits_values and "all_to_all" in exchanges and "all_gather" not in exchanges
        return ("dp", "ep") if by_expert else ("dp",)
    if splits_values:
        return ("tp", "sp") if splits_later else ("tp",)
    return ("cp",) if splits_later else ("copy",)


def _zero(group: GroupPlan, data: Sequence[MeshAxis], counted: Sequence[MeshAxis]) -> list[str]:
    """The label of what `counted`, of the dp axes `data`, split; none where nothing is split."""
    levels = {axis.name: _levels(group, axis.name) for axis in counted}
    if not any(high for _, high in levels.values()):
        return []
    texts = {name: f"{low}..{high}" if low < high else f"{low}" for name, (low, high) in levels.items()}
    if len(counted) == len(data) and len(set(texts.values())) == 1:
        return [f"zero={texts[counted[0].name]}"]
    return ["zero=" + ", ".join(f"{texts[axis.name]} over {axis.size}" for axis in counted)]


def _levels(group: GroupPlan, axis: str) -> tuple[int, int]:
    """The lowest and the highest ZeRO level of an axis over the parameters."""
    elements: Counter[int] = Counter()
    for parameter in _trained(group):
        elements[_level(parameter, axis)] += math.prod(parameter.shape)
    named = [level for level, count in elements.items() if count >= MINOR * elements.total()]
    return min(named, default=0), max(named, default=0)


def _level(parameter: ParameterPlan, axis: str) -> int:
    """ZeRO level of one parameter over one axis."""
    roles = ((3, parameter.value), (2, parameter.gradient), (1, parameter.optimizer))
    return next((level for level, dims in roles if axis in chain(*dims)), 0)


def _trained(group: GroupPlan) -> list[ParameterPlan]:
    return [parameter for parameter in group.parameters if parameter.trained]


def _reduces_most(group: GroupPlan, axis: str) -> bool:
    """Whether most trained elements have their gradient summed over the axis: the mark of data parallelism where no
    activation leaves the stage (a single stage, or the one with the loss)."""
    trained = _trained(group)
    total = sum(math.prod(parameter.shape) for parameter in trained)
    reduced = sum(math.prod(parameter.shape) for parameter in trained if axis in parameter.reduced_over)
    return total > 0 and 2 * reduced > total
