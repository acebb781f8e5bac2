"""Validation of plans and plan files against clusters and, where asked, against the training function."""

from pathlib import Path
from typing import TYPE_CHECKING

from costmodel.cluster import Cluster
from costmodel.errors import InputError
from planner.arguments import require_cluster, require_plan, require_task
from planner.check.rules import check_plan
from planner.planfile.schema import Finding, Plan

if TYPE_CHECKING:
    from planner.frontend.task import TrainingTask
    from profiles.compiled.oracle import Oracle


def validate(
    plan: Plan | str | Path,
    cluster: Cluster | str | Path,
    task: "TrainingTask | None" = None,
    *,
    compiler: "Oracle | None" = None,
) -> tuple[Finding, ...]:
    """Everything that is wrong with running a plan on a cluster; errors first, empty if nothing is.

    Args:
        plan: a plan or a plan file.
        cluster: a cluster or a cluster file.
        task: the training task as it is now; given, it is captured (which imports JAX) and compared with the plan's.
        compiler: given (`profiles.compiled.oracle.default_oracle()`), the plan's programs are compiled for its device
            kinds, none of which need be attached, and compared with its figures (MP650 to MP655). Needs the task.

    Raises:
        InputError: a file that cannot be read, or an argument of another type (MP163), or no task to compile (MP163).
    """
    call = "planner.validate(plan, cluster)"
    plan, target = require_plan(plan, call), require_cluster(cluster, call)
    findings = check_plan(plan, target)
    if task is not None:
        from planner.api import model_findings

        drifted = model_findings(plan, require_task(task, f"{call[:-1]}, task)"))
        findings = (*drifted, *findings)
        if compiler is not None and not any(one.severity == "error" for one in findings):
            from planner.compile_findings import compile_findings

            findings = (*findings, *compile_findings(plan, target, task, compiler))
    elif compiler is not None:
        raise InputError("MP163", "a compiler was given, but no task whose programs it compiles", f"{call[:-1]}, task)")
    return findings
