"""How values lie where they pass from block to block and from stage to stage.

Inside a block a value may be equal everywhere with a pending cotangent (VARYING) or a pending sum. Between blocks what
is differentiated is replicated or split, and so is all that crosses stages: only then is an array an array to both
sides. Layers of a scan hand their carry on in the spec in which the next one takes it; each layer casts at its end.
"""

from collections.abc import Iterable, Sequence
from itertools import product

from costmodel.graph import ModelGraph, Tensor
from costmodel.sharding import PARTIAL, REPLICATED, VARYING, Spec, divides


def carries(graph: ModelGraph, key: str) -> dict[int, int]:
    """Inputs of a layer that are the output of the layer before: input position -> output position."""
    if key not in graph.layered:
        return {}
    found: dict[int, int] = {}
    for a, b in zip(graph.blocks, graph.blocks[1:], strict=False):
        if a.class_key == b.class_key == key:
            found.update((i, a.outputs.index(s)) for i, s in enumerate(b.inputs) if s in a.outputs)
    return found


def port_specs(tensor: Tensor, wanted: Iterable[Spec], mesh: tuple[int, ...], *, shared: bool) -> dict[Spec, None]:
    """Specs in which a block may take an input, given those that its ops want.

    Args:
        shared: all layers of a scan read this one value: it may be made varying before the scan, so that its cotangents
            are joined before they are reduced.
    """
    found: dict[Spec, None] = {}
    for spec in wanted:
        if PARTIAL in spec:
            continue
        if VARYING not in spec or shared or not tensor.needs_grad:
            found[spec] = None
            continue
        splits = (REPLICATED, *range(len(tensor.shape)))
        for codes in product(*(splits if code == VARYING else (code,) for code in spec)):
            found[codes] = None
    return {spec: None for spec in found if divides(tensor.shape, spec, mesh)}


def crossing(spec: Spec, shape: Sequence[int], mesh: Sequence[int]) -> Spec:
    """The spec in which a value crosses stages: splits stay, and what is equal everywhere is split, where some dim
    divides, so that each device sends (and gets the cotangent of) its own part."""
    codes = [REPLICATED if code in (VARYING, PARTIAL) else code for code in spec]
    for axis, code in enumerate(spec):
        if code == VARYING:
            fitting = (d for d in range(len(shape)) if divides(shape, (*codes[:axis], d, *codes[axis + 1 :]), mesh))
            codes[axis] = next(fitting, REPLICATED)
    return tuple(codes)


def arriving(spec: Spec, tensor: Tensor, shape: Sequence[int], mesh: Sequence[int]) -> Spec:
    """The spec in which a stage gets a value that its blocks take as `spec`: without a gradient, whole is as good."""
    if tensor.needs_grad:
        return crossing(spec, shape, mesh)
    return tuple(code if code >= 0 else REPLICATED for code in spec)
