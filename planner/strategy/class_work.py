"""From a decision of the planner's space on the mesh (context, tensor, expert) to the work of each class: its kernels,
collectives and bytes."""

import math
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from costmodel.compute import peak_flops_per_s
from costmodel.graph import BlockClass, Op, Tensor
from costmodel.kernels import Kernel, KernelTable, is_matmul, op_dtype
from costmodel.sharding import Spec, operand_spec, result_spec, split_factor
from costmodel.sharding import Strategy as Codes
from costmodel.stack import Saves
from planner.search.layout import crossing_bytes, crossing_values
from planner.space.decision import Decision
from planner.space.group_costs import group_live
from planner.space.model_space import ModelSpace, is_small
from planner.space.nodes import GroupNode
from planner.strategy.attention import attention_cores, hidden_by, kernels_with, ops_of, saved_with
from planner.strategy.layers import layer_classes
from planner.strategy.leaves import Leaf
from planner.strategy.strategy import Attention
from planner.strategy.work import ClassWork, MoveKey, Moves, Work


def work_of(
    decisions: Mapping[str, Decision], attention: Attention, matmul_dtype: str | None = None, replicas: int = 1
) -> Work:
    """The amounts behind a decision.

    Args:
        decisions: the same choice by remat, ``none`` and ``full``, on a mesh whose axes are named by their roles
            (`planner.strategy.restricted.Role`).
        matmul_dtype: in which products with parameters run, if not in what the model computes in.
        replicas: that compute on their examples together.
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
        replicas=replicas,
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
        ahead, back = kernels_with(op.name, ahead, back, cores, attention, decision, key)
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
    hidden = hidden_by(cls, cores, attention)
    live = [
        group_live(space, node, node.options[decision.choice[i]], hidden=hidden)
        for i, node in enumerate(space.nodes)
        if isinstance(node, GroupNode) and node.class_key == key
    ]
    entries = decisions["full"].kept[key]
    saved: dict[Saves, Mapping[tuple[str, Spec], float]] = {
        "residuals": decision.kept[key],
        "inputs": decision.fused_saves(key),
    }
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
        saved={saves: saved_with(decision, key, cores, attention, kept) for saves, kept in saved.items()},
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
        shape, split = list(node.tensor.shape), dict[str, int]()
        for size, role, code in zip(space.mesh, space.pricing.axis_names, storage.value, strict=True):
            if code >= 0:
                shape[code] //= size
                split[role] = code
        found.append(
            Leaf(
                facts=space.graph.params[name],
                elements=float(math.prod(shape)),
                shape=tuple(shape),
                split=split,
                small=is_small(space.graph, name),
                layered=node.count > len(node.names),
                readers=frozenset(readers[name]),
            )
        )
    return tuple(found)


__all__ = ["work_of"]
