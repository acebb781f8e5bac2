"""Training functions from published packages: the models and losses are the packages' own, at tiny sizes.

Each builder returns a `Published`: the task (parameters abstract), how to make its parameters, and one concrete batch.
"""

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import jax
import numpy as np
import optax

from planner.frontend.task import TrainingTask

BATCH = 16  # examples of the concrete batch
MICROBATCH = 8
FAMILIES = ("transformers_models", "haiku_models", "flax_models", "equinox_models", "keras_models", "other_models")


@dataclass(frozen=True, kw_only=True)
class Published:
    """A task with what a run of it needs.

    Attributes:
        init: makes the parameters.
        batch: a pytree of numpy arrays with `BATCH` examples.
        state: makes the carried state, for tasks that have one.
        steps: how many are compared; rtol: how closely. Statistics over a handful of numbers (a deep net's last layers,
            one pixel each) amplify rounding from step to step.
    """

    task: TrainingTask
    init: Callable[[], Any]
    batch: Any
    state: Callable[[], Any] | None = None
    steps: int = 2
    rtol: float = 1e-4


@dataclass(frozen=True, kw_only=True)
class Entry:
    """A published function: the packages that it needs and its builder."""

    name: str
    packages: tuple[str, ...]
    build: Callable[[], Published]


REGISTRY: dict[str, Entry] = {}


def published(*packages: str) -> Callable[[Callable[[], Published]], Callable[[], Published]]:
    """Registers a builder under its function's name."""

    def add(build: Callable[[], Published]) -> Callable[[], Published]:
        REGISTRY[build.__name__] = Entry(name=build.__name__, packages=packages, build=build)
        return build

    return add


def entries() -> dict[str, Entry]:
    """All entries by name. No published package is imported."""
    for family in FAMILIES:
        import_module(f"tests.published.{family}")
    return REGISTRY


def optimizer() -> optax.GradientTransformation:
    """Momentum and clipping: Adam would turn rounding noise into steps of full size."""
    return optax.chain(optax.clip_by_global_norm(0.5), optax.sgd(0.1, momentum=0.9))


def make(
    loss_fn: Callable[..., Any],
    init: Callable[[], Any],
    batch: Any,
    *,
    state: Callable[[], Any] | None = None,
    **options: Any,
) -> Published:
    """A `Published` whose parameters (and carried state) are known by shape only."""
    task = TrainingTask(
        loss_fn=loss_fn,
        params=jax.eval_shape(init),
        batch=batch,
        optimizer=optimizer(),
        state=None if state is None else jax.eval_shape(state),
        **options,
    )
    return Published(task=task, init=init, batch=batch, state=state)


def tokens(length: int, vocabulary: int, seed: int = 0) -> np.ndarray:
    """Token ids of `BATCH` sequences; 0 and 1 are left to padding."""
    return np.random.default_rng(seed).integers(2, vocabulary, (BATCH, length)).astype(np.int32)


def classes(count: int, seed: int = 1) -> np.ndarray:
    """One class id an example."""
    return np.random.default_rng(seed).integers(0, count, (BATCH,)).astype(np.int32)


def normal(*shape: int, seed: int = 2) -> np.ndarray:
    """Standard normal numbers for `BATCH` examples."""
    return np.random.default_rng(seed).standard_normal((BATCH, *shape)).astype(np.float32)


def cross_entropy(logits: Any, labels: Any) -> Any:
    """Mean cross entropy of all positions."""
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()
