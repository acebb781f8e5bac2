"""A published function planned for eight slow devices and run on fake ones, and the same steps on one device.

The devices compute slowly and their links are fast, so that the search splits whatever can be split.
"""

import math
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import planner
from costmodel.sharding import local_fraction
from planner.frontend.capture import Capture
from planner.planfile.schema import Plan
from planner.planfile.specs import strategy_from_names
from tests.lowering.execution import slow_cluster
from tests.published.functions import BATCH, MICROBATCH, Published

DEVICES = 8


def planned(published: Published) -> Plan:
    """The best plan of one stage."""
    return planner.plan(
        published.task,
        cluster=slow_cluster(DEVICES),
        global_batch=BATCH,
        microbatch=MICROBATCH,
        stages=1,
        baselines=False,
    )


@dataclass(frozen=True)
class Share:
    """How much of the work one device does.

    Attributes:
        total: share of all floating point operations, forward and backward.
        whole: ops that are not split at all: share of all operations, op, and why its loops do not split.
    """

    total: float
    whole: tuple[tuple[float, str, tuple[str, ...]], ...]


def share_of(plan: Plan, capture: Capture) -> Share:
    """What one device computes of the operations of a step."""
    (group,) = plan.stages[0].groups
    names, mesh = tuple(a.name for a in group.mesh), tuple(a.size for a in group.mesh)
    chosen = {s.block_class: s.ops for s in group.strategies}
    total = local = 0.0
    whole = []
    for block in capture.blocks:
        for op in block.cls.ops.values():
            flops = op.flops + op.backward_flops
            strategy = strategy_from_names(op, chosen[block.cls.key].get(op.name, {}), names)
            fraction = local_fraction(op, strategy, mesh)
            total, local = total + flops, local + flops * fraction
            if fraction == 1.0 and flops:
                reasons = tuple(f"{f.name}[{f.size}]: {f.reason or f.combine}" for f in op.factors)
                whole.append((flops, f"{op.name} {op.source}", reasons))
    return Share(local / total, tuple(sorted(((f / total, op, why) for f, op, why in whole), reverse=True)))


@dataclass(frozen=True)
class Outcome:
    """Losses of some steps, and the parameters after them."""

    losses: list[float]
    params: Any


def run(published: Published, steps: Any) -> Outcome:
    """Some steps of a compiled plan or of the reference."""
    params = jax.tree.map(jnp.asarray, published.init())
    state = steps.init(params, published.state()) if published.state else steps.init(params)
    extra = {"rng": jax.random.key(3)} if published.task.rng else {}
    losses = []
    for _ in range(published.steps):
        state, metrics = steps.step(state, published.batch, **extra)
        losses.append(float(metrics["loss"]))
    return Outcome(losses, jax.device_get(steps.params(state)))


def largest_error(got: Outcome, want: Outcome) -> float:
    """Largest difference of losses and parameters, relative to the largest element of its leaf (at least 1e-2)."""
    pairs = [(np.asarray(got.losses), np.asarray(want.losses))]
    pairs += zip(jax.tree.leaves(got.params), jax.tree.leaves(want.params), strict=True)
    errors = []
    for a, b in pairs:
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        errors.append(float(np.abs(a - b).max(initial=0.0)) / max(float(np.abs(b).max(initial=0.0)), 1e-2))
    return math.inf if any(map(math.isnan, errors)) else max(errors)
