"""Checks a plan against a cluster: every rule of `codes.RULES` but `MODEL_RULES` and
`COMPILE_RULES`. Needs neither JAX nor devices."""

from collections.abc import Callable, Iterator

from costmodel.cluster import Cluster
from planner.check.conservation import batch_conserved, blocks_conserved, microbatches_shared, parameters_conserved
from planner.check.figures import certificate_consistent, memory_adds_up, memory_fits, prediction_finite, tied_owned
from planner.check.placement import (
    cluster_matches,
    devices_exist,
    devices_of_kind,
    devices_used_once,
    links_exist,
    meshes_fit,
    transfers_lead_on,
)
from planner.check.records import model_consistent, strategies_complete, words_known
from planner.check.relations import figures_follow
from planner.check.sharding import large_replicated, splits_divide
from planner.check.step import step_follows
from planner.check.timetable import schedule_runs, updates_wait
from planner.planfile.schema import Finding, Plan

Check = Callable[[Plan, Cluster], Iterator[Finding]]

CHECKS: tuple[Check, ...] = (
    cluster_matches,
    devices_exist,
    devices_used_once,
    devices_of_kind,
    meshes_fit,
    links_exist,
    blocks_conserved,
    splits_divide,
    batch_conserved,
    microbatches_shared,
    schedule_runs,
    transfers_lead_on,
    updates_wait,
    memory_fits,
    memory_adds_up,
    large_replicated,
    tied_owned,
    prediction_finite,
    certificate_consistent,
    parameters_conserved,
    words_known,
    strategies_complete,
    model_consistent,
    figures_follow,
    step_follows,
)

_RANK = {"error": 0, "warning": 1, "note": 2}


def check_plan(plan: Plan, cluster: Cluster) -> tuple[Finding, ...]:
    """Everything that is wrong with running `plan` on `cluster`: errors first, then in the order of the rules."""
    findings = [finding for check in CHECKS for finding in check(plan, cluster)]
    return tuple(sorted(findings, key=lambda finding: (_RANK[finding.severity], finding.code)))
