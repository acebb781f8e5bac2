"""Layouts of eight devices that plans are pinned to, and ways to store parameters that they are restricted to."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from costmodel.cluster import Cluster
from costmodel.sharding import REPLICATED, Spec
from planner.frontend.task import TrainingTask
from planner.planfile.schema import Plan
from planner.search.pinned import GroupPin, StagePin
from planner.search.problem import IntraOpProblem
from planner.space.model_space import ModelSpace
from planner.space.nodes import ParameterNode
from planner.space.parameters import Storage
from planner.space.setting import Remat
from tests.lowering.execution import executed_plan, pins, slow_cluster

Allowed = Callable[[Spec, tuple[int, ...], Storage], bool]  # shape of one layer's parameter, mesh, storage


def stored(allowed: Allowed) -> Callable[[ModelSpace, IntraOpProblem], IntraOpProblem]:
    """Restricts how trained parameters are stored; one that has no such storage (it does not divide) is left free."""

    def restrict(space: ModelSpace, problem: IntraOpProblem) -> IntraOpProblem:
        nodes = []
        for node, priced in zip(space.nodes, problem.nodes, strict=True):
            if isinstance(node, ParameterNode) and space.graph.params[node.names[0]].trained:
                keep = np.array([allowed(node.tensor.shape, space.mesh, option) for option in node.options])
                if keep.any():
                    priced = replace(priced, time_s=np.where(keep, priced.time_s, np.inf))
            nodes.append(priced)
        return replace(problem, nodes=tuple(nodes))

    return restrict


def zero_3(shape: tuple[int, ...], mesh: tuple[int, ...], storage: Storage) -> bool:
    """One dim, the largest that divides, is split over all axes; so are gradient and optimizer state."""
    fitting = [d for d, n in enumerate(shape) if n % int(np.prod(mesh)) == 0]
    if not fitting:
        return False
    dim = max(fitting, key=lambda d: shape[d])
    return storage.value == storage.gradient == storage.optimizer == (dim,) * len(mesh)


def zero_2(shape: tuple[int, ...], mesh: tuple[int, ...], storage: Storage) -> bool:
    """Replicated values; gradients and optimizer state split."""
    whole = all(code == REPLICATED for code in storage.value)
    return whole and storage.gradient == storage.optimizer and all(code >= 0 for code in storage.optimizer)


def zero_1(shape: tuple[int, ...], mesh: tuple[int, ...], storage: Storage) -> bool:
    """Replicated values and gradients; only the optimizer state is split."""
    whole = all(code == REPLICATED for code in (*storage.value, *storage.gradient))
    return whole and all(code >= 0 for code in storage.optimizer)


def zero_0(shape: tuple[int, ...], mesh: tuple[int, ...], storage: Storage) -> bool:
    """Everything replicated: data parallelism."""
    return all(code == REPLICATED for code in (*storage.value, *storage.gradient, *storage.optimizer))


@dataclass(frozen=True)
class PinnedLayout:
    """Devices, stages and microbatches of a plan.

    Attributes:
        microbatch: examples of one microbatch, such that the data axes of the stages divide it.
    """

    cluster: Cluster
    stages: tuple[StagePin, ...]
    microbatch: int = 4
    microbatches: int = 4
    schedule: str = "1f1b"
    allowed: Allowed | None = None
    remat: Remat | None = None

    def plan(self, task: TrainingTask) -> Plan:
        return executed_plan(
            task, self.stages, self.cluster, microbatch=self.microbatch, microbatches=self.microbatches,
            schedule=self.schedule, restrict=stored(self.allowed) if self.allowed else None, remat=self.remat,
        )  # fmt: skip


def on(pool: str, devices: int, share: int = 1, mesh: tuple[int, ...] | None = None) -> GroupPin:
    return GroupPin(pool=pool, devices=devices, share=share, mesh=mesh)


ONE = pins((on("g0", 8, mesh=(2, 4)),))
FLAT = pins((on("g0", 8, mesh=(8,)),))
TWO = pins((on("g0", 4),), (on("g1", 4),))

LAYOUTS: dict[str, PinnedLayout] = {
    "tensor x data": PinnedLayout(slow_cluster(8), ONE),
    "zero-3": PinnedLayout(slow_cluster(8), ONE, microbatch=8, allowed=zero_3),
    "3+5": PinnedLayout(slow_cluster(3, 5), pins((on("g0", 3),), (on("g1", 5),)), microbatch=15),
    "1+2+2+3": PinnedLayout(slow_cluster(8), pins(*((on("g0", n),) for n in (1, 2, 2, 3))), microbatch=6),
    "unequal groups": PinnedLayout(slow_cluster(2, 2, 4), pins((on("g0", 2, 3), on("g1", 2, 1)), (on("g2", 4),))),
}
# What a layout varies besides devices; run with one model.
VARIANTS: dict[str, PinnedLayout] = {
    "zero-1": PinnedLayout(slow_cluster(8), ONE, allowed=zero_1),
    "zero-2": PinnedLayout(slow_cluster(8), ONE, allowed=zero_2),
    "data": PinnedLayout(slow_cluster(8), FLAT, microbatch=8, allowed=zero_0),
    "remat": PinnedLayout(slow_cluster(8), ONE, remat="full"),
    "zero-3 remat": PinnedLayout(slow_cluster(8), ONE, microbatch=8, allowed=zero_3, remat="full"),
    "gpipe": PinnedLayout(slow_cluster(4, 4), TWO, schedule="gpipe"),
    "pipeline zero-1": PinnedLayout(slow_cluster(4, 4), TWO, allowed=zero_1),
    "pipeline zero-2": PinnedLayout(slow_cluster(4, 4), TWO, allowed=zero_2),
    "pipeline zero-3": PinnedLayout(slow_cluster(4, 4), TWO, allowed=zero_3),
    "pipeline remat": PinnedLayout(slow_cluster(4, 4), TWO, remat="full"),
    "one microbatch": PinnedLayout(slow_cluster(8), ONE, microbatches=1),
}
