"""What a strategy asks for and does not get: parameters that its degrees do not divide, what changes nothing."""

from collections.abc import Container, Iterable, Iterator, Sequence
from dataclasses import dataclass

from costmodel.stack import Stack
from planner.check.finding import some
from planner.planfile.schema import Finding
from planner.search.baselines import split_dim
from planner.space.decision import Decision
from planner.strategy.links import AxisLinks
from planner.strategy.restricted import Role
from planner.strategy.strategy import Strategy
from planner.strategy.work import Work
from planner.strategy.zero import replicas, state_parts

_LEAST_SHARE = 0.01  # of the model's parameters: what is smaller is not worth a word


@dataclass(frozen=True)
class HeldParameter:
    """How one parameter lies on a strategy's devices.

    Attributes:
        shape: whole, of one layer's item; elements: of all layers.
        tensor_dim: dim that tensor parallelism splits, if any.
        state_split: whether all replicas split its state, as far as the ZeRO stage goes.
    """

    path: str
    shape: tuple[int, ...]
    elements: int
    trained: bool
    tensor_dim: int | None
    state_split: bool


def held_in_estimate(work: Work, strategy: Strategy, stack: Stack) -> list[HeldParameter]:
    """Parameters as `planner.estimate` prices them."""
    degrees = {"model": strategy.tp, "expert": strategy.ep, "batch": strategy.dp // strategy.ep, "context": strategy.cp}
    found = []
    for leaf in work.leaves:
        shape = list(leaf.shape)
        for role, dim in leaf.split.items():
            shape[dim] *= degrees[role]
        split = state_parts(leaf, strategy, flat=stack.flat_state) == replicas(leaf, strategy)
        facts = leaf.facts
        found.append(
            HeldParameter(
                facts.path, tuple(shape), facts.elements, facts.trained, leaf.split.get("model"), state_split=split
            )
        )
    return found


def held_in_plan(decisions: Iterable[Decision], roles: Sequence[Role]) -> list[HeldParameter]:
    """Parameters as the decisions of a plan's stages store them."""
    found = {}
    for decision in decisions:
        for name, node in decision.parameter_nodes.items():
            storage, facts = decision.storage[name], decision.space.graph.params[name]
            dims = {role: code for role, code in zip(roles, storage.value, strict=True) if code >= 0}
            split = all(code >= 0 for role, code in zip(roles, storage.optimizer, strict=True) if role != "model")
            found[name] = HeldParameter(
                name, node.tensor.shape, facts.elements, facts.trained, dims.get("model"), state_split=split
            )
    return list(found.values())


def degree_findings(held: Sequence[HeldParameter], strategy: Strategy) -> Iterator[Finding]:
    """MP176 of tensor parallelism and MP177 of ZeRO: what their degrees do not divide."""
    elements = max(1, sum(one.elements for one in held))
    if strategy.tp > 1:
        matrices = [one for one in held if len(one.shape) > 1]
        yield from _whole_matrices([one for one in matrices if one.tensor_dim is None], strategy.tp, elements)
        yield from _split_elsewhere(matrices, strategy.tp, elements)
    several = strategy.dp * strategy.cp
    if strategy.zero and several > 1:
        whole = [one for one in held if one.trained and not one.state_split]
        share = sum(one.elements for one in whole) / elements
        if share >= _LEAST_SHARE:
            degrees = f"dp={strategy.dp}" + (f" with cp={strategy.cp}" if strategy.cp > 1 else "")
            yield Finding(
                code="MP177",
                severity="warning",
                message=f"zero={strategy.zero}: {degrees} divides no dim of {_named(whole)}, {share:.0%} of the "
                f"parameters, whose state stays whole on several of {several} devices",
                hint="choose degrees that divide their dims; in an estimate, `flat_state=on` or a framework's stack "
                "splits state as one array",
            )


def _whole_matrices(whole: Sequence[HeldParameter], tp: int, elements: int) -> Iterator[Finding]:
    share = sum(one.elements for one in whole) / elements
    if share >= _LEAST_SHARE:
        yield Finding(
            code="MP176",
            severity="warning",
            message=f"tp={tp} divides no dim of {_named(whole)}, {share:.0%} of the parameters: each of {tp} devices "
            "holds and computes them whole",
            hint="choose a tp that divides their dims",
        )


def _split_elsewhere(matrices: Sequence[HeldParameter], tp: int, elements: int) -> Iterator[Finding]:
    moved = []
    for one in matrices:
        named = split_dim(one.path, one.shape)
        if named is not None and one.shape[named] % tp and one.tensor_dim is not None:
            moved.append((one, named))
    if sum(one.elements for one, _ in moved) / elements >= _LEAST_SHARE:
        sizes = ", ".join(str(n) for n in sorted({one.shape[dim] for one, dim in moved}))
        yield Finding(
            code="MP176",
            severity="note",
            message=f"tp={tp} does not divide {sizes}, so that {_named([one for one, _ in moved])} cannot be split as "
            "usual: priced with the best split of another dim, which frameworks may not offer",
            hint="choose a tp that divides them, or pad them",
        )


def _named(held: Sequence[HeldParameter]) -> str:
    largest = sorted(held, key=lambda one: (-one.elements, one.path))
    return some([f"{one.path} {one.shape}" for one in largest], limit=3)


def idle_findings(
    strategy: Strategy, stack: Stack, *, attention: bool, constants: Container[str] = ()
) -> Iterator[Finding]:
    """MP178: what the strategy asks for and nothing follows from: there is nothing to split, send, run again or
    reorder, or the stack's constants say that overlap hides nothing.

    Args:
        attention: whether the model has attention cores (`planner.strategy.attention`).
        constants: of the stack, that were written among the strategy.
    """
    copies = strategy.dp * strategy.cp
    alone = {
        "sp=on": (strategy.sp and strategy.tp == 1, "tp=1 leaves positions whole"),
        "scatter_gather=on": (strategy.scatter_gather, _nothing_scattered(strategy)),
        f"schedule={strategy.schedule}": (strategy.schedule != "1f1b" and strategy.pp == 1, "pp=1 has no pipeline"),
        f"zero={strategy.zero}": (strategy.zero > 0 and copies == 1, "dp=1 has no replicas that could split state"),
        f"bucket_bytes={strategy.bucket_bytes}": (
            strategy.bucket_bytes is not None and copies == 1,
            "dp=1 reduces no gradients",
        ),
        f"attention={strategy.attention}": (
            strategy.attention != "graph" and not attention,
            "the model has no attention that is recognised",
        ),
        "remat=selective": (strategy.remat == "selective", _nothing_selected(strategy, attention)),
    }
    for asked, (idle, reason) in alone.items():
        if idle and reason:
            yield _idle(asked, reason)
    overlaps = {
        "overlap_gradients": ("gradient_overlap", copies > 1),
        "overlap_parameters": ("parameter_overlap", copies > 1 and strategy.zero > 0),
        "overlap_tensor": ("tensor_overlap", strategy.tp * strategy.cp * strategy.ep > 1),
    }
    for name, (constant, moves) in overlaps.items():
        share = getattr(stack, constant)
        if not getattr(strategy, name):
            if constant in constants and share:
                yield _idle(f"{constant}={share:g}", f"{name} is off", f"{name}=on asks for it")
        elif not moves:
            yield _idle(f"{name}=on", "the strategy has no such collectives")
        elif share == 0.0:
            reason = f"stack {stack.name} hides none of them ({constant} is 0)"
            hint = f"give a share of compute that they can hide behind, {constant}=0.5, or another stack"
            yield _idle(f"{name}=on", reason, hint)


def _nothing_scattered(strategy: Strategy) -> str:
    """Why no stage sends parts because of `scatter_gather`; '' where one does."""
    if strategy.tp == 1 or strategy.pp == 1:
        return "it splits what tensor-parallel devices of one stage send to the next"
    return "sp=on sends parts already" if strategy.sp else ""


def _nothing_selected(strategy: Strategy, attention: bool) -> str:
    """Why selective remat runs nothing again; '' where it does."""
    if not attention:
        return "the model has no attention that is recognised"
    return "flash attention stores no scores, and runs again anyway" if strategy.attention == "flash" else ""


def spanning_findings(stages: Sequence[AxisLinks]) -> Iterator[Finding]:
    """MP169: stages whose devices share out every layer (tensor and context parallelism) across groups of the
    cluster."""
    for s, links in enumerate(stages):
        for axis in ("tp", "cp"):
            if (groups := links.across.get(axis)) is None:
                continue
            yield Finding(
                code="MP169",
                severity="warning",
                message=f"{axis}={links.by_axis[axis].size}: stage {s} shares out its layers among devices of "
                f"{' and '.join(groups)}: each of their collectives runs at the pace of the link between them",
                hint="choose degrees by which each stage stays in one group, as `meshplan plan --strategy` does",
            )


def meeting_finding(why: str, strategy: Strategy, stack: Stack) -> Finding:
    """MP199: that examples of several replicas meet in the model, which a framework's replicas do not know.

    Args:
        why: they do, and where.
    """
    return Finding(
        code="MP199",
        severity="note",
        message=f"dp={strategy.dp}: examples of all replicas meet: {why}; priced as stack {stack.name} would run it, "
        "each replica's by themselves and without collectives for that",
        hint="a plan of this strategy has the collectives, and so has an estimate without a stack",
    )


def _idle(asked: str, reason: str, hint: str = "") -> Finding:
    return Finding(code="MP178", severity="note", message=f"{asked} changes nothing: {reason}", hint=hint)
