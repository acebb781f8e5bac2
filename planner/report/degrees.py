"""What each mesh axis of a stage group does, read off its parameter and activation specs: dp=4 tp=2 zero=1.

A plan states how every tensor is split; the customary names follow from that. For an axis of size n:

    dp=n        it splits the leading dim of the activations between blocks (the batch)
    zero=1..3   on a dp axis: optimizer state / also gradients / also parameters are split over it (by most elements)
    ep=n        on a dp axis that splits parameters and exchanges activations by all_to_all instead of gathering them
    tp=n        it splits parameters, and not the batch
    sp          on a tp axis: activations between blocks are split over it too
    cp=n        it splits a later dim of the activations, and no parameter
    copy=n      it splits nothing: its devices repeat the same work
"""

import math
from itertools import chain

from planner.planfile.schema import GroupPlan, Plan


def group_degrees(group: GroupPlan) -> tuple[str, ...]:
    """Labels of the group's axes in mesh order, such as ``("dp=4", "zero=1", "tp=2", "sp")``; none for one device."""
    return tuple(label for axis in group.mesh if axis.size > 1 for label in _axis_labels(group, axis.name, axis.size))


def plan_degrees(plan: Plan) -> tuple[str, ...]:
    """Labels of the plan as a whole: ``pp=2`` for its stages."""
    return (f"pp={len(plan.stages)}",) if len(plan.stages) > 1 else ()


def _axis_labels(group: GroupPlan, axis: str, size: int) -> tuple[str, ...]:
    activations = [
        value.dims
        for strategy in group.strategies
        for value in strategy.outputs.values()
        if any(axis in dim for dim in value.dims)
    ]
    splits_batch = any(axis in dims[0] for dims in activations) or _reduces_most(group, axis)
    splits_later = any(axis in chain(*dims[1:]) for dims in activations)
    shares = _shares(group, axis)
    if splits_batch:
        exchanges = {kind.split()[1] for kind in group.time.collectives if kind.split()[-1] == axis and " " in kind}
        if shares["value"] and "all_to_all" in exchanges and "all_gather" not in exchanges:
            return (f"dp={size}", f"ep={size}")
        level = next((n for n, role in ((3, "value"), (2, "gradient"), (1, "optimizer")) if shares[role] >= 0.5), 0)
        return (f"dp={size}", f"zero={level}") if level else (f"dp={size}",)
    if shares["value"]:
        return (f"tp={size}", "sp") if splits_later else (f"tp={size}",)
    return (f"cp={size}",) if splits_later else (f"copy={size}",)


def _reduces_most(group: GroupPlan, axis: str) -> bool:
    """Whether most trained elements have their gradient summed over the axis: the mark of data parallelism where no
    activation leaves the stage (a single stage, or the one with the loss)."""
    trained = [parameter for parameter in group.parameters if parameter.trained]
    total = sum(math.prod(parameter.shape) for parameter in trained)
    reduced = sum(math.prod(parameter.shape) for parameter in trained if axis in parameter.reduced_over)
    return total > 0 and 2 * reduced > total


def _shares(group: GroupPlan, axis: str) -> dict[str, float]:
    """Share of the trained elements whose value, gradient and optimizer state are split over the axis."""
    trained = [parameter for parameter in group.parameters if parameter.trained]
    total = sum(math.prod(parameter.shape) for parameter in trained) or 1
    return {
        role: sum(math.prod(p.shape) for p in trained if axis in chain(*getattr(p, role))) / total
        for role in ("value", "gradient", "optimizer")
    }
