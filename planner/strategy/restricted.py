"""The point of the planner's space that a strategy names: each mesh axis splits only what its role says.

    batch      examples                        parameters whole, their state as ZeRO says
    context    positions of a sequence         the same
    expert     examples, or experts            split by experts where they have them, else the same
    model      neither, but with `sp` positions of what is shaped as the stream that layers hand on, which otherwise
               is whole; every matrix is split: by the published table of `planner.search.baselines.SPLITS`, else by
               whichever dim is fastest

What a role leaves open is solved. The choice does not depend on the microbatch, so that one is made for all.
"""

from dataclasses import replace
from typing import Literal

import numpy as np

from costmodel.errors import InfeasibleError
from costmodel.sharding import REPLICATED, Spec
from planner.search.baselines import split_dim
from planner.search.intra_op import solve
from planner.search.problem import IntraOpProblem, SearchBudget
from planner.space.decision import Decision
from planner.space.dims import batch_dims, sequence_dims
from planner.space.model_space import ModelSpace
from planner.space.nodes import AnyNode, BatchNode, GroupNode, ParameterNode, PortNode
from planner.space.parameters import Storage
from planner.space.setting import Setting
from planner.strategy.divisible import require_experts, require_matrices, require_positions
from planner.strategy.experts import expert_dims
from planner.strategy.layers import streams

Role = Literal["batch", "context", "expert", "model"]
_MANY = 64  # microbatches: what can be done once a step is
_BUDGET = SearchBudget(relative_gap=0.05, prove=False, mip_nodes=50)


def choose(space: ModelSpace, roles: tuple[Role, ...], *, sp: bool, parted: bool = False) -> tuple[int, ...]:
    """The option of each node of a space under roles of its axes.

    Args:
        parted: whether axes of examples split parameters too (ZeRO-3). Those of which ops use just the part that their
            devices hold stay split; others, which are gathered, are whole in the choice.

    Raises:
        InputError: MP181 for an axis that the model has nothing for. InfeasibleError: MP181 where no assignment
            conforms.
    """
    problem = space.problem(Setting(microbatches=_MANY, stages=1, in_flight=1, remat="none"), limit_bytes=np.inf)
    solution = solve(restricted(space, problem, roles, sp=sp, zero=3 if parted else 0), budget=_BUDGET)
    if not solution.status.found:
        message = f"no assignment of {space.graph.name} splits its axes as {', '.join(roles)} of sizes {space.mesh}"
        raise InfeasibleError("MP181", message, "choose other degrees")
    return _gathered_whole(space, solution.choice, roles) if parted else solution.choice


def _gathered_whole(space: ModelSpace, choice: tuple[int, ...], roles: tuple[Role, ...]) -> tuple[int, ...]:
    """A choice whose parameters are split along axes that ZeRO splits only where some op uses the part that lies on its
    device; what others then take of them whole is theirs to gather."""
    setting = Setting(microbatches=_MANY, stages=1, in_flight=1, remat="none")
    decision = Decision(space=space, setting=setting, choice=choice, time_s=0.0, bound_s=0.0)
    experts = expert_dims(space.graph) if "expert" in roles else {}
    picks = list(choice)
    for index, node in enumerate(space.nodes):
        if not isinstance(node, ParameterNode):
            continue
        stored = node.options[choice[index]].value
        shared_out = any(experts.get(key, {}).get(name) for key, name in node.places)
        used = [(node.spec_at(place, stored), need) for place in node.places for need in decision.needs_at(place)]
        value = tuple(
            code
            if role == "model" or (role == "expert" and shared_out) or any(have[a] == need[a] for have, need in used)
            else REPLICATED
            for a, (code, role) in enumerate(zip(stored, roles, strict=True))
        )
        if value != stored:
            picks[index] = node.options.index(Storage(value, value, value))
    return tuple(picks)


def restricted(
    space: ModelSpace, problem: IntraOpProblem, roles: tuple[Role, ...], *, sp: bool, zero: int = 0
) -> IntraOpProblem:
    """The problem with the options left that the roles allow; a node of which none is allowed is left free.

    Args:
        zero: what of parameters' state axes of examples split (`planner.strategy.strategy.Strategy`).

    Raises:
        InputError: MP181 for an axis that the model has nothing for.
    """
    _require_use(space, roles, sp=sp)
    allow = _Allowed(space, roles, sp, zero)
    nodes = []
    for node, priced in zip(space.nodes, problem.nodes, strict=True):
        keep = allow.of(node)
        nodes.append(replace(priced, time_s=np.where(keep, priced.time_s, np.inf)) if keep.any() else priced)
    return replace(problem, nodes=tuple(nodes))


def _require_use(space: ModelSpace, roles: tuple[Role, ...], *, sp: bool) -> None:
    for size, role in zip(space.mesh, roles, strict=True):
        if role == "model":
            require_matrices(space, size)
            if sp:
                require_positions(space.graph, f"sp=on with tp={size}", size)
        elif role == "context":
            require_positions(space.graph, f"cp={size}", size)
        elif role == "expert":
            require_experts(space.graph, size)


class _Allowed:
    def __init__(self, space: ModelSpace, roles: tuple[Role, ...], sp: bool, zero: int):
        self.space, self.roles, self.sp, self.zero = space, roles, sp, zero
        self.batch, self.sequence = batch_dims(space.graph), sequence_dims(space.graph)
        self.experts = expert_dims(space.graph) if "expert" in roles else {}
        self.streams = streams(space.graph)
        self.stream_shapes = {
            space.graph.classes[key].tensors[name].shape for key, names in self.streams.items() for name in names
        }

    def of(self, node: AnyNode) -> np.ndarray:
        if isinstance(node, GroupNode):
            tensors = self.space.graph.classes[node.class_key].tensors
            names = (*node.group.reads, *node.group.exports)
            return np.array(
                [
                    all(
                        self._group_spec(node.class_key, n, spec, tensors[n].role == "param")
                        for n, spec in zip(names, (*option.needs, *option.gives), strict=True)
                    )
                    for option in node.options
                ]
            )
        if isinstance(node, PortNode):
            return np.array([self._port_spec(node, spec) for spec in node.options])
        if isinstance(node, ParameterNode):
            conform = np.array([self._storage(node, storage) for storage in node.options])
            return conform == conform.max()  # where dims do not divide, on as many axes as they do
        if isinstance(node, BatchNode) and len(node.options) > 1:
            wanted = [
                all((c >= 0) == (r in ("batch", "expert")) for c, r in zip(spec, self.roles, strict=True))
                for spec in node.options
            ]
            return np.array(wanted)
        return np.ones(len(node.options), dtype=bool)

    def _group_spec(self, key: str, name: str, spec: Spec, parameter: bool) -> bool:
        batch, sequence = self.batch[key].get(name, frozenset()), self.sequence[key].get(name, frozenset())
        experts = self.experts.get(key, {}).get(name, frozenset())
        for code, role in zip(spec, self.roles, strict=True):
            if role == "expert" and parameter and experts and code not in experts:
                return False
            if code < 0:
                continue
            if role == "expert" and code not in experts and (parameter or code not in batch):
                return False
            if role == "batch" and (parameter or code not in batch):
                return False
            if role == "context" and (parameter or code not in sequence):
                return False
            if role == "model" and (code in batch or (code in sequence and not self.sp)):
                return False
            if role == "model" and code not in sequence and self._shape(key, name) in self.stream_shapes:
                return False
        return True

    def _shape(self, key: str, name: str) -> tuple[int, ...]:
        return self.space.graph.classes[key].tensors[name].shape

    def _port_spec(self, node: PortNode, spec: Spec) -> bool:
        """With `sp`, what a layer hands to the next lies split by positions."""
        key, name = node.class_key, node.tensor
        if not self._group_spec(key, name, spec, False):
            return False
        if name not in self.streams.get(key, ()):
            return True
        sequence = self.sequence[key].get(name, frozenset())
        split = all(c in sequence for c, role in zip(spec, self.roles, strict=True) if role == "model")
        return split == self.sp or not sequence

    def _storage(self, node: ParameterNode, storage: Storage) -> int:
        """On how many axes a parameter is stored as their roles ask."""
        conform = 0
        matrix = len(node.tensor.shape) > 1
        experts = frozenset().union(*(self.experts.get(key, {}).get(name, ()) for key, name in node.places))
        codes = zip(storage.value, storage.gradient, storage.optimizer, self.roles, strict=True)
        for axis, (code, gradient, optimizer, role) in enumerate(codes):
            if role == "expert" and experts:
                conform += code in experts and code == gradient == optimizer
                continue
            if role != "model":
                split = tuple(c != REPLICATED for c in (optimizer, gradient, code))
                conform += split == tuple(self.zero >= stage for stage in (1, 2, 3))
                continue
            size, shape = self.space.mesh[axis], node.tensor.shape
            named = split_dim(node.names[0], shape)
            if not code == gradient == optimizer:
                continue
            if named is not None and shape[named] % size == 0:
                conform += code == named
            else:
                must = matrix and len(node.options) > 1 and any(n % size == 0 for n in shape)
                conform += not (must and code == REPLICATED)
        return conform
