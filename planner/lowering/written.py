"""Collectives that a traced program writes, before any compiler sees it: phase, kind and mesh axis -> times run.

A step is one program in which JAX's name stacks tell the phases apart: the step marks what it does once with the scopes
below, transposed code is under ``transpose``, and all else is forward.
"""

import math
from collections import Counter
from dataclasses import dataclass
from typing import Any

import jax

from planner.frontend import jax_compat as jc

ACCUMULATE, REDUCE, GATHER = "accumulate_gradients", "reduce_gradients", "gather_parameters"
UPDATE, LOSS = "run_optimizer", "sum_losses"  # no plan counts these: a global norm, the loss

KINDS = {
    "psum": "all_reduce",
    "psum_invariant": "all_reduce",
    "pmax": "all_reduce",
    "pmin": "all_reduce",
    "all_gather": "all_gather",
    "all_gather_invariant": "all_gather",
    "reduce_scatter": "reduce_scatter",
    "all_to_all": "all_to_all",
    "ppermute": "permute",
}
Counts = Counter[str]  # "forward all_gather data" -> times


@dataclass(frozen=True)
class WrittenCollective:
    """A collective of a traced program.

    Attributes:
        phase: ``forward``, ``backward`` or ``once``; '' for what no plan counts.
        bytes: of the tensor that is whole on the axes, as `profiles.compiled.hlo.HloCollective.bytes`.
        elements: of that tensor; times: that it runs in one run of the program.
    """

    phase: str
    kind: str
    axes: tuple[str, ...]
    bytes: int
    elements: int
    times: int


def written(traced: Any, phase: str | None = None) -> Counts:
    """Counts of a traced program (``jax.jit(f).trace(...)``); a collective over several axes counts once for each.

    Args:
        phase: of the whole program; None for a step, whose parts say what they are.
    """
    found: Counts = Counter()
    for c in written_collectives(traced, phase):
        for axis in c.axes if c.phase else ():
            found[f"{c.phase} {c.kind} {axis}"] += c.times
    return found


def written_collectives(traced: Any, phase: str | None = None) -> list[WrittenCollective]:
    """Every collective of a traced program, in its order; arguments as of `written`."""
    found: list[WrittenCollective] = []
    _walk(jc.as_closed(traced.jaxpr).jaxpr, 1, phase, "", found)
    return found


def phase_of(path: str) -> str:
    """Phase of an operation in a step, by its name stack: ``forward``, ``backward``, ``once`` or '' (not of the
    plan)."""
    if LOSS in path or UPDATE in path:
        return ""
    if REDUCE in path or GATHER in path:
        return "once"
    return "backward" if ACCUMULATE in path or "transpose(" in path else "forward"


def _walk(jaxpr: Any, times: int, phase: str | None, path: str, found: list[WrittenCollective]) -> None:
    for eqn in jaxpr.eqns:
        here = f"{path}/{jc.name_stack(eqn)}"
        kind = KINDS.get(eqn.primitive.name)
        if kind is not None:
            of = phase if phase is not None and UPDATE not in here else phase_of(here)
            whole = eqn.outvars if kind == "all_gather" else eqn.invars
            counts = [math.prod(v.aval.shape) for v in whole]
            size = sum(n * jc.itemsize(v.aval.dtype) for n, v in zip(counts, whole, strict=True))
            found.append(WrittenCollective(of, kind, tuple(jc.collective_axes(eqn)), size, sum(counts), times))
        inside = times * eqn.params["length"] if eqn.primitive.name == "scan" else times
        for inner in jax.tree.leaves(list(eqn.params.values()), is_leaf=jc.is_jaxpr):
            if jc.is_jaxpr(inner):
                _walk(jc.as_closed(inner).jaxpr, inside, phase, here, found)
