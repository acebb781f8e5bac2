"""One choice of every node of a space, by name: strategies of ops, where parameters live, specs at block borders."""

from dataclasses import dataclass
from functools import cached_property

from costmodel.sharding import Spec, Strategy
from planner.space.block_cost import Collective
from planner.space.group_costs import specs_in_group
from planner.space.groups import GroupStrategy
from planner.space.model_space import ModelSpace
from planner.space.nodes import GroupNode, ParameterNode, Place, PortNode
from planner.space.parameters import Storage, gradient_collectives, hoisted
from planner.space.setting import Setting


@dataclass(frozen=True, kw_only=True)
class Assignment:
    """A choice of every node of a space.

    Attributes:
        choice: option index of each node.
        time_s: seconds of one step as the problem counts them; bound_s: proven least.
    """

    space: ModelSpace
    setting: Setting
    choice: tuple[int, ...]
    time_s: float
    bound_s: float

    def option(self, *key: str) -> object:
        index = self.space.index[key]
        return self.space.nodes[index].options[self.choice[index]]

    def group_option(self, key: str, at: int) -> GroupStrategy:
        """How a group of a class's ops is split."""
        found = self.option("group", key, str(at))
        assert isinstance(found, GroupStrategy)
        return found

    @cached_property
    def op_strategies(self) -> dict[str, dict[str, Strategy]]:
        """Block class -> op name -> strategy."""
        found: dict[str, dict[str, Strategy]] = {key: {} for key in self.space.graph.classes}
        for node, pick in zip(self.space.nodes, self.choice, strict=True):
            if isinstance(node, GroupNode):
                found[node.class_key].update(
                    (op.name, s) for op, s in zip(node.group.ops, node.options[pick].ops, strict=True)
                )
        return found

    @cached_property
    def storage(self) -> dict[str, Storage]:
        """Parameter name -> specs in the dims of one block's slice."""
        return {
            name: node.options[pick]
            for node, pick in zip(self.space.nodes, self.choice, strict=True)
            if isinstance(node, ParameterNode)
            for name in node.names
        }

    def needs(self, node: ParameterNode) -> list[Spec]:
        """Specs in which the ops take a parameter."""
        if node.places not in self._needs:
            self._needs[node.places] = [need for place in node.places for need in self.needs_at(place)]
        return self._needs[node.places]

    def needs_at(self, place: Place) -> list[Spec]:
        """Specs in which the ops of a class take one of its inputs."""
        return [specs[self.choice[consumer]] for consumer, specs in self.space.consumers(*place)]

    @cached_property
    def _needs(self) -> dict[tuple[Place, ...], list[Spec]]:
        return {}

    def gradient_collectives(self, node: ParameterNode) -> list[Collective]:
        """Collectives of the gradient and update of each of a node's leaves, on a stage that owns it."""
        if not self.space.graph.params[node.names[0]].trained:
            return []
        storage = node.options[self.choice[self.space.index["place", *node.places[0]]]]
        return gradient_collectives(storage, hoisted(storage.value, self.needs(node)), self.space.mesh)

    @cached_property
    def parameter_nodes(self) -> dict[str, ParameterNode]:
        return {name: n for n in self.space.nodes if isinstance(n, ParameterNode) for name in n.names}

    @cached_property
    def input_specs(self) -> dict[str, dict[str, Spec]]:
        """Block class -> input -> spec in which the class takes it (parameters: as they are through the step)."""
        found: dict[str, dict[str, Spec]] = {key: {} for key in self.space.graph.classes}
        for node, pick in zip(self.space.nodes, self.choice, strict=True):
            if isinstance(node, PortNode):
                found[node.class_key][node.tensor] = node.options[pick]
            elif isinstance(node, ParameterNode):
                through = hoisted(node.options[pick].value, self.needs(node))
                for place in node.places:
                    found[place[0]][place[1]] = node.spec_at(place, through)
        return found

    @cached_property
    def group_specs(self) -> dict[str, list[dict[str, Spec]]]:
        """Block class -> for each of its groups, spec of every tensor that it reads or makes."""
        return {
            key: [specs_in_group(g, self.group_option(key, i)) for i, g in enumerate(groups)]
            for key, groups in self.space.groups.items()
        }

    @cached_property
    def output_specs(self) -> dict[str, dict[str, Spec]]:
        """Block class -> output tensor -> spec in which the class makes it."""
        found: dict[str, dict[str, Spec]] = {}
        for key, cls in self.space.graph.classes.items():
            specs = dict(self.input_specs[key])
            for own in self.group_specs[key]:
                specs |= own
            found[key] = {name: specs[name] for name in cls.outputs if name in specs}
        return found


__all__ = ["Assignment"]
