"""Whether a plan's records are whole and name what exists: strategies, parameters, words, the model's own counts."""

import math
import re
from collections import Counter
from collections.abc import Iterator

from costmodel.cluster import Cluster
from costmodel.errors import InputError
from costmodel.provenance import PROVENANCES
from costmodel.schedule.registry import FAMILIES
from planner.check.finding import finding, group_label, group_path, some
from planner.check.placement import groups_of
from planner.planfile.names import expand_names
from planner.planfile.schema import Finding, Plan

REDUCTIONS = ("mean", "sum", "weighted")
SCHEDULES = (*FAMILIES, "auto")
STATUSES = ("optimal", "feasible")
PHASES = ("forward", "backward", "once")

_DTYPE = re.compile(
    r"bool|u?int(2|4|8|16|32|64)|float(16|32|64)|bfloat16|float8_\w+|float4_\w+|complex(64|128)|key<\w+>"
)


def words_known(plan: Plan, cluster: Cluster) -> Iterator[Finding]:
    """MP618: names of reductions, schedules, statuses, provenances, dtypes and collectives."""
    yield from _known("model.reduction", plan.model.reduction, REDUCTIONS)
    yield from _known("schedule.name", plan.schedule.name, SCHEDULES)
    yield from _known("certificate.status", plan.certificate.status, STATUSES)
    for figure, word in plan.prediction.provenance.items():
        yield from _known(f"prediction.provenance.{figure}", word, PROVENANCES)
    for stage, group, record in groups_of(plan):
        for at, parameter in enumerate(record.parameters):
            for field, dtype in (("dtype", parameter.dtype), ("gradient_dtype", parameter.gradient_dtype)):
                if not _DTYPE.fullmatch(dtype):
                    message = f"{field} of parameter {parameter.path} is {dtype!r}, which is no dtype"
                    where = group_path(stage, group, f"parameters[{at}].{field}")
                    yield finding("MP618", where, message, "write it as JAX does, such as float32 or bfloat16")
        axes = [axis.name for axis in record.mesh]
        for name in record.time.collectives:
            words = name.split(" ")
            if len(words) != 3 or words[0] not in PHASES or words[2] not in axes:
                message = f"{group_label(plan, stage, group)} counts collectives {name!r}; its axes are {some(axes)}"
                hint = "a collective is counted as its phase (forward, backward, once), kind and axis"
                yield finding("MP618", group_path(stage, group, "time.collectives"), message, hint)


def _known(where: str, word: str, legal: tuple[str, ...]) -> Iterator[Finding]:
    if word not in legal:
        yield finding("MP618", where, f"{where} is {word!r}", f"legal: {', '.join(legal)}")


def strategies_complete(plan: Plan, cluster: Cluster) -> Iterator[Finding]:
    """MP628: a group has one strategy for each class of its blocks, as far as the plan records classes."""
    kinds: dict[str, str] = {}
    try:
        for key, runs in plan.model.block_classes.items():
            kinds |= dict.fromkeys(expand_names(runs), key)
        blocks = [expand_names(stage.blocks) for stage in plan.stages]
    except InputError as error:
        yield finding("MP628", "model.block_classes", error.message, error.hint)
        return
    for stage, group, record in groups_of(plan):
        label, where = group_label(plan, stage, group), group_path(stage, group, "strategies")
        counts = Counter(strategy.block_class for strategy in record.strategies)
        twice = [key for key, count in counts.items() if count > 1]
        if twice:
            yield finding("MP628", where, f"{label} has two strategies for block class {some(twice)}")
        needed = {kinds[name]: name for name in reversed(blocks[stage]) if name in kinds}
        for key, name in needed.items():
            if key not in counts:
                message = f"{label} runs block {name} of class {key}, for which it has no strategy"
                yield finding("MP628", where, message, "plan again: nothing says how its ops are split")
        if kinds and all(name in kinds for name in blocks[stage]):
            unused = [key for key in counts if key not in needed]
            if unused:
                message = f"{label} has a strategy for block class {some(unused)}, of which it runs no block"
                yield finding("MP628", where, message, "plan again")
        if not record.strategies and blocks[stage] and not needed:
            message = f"{label} runs {len(blocks[stage])} blocks and has no strategy for any"
            yield finding("MP628", where, message, "plan again: nothing says how their ops are split")
        paths = Counter(parameter.path for parameter in record.parameters)
        twice = [path for path, count in paths.items() if count > 1]
        if twice:
            where = group_path(stage, group, "parameters")
            yield finding("MP628", where, f"{label} holds parameter {some(twice)} twice")


def _trained(plan: Plan) -> dict[str, set[bool]]:
    """Path of each parameter -> whether stages train it."""
    said: dict[str, set[bool]] = {}
    for _, _, record in groups_of(plan):
        for parameter in record.parameters:
            said.setdefault(parameter.path, set()).add(parameter.trained)
    return said


def model_consistent(plan: Plan, cluster: Cluster) -> Iterator[Finding]:
    """MP629: the model's counts are those of its shapes, its classes have each of its blocks once."""
    model = plan.model
    if model.parameters < 0:
        yield finding("MP629", "model.parameters", f"the model states {model.parameters} parameters")
    elif model.parameter_shapes:
        count = sum(math.prod(shape) for shape in model.parameter_shapes.values())
        if model.parameters != count:
            message = f"the model states {model.parameters:,} parameters, its shapes have {count:,}"
            yield finding("MP629", "model.parameters", message)
    negative = [path for path, shape in model.parameter_shapes.items() if any(size < 0 for size in shape)]
    if negative:
        yield finding("MP629", "model.parameter_shapes", f"shapes of {some(negative)} have negative sizes")
    if not 0 <= model.trained_parameters <= max(model.parameters, 0):
        message = f"{model.trained_parameters:,} of {model.parameters:,} parameters are trained"
        yield finding("MP629", "model.trained_parameters", message)
    said = _trained(plan)
    trained = sum(math.prod(model.parameter_shapes.get(path, ())) for path, words in said.items() if True in words)
    if both := [path for path, words in said.items() if len(words) > 1]:
        yield finding("MP629", "stages", f"some stages train {some(both)}, others do not")
    elif said.keys() == model.parameter_shapes.keys() and trained != model.trained_parameters:  # else MP627 says so
        message = f"{model.trained_parameters:,} of its parameters are trained, the stages train {trained:,}"
        yield finding("MP629", "model.trained_parameters", message)
    if model.sequence is not None and model.sequence < 1:
        yield finding("MP629", "model.sequence", f"the sequence length is {model.sequence}")
    if model.block_classes:
        try:
            named = Counter(name for runs in model.block_classes.values() for name in expand_names(runs))
            blocks = Counter(expand_names(model.blocks))
        except InputError:
            return  # MP606 and MP628 say so
        if named != blocks:
            wrong = sorted(name for name in named | blocks if named[name] != blocks[name])
            message = f"the model's block classes do not have each of its blocks once: {some(wrong)}"
            yield finding("MP629", "model.block_classes", message)
    counts = plan.cluster
    if counts.devices != sum(counts.kinds.values()) or any(count < 0 for count in counts.kinds.values()):
        message = f"the cluster's record states {counts.devices} devices, its kinds have {sum(counts.kinds.values())}"
        yield finding("MP629", "cluster.devices", message)
