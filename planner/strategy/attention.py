"""Where a block computes attention, and what its kernels move when scores are computed in one kernel or never stored.

An attention core is a matrix product of two activations (scores), whose result reaches a second one (the mix of values)
through elementwise ops and reductions alone. However it is written, its traffic depends on the kernels that run it:

    graph     scores, what the softmax makes of them, and its result, as the captured ops say
    fused     scores read once and shares written once (backward: shares and their cotangent read, one written)
    flash     nothing of that; the backward pass computes the scores again (Dao et al., "FlashAttention", 2022), and of
              causal scores, which a comparison of two positions masks, only the half that counts is computed
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from costmodel.graph import BlockClass, Op
from costmodel.kernels import Kernel
from costmodel.sharding import Spec, result_spec, split_factor
from planner.space.decision import Decision
from planner.strategy.strategy import Attention
from planner.strategy.work import Saved


@dataclass(frozen=True)
class Core:
    """Names of the ops of one attention core; `scores` and `shares` are the tensors that join them. `causal`: positions
    are compared on the way."""

    score_op: str
    mix_op: str
    chain: frozenset[str]
    scores: str
    shares: str
    causal: bool = False


def ops_of(cores: Iterable[Core]) -> frozenset[str]:
    """Names of all ops of attention cores."""
    return frozenset[str]().union(*(core.chain | {core.score_op, core.mix_op} for core in cores))


def attention_cores(cls: BlockClass) -> tuple[Core, ...]:
    """The attention cores of a block, in program order."""
    makers = {name: op for op in cls.ops for name in op.outputs}
    found = []
    for op in cls.ops:
        if op.work != "matmul" or op.inside is not None:
            continue
        for name in op.inputs:
            core = _core(cls, op, name, makers)
            if core is not None:
                found.append(core)
                break
    return tuple(found)


def _core(cls: BlockClass, mix: Op, operand: str, makers: Mapping[str, Op]) -> Core | None:
    """Walks back from an operand of a product to the product of activations that it was made from."""
    chain: dict[str, Op] = {}
    scores: Op | None = None
    waiting, seen = [operand], set[str]()
    while waiting:
        name = waiting.pop()
        if name in seen or name not in makers:
            continue
        seen.add(name)
        op = makers[name]
        if op.work in ("matmul", "conv"):
            if not _of_activations(cls, op, makers) or (scores is not None and scores is not op):
                return None
            scores = op
        elif op.work in ("elementwise", "reduce", "view", "data", "random"):
            chain[op.name] = op
            waiting += [n for n in op.inputs if n]
        else:
            return None
    if scores is None or not any(op.work == "reduce" for op in chain.values()):
        return None
    after = {n for op in cls.ops for n in op.outputs if op.name in chain} | set(scores.outputs)
    between = frozenset(op.name for op in chain.values() if not after.isdisjoint(op.inputs))
    causal = any(op.primitive in _COMPARISONS and _of_positions(op, makers) for op in chain.values())
    return Core(scores.name, mix.name, between, scores.outputs[0], operand, causal)


_COMPARISONS = ("gt", "ge", "lt", "le")


def _of_positions(op: Op, makers: Mapping[str, Op]) -> bool:
    """Whether an op compares two counts of positions."""
    return all(name in makers and makers[name].primitive == "iota" for name in op.inputs)


def _of_activations(cls: BlockClass, op: Op, makers: Mapping[str, Op]) -> bool:
    """Whether neither operand of a product is made of parameters alone."""

    def parameters_alone(name: str) -> bool:
        if name not in makers:
            return cls.tensors[name].role == "param"
        maker = makers[name]
        named = [n for n in maker.inputs if n]
        return bool(named) and (maker.fuses or maker.work == "view") and all(parameters_alone(n) for n in named)

    return not any(parameters_alone(name) for name in op.inputs[:2] if name)


def saved_with(
    decision: Decision,
    key: str,
    cores: tuple[Core, ...],
    attention: Attention,
    kept: Mapping[tuple[str, Spec], float],
) -> Saved:
    """The bytes of what one block keeps, with attention computed so."""
    cls, space = decision.space.graph.classes[key], decision.space
    inside = ops_of(cores)
    makes = {name for op in cls.ops if op.name in inside for name in op.outputs}
    own = tuple(f"{op}(" for op in inside)
    mixes = {name for op in cls.ops if op.name in {c.mix_op for c in cores} for name in op.outputs}
    layers, whole, of_cores = space.counts[key], 0.0, 0.0
    for (name, _), size in kept.items():
        size = size / (layers if name in space.once[key] else 1)
        whole += size
        if (name in makes or name.startswith(own)) and name not in mixes:
            of_cores += size
    if attention == "graph":
        return Saved(whole, of_cores)
    shares = sum(_local_bytes(decision, key, c.shares) for c in cores) if attention == "fused" else 0.0
    return Saved(whole - of_cores + shares, shares)


def hidden_by(cls: BlockClass, cores: tuple[Core, ...], attention: Attention) -> frozenset[str]:
    """Tensors of attention that never lie in memory."""
    inside = {name for op in cls.ops for core in cores if op.name in core.chain for name in op.outputs}
    if attention == "flash":
        return frozenset(inside | {core.scores for core in cores})
    return frozenset(inside - {core.shares for core in cores}) if attention == "fused" else frozenset()


def _local_bytes(decision: Decision, key: str, name: str) -> float:
    """Bytes of one tensor of a class on one device, as the op that makes it leaves it."""
    cls = decision.space.graph.classes[key]
    op = next(op for op in cls.ops if name in op.outputs)
    spec = result_spec(op, op.outputs.index(name), decision.op_strategies[key][op.name])
    return cls.tensors[name].bytes / split_factor(spec, decision.space.mesh)


def kernels_with(
    op: str,
    ahead: tuple[Kernel, ...],
    back: tuple[Kernel, ...],
    cores: tuple[Core, ...],
    attention: Attention,
    decision: Decision,
    key: str,
) -> tuple[tuple[Kernel, ...], tuple[Kernel, ...]]:
    """An op's kernels where attention is fused or never stores its scores."""
    core = next((c for c in cores if op in (c.score_op, c.mix_op) or op in c.chain), None)
    if core is None or attention == "graph":
        return ahead, back
    bandwidth = decision.space.pricing.kind.memory_bandwidth_bytes_per_s
    shares_s = _local_bytes(decision, key, core.shares) / bandwidth
    scores_s = _local_bytes(decision, key, core.scores) / bandwidth
    if op in core.chain:
        if attention == "flash" or op != min(core.chain):
            return (), ()
        forward = Kernel(0.0, 0.0, scores_s + shares_s, 1.0)
        return (forward,), (replace(forward, memory_s=2 * shares_s + scores_s),)
    if attention == "fused":
        return ahead, back
    stored_s = scores_s if op == core.score_op else shares_s
    part = 0.5 if core.causal else 1.0
    less, behind = (
        tuple(
            replace(
                k, matmul_s=part * k.matmul_s, memory_s=max(0.0, k.memory_s - stored_s), dims=None, misaligned=False
            )
            for k in run
        )
        for run in (ahead, back)
    )
    return less, (*behind, *less) if op == core.score_op else behind
