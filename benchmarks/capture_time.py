"""How long capture takes: every built-in model, and an unrolled function of tens of thousands of equations.

    python benchmarks/capture_time.py [--model NAME ...] [--equations 44000] [--limit-s 20]

meshplan must be installed (`pip install .`); `make bench` sees to that, and runs the other benchmarks too.

Nothing is allocated: parameters are shapes. The exit code is 1 if a capture takes longer than the limit.
"""

import argparse
import resource
import sys
import time
from collections.abc import Iterator

import jax
import jax.extend.core
import jax.numpy as jnp
import optax

import planner
from planner.frontend.capture import capture
from planner.frontend.graph import model_graph

WIDTH = 128
EQUATIONS_A_LAYER = 8


def unrolled(equations: int) -> planner.TrainingTask:
    """A deep network as a Python loop: every layer is traced anew, about eight equations each."""
    layers = equations // EQUATIONS_A_LAYER
    shapes = {
        "kernel": jax.ShapeDtypeStruct((WIDTH, WIDTH), jnp.float32),
        "bias": jax.ShapeDtypeStruct((WIDTH,), jnp.float32),
    }

    def loss(params: list[dict[str, jax.Array]], batch: jax.Array) -> jax.Array:
        x = batch
        for layer in params:
            y = jnp.tanh(x @ layer["kernel"] + layer["bias"])
            x = x + 0.1 * (y - x * y)
        return jnp.mean(x**2)

    return planner.TrainingTask(
        loss_fn=loss,
        params=[shapes] * layers,
        batch=jax.ShapeDtypeStruct((8, WIDTH), jnp.float32),
        optimizer=optax.sgd(1e-3),
        name=f"unrolled, {layers} layers",
    )


def count_equations(jaxpr: jax.extend.core.Jaxpr) -> int:
    """Equations with those of every jaxpr inside."""
    return sum(1 + sum(map(count_equations, inside(eqn.params))) for eqn in jaxpr.eqns)


def inside(params: dict[str, object]) -> Iterator[jax.extend.core.Jaxpr]:
    for value in params.values():
        for one in value if isinstance(value, tuple | list) else (value,):
            if hasattr(one, "eqns"):
                yield one
            elif hasattr(one, "jaxpr"):
                yield one.jaxpr


def tasks(models: list[str] | None, equations: int) -> Iterator[planner.TrainingTask]:
    for row in planner.models.list_models():
        if models is None or row.name in models:
            yield planner.load_task(row.name)
    if models is None or not models:
        yield unrolled(equations)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument(
        "--model", action="append", help="built-in name; repeatable; default: all, and the unrolled one"
    )
    parser.add_argument("--equations", type=int, default=44_000, help="of the unrolled function (default 44000)")
    parser.add_argument("--limit-s", type=float, default=20.0, help="for one capture (default 20)")
    arguments = parser.parse_args()
    slow = []
    print(f"{'model':24} {'equations':>9} {'blocks':>6} {'classes':>7} {'capture':>9} {'graph':>9}")
    for task in tasks(arguments.model, arguments.equations):
        traced = jax.make_jaxpr(task.loss_fn)(
            task.params, task.batch, **({"state": task.state} if task.state is not None else {})
        )
        start_s = time.perf_counter()
        captured = capture(task, task.batch_size)
        captured_s = time.perf_counter() - start_s
        graph = model_graph(captured)
        graph_s = time.perf_counter() - start_s - captured_s
        sizes = f"{count_equations(traced.jaxpr):9} {len(captured.blocks):6} {len(graph.classes):7}"
        print(f"{task.name:24} {sizes} {captured_s:7.2f} s {graph_s:7.2f} s", flush=True)
        if captured_s + graph_s > arguments.limit_s:
            slow.append(task.name)
    print(f"peak memory {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (1 << 20):.2f} GiB")
    print(f"MISSED the limit of {arguments.limit_s:g} s: {', '.join(slow)}" if slow else "the limit is kept")
    return 1 if slow else 0


if __name__ == "__main__":
    sys.exit(main())
