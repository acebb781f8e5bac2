"""Training functions from published packages: captured, planned on eight devices, run on fake ones, compared with one.

    pip install -e . -r tests/published/requirements.txt
    python benchmarks/published_functions.py [--only NAME ...] [--kind stage|pipeline]

A row of the table is one function in one layout: one stage, or a pipeline where tests/published has one. The exit code
is 1 if a step differs from one device's, or one device does more than a quarter of the work of a one-stage plan.
"""

import argparse
import resource
import sys
import time
import warnings
from dataclasses import dataclass
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

import tests.conftest
import tests.published.conftest  # noqa: F401  (both set up JAX before it is imported)

# isort: split
import jax
from capture_time import count_equations

import planner
from costmodel.errors import LoweringError
from planner.frontend.capture import Capture, capture
from planner.frontend.task import TrainingTask
from planner.planfile.schema import Plan
from tests.published.functions import MICROBATCH, Entry, Published, entries
from tests.published.planned import PIPELINES, compared, pipelined, planned, share_of

LIMIT = 0.25  # of the work, for one device
DISTRIBUTIONS = {
    "haiku": "dm-haiku", "equimo": "Equimo", "e3nn_jax": "e3nn-jax", "ott": "ott-jax",
}  # fmt: skip
HEAD = (
    "function", "packages", "equations", "capture", "FLOPs of one device", "forbidden by", "stages", "as planned",
    "equal", "largest difference",
)  # fmt: skip


@dataclass(frozen=True)
class Row:
    """One function in one layout; `cells` are those of `HEAD`."""

    cells: tuple[str, ...]
    passed: bool

    def __str__(self) -> str:
        return f"| {' | '.join(self.cells)} |"


def equations(task: TrainingTask) -> int:
    """Equations of the loss function as traced, with those inside loops and calls."""
    extra: dict[str, Any] = {"state": task.state} if task.state is not None else {}
    if task.rng:
        extra["rng"] = jax.eval_shape(lambda: jax.random.key(0))
    return count_equations(jax.make_jaxpr(task.loss_fn)(task.params, task.batch, **extra).jaxpr)


def shape(plan: Plan) -> str:
    """Mesh of every group: stages are joined by ``→``, the groups of one by ``+``."""
    return " → ".join(
        " + ".join("×".join(str(a.size) for a in group.mesh) for group in stage.groups) for stage in plan.stages
    )


def row(entry: Entry, published: Published, captured: Capture, capture_s: float, plan: Plan) -> Row:
    """Runs a plan and the same steps on one device."""
    share = share_of(plan, captured) if len(plan.stages) == 1 else None
    forbidden = "; ".join(f"{op}: {', '.join(why)}" for _, op, why in share.whole[:2]) if share else ""
    trainer = planner.compile_plan(plan, published.task)
    try:
        trainer.verify(compiled=False)
        as_planned = "yes"
    except LoweringError as error:
        as_planned = error.code
    comparison = compared(published, plan, trainer)
    try:
        comparison.check()
        equal = True
    except AssertionError:
        equal = False
    cells = (
        entry.name,
        ", ".join(f"{d} {version(d)}" for d in (DISTRIBUTIONS.get(p, p) for p in entry.packages)),
        str(equations(published.task)),
        f"{capture_s:.1f} s",
        f"{share.total:.3f}" if share else "",
        forbidden if share and share.total > LIMIT else "",
        f"{len(plan.stages)} ({shape(plan)})",
        as_planned,
        "yes" if equal else "no",
        f"{comparison.largest_difference:.1e}",
    )
    return Row(cells, equal and (share is None or share.total <= LIMIT))


def rows(entry: Entry, kinds: list[str]) -> list[Row]:
    published = entry.build()
    start_s = time.perf_counter()
    captured = capture(published.task, MICROBATCH)
    capture_s = time.perf_counter() - start_s
    found = []
    if "stage" in kinds:
        found.append(row(entry, published, captured, capture_s, planned(published)))
    if "pipeline" in kinds and entry.name in PIPELINES:
        plan = pipelined(published, PIPELINES[entry.name])
        found.append(row(entry, published, captured, capture_s, plan))
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--only", action="append", help="a function of tests/published; repeatable; default: all")
    parser.add_argument("--kind", action="append", choices=("stage", "pipeline"), help="default: both")
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore")
    print("| " + " | ".join(HEAD) + " |\n" + "|---" * len(HEAD) + "|", flush=True)
    start_s, count, failed = time.perf_counter(), 0, []
    for entry in sorted(entries().values(), key=lambda e: e.name):
        if arguments.only and entry.name not in arguments.only:
            continue
        if missing := [p for p in entry.packages if find_spec(p) is None]:
            print(f"{entry.name} left out: {', '.join(missing)} not installed", file=sys.stderr)
            continue
        count += 1
        for found in rows(entry, arguments.kind or ["stage", "pipeline"]):
            print(found, flush=True)
            if not found.passed:
                failed.append(entry.name)
        jax.clear_caches()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (1 << 20)
    print(f"\n{count} functions in {time.perf_counter() - start_s:.0f} s, peak memory {peak:.1f} GiB", end="")
    print(f"; FAILED: {', '.join(failed)}" if failed else "; every step equals one device's")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
