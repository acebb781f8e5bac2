"""What a model does on the devices of one replica of one stage, as amounts that no constant of a device has touched.

A decision of the planner's space on the mesh (context, tensor, expert) becomes kernels, collectives and bytes by class.
All of them grow with the microbatch as ``a + b * microbatch``, so that two captures give every size; only the shapes of
the kernels make time curve, and those are kept. (A lookup that takes more rows than its table has grows no more: below
that its bytes are overstated by at most the table's.)
"""

import math
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace

import numpy as np
from numpy.typing import NDArray

from costmodel.compute import peak_flops_per_s
from costmodel.graph import BlockClass, Op, Parameter, Tensor
from costmodel.kernels import Kernel, KernelTable, is_matmul, op_dtype
from costmodel.sharding import Spec, operand_spec, result_spec, split_factor
from costmodel.sharding import Strategy as Codes
from costmodel.stack import Reruns, Saves
from planner.search.layout import crossing_bytes, crossing_values
from planner.space.decision import Decision
from planner.space.group_costs import group_live
from planner.space.model_space import ModelSpace, is_small
from planner.space.nodes import GroupNode
from planner.strategy.attention import Core, attention_cores, ops_of
from planner.strategy.layers import layer_classes
from planner.strategy.strategy import Attention, RematPolicy

Floats = NDArray[np.float64]
MoveKey = tuple[str, str, int]  # phase, kind, axis


@dataclass(frozen=True)
class Moves:
    """Bytes and starts of collectives by (phase, kind, axis), as rows in the order of `keys`."""

    keys: tuple[MoveKey, ...]
    amounts: Floats  # (n, 2): bytes, starts


@dataclass(frozen=True)
class Saved:
    """Bytes that one block keeps for its backward pass without remat; of these core_bytes are attention's own."""

    kept_bytes: float
    core_bytes: float


@dataclass(frozen=True)
class ClassWork:
    """One block of a class, for one microbatch of one size, on one device.

    Attributes:
        blocks: how many the model has; layered: whether they are its layers (`planner.strategy.layers`).
        kernels: of both passes; backward: which run backward; again, core: which of the forward pass full remat runs
            again as far as the backward pass needs them, and which selective remat runs again; flash: which are
            products inside attention that never stores its scores.
        weight: share of each that only weight gradients need.
        moves: collectives, without and with full remat, which runs those again that the backward pass needs.
        saved: by what a stack saves; entry_bytes: what is kept under full remat.
        group_bytes: what is live while each op group runs.
    """

    key: str
    blocks: int
    layered: bool
    kernels: KernelTable
    backward: NDArray[np.bool_]
    again: NDArray[np.bool_]
    core: NDArray[np.bool_]
    flash: NDArray[np.bool_]
    weight: Floats
    moves: Mapping[str, Moves]
    saved: Mapping[Saves, Saved]
    entry_bytes: float
    group_bytes: Floats

    @property
    def live_bytes(self) -> float:
        """The most that is live while one op group runs."""
        return float(self.group_bytes.max(initial=0.0))


def reruns_full(one: ClassWork, remat: RematPolicy, reruns: Reruns) -> bool:
    """Whether a block of a class runs again, and keeps but its inputs until then."""
    return remat == "full" and (one.layered or reruns == "blocks")


@dataclass(frozen=True)
class Leaf:
    """A parameter as one device of the tensor-parallel group holds it.

    Attributes:
        elements: that one block of a reading class needs; shape: of these, on one device.
        tensor_dim: dim that tensor parallelism splits, if any.
        expert_dim: dim that expert parallelism splits, if any.
        small: whether it is so small that plans keep it whole (`planner.space.model_space.is_small`).
        layered: whether every block reads an item of its own.
        readers: positions of blocks.
    """

    facts: Parameter
    elements: float
    shape: tuple[int, ...]
    tensor_dim: int | None
    expert_dim: int | None
    small: bool
    layered: bool
    readers: frozenset[int]


@dataclass(frozen=True)
class Work:
    """All classes of a model at one microbatch size, its leaves, and the order of its blocks.

    Attributes:
        microbatch: examples of all devices of expert parallelism together.
        border_bytes: of so many examples, whole: what crosses between each two consecutive blocks, (n, 2): forward, and
            its cotangents.
    """

    microbatch: int
    classes: Mapping[str, ClassWork]
    leaves: tuple[Leaf, ...]
    order: tuple[str, ...]
    border_bytes: Floats


def work_of(decisions: Mapping[str, Decision], attention: Attention, matmul_dtype: str | None = None) -> Work:
    """The amounts behind a decision.

    Args:
        decisions: the same choice by remat, ``none`` and ``full``.
        matmul_dtype: in which products with parameters run, if not in what the model computes in.
    """
    decision = decisions["none"]
    graph = decision.space.graph
    layers = layer_classes(graph)
    classes = {}
    for key, cls in graph.classes.items():
        classes[key] = _class_work(decisions, key, cls, attention, matmul_dtype, layered=key in layers)
    borders = [crossing_bytes(graph, crossing_values(graph, border)) for border in range(1, len(graph.blocks))]
    return Work(
        microbatch=graph.microbatch,
        classes=classes,
        leaves=_leaves(decision),
        order=tuple(block.class_key for block in graph.blocks),
        border_bytes=np.array(borders, dtype=np.float64).reshape(-1, 2),
    )


def _class_work(
    decisions: Mapping[str, Decision],
    key: str,
    cls: BlockClass,
    attention: Attention,
    matmul_dtype: str | None,
    *,
    layered: bool,
) -> ClassWork:
    decision = decisions["none"]
    space = decision.space
    cores = attention_cores(cls)
    inside = ops_of(cores)
    kernels: list[Kernel] = []
    backward: list[bool] = []
    again: list[bool] = []
    core: list[bool] = []
    flash: list[bool] = []
    weight: list[float] = []
    done: set[tuple[str, Spec]] = set()  # what a product has cast
    for op in cls.ops:
        strategy = decision.op_strategies[key][op.name]
        ahead, back = space.pricing.timed_kernels(op, strategy, cls.tensors, space.traffic[key])
        if (scale := space.scales.get(key)) is not None:
            ahead = tuple(kernel.scaled(scale.forward) for kernel in ahead)
            back = tuple(kernel.scaled(scale.backward) for kernel in back)
        moving = [n for n in op.inputs if n and cls.tensors[n].needs_grad]
        of_weights = [n for n in moving if cls.tensors[n].role == "param" or n in space.derived[key]]
        share = 0.0 if not of_weights else 1.0 if len(of_weights) == len(moving) else 0.5
        ahead, back = _with_attention(op.name, ahead, back, cores, attention, decision, key)
        if matmul_dtype is not None and is_matmul(op) and of_weights:
            kind = space.pricing.kind
            own = peak_flops_per_s(op_dtype(op, cls.tensors), kind, is_matmul=True).value
            faster = own / peak_flops_per_s(matmul_dtype, kind, is_matmul=True).value
            casts = _casts(op, cls, strategy, space, frozenset(of_weights), done)
            ahead, back = (
                (*(replace(k, matmul_s=k.matmul_s * faster) for k in run), *own_casts)
                for run, own_casts in zip((ahead, back), casts, strict=True)
            )
        regions, full = (space.again[key, remat].runs.get(op.name, 0) for remat in ("none", "full"))
        for run, way in ((ahead, False), ((*back, *ahead * regions), True)):  # the user's own remat
            kernels += run
            backward += [way] * len(run)
            again += [full > regions and not way] * len(run)
            core += [op.name in inside and not way and attention != "flash"] * len(run)  # flash does so anyway
            flash += [op.name in inside and attention == "flash"] * len(run)
            weight += [share if way else 0.0] * len(run)
    layers = space.counts[key]
    hidden = _hidden(cls, cores, attention)
    live = [
        group_live(space, node, node.options[decision.choice[i]], hidden=hidden)
        for i, node in enumerate(space.nodes)
        if isinstance(node, GroupNode) and node.class_key == key
    ]
    entries = decisions["full"].kept[key]
    saved = {"residuals": decision.kept[key], "inputs": decision.fused_saves(key)}
    return ClassWork(
        key=key,
        blocks=layers,
        layered=layered,
        kernels=KernelTable.of(kernels),
        backward=np.array(backward, dtype=bool),
        again=np.array(again, dtype=bool),
        core=np.array(core, dtype=bool),
        flash=np.array(flash, dtype=bool),
        weight=np.array(weight),
        moves={remat: _moves(one, key) for remat, one in decisions.items()},
        saved={saves: _saved(decision, key, cores, attention, kept) for saves, kept in saved.items()},
        entry_bytes=sum(b / (layers if n in space.once[key] else 1) for (n, _), b in entries.items()),
        group_bytes=np.array(live),
    )


def _casts(
    op: Op,
    cls: BlockClass,
    strategy: Codes,
    space: ModelSpace,
    of_weights: frozenset[str],
    done: set[tuple[str, Spec]],
) -> tuple[tuple[Kernel, ...], tuple[Kernel, ...]]:
    """Kernels that bring a product's activations, and backward its result's cotangent, into a dtype of one byte: each
    is read once and written twice, as rows and as columns, since the products of both passes contract other dims.
    Weights are cast once a step, which is not counted.

    Args:
        done: activations that products before have cast (queries, keys and values read one); those of this are added.
    """

    def cast(tensor: Tensor, spec: Spec) -> Kernel:
        moved = tensor.bytes * (1.0 + 2.0 / tensor.itemsize) / split_factor(spec, space.mesh)
        return Kernel(0.0, 0.0, moved / space.pricing.kind.memory_bandwidth_bytes_per_s, 1.0)

    operands = ((name, operand_spec(op, at, strategy)) for at, name in enumerate(op.inputs[:2]))
    new = [value for value in operands if value[0] and value[0] not in of_weights and value not in done]
    done.update(new)
    ahead = tuple(cast(cls.tensors[name], spec) for name, spec in new)
    return ahead, (cast(cls.tensors[op.outputs[0]], result_spec(op, 0, strategy)),)


def _saved(
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


def _hidden(cls: BlockClass, cores: tuple[Core, ...], attention: Attention) -> frozenset[str]:
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


def _with_attention(
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


def _moves(decision: Decision, key: str) -> Moves:
    """Collectives by kind; those of gradients once a step belong to the leaves (`Leaf`)."""
    found: dict[MoveKey, list[float]] = defaultdict(lambda: [0.0, 0.0])
    for move in decision.costs[key].moves:
        if move.phase != "once":
            row = found[move.phase, move.kind, move.axis]
            row[0] += move.moved_bytes
            row[1] += move.starts
    keys = tuple(sorted(found))
    return Moves(keys, np.array([found[k] for k in keys]).reshape(-1, 2))


def _leaves(decision: Decision) -> tuple[Leaf, ...]:
    space, found = decision.space, list[Leaf]()
    readers: dict[str, set[int]] = defaultdict(set)
    for at, block in enumerate(space.graph.blocks):
        for source in block.inputs:
            readers[source.value].add(at)
    for name, node in decision.parameter_nodes.items():
        storage = decision.storage[name]
        shape, dims = list(node.tensor.shape), dict[str, int]()
        for axis, code in enumerate(storage.value):
            if code >= 0:
                shape[code] //= space.mesh[axis]
                dims[space.pricing.axis_names[axis]] = code
        found.append(
            Leaf(
                facts=space.graph.params[name],
                elements=float(math.prod(shape)),
                shape=tuple(shape),
                tensor_dim=dims.get("model"),
                expert_dim=dims.get("expert"),
                small=is_small(space.graph, name),
                layered=node.count > len(node.names),
                readers=frozenset(readers[name]),
            )
        )
    return tuple(found)


def interpolated(one: Work, other: Work, microbatch: int) -> Work:
    """The amounts at another microbatch size, on the line through two.

    Raises:
        ValueError: the two differ in more than amounts: the model is not the same at both sizes.
    """
    if microbatch == one.microbatch:
        return one
    t = (microbatch - one.microbatch) / (other.microbatch - one.microbatch)
    if one.order != other.order and len(one.order) != len(other.order):
        raise ValueError("the model has other blocks at another microbatch size")
    classes = {}
    for (key, a), b in zip(one.classes.items(), other.classes.values(), strict=True):
        shapes = [(len(w.kernels.matmul_s), len(w.group_bytes), w.moves["none"].keys) for w in (a, b)]
        if shapes[0] != shapes[1]:
            raise ValueError("the model has other ops at another microbatch size")
        kernels = KernelTable(
            **{
                f.name: _line(getattr(a.kernels, f.name), getattr(b.kernels, f.name), t)
                for f in fields(KernelTable)
                if f.name != "misaligned"
            },
            misaligned=a.kernels.misaligned,
        )
        moves = {remat: Moves(m.keys, _line(m.amounts, b.moves[remat].amounts, t)) for remat, m in a.moves.items()}
        saved = {
            saves: Saved(
                _between(own.kept_bytes, b.saved[saves].kept_bytes, t),
                _between(own.core_bytes, b.saved[saves].core_bytes, t),
            )
            for saves, own in a.saved.items()
        }
        entry_bytes = _between(a.entry_bytes, b.entry_bytes, t)
        group_bytes = _line(a.group_bytes, b.group_bytes, t)
        classes[key] = replace(
            a, kernels=kernels, moves=moves, saved=saved, entry_bytes=entry_bytes, group_bytes=group_bytes
        )
    return Work(microbatch, classes, one.leaves, one.order, _line(one.border_bytes, other.border_bytes, t))


def _between(a: float, b: float, t: float) -> float:
    return a + t * (b - a)


def _line(a: Floats, b: Floats, t: float) -> Floats:
    with np.errstate(invalid="ignore"):
        return np.where(np.isfinite(a), a + t * (b - a), a)
