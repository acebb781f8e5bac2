"""Hand-written configurations that a plan is compared with, scored by the same model.

Each states where parameters live and which dims devices may split; what is left open (which of several equal layouts
activations take, how an op runs whose dims do not divide) is solved, in the baseline's favour. What is allowed is
written here, without the planner's rules of choice; spaces, prices and scores are the planner's, so that times compare.

    data parallel   every device holds everything and runs its part of each microbatch
    FSDP            the same, parameters, gradients and optimizer state split over all devices (ZeRO-3)
    Megatron        tensor parallel inside a node, data parallel across, by the table of `SPLITS` below
    GPipe           equal stages, data parallel inside, 4 microbatches a stage, full remat
"""

import bisect
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from costmodel.cluster import Cluster, DeviceGroup
from costmodel.errors import PlanError
from costmodel.graph import ModelGraph
from costmodel.sharding import REPLICATED, Spec
from planner.search.candidates import Candidates, Restrict
from planner.search.facts import Facts
from planner.search.meshes import Mesh
from planner.search.pinned import GroupPin, StagePin, pinned_layout
from planner.search.problem import IntraOpProblem
from planner.search.score import Score
from planner.space.dims import batch_dims
from planner.space.model_space import BatchNode, GroupNode, ModelSpace, ParameterNode
from planner.space.parameters import Storage

# Megatron-LM's layout (Shoeybi et al. 2019, section 3): columns of the first matrix, rows of the second, heads of
# attention, rows of the vocabulary. A path ending -> the dim of one layer's parameter that tensor parallelism splits.
SPLITS: tuple[tuple[str, int], ...] = (
    (r"(^|/)w[qkv]$", 1),
    (r"(^|/)wo$", 0),
    (r"(^|/)[qkv]_bias$", 0),
    (r"(^|/)(up|gate)$", -1),
    (r"(^|/)up_bias$", -1),
    (r"(^|/)down$", -2),
    (r"(^|/)(token_embedding|embedding|tokens)$", 0),
    (r"(^|/)(head|lm_head|unembedding|output)$", -1),
)


Allowed = Callable[[ModelSpace, ParameterNode, Storage], bool]


@dataclass(frozen=True)
class Baseline:
    """A named configuration and its score; `reason` says why it has none."""

    name: str
    description: str
    score: Score | None
    reason: str = ""


def _restriction(batch_axes: tuple[int, ...], allowed: Allowed) -> Restrict:
    """Only batch dims are split on `batch_axes`, none on the others; parameters are stored as `allowed` says."""

    def restrict(space: ModelSpace, problem: IntraOpProblem) -> IntraOpProblem:
        dims = batch_dims(space.graph)
        nodes = []
        for node, priced in zip(space.nodes, problem.nodes, strict=True):
            keep = np.ones(len(priced.time_s), dtype=bool)
            if isinstance(node, GroupNode):
                own, tensors = dims[node.class_key], space.graph.classes[node.class_key].tensors
                names = (*node.group.reads, *node.group.exports)
                for j, option in enumerate(node.options):
                    keep[j] = all(
                        _conforms(spec, own.get(n, frozenset()), batch_axes, tensors[n].role == "param")
                        for n, spec in zip(names, (*option.needs, *option.gives), strict=True)
                    )
            elif isinstance(node, BatchNode) and len(node.options) > 1:
                keep[:] = [all((c >= 0) == (a in batch_axes) for a, c in enumerate(spec)) for spec in node.options]
            elif isinstance(node, ParameterNode):
                keep[:] = [allowed(space, node, storage) for storage in node.options]
            if not keep.any():
                keep[:] = True  # nothing conforms (a batch that does not divide): the node is left free
            nodes.append(replace(priced, time_s=np.where(keep, priced.time_s, np.inf)))
        return replace(problem, nodes=tuple(nodes))

    return restrict


def _conforms(spec: Spec, batch: frozenset[int], batch_axes: tuple[int, ...], parameter: bool) -> bool:
    for axis, code in enumerate(spec):
        if code < 0:
            continue
        if axis in batch_axes and (code not in batch or parameter):
            return False
        if axis not in batch_axes and code in batch:
            return False
    return True


def _whole(space: ModelSpace, node: ParameterNode, storage: Storage) -> bool:
    return all(c == REPLICATED for c in (*storage.value, *storage.gradient, *storage.optimizer))


def _split_over_all(space: ModelSpace, node: ParameterNode, storage: Storage) -> bool:
    """One dim, the largest that divides, split over every axis; whole where none divides."""
    parts = int(np.prod(space.mesh))
    fitting = [d for d, n in enumerate(node.tensor.shape) if n % parts == 0]
    if not fitting:
        return _whole(space, node, storage)
    best = max(fitting, key=lambda d: node.tensor.shape[d])
    return storage.value == storage.gradient == storage.optimizer == (best,) * len(space.mesh)


def split_dim(name: str, shape: Sequence[int]) -> int | None:
    """The dim of a (layer's) parameter that tensor parallelism splits by the table; None where it is not listed."""
    dim = next((d for pattern, d in SPLITS if re.search(pattern, name)), None)
    return dim % len(shape) if dim is not None and shape else None


def _megatron_storage(space: ModelSpace, node: ParameterNode, storage: Storage) -> bool:
    dim = split_dim(node.names[0], node.tensor.shape)
    want = dim if dim is not None and node.tensor.shape[dim] % space.mesh[-1] == 0 else REPLICATED
    return storage.value == storage.gradient == storage.optimizer == (*(REPLICATED,) * (len(space.mesh) - 1), want)


def baselines(
    cluster: Cluster,
    graph_of: Callable[[int], ModelGraph],
    facts: Mapping[str, Facts],
    *,
    global_batch: int,
    sizes: tuple[int, ...],
) -> Iterator[Baseline]:
    """Every baseline with its best microbatch size, one after the other.

    Args:
        sizes: microbatch sizes to try.
    """
    pool = max(
        cluster.groups, key=lambda g: (len([d for d in cluster.devices if d.group == g.name]) * _speed(g), g.name)
    )
    count = len([d for d in cluster.devices if d.group == pool.name])
    where = f" on the {count} devices of {pool.name}" if len(cluster.groups) > 1 else ""
    flat: Mesh = (count,) if count > 1 else ()
    yield _best(
        "data parallel",
        f"batch split over all devices, everything replicated{where}",
        _one_stage(
            cluster,
            graph_of,
            facts,
            pool,
            count,
            flat,
            global_batch,
            sizes,
            tuple(range(len(flat))),
            _whole,
        ),
    )
    yield _best(
        "FSDP",
        f"batch, parameters, gradients and optimizer state split over all devices{where}",
        _one_stage(
            cluster,
            graph_of,
            facts,
            pool,
            count,
            flat,
            global_batch,
            sizes,
            tuple(range(len(flat))),
            _split_over_all,
        ),
    )
    inner = max(
        (n for n in range(1, min(8, pool.devices_per_node) + 1) if count % n == 0 and pool.devices_per_node % n == 0),
        default=1,
    )
    if inner > 1:
        mesh: Mesh = (count // inner, inner) if count > inner else (inner,)
        axes = (0,) if len(mesh) == 2 else ()
        yield _best(
            "Megatron",
            f"tensor parallel {inner} x data parallel {count // inner}{where}",
            _one_stage(cluster, graph_of, facts, pool, count, mesh, global_batch, sizes, axes, _megatron_storage),
        )
    yield _best(
        "GPipe",
        "equal stages, data parallel inside, 4 microbatches a stage, full remat",
        _gpipe(cluster, graph_of, facts, global_batch, sizes),
    )


def _speed(group: DeviceGroup) -> float:
    return max(group.device.peak_flops_per_s.values())


def _best(name: str, description: str, tries: Iterator[Score | str]) -> Baseline:
    best: Score | None = None
    closest = "no microbatch size applies"
    for one in tries:
        if isinstance(one, str):
            closest = one
        elif best is None or one.time_s < best.time_s:
            best = one
    return Baseline(name, description, best, "" if best is not None else closest)


def _one_stage(
    cluster: Cluster,
    graph_of: Callable[[int], ModelGraph],
    facts: Mapping[str, Facts],
    pool: DeviceGroup,
    count: int,
    mesh: Mesh,
    global_batch: int,
    sizes: tuple[int, ...],
    batch_axes: tuple[int, ...],
    allowed: Allowed,
) -> Iterator[Score | str]:
    """The largest microbatch size that fits, which bisection finds as memory only grows with it, and then smaller ones
    while they are faster."""
    shards = count // mesh[1] if len(mesh) == 2 else count if batch_axes else 1
    fair = [size for size in sizes if size % shards == 0]
    if not fair:
        yield f"no microbatch size of a batch of {global_batch} splits over {shards} devices"
        return
    candidates = Candidates(cluster=cluster, graph_of=graph_of, facts=facts, restrict=_restriction(batch_axes, allowed))
    pin = StagePin(groups=(GroupPin(pool=pool.name, devices=count, mesh=mesh),))
    found: dict[int, Score | str] = {}

    def value(i: int) -> float:
        if i not in found:
            size = fair[i]
            (found[i],) = _try(
                candidates, (pin,), size, global_batch // size, "gpipe" if global_batch == size else "1f1b"
            )
        one = found[i]
        return math.inf if isinstance(one, str) else one.time_s

    at = bisect.bisect_left(range(len(fair)), True, key=lambda i: value(i) < math.inf)
    at = min(at, len(fair) - 1)
    while at + 1 < len(fair) and value(at + 1) < value(at):
        at += 1
    value(at)
    yield from found.values()


def _gpipe(
    cluster: Cluster,
    graph_of: Callable[[int], ModelGraph],
    facts: Mapping[str, Facts],
    global_batch: int,
    sizes: tuple[int, ...],
) -> Iterator[Score | str]:
    counts = {g.name: len([d for d in cluster.devices if d.group == g.name]) for g in cluster.groups}
    depths = [
        p for p in (2, 4, 8, 16) if all(n % max(1, round(p * n / sum(counts.values()))) == 0 for n in counts.values())
    ]
    for depth in depths:
        pins: list[StagePin] = []
        for name, n in counts.items():
            own = max(1, round(depth * n / sum(counts.values())))
            pins += [
                StagePin(groups=(GroupPin(pool=name, devices=n // own, mesh=(n // own,) if n > own else ()),))
            ] * own
        for size in (s for s in sizes if global_batch // s >= 4 * len(pins)):
            candidates = Candidates(
                cluster=cluster, graph_of=graph_of, facts=facts, restrict=_restriction((0,), _whole)
            )
            yield from _try(candidates, tuple(pins), size, global_batch // size, "gpipe")
            break


def _try(
    candidates: Candidates, pins: tuple[StagePin, ...], size: int, count: int, schedule: str
) -> Iterator[Score | str]:
    try:
        found = pinned_layout(candidates, pins, microbatch=size, microbatches=count, schedule=schedule)
    except PlanError as error:
        yield error.message
        return
    yield found if found.feasible else f"misses device memory by {found.missing_bytes / 2**30:.2f} GiB"
