"""Collectives that a traced program writes, before any compiler sees it: phase, kind and mesh axis -> times run.

A step is one program in which JAX's name stacks tell the phases apart: the step marks what it does once with the scopes
below, transposed code is under ``transpose``, and all else is forward.
"""

from collections import Counter
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


def written(traced: Any, phase: str | None = None) -> Counts:
    """Counts of a traced program (``jax.jit(f).trace(...)``); a collective over several axes counts once for each.

    Args:
        phase: of the whole program; None for a step, whose parts say what they are.
    """
    found: Counts = Counter()
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


def _walk(jaxpr: Any, times: int, phase: str | None, path: str, found: Counts) -> None:
    for eqn in jaxpr.eqns:
        here = f"{path}/{jc.name_stack(eqn)}"
        kind = KINDS.get(eqn.primitive.name)
        if kind is not None:
            of = phase if phase is not None and UPDATE not in here else phase_of(here)
            if of:
                for axis in jc.collective_axes(eqn):
                    found[f"{of} {kind} {axis}"] += times
        inside = times * eqn.params["length"] if eqn.primitive.name == "scan" else times
        for inner in jax.tree.leaves(list(eqn.params.values()), is_leaf=jc.is_jaxpr):
            if jc.is_jaxpr(inner):
                _walk(jc.as_closed(inner).jaxpr, inside, phase, here, found)
