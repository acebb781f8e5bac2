"""A strategy as pins of the search: the plan that it names, to be explained, compiled and run like any other."""

import math
from collections.abc import Iterable
from dataclasses import dataclass

from costmodel.cluster import Cluster
from costmodel.errors import InputError
from costmodel.schedule.registry import schedule_family
from planner.planfile.schema import Finding
from planner.search.candidates import Remat, Restrict
from planner.search.meshes import pool_devices
from planner.search.pinned import GroupPin, StagePin
from planner.search.problem import IntraOpProblem
from planner.space.decision import Decision
from planner.space.model_space import ModelSpace
from planner.strategy.findings import degree_findings, held_in_plan
from planner.strategy.restricted import Role, restricted
from planner.strategy.strategy import Strategy

_NOT_PLANNED = {
    "attention": "graph",
    "matmul_dtype": None,
    "gradient_dtype": None,
    "bucket_bytes": None,
    "scatter_gather": False,
    "rank_order": "tp-cp-dp-pp",
    "overlap_gradients": False,
    "overlap_parameters": False,
    "overlap_tensor": False,
    "partition": None,
}
"""Fields that say what a framework does, not what a plan decides; a plan cuts stages where they are balanced."""


@dataclass(frozen=True, kw_only=True)
class StrategyPins:
    """What a strategy leaves to the search.

    Attributes:
        microbatch: examples of one microbatch of all replicas together.
        chunks: parts of the model that each stage's devices run, where the schedule leaves that open; else None.
        roles: of the axes of a stage's mesh.
    """

    stages: tuple[StagePin, ...]
    restrict: Restrict
    remat: Remat
    microbatch: int
    schedule: str
    chunks: int | None
    strategy: Strategy
    roles: tuple[Role, ...]

    def findings(self, decisions: Iterable[Decision]) -> tuple[Finding, ...]:
        """What the strategy asks for and the decisions of a plan's stages do not give."""
        return tuple(degree_findings(held_in_plan(decisions, self.roles), self.strategy))


def pins_of(strategy: Strategy, cluster: Cluster) -> StrategyPins:
    """The search that is left of a strategy on a cluster.

    Raises:
        InputError: MP180 for what a plan does not decide, MP183 where the cluster has too few devices.
    """
    for name, plain in _NOT_PLANNED.items():
        value = getattr(strategy, name)
        if value != plain:
            message = f"{name}={value}: a plan runs the captured program, and this is not its to decide"
            raise InputError("MP180", message, "leave it out; `meshplan estimate` predicts it")
    if strategy.remat == "selective":
        message = "remat=selective: a plan recomputes whole layers or nothing"
        raise InputError("MP180", message, "wrap attention in jax.checkpoint, which plans respect")
    named: list[tuple[int, Role]] = [
        (strategy.dp // strategy.ep, "batch"),
        (strategy.ep, "expert"),
        (strategy.cp, "context"),
        (strategy.tp, "model"),
    ]
    axes: list[tuple[int, Role]] = [one for one in named if one[0] > 1]
    if len(axes) > 2:
        several = ", ".join(f"{role} {size}" for size, role in axes)
        message = f"the strategy has {len(axes)} axes ({several}): a plan's stage has two at most"
        raise InputError("MP180", message, "leave degrees at 1; ep equal to dp is one axis with it")
    mesh = tuple(size for size, _ in axes)
    roles: tuple[Role, ...] = tuple(role for _, role in axes)
    sp, zero = strategy.sp, strategy.zero
    schedule = "interleaved" if strategy.interleave > 1 and strategy.schedule == "1f1b" else strategy.schedule

    def restrict(space: ModelSpace, problem: IntraOpProblem) -> IntraOpProblem:
        return restricted(space, problem, roles, sp=sp, zero=zero)

    return StrategyPins(
        stages=_stages(strategy, cluster, mesh),
        restrict=restrict,
        remat="full" if strategy.remat == "full" else "none",
        microbatch=strategy.microbatch * strategy.dp,
        schedule=schedule,
        chunks=_chunks(strategy, schedule),
        strategy=strategy,
        roles=roles,
    )


def _chunks(strategy: Strategy, schedule: str) -> int | None:
    """Parts of each stage, as an estimate counts them: two, unless the strategy asks for more; None where the schedule
    does not leave them open.

    Raises:
        InputError: MP146 for a schedule that there is not, MP180 for one of another number of parts than the strategy
            asks for.
    """
    own = None if schedule == "auto" else schedule_family(schedule).chunks
    if own == "chunks":
        return max(2, strategy.interleave)
    if strategy.interleave not in (1, own):
        words = {None: "no set number of parts", 1: "one part a stage", "layers": "a part a layer"}
        parts = words.get(own, f"{own} parts a stage")
        message = f"interleave={strategy.interleave}: schedule {schedule} has {parts}"
        raise InputError("MP180", message, "leave it out, or schedule=interleaved")
    return None


def _stages(strategy: Strategy, cluster: Cluster, mesh: tuple[int, ...]) -> tuple[StagePin, ...]:
    """Stages on the cluster's groups in order; none stands on two groups."""
    each = math.prod(mesh)
    pins: list[StagePin] = []
    for group in cluster.groups:
        room = len(pool_devices(cluster, group.name)) // each
        count = min(room, strategy.pp - len(pins))
        pins += [StagePin(groups=(GroupPin(pool=group.name, devices=each, mesh=mesh),))] * count
    if len(pins) < strategy.pp:
        have = ", ".join(f"{g.name} {len(pool_devices(cluster, g.name))}" for g in cluster.groups)
        stages = "stage" if strategy.pp == 1 else "stages"
        verb = "does" if strategy.pp == 1 else "do"
        devices = "device" if each == 1 else "devices"
        message = (
            f"{strategy.pp} {stages} of {each} {devices} {verb} not fit the cluster's groups ({have}): a plan's stage "
            "stays in one group"
        )
        raise InputError("MP183", message, "lower a degree, or name a larger cluster")
    return tuple(pins)
