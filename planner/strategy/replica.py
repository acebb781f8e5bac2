"""A strategy as an assignment of the planner's space, so that the planner's own account says what it takes.

Estimates solve one replica: the mesh has the axes that split a microbatch's tensors (context, experts, tensor
parallelism), and no data axis. This puts the data axis back before them, be it of one device. There ops vary
(`costmodel.sharding.VARYING`): each replica has examples of its own, as many as a microbatch of the graph has, and its
gradients are summands. What ZeRO splits is chosen among the planner's own ways to store a parameter
(`planner.space.parameters.storages`).

Most of this is the same for many strategies. Kernels, and when what they make is live, depend on which dims of values
ZeRO splits, not on the size of the data axis nor on that of microbatches; state does not depend on microbatches, nor
passes on how gradients and optimizer state are split.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

from costmodel.collectives import NO_LINK
from costmodel.graph import ModelGraph
from costmodel.sharding import REPLICATED, VARYING, Spec, Strategy
from planner.space.decision import Decision
from planner.space.groups import GroupStrategy
from planner.space.live_spans import BlockSpans
from planner.space.model_space import ModelSpace, is_small
from planner.space.nodes import AnyNode, GroupNode, ParameterNode, Place
from planner.space.parameters import Storage, storages, whole_storage
from planner.space.setting import Remat, Setting
from planner.strategy.one_program import StepPasses, StepState, step_passes, step_state
from planner.strategy.restricted import Role


@dataclass(frozen=True, kw_only=True)
class AlikeDecision(Decision):
    """An assignment that differs from another one in sizes, of microbatches and of the data axis, and in how gradients
    and optimizer state are split: its ops, and the specs of what they take and make, are the same.

    Attributes:
        as_large: one of microbatches as large, whose blocks keep the same.
    """

    like: Decision
    as_large: Decision | None = None

    # What is equal is worked out in `like` once: properties stand here for what is cached there.

    @property
    def op_strategies(self) -> dict[str, dict[str, Strategy]]:  # type: ignore[override]
        return self.like.op_strategies

    @property
    def group_specs(self) -> dict[str, list[dict[str, Spec]]]:  # type: ignore[override]
        return self.like.group_specs

    @property
    def input_specs(self) -> dict[str, dict[str, Spec]]:  # type: ignore[override]
        return self.like.input_specs

    @property
    def _needs(self) -> dict[tuple[Place, ...], list[Spec]]:  # type: ignore[override]
        return self.like._needs

    @cached_property
    def kept_without_remat(self) -> dict[str, dict[tuple[str, Spec], float]]:
        return super().kept_without_remat if self.as_large is None else self.as_large.kept_without_remat

    def _spans(self, key: str) -> BlockSpans:
        return self.like._spans(key)


class Replicas:
    """All strategies that a replica of one layout is part of: other numbers of replicas, stages of ZeRO, sizes of
    microbatches, and with or without remat.

    Args:
        decision: the assignment of one replica's mesh, at any microbatch size.
        roles: of the axes of its mesh.
    """

    def __init__(self, decision: Decision, roles: Sequence[Role]):
        before = decision.space
        self._space, self._roles = before, ("batch", *roles)
        self._nodes = [_varying(node, pick) for node, pick in zip(before.nodes, decision.choice, strict=True)]
        self._parameters: dict[tuple[tuple[str, ...], Storage], ParameterNode] = {}
        self._spaces: dict[tuple[int, int], ModelSpace] = {}
        self._likes: dict[tuple[Spec, ...], Decision] = {}
        self._as_large: dict[int, Decision] = {}
        self._states: dict[tuple[int, int, bool], StepState] = {}
        self._passes: dict[tuple[int, Remat, int, bool], StepPasses] = {}

    def state(self, *, data: int, zero: int, accumulates: bool) -> StepState:
        """What the state of parameters takes on one device.

        Args:
            data: replicas; zero: what they, and devices of context parallelism, split.
            accumulates: whether there are several microbatches, whose gradients add up.
        """
        key = (data, zero, accumulates)
        if key not in self._states:
            setting = Setting(microbatches=2 if accumulates else 1, stages=1, in_flight=1, remat="none")
            self._states[key] = step_state(self.decision(data, zero, setting))
        return self._states[key]

    def passes(self, graph: ModelGraph, *, data: int, zero: int, remat: Remat) -> StepPasses:
        """What the passes of a microbatch take on one device.

        Args:
            graph: of the decision's model, at the microbatch size of one replica.
            data, zero: as of `state`.
        """
        split = zero == 3  # values too; else all numbers of replicas above one are alike
        key = (graph.microbatch, remat, data if split else min(data, 2), split)
        if key not in self._passes:
            own = self.decision(data, zero, Setting(microbatches=1, stages=1, in_flight=1, remat=remat))
            own = replace(own, space=own.space.with_graph(graph), as_large=self._as_large.get(graph.microbatch))
            self._as_large.setdefault(graph.microbatch, own)
            self._passes[key] = step_passes(own)
        return self._passes[key]

    def decision(self, data: int, zero: int, setting: Setting) -> AlikeDecision:
        """The assignment of all replicas' devices, of microbatches as large as the one replica's decision has."""
        if (data, zero) not in self._spaces:
            self._spaces[data, zero] = self._space_of(data, zero)
        space = self._spaces[data, zero]
        values = tuple(node.options[0].value for node in space.nodes if isinstance(node, ParameterNode))
        choice = (0,) * len(space.nodes)
        if values not in self._likes:
            self._likes[values] = Decision(space=space, setting=setting, choice=choice, time_s=0.0, bound_s=0.0)
        like = self._likes[values]
        return AlikeDecision(like=like, space=space, setting=setting, choice=choice, time_s=0.0, bound_s=0.0)

    def _space_of(self, data: int, zero: int) -> ModelSpace:
        """The space that has no option but the one of so many replicas and a stage of ZeRO."""
        pricing = self._space.pricing
        mesh, links = (data, *pricing.mesh), (NO_LINK, *pricing.links)
        nodes = [self._stored(node, mesh, zero) if isinstance(node, ParameterNode) else node for node in self._nodes]
        return self._space.with_assignment(
            nodes, replace(pricing, mesh=mesh, axis_names=("batch", *pricing.axis_names), links=links)
        )

    def _stored(self, node: ParameterNode, mesh: tuple[int, ...], zero: int) -> ParameterNode:
        """A parameter that one replica stores in one way, as all of them do."""
        graph, (chosen,) = self._space.graph, node.options
        if is_small(graph, node.names[0]):
            storage = whole_storage(len(mesh))
        else:
            trained = graph.params[node.names[0]].trained
            storage = _ways(node.tensor.shape, mesh, self._roles, chosen.value, trained)[zero]
        key = (node.names, storage)
        if key not in self._parameters:
            self._parameters[key] = replace(node, options=(storage,))
        return self._parameters[key]


def _varying(node: AnyNode, pick: int) -> AnyNode:
    """A node with the one option that was picked, on the mesh with the data axis; of parameters as one replica stores
    them."""
    option = node.options[pick]
    if isinstance(option, Storage):
        assert isinstance(node, ParameterNode)
        return replace(node, options=(option,))
    if isinstance(option, GroupStrategy):
        assert isinstance(node, GroupNode)
        parts = (tuple((VARYING, *spec) for spec in specs) for specs in (option.ops, option.needs, option.gives))
        return replace(node, options=(GroupStrategy(*parts),))
    return replace(node, options=((VARYING, *option),))  # type: ignore[type-var]


@lru_cache(maxsize=4096)
def _ways(
    shape: tuple[int, ...], mesh: tuple[int, ...], roles: tuple[Role, ...], value: Spec, trained: bool
) -> tuple[Storage, ...]:
    """For each stage of ZeRO, the way to store a parameter that splits as many axes of equal replicas as it says and
    dims allow.

    Args:
        value: spec of the value on the axes but the data axis; axes that split it keep doing so.
    """
    codes = (REPLICATED, *value)
    fixed = {a: code for a, code in enumerate(codes) if roles[a] == "model" or code >= 0 or mesh[a] == 1}
    options = storages(shape, mesh, trained, fixed)
    splits = [_stages(storage, [axis for axis in range(len(mesh)) if axis not in fixed]) for storage in options]
    return tuple(options[max(range(len(options)), key=lambda i: splits[i].count(zero))] for zero in range(4))


def _stages(storage: Storage, axes: Sequence[int]) -> list[int]:
    """The stage of ZeRO that each of these axes is split as: optimizer state, gradients and values one after the other;
    -1 for none."""
    codes = [(storage.optimizer[axis], storage.gradient[axis], storage.value[axis]) for axis in axes]
    counts = [(sum(code >= 0 for code in own), own) for own in codes]
    return [count if all(code >= 0 for code in own[:count]) else -1 for count, own in counts]


__all__ = ["AlikeDecision", "Replicas"]
