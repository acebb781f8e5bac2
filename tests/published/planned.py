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
from planner.lowering.compile import Trainer
from planner.planfile.schema import Plan
from planner.planfile.specs import strategy_from_names
from planner.search.pinned import GroupPin, StagePin
from tests.lowering.execution import compare_updates, slow_cluster
from tests.published.functions import BATCH, MICROBATCH, Published

DEVICES = 8
PIPELINE_MICROBATCH = 4  # four microbatches go through a pipeline


@dataclass(frozen=True)
class Pipeline:
    """How a function is run as a pipeline.

    Attributes:
        devices: how many there are of each kind. stages: how many at most.
        pins: devices of each stage, where the search does not choose them.
    """

    devices: tuple[int, ...] = (DEVICES,)
    stages: int = 2
    pins: tuple[StagePin, ...] | None = None


def pinned(*devices: int) -> Pipeline:
    """One stage for each number of devices."""
    pins = tuple(StagePin(groups=(GroupPin(pool="g0", devices=n),)) for n in devices)
    return Pipeline(devices=(sum(devices),), stages=len(devices), pins=pins)


PIPELINES = {
    "equimo_vit": Pipeline(),
    "flowjax_coupling_flow": Pipeline(),
    "hf_bart": Pipeline(),  # the encoder's output goes on to every layer of the decoder
    "hf_bert": pinned(2, 3, 3),
    "hf_gpt2": Pipeline(devices=(3, 5)),  # tied embeddings; stages of two groups that share microbatches
    "hf_llama": pinned(3, 5),
    "hf_vit": Pipeline(),
    "hk_layer_stack": pinned(1, 2, 2, 3),
    "hk_mlp": Pipeline(devices=(3, 5)),
    "hk_resnet": Pipeline(),  # carried batch statistics
    "hk_transformer": pinned(2, 2, 4),
    "keras_transformer": Pipeline(),  # carried seeds
    "linen_scanned_transformer": Pipeline(devices=(3, 5)),
    "nnx_transformer": pinned(3, 5),
    "penzai_llama": Pipeline(),
}
# Functions of which a plan does not count every collective right yet (MP505). Single numbers that a loop or a custom
# derivative asks of all devices: diffrax, optimistix. The transpose of a cast whose reader gives no cotangent (a
# comparison, a stopped gradient) is counted and not written: the others.
MISCOUNTED = frozenset(
    {
        "diffrax_neural_ode",
        "optimistix_equilibrium",
        "flowjax_coupling_flow",
        "hf_bart",
        "hf_whisper",
        "hk_vq_vae",
        "penzai_llama",
        "rax_ranking",
    }
)


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


def pipelined(published: Published, pipeline: Pipeline) -> Plan:
    """The best plan of several stages."""
    return planner.plan(
        published.task,
        cluster=slow_cluster(*pipeline.devices),
        global_batch=BATCH,
        microbatch=PIPELINE_MICROBATCH,
        stages=None if pipeline.pins else pipeline.stages,
        pins=pipeline.pins,
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


def largest_difference(got: Outcome, want: Outcome) -> float:
    """Largest difference of losses and parameters, relative to the largest element of its leaf (at least 1e-2)."""
    pairs = [(np.asarray(got.losses), np.asarray(want.losses))]
    pairs += zip(jax.tree.leaves(got.params), jax.tree.leaves(want.params), strict=True)
    found = []
    for a, b in pairs:
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        found.append(float(np.abs(a - b).max(initial=0.0)) / max(float(np.abs(b).max(initial=0.0)), 1e-2))
    return math.inf if any(map(math.isnan, found)) else max(found)


@dataclass(frozen=True)
class Comparison:
    """Some steps of a plan beside the same steps, with the same microbatches, on one device."""

    published: Published
    got: Outcome
    want: Outcome

    @property
    def largest_difference(self) -> float:
        return largest_difference(self.got, self.want)

    def check(self) -> None:
        """Raises AssertionError where a loss or what training changed in a parameter differs beyond rounding."""
        rtol = self.published.rtol
        np.testing.assert_allclose(self.got.losses, self.want.losses, rtol=rtol, err_msg="losses")
        start = jax.tree.map(jnp.asarray, self.published.init())
        compare_updates(start, self.want.params, self.got.params, rtol)


def compared(published: Published, plan: Plan, trainer: Trainer) -> Comparison:
    """Runs a compiled plan and the same steps on one device."""
    return Comparison(published, run(published, trainer), run(published, planner.reference(published.task, plan)))
