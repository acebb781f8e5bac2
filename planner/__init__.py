"""Parallel plans for JAX training steps: proven good, checked by the compiler, and run.

    import planner
    task = planner.load_task("gpt2")                       # or a TrainingTask of your own
    plan = planner.plan(task, cluster="cluster.toml", global_batch=512)
    plan                                                   # a notebook shows stages, schedule, memory
    step = planner.compile_plan(plan, task)

Names are loaded when they are first used, so that `explain` and `validate` need no JAX.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from planner import models
    from planner.api import capture_record, compile_plan, load_task, plan, reference
    from planner.calibrating import Calibrated, calibrate
    from planner.estimating import Estimate, Estimator, estimate
    from planner.frontend.task import TrainingTask
    from planner.plan_files import read_plan as load_plan
    from planner.plan_files import write_plan as save_plan
    from planner.planfile.schema import Plan
    from planner.report.explain import explain
    from planner.search.schedule_synthesis import synthesize_schedule
    from planner.simulation import simulate
    from planner.validation import validate
    from profiles.cluster_files import load_cluster

__all__ = [
    "Calibrated",
    "Estimate",
    "Estimator",
    "Plan",
    "TrainingTask",
    "calibrate",
    "capture_record",
    "compile_plan",
    "estimate",
    "explain",
    "load_cluster",
    "load_plan",
    "load_task",
    "models",
    "plan",
    "reference",
    "save_plan",
    "simulate",
    "synthesize_schedule",
    "validate",
]

_HOMES = {
    "Calibrated": ("planner.calibrating", "Calibrated"),
    "calibrate": ("planner.calibrating", "calibrate"),
    "Estimate": ("planner.estimating", "Estimate"),
    "Estimator": ("planner.estimating", "Estimator"),
    "estimate": ("planner.estimating", "estimate"),
    "Plan": ("planner.planfile.schema", "Plan"),
    "TrainingTask": ("planner.frontend.task", "TrainingTask"),
    "capture_record": ("planner.api", "capture_record"),
    "compile_plan": ("planner.api", "compile_plan"),
    "explain": ("planner.report.explain", "explain"),
    "load_cluster": ("profiles.cluster_files", "load_cluster"),
    "load_plan": ("planner.plan_files", "read_plan"),
    "load_task": ("planner.api", "load_task"),
    "models": ("planner.models", ""),
    "plan": ("planner.api", "plan"),
    "reference": ("planner.api", "reference"),
    "save_plan": ("planner.plan_files", "write_plan"),
    "simulate": ("planner.simulation", "simulate"),
    "synthesize_schedule": ("planner.search.schedule_synthesis", "synthesize_schedule"),
    "validate": ("planner.validation", "validate"),
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'planner' has no attribute {name!r}; it has {', '.join(__all__)}")
    module, attribute = _HOMES[name]
    found = import_module(module)
    value = getattr(found, attribute) if attribute else found
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
