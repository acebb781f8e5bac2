"""Whether a training function is still the one that was planned, and if not, what changed by name."""

from collections.abc import Iterator

from costmodel.errors import InputError
from planner.check.finding import finding, some
from planner.planfile.fingerprint import short_fingerprint
from planner.planfile.names import compress_names, expand_names
from planner.planfile.schema import Finding, ModelRecord, Plan

_HINT = "plan again for the model as it is now"


def drift(plan: Plan, record: ModelRecord) -> tuple[Finding, ...]:
    """Differences between the model that `plan` was made for and `record`, a new capture; empty if it is the same.

    A different fingerprint is an error also where blocks and parameters agree: the function computes something else.
    """
    planned = plan.model
    if planned.fingerprint == record.fingerprint:
        return ()
    named = (*_blocks(planned, record), *_parameters(planned, record), *_reduction(planned, record))
    message = f"the model {record.name!r} is not the one that was planned ({planned.name!r}): fingerprint "
    message += f"{short_fingerprint(record.fingerprint)}, planned {short_fingerprint(planned.fingerprint)}"
    if not named:
        message += "; blocks and parameters agree, so the function computes something else with them"
    return (finding("MP630", "model.fingerprint", message, _HINT), *named)


def _blocks(planned: ModelRecord, record: ModelRecord) -> Iterator[Finding]:
    try:
        before, now = expand_names(planned.blocks), expand_names(record.blocks)
    except InputError as error:
        yield finding("MP631", "model.blocks", error.message, error.hint)
        return
    if before == now:
        return
    gone = list(compress_names(name for name in before if name not in set(now)))
    new = list(compress_names(name for name in now if name not in set(before)))
    parts = [f"gone: {some(gone)}"] * bool(gone) + [f"new: {some(new)}"] * bool(new)
    what = "; ".join(parts) or "their order differs"
    message = f"the model has {len(now)} blocks, {len(before)} were planned; {what}"
    yield finding("MP631", "model.blocks", message, _HINT)


def _parameters(planned: ModelRecord, record: ModelRecord) -> Iterator[Finding]:
    before, now = planned.parameter_shapes, record.parameter_shapes
    if before and now:
        changed = [f"{p} {list(before[p])} -> {list(now[p])}" for p in before if p in now and before[p] != now[p]]
        changed += [f"{path} is gone" for path in before if path not in now]
        changed += [f"{path} {list(now[path])} is new" for path in now if path not in before]
        if changed:
            message = f"{len(changed)} parameters differ from the planned ones: {some(changed)}"
            yield finding("MP632", "model.parameter_shapes", message, _HINT)
    elif planned.parameters != record.parameters:
        message = f"the model has {record.parameters} parameters, {planned.parameters} were planned"
        yield finding("MP632", "model.parameters", message, _HINT)


def _reduction(planned: ModelRecord, record: ModelRecord) -> Iterator[Finding]:
    if planned.reduction != record.reduction:
        message = f"the loss reduces by {record.reduction!r}, the plan is for {planned.reduction!r}"
        yield finding("MP633", "model.reduction", message, "microbatches would be joined in another way; plan again")
