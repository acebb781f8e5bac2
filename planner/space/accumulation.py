"""What adding each microbatch's gradient to the accumulator moves: the gradient is read, the accumulator read and
written, in the accumulator's own split. Every block that reads a parameter adds its part."""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from costmodel.graph import Parameter
from costmodel.sharding import split_factor
from planner.space.nodes import ParameterNode
from planner.space.parameters import Storage
from planner.space.prices import SpacePrices

if TYPE_CHECKING:
    from planner.space.model_space import ModelSpace


def accumulated_bytes(parameter: Parameter, elements: int, storage: Storage, mesh: Sequence[int]) -> float:
    """Bytes that one device moves to add one microbatch's gradient of `elements` elements of a parameter."""
    if not parameter.trained:
        return 0.0
    return 3.0 * elements * parameter.gradient_itemsize / split_factor(storage.gradient, tuple(mesh))


def accumulate_s(space: "ModelSpace", node: ParameterNode, storage: Storage) -> float:
    """Seconds of that for what one block reads of a node's parameter."""
    elements = math.prod(node.tensor.shape)
    moved = accumulated_bytes(space.graph.params[node.names[0]], elements, storage, space.mesh)
    return space.pricing.accumulate_s(moved)


def with_accumulation(space: "ModelSpace", prices: SpacePrices) -> SpacePrices:
    """Prices whose parameters have the accumulation of their gradients."""
    nodes = []
    for node, priced in zip(space.nodes, prices.nodes, strict=True):
        if isinstance(node, ParameterNode):
            readers = sum(share * space.counts[key] for key, share in node.shares.items()) / node.count
            each = np.array([accumulate_s(space, node, storage) for storage in node.options])
            priced = replace(priced, adding_s=readers * each)
        nodes.append(priced)
    return replace(prices, nodes=tuple(nodes))
