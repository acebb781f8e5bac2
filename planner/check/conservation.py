"""Whether nothing is lost: every block and parameter in the stages, every example of the batch in a microbatch."""

from collections import Counter
from collections.abc import Iterator
from itertools import islice, pairwise

from costmodel.cluster import Cluster
from costmodel.errors import InputError
from costmodel.units import format_count
from planner.check.finding import finding, some
from planner.planfile.names import compress_names, expand_names
from planner.planfile.schema import Finding, Plan


def blocks_conserved(plan: Plan, cluster: Cluster) -> Iterator[Finding]:
    """MP606."""
    try:
        model = expand_names(plan.model.blocks)
        stages = [expand_names(stage.blocks) for stage in plan.stages]
    except InputError as error:
        yield finding("MP606", "model.blocks", error.message, error.hint)
        return
    if len(model) != plan.model.block_count:
        message = f"the model states {plan.model.block_count} blocks and names {len(model)}"
        yield finding("MP606", "model.block_count", message)
    place = {name: at for at, name in enumerate(model)}
    owners: dict[str, int] = {}
    for stage, names in enumerate(stages):
        where = f"stages[{stage}].blocks"
        if len(names) != plan.stages[stage].block_count:
            message = f"stage {stage} states {plan.stages[stage].block_count} blocks and names {len(names)}"
            yield finding("MP606", f"stages[{stage}].block_count", message)
        if not names:
            yield finding("MP606", where, f"stage {stage} has no blocks", "every stage runs at least one")
        unknown = [name for name in names if name not in place]
        if unknown:
            message = f"stage {stage} runs {some(list(compress_names(unknown)))}, which the model does not have"
            yield finding("MP606", where, message, f"the model's blocks are {some(list(plan.model.blocks))}")
        twice = [name for name in names if name in owners]
        if twice:
            message = f"{some(list(compress_names(twice)))} is in stage {owners[twice[0]]} and again in stage {stage}"
            yield finding("MP606", where, message, "every block is in exactly one stage")
        owners.update((name, stage) for name in names if name not in owners)
    lost = [name for name in model if name not in owners]
    if lost:
        message = f"{len(lost)} of {len(model)} blocks are in no stage: {some(list(compress_names(lost)))}"
        yield finding("MP606", "stages", message, "every block is in exactly one stage; the model would lose layers")
    flat = [(name, stage) for stage, names in enumerate(stages) for name in names if name in place]
    for (before, _), (after, stage) in pairwise(flat):
        if place[after] < place[before]:
            message = f"stage {stage} runs {after} after {before}; the model runs it before"
            yield finding("MP606", f"stages[{stage}].blocks", message, "stages are contiguous and in the model's order")
            break


def parameters_conserved(plan: Plan, cluster: Cluster) -> Iterator[Finding]:
    """MP627: judged by the shapes that the plan records of the model, where it records any."""
    if not plan.model.parameter_shapes:
        return
    held: dict[str, list[tuple[int, ...]]] = {}
    for stage in plan.stages:
        if stage.groups:  # groups of a stage hold copies
            for parameter in stage.groups[0].parameters:
                held.setdefault(parameter.path, []).append(parameter.shape)
    lost = [path for path in plan.model.parameter_shapes if path not in held]
    if lost:
        message = f"{len(lost)} of {len(plan.model.parameter_shapes)} parameters are in no stage: {some(lost)}"
        yield finding("MP627", "stages", message, "every parameter is held by a stage")
    unknown = [path for path in held if path not in plan.model.parameter_shapes]
    if unknown:
        yield finding("MP627", "stages", f"stages hold parameters that the model does not have: {some(unknown)}")
    for path, whole in plan.model.parameter_shapes.items():
        parts = held.get(path, [])
        if parts and not _covers(whole, parts):
            text = ", ".join(str(list(part)) for part in parts)
            yield finding("MP627", "stages", f"parameter {path} of shape {list(whole)} is held as {text}")


def _covers(whole: tuple[int, ...], parts: list[tuple[int, ...]]) -> bool:
    """Whether each part is the whole (a tied or unsplit parameter), or the parts are its layers (along dim 0)."""
    if all(part == whole for part in parts):
        return True
    if not whole or any(len(part) != len(whole) or part[1:] != whole[1:] or not part[0] for part in parts):
        return False
    return sum(part[0] for part in parts) == whole[0]


def batch_conserved(plan: Plan, cluster: Cluster) -> Iterator[Finding]:
    """MP608."""
    product = plan.microbatches * plan.microbatch_size
    if plan.microbatches < 1 or plan.microbatch_size < 1 or product != plan.global_batch:
        count = format_count(plan.microbatches, "microbatch", "microbatches")
        message = f"{count} of {plan.microbatch_size} examples are {product} examples, the "
        message += f"global batch is {plan.global_batch}"
        hint = "microbatches times microbatch size must be the global batch, or examples are lost or seen twice"
        yield finding("MP608", "microbatches", message, hint)


def microbatches_shared(plan: Plan, cluster: Cluster) -> Iterator[Finding]:
    """MP609."""
    everything = range(max(plan.microbatches, 0))
    for stage, record in enumerate(plan.stages):
        if not record.groups:
            yield finding("MP609", f"stages[{stage}].groups", f"stage {stage} has no group to run it")
            continue
        given = [microbatch for group in record.groups for microbatch in group.microbatches]
        counts = Counter(given)
        own = {microbatch for microbatch in counts if microbatch in everything}
        missing = [str(m) for m in islice((m for m in everything if m not in own), 6)]
        rest = len(everything) - len(own) - len(missing)
        foreign = [str(m) for m in sorted(counts) if m not in everything]
        twice = [str(m) for m, count in sorted(counts.items()) if count > 1]
        wrong = [f"nobody runs {', '.join(missing)}" + (f" and {rest} more" if rest else "")] * bool(missing)
        wrong += [f"not among them: {some(foreign)}"] * bool(foreign) + [f"run twice: {some(twice)}"] * bool(twice)
        if wrong:
            message = f"stage {stage}: its {len(record.groups)} group(s) do not share out the {plan.microbatches} "
            message += f"microbatches: {'; '.join(wrong)}"
            hint = "give each microbatch to exactly one group of each stage"
            yield finding("MP609", f"stages[{stage}].groups", message, hint)
