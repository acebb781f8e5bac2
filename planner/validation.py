"""Validation of plans and plan files against clusters and, where asked, against the training function."""

from pathlib import Path
from typing import TYPE_CHECKING

from costmodel.cluster import Cluster
from planner.check.drift import drift
from planner.check.rules import check_plan
from planner.plan_files import read_plan
from planner.planfile.schema import Finding, Plan

if TYPE_CHECKING:
    from planner.frontend.task import TrainingTask


def validate(
    plan: Plan | str | Path, cluster: Cluster | str | Path, task: "TrainingTask | None" = None
) -> tuple[Finding, ...]:
    """Everything that is wrong with running a plan on a cluster; errors first, empty if nothing is.

    Args:
        plan: a plan or a plan file.
        cluster: a cluster or a cluster file.
        task: the training task as it is now; given, it is captured (which imports JAX) and compared with the plan's.

    Raises:
        InputError: a file that cannot be read.
    """
    if not isinstance(plan, Plan):
        plan = read_plan(plan)
    if not isinstance(cluster, Cluster):
        from profiles.cluster_files import load_cluster

        cluster = load_cluster(cluster)
    findings = check_plan(plan, cluster)
    if task is not None:
        from planner.api import capture_record

        findings = (*drift(plan, capture_record(task, plan)), *findings)
    return findings
