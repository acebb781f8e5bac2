"""What a plan says of one stage group, in the terms of the interpreter: meshes and specs instead of names."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from costmodel.errors import MismatchError
from costmodel.sharding import REPLICATED, Spec, Strategy
from planner.frontend.blocks import BlockClass
from planner.planfile.schema import BlockStrategy, GroupPlan, ParameterPlan
from planner.planfile.specs import spec_from_value, strategy_from_names

ALONE = "device"  # the axis of a mesh of one device: nothing is split over it


def partition(spec: Spec, dims: int, axis_names: Sequence[str]) -> PartitionSpec:
    """JAX's PartitionSpec of the splits of a spec."""
    parts = []
    for d in range(dims):
        names = tuple(n for n, code in zip(axis_names, spec, strict=True) if code == d)
        parts.append(None if not names else names[0] if len(names) == 1 else names)
    return PartitionSpec(*parts)


@dataclass(frozen=True)
class ClassPlacement:
    """How one block class runs on a group.

    Attributes:
        again: names of equations whose results backward makes again.
    """

    strategies: dict[str, Strategy]
    inputs: dict[str, Spec]
    outputs: dict[str, Spec]
    remat: str
    again: frozenset[str] = frozenset()


@dataclass(frozen=True)
class GroupPlacement:
    """One stage group on its devices.

    Attributes:
        plan: its record in the plan file.
        devices: JAX devices, in the order of the plan's device ids; None where programs are only made, for devices that
            are not attached.
    """

    plan: GroupPlan
    devices: tuple[Any, ...] | None
    classes: dict[str, BlockClass]

    @cached_property
    def axis_names(self) -> tuple[str, ...]:
        return tuple(a.name for a in self.plan.mesh if a.size > 1)

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        return tuple(a.size for a in self.plan.mesh if a.size > 1)

    @cached_property
    def mesh(self) -> Mesh | AbstractMesh:
        """The JAX mesh. Axes of size one are left out; a single device has one axis that nothing is split over."""
        names, sizes = self.axis_names or (ALONE,), self.sizes or (1,)
        types = (AxisType.Auto,) * len(names)
        if self.devices is None:
            return AbstractMesh(sizes, names, axis_types=types)
        devices = np.empty(len(self.devices), dtype=object)
        devices[:] = self.devices
        return Mesh(devices.reshape(sizes), names, axis_types=types)

    @cached_property
    def whole(self) -> Spec:
        return (REPLICATED,) * len(self.axis_names)

    def sharding(self, spec: Spec, dims: int) -> NamedSharding:
        return NamedSharding(self.mesh, partition(spec, dims, self.axis_names))

    @cached_property
    def parameters(self) -> dict[str, ParameterPlan]:
        return {p.path: p for p in self.plan.parameters}

    def of_class(self, key: str) -> ClassPlacement:
        return self._classes[key]

    @cached_property
    def _classes(self) -> dict[str, ClassPlacement]:
        return {s.block_class: self._class(s) for s in self.plan.strategies}

    def _class(self, strategy: BlockStrategy) -> ClassPlacement:
        cls = self.classes.get(strategy.block_class)
        if cls is None:
            raise MismatchError(
                "MP402",
                f"the plan has a strategy for block class {strategy.block_class}, which the model lacks",
                "the plan was made for another model or version; plan again",
            )
        return ClassPlacement(
            strategies={
                n: strategy_from_names(op, strategy.ops.get(n, {}), self.axis_names) for n, op in cls.ops.items()
            },
            inputs={n: spec_from_value(v, self.axis_names) for n, v in strategy.inputs.items()},
            outputs={n: spec_from_value(v, self.axis_names) for n, v in strategy.outputs.items()},
            remat=strategy.remat,
        )
