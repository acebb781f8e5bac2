"""A strategy as an assignment of the planner's space, so that the planner's own account says what it takes.

Estimates solve one replica: the mesh has the axes that split a microbatch's tensors (context, experts, tensor
parallelism), and no data axis. This puts the data axis back before them. There ops vary (`costmodel.sharding.VARYING`):
each replica has examples of its own, as many as a microbatch of the graph has, and its gradients are summands. What
ZeRO splits is chosen among the planner's own ways to store a parameter (`planner.space.parameters.storages`).
"""

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from costmodel.collectives import NO_LINK
from costmodel.estimator import Pricing
from costmodel.graph import ModelGraph, Op
from costmodel.sharding import REPLICATED, VARYING, Spec
from planner.space.decision import Decision
from planner.space.groups import Group, GroupStrategy
from planner.space.model_space import is_small
from planner.space.nodes import AnyNode, GroupNode, ParameterNode
from planner.space.parameters import Storage, storages, whole_storage
from planner.space.setting import Setting
from planner.strategy.restricted import Role


@dataclass(frozen=True, kw_only=True)
class AlikeDecision(Decision):
    """An assignment that differs from another one in how the state of parameters is split, not their values: its blocks
    have the same in memory."""

    like: Decision

    @property
    def input_specs(self) -> dict[str, dict[str, Spec]]:  # type: ignore[override]
        return self.like.input_specs

    @property
    def kept(self) -> dict[str, dict[tuple[str, Spec], float]]:  # type: ignore[override]
        return self.like.kept

    @property
    def lying(self) -> dict[str, dict[tuple[str, Spec], float]]:  # type: ignore[override]
        return self.like.lying

    def live_bytes(self, key: str, *, rerun: bool, alone: bool = False) -> float:
        return self.like.live_bytes(key, rerun=rerun, alone=alone)

    def forward_bytes(self, key: str) -> float:
        return self.like.forward_bytes(key)

    def waiting_bytes(self, key: str, gradients: float) -> tuple[float, float]:
        return self.like.waiting_bytes(key, gradients)


def replica_decision(
    decision: Decision,
    graph: ModelGraph,
    roles: Sequence[Role],
    *,
    data: int,
    zero: int,
    setting: Setting,
) -> Decision:
    """The assignment of all replicas' devices.

    Args:
        decision: of one replica's mesh; its graph is the same model as `graph`, at any microbatch size.
        graph: at the microbatch size of one replica.
        roles: of the axes of one replica's mesh.
        data: replicas; zero: what they, and devices of context parallelism, split.
    """
    space = copy.copy(decision.space)
    axes = _Axes(data, tuple(roles), decision.space.mesh, zero, graph)
    for known in ("prices", "in_memory", "first_inputs"):  # cached of the other graph
        space.__dict__.pop(known, None)
    space.graph, space.links = graph, []  # casts between blocks hold no memory
    space.pricing = axes.on(space.pricing)
    space.groups = {
        key: tuple(_sized(group, {op.name: op for op in graph.classes[key].ops}) for group in groups)
        for key, groups in space.groups.items()
    }
    at = {(key, str(i)): group for key, groups in space.groups.items() for i, group in enumerate(groups)}
    space.nodes = list(decision.space.nodes)
    for key, index in space.index.items():
        if key[0] == "place":
            continue
        node = decision.space.nodes[index]
        space.nodes[index] = axes.node(node, decision.choice[index], at.get(key[1:]) if key[0] == "group" else None)
    return Decision(space=space, setting=setting, choice=(0,) * len(space.nodes), time_s=0.0, bound_s=0.0)


def alike_decision(
    like: Decision, decision: Decision, roles: Sequence[Role], *, data: int, zero: int, setting: Setting
) -> Decision:
    """The same for other numbers of replicas above one, and other stages of ZeRO below 3, at the size of `like`.

    Args:
        like: what `replica_decision` gives for one of these.
    """
    space = copy.copy(like.space)
    axes = _Axes(data, tuple(roles), decision.space.mesh, zero, space.graph)
    space.pricing = axes.on(decision.space.pricing)
    space.nodes = [
        axes.node(node, pick, None) if isinstance(node, ParameterNode) else same
        for node, pick, same in zip(decision.space.nodes, decision.choice, like.space.nodes, strict=True)
    ]
    return AlikeDecision(
        like=like, space=space, setting=setting, choice=like.choice, time_s=like.time_s, bound_s=like.bound_s
    )


class _Axes:
    """Puts the data axis before a replica's, in specs, strategies and storage."""

    def __init__(self, data: int, roles: tuple[Role, ...], mesh: tuple[int, ...], zero: int, graph: ModelGraph):
        self.more = data > 1
        self.mesh = (data, *mesh) if self.more else mesh
        self.roles: tuple[Role, ...] = ("batch", *roles) if self.more else roles
        self.zero, self.graph = zero, graph

    def on(self, pricing: Pricing) -> Pricing:
        """Prices of a replica's mesh as those of the mesh with the data axis."""
        if not self.more:
            return pricing
        names, links = ("batch", *pricing.axis_names), (NO_LINK, *pricing.links)
        return replace(pricing, mesh=self.mesh, axis_names=names, links=links)

    def spec(self, spec: Spec) -> Spec:
        return (VARYING, *spec) if self.more else spec

    def node(self, node: AnyNode, pick: int, group: Group | None) -> AnyNode:
        """A node that has no option but the one that was picked."""
        option = node.options[pick]
        if isinstance(option, Storage):
            assert isinstance(node, ParameterNode)
            return replace(node, options=(self._storage(node, option),))
        if isinstance(option, GroupStrategy):
            assert isinstance(node, GroupNode) and group is not None
            parts = (tuple(map(self.spec, specs)) for specs in (option.ops, option.needs, option.gives))
            return replace(node, group=group, options=(GroupStrategy(*parts),))
        return replace(node, options=(self.spec(option),))  # type: ignore[type-var]

    def _storage(self, node: ParameterNode, chosen: Storage) -> Storage:
        if is_small(self.graph, node.names[0]):
            return whole_storage(len(self.mesh))
        trained = self.graph.params[node.names[0]].trained
        return _stored(node.tensor.shape, self.mesh, self.roles, self.zero, chosen.value, trained)


@lru_cache(maxsize=4096)
def _stored(
    shape: tuple[int, ...], mesh: tuple[int, ...], roles: tuple[Role, ...], zero: int, value: Spec, trained: bool
) -> Storage:
    """The way to store a parameter that splits as many axes of equal replicas as ZeRO says and dims allow.

    Args:
        value: spec of the value on the axes but the data axis; axes that split it keep doing so.
    """
    wanted = tuple(zero >= stage for stage in (1, 2, 3))
    fixed = (REPLICATED,) * (len(mesh) - len(value)) + value

    def conforming(storage: Storage) -> int:
        count = 0
        for role, own, *codes in zip(roles, fixed, storage.optimizer, storage.gradient, storage.value, strict=True):
            if role == "model" or own >= 0:
                count += len(mesh) * all(code == own for code in codes)
            else:
                count += tuple(code >= 0 for code in codes) == wanted
        return count

    return max(storages(shape, mesh, trained), key=conforming)


def _sized(group: Group, ops: Mapping[str, Op]) -> Group:
    return replace(group, ops=tuple(ops[op.name] for op in group.ops))


__all__ = ["AlikeDecision", "alike_decision", "replica_decision"]
