"""A published function planned on one mesh and run on fake devices, and the same step on one device.

The device kind is slow and its links are fast, so that tiny models are split as far as they can be.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import msgspec
import numpy as np
import optax

from costmodel.collectives import AxisLink
from costmodel.estimator import Pricing
from costmodel.sharding import local_fraction
from planner.frontend.capture import Capture
from planner.frontend.flat import Value
from planner.frontend.graph import model_graph
from planner.lowering.feed import Feed
from planner.lowering.microbatch import MicrobatchProgram
from planner.lowering.one_stage import OneStageTrainer
from planner.lowering.placement import GroupPlacement
from planner.lowering.stage import StageProgram
from planner.lowering.update import Updater, parts_of
from planner.planfile.schema import BlockStrategy, GroupPlan, MemoryPlan, MeshAxis, ParameterPlan, TimePlan
from planner.planfile.specs import dims_of, shifted, strategy_names, value_from_spec
from planner.search.intra_op import solve
from planner.space.decision import Decision
from planner.space.model_space import ModelSpace, Setting
from profiles.cluster_files import load_cluster
from tests.published.functions import BATCH, MICROBATCH, Published

NAMES = ("data", "model")
MICROBATCHES = BATCH // MICROBATCH
STEPS = 2


def decide(capture: Capture, mesh: tuple[int, ...]) -> Decision:
    """The best assignment where computing is slow and communication next to free."""
    kind = load_cluster("examples/clusters/cpu8.toml").groups[0].device
    slow = msgspec.structs.replace(
        kind, peak_flops_per_s=dict.fromkeys(kind.peak_flops_per_s, 1e6), memory_bandwidth_bytes_per_s=1e6, launch_s=0.0
    )
    links = tuple(AxisLink(size=n, bandwidth_bytes_per_s=1e12 * (1 + i), latency_s=1e-9) for i, n in enumerate(mesh))
    space = ModelSpace(
        graph=model_graph(capture), pricing=Pricing(kind=slow, mesh=mesh, axis_names=NAMES[: len(mesh)], links=links)
    )
    setting = Setting(microbatches=MICROBATCHES, stages=1, in_flight=1, remat="none")
    solution = solve(space.problem(setting, limit_bytes=1e12))
    assert solution.choice is not None, solution.status
    return Decision(
        space=space, setting=setting, choice=solution.choice, time_s=solution.time_s, bound_s=solution.bound_s
    )


@dataclass(frozen=True)
class Share:
    """How much of the work one device does.

    Attributes:
        total: share of all floating point operations, forward and backward.
        whole: ops that are not split at all: (share of all operations, class, op, why its loops do not split).
    """

    total: float
    whole: tuple[tuple[float, str, str, tuple[str, ...]], ...]


def share_of(decision: Decision) -> Share:
    """What one device computes, of the operations of a step."""
    graph, mesh = decision.space.graph, decision.space.mesh
    total = local = 0.0
    whole = []
    for key, count in decision.space.counts.items():
        for op in graph.classes[key].ops:
            flops = (op.flops + op.backward_flops) * count
            fraction = local_fraction(op, decision.op_strategies[key][op.name], mesh)
            total, local = total + flops, local + flops * fraction
            if fraction == 1.0 and flops:
                reasons = tuple(f"{f.name}[{f.size}]: {f.reason or f.combine}" for f in op.factors)
                whole.append((flops, key, f"{op.name} {op.source}", reasons))
    return Share(local / total, tuple(sorted(((f / total, *rest) for f, *rest in whole), reverse=True)))


def trainer(capture: Capture, decision: Decision) -> OneStageTrainer:
    """The step of a decision on the first devices of this process."""
    graph, mesh = decision.space.graph, decision.space.mesh
    names = decision.space.pricing.axis_names
    strategies = []
    for key, cls in graph.classes.items():

        def values(specs: Any, cls: Any = cls) -> Any:
            return {n: value_from_spec(s, len(cls.tensors[n].shape), names) for n, s in specs.items()}

        strategies.append(BlockStrategy(
            block_class=key,
            ops={n: strategy_names(capture.classes[key].ops[n], s, names) for n, s in decision.op_strategies[key].items()},
            inputs=values(decision.input_specs[key]), outputs=values(decision.output_specs[key]), remat="none",
        ))
    stacked = {s.value for b in capture.blocks for s in b.inputs if s.index is not None}
    parameters = []
    for name, storage in decision.storage.items():
        tensor, by = capture.values[name], int(name in stacked)
        dims = [dims_of(shifted(s, by), len(tensor.shape), names) for s in (storage.value, storage.gradient, storage.optimizer)]
        parameters.append(ParameterPlan(
            path=capture.inputs[name].path, shape=tensor.shape, dtype=tensor.dtype, gradient_dtype=tensor.dtype,
            value=dims[0], gradient=dims[1], optimizer=dims[2],
        ))
    plan = GroupPlan(
        name="group", kind="cpu", devices=(), mesh=tuple(MeshAxis(name=n, size=s) for n, s in zip(names, mesh, strict=True)),
        microbatches=tuple(range(MICROBATCHES)), strategies=tuple(strategies), parameters=tuple(parameters),
        memory=MemoryPlan(**dict.fromkeys(MemoryPlan.__struct_fields__, 0)),
        time=TimePlan(**{**dict.fromkeys(TimePlan.__struct_fields__, 0.0), "collectives": {}}),
    )
    placement = GroupPlacement(plan, tuple(jax.devices()[: int(np.prod(mesh))]), capture.classes)
    stage = StageProgram(capture, placement, capture.blocks)
    sends = tuple(dict.fromkeys(o.name for o in (*capture.state, *capture.aux) if isinstance(o, Value)))
    micro = MicrobatchProgram(stage, sends, tuple(o.name for o in capture.loss if isinstance(o, Value)))
    return OneStageTrainer(micro, Updater(capture.task, parts_of([stage.held]), (placement,)), Feed(capture, MICROBATCHES))


@dataclass(frozen=True)
class Outcome:
    """Losses of some steps, and the parameters after them."""

    losses: list[float]
    params: Any


def run_planned(published: Published, planned: OneStageTrainer) -> Outcome:
    """Some steps as planned."""
    params = jax.tree.map(jnp.asarray, published.init())
    state = planned.init(params, published.state()) if published.state else planned.init(params)
    extra = {"rng": jax.random.key(3)} if published.task.rng else {}
    losses = []
    for _ in range(STEPS):
        state, metrics = planned.step(state, published.batch, **extra)
        losses.append(float(metrics["loss"]))
    return Outcome(losses, jax.device_get(planned.params(state)))


def run_alone(published: Published) -> Outcome:
    """The same steps on one device, by the law of `planner/frontend/task.py`."""
    task = published.task
    params = jax.tree.map(jnp.asarray, published.init())
    carried = published.state() if published.state else None
    optimizer, key = task.optimizer.init(params), jax.random.key(3)

    @jax.jit
    def gradient(params: Any, batch: Any, carried: Any, key: Any) -> Any:
        def loss(params: Any) -> Any:
            extra = ({"state": carried} if published.state else {}) | ({"rng": key} if task.rng else {})
            found = task.loss_fn(params, batch, **extra)
            return found if published.state or task.reduction == "weighted" else (found, 0.0)

        return jax.value_and_grad(loss, has_aux=True, allow_int=True)(params)

    @jax.jit
    def update(grads: Any, optimizer: Any, params: Any) -> Any:
        updates, optimizer = task.optimizer.update(grads, optimizer, params)
        return optax.apply_updates(params, updates), optimizer

    losses = []
    for _ in range(STEPS):
        total, weight, sums = 0.0, 0.0, None
        for i in range(MICROBATCHES):
            batch = jax.tree.map(partial(_part, i), published.batch)
            (loss, aux), grads = gradient(params, batch, carried, jax.random.fold_in(key, i))
            carried = aux if published.state else carried
            total, weight = total + loss, weight + (aux if task.reduction == "weighted" else 0.0)
            sums = grads if sums is None else jax.tree.map(jnp.add, sums, grads)
        scale = {"mean": 1 / MICROBATCHES, "sum": 1.0, "weighted": 1 / weight if weight else 1.0}[task.reduction]
        params, optimizer = update(jax.tree.map(lambda g, s=scale: g * s, sums), optimizer, params)
        losses.append(float(total * scale))
    return Outcome(losses, jax.device_get(params))


def _part(i: int, leaf: Any) -> Any:
    return leaf[i * MICROBATCH : (i + 1) * MICROBATCH]


def largest_error(got: Outcome, want: Outcome) -> float:
    """Largest difference of losses and parameters, each relative to the largest element of its leaf (at least 1e-2)."""
    pairs = [(np.asarray(got.losses), np.asarray(want.losses))]
    pairs += zip(jax.tree.leaves(got.params), jax.tree.leaves(want.params), strict=True)
    return max(
        float(np.abs(np.asarray(a, np.float64) - b).max(initial=0) / max(np.abs(b).max(initial=0), 1e-2)) for a, b in pairs
    )
