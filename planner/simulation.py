"""`simulate`: a plan's step action by action, as it is or with something changed, from the plan file alone."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from costmodel.simulate import Contention, Simulation
from costmodel.simulate import simulate as simulate_schedule
from costmodel.simulation.critical_path import PathShare, Segment, critical_path, path_shares
from costmodel.simulation.memory import MemoryCurve, memory_over_time
from costmodel.simulation.what_if import WhatIf, what_ifs
from planner.arguments import require_plan
from planner.device_stages import actor_label, device_stages, link_label, stage_label
from planner.other_schedules import as_planned, is_moved
from planner.plan_problem import WEIGHT_SHARE, assumes_weights, held_of, problem_of, shared_nics
from planner.planfile.schema import Plan
from planner.step_changes import delayed, failed, slowed


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupRow:
    """One stage group in the simulated step.

    Attributes:
        label: ``stage 1``, ``stage 0+7`` where its devices run several stages of the plan, with the group's name where
            the stage has several.
        stages: of the plan, those on its devices; `stage` is the first of them, `group` its number in each.
        busy_s: time in which it runs actions.
        bubble_s: time between its first and its last action in which it runs none.
        bubble_share: bubble over that span.
        end_s: end of its parameter update.
        in_flight: most microbatches whose activations it holds at one time; under virtual stages, of each by itself.
        peak_bytes: most memory that each of its devices uses at one time.
        limit_bytes: what the device has; None if the plan does not say.
    """

    label: str
    stages: tuple[int, ...]
    stage: int
    group: int
    microbatches: int
    busy_s: float
    bubble_s: float
    bubble_share: float
    end_s: float
    in_flight: int
    peak_bytes: int
    limit_bytes: int | None

    @property
    def fits(self) -> bool:
        return self.limit_bytes is None or self.peak_bytes <= self.limit_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSimulation:
    """A simulated step. `text` is for terminals, a notebook shows `_repr_html_`.

    Attributes:
        plan: whose times these are.
        changes: what is different from the plan, in words; empty if nothing is.
        unchanged_s: step time of the plan simulated without the changes.
        step: every action, message and memory use.
        groups: one row a stage group.
        memory: bytes over time of each group, in the same order.
        chain: the critical path, from the start of the step to its end.
        path: the same by part and place, longest first; the times add up to the step time.
        what_ifs: single improvements that would shorten the step most, best first.
        notes: what was assumed.
    """

    plan: Plan = field(repr=False)
    changes: tuple[str, ...]
    unchanged_s: float
    step: Simulation = field(repr=False)
    groups: tuple[GroupRow, ...]
    memory: tuple[MemoryCurve, ...] = field(repr=False)
    chain: tuple[Segment, ...] = field(repr=False)
    path: tuple[PathShare, ...]
    what_ifs: tuple[WhatIf, ...]
    notes: tuple[str, ...]

    @property
    def makespan_s(self) -> float:
        """The step time in seconds."""
        return self.step.makespan_s

    @property
    def fits(self) -> bool:
        """Whether every group stays within its devices' memory."""
        return all(row.fits for row in self.groups)

    @property
    def text(self) -> str:
        """The whole report as plain text, with the schedule as a grid."""
        from planner.report.step_text import render_text

        return render_text(self)

    @property
    def html(self) -> str:
        """One HTML page without outside resources."""
        from planner.report.step_html import render_page

        return render_page(self)

    @property
    def trace(self) -> str:
        """The timeline in the Trace Event format, which ui.perfetto.dev and chrome://tracing show."""
        from planner.report.trace import render_trace

        return render_trace(self)

    def _repr_html_(self) -> str:
        from planner.report.step_html import render_html

        return render_html(self)

    def __str__(self) -> str:
        return self.text

    def __repr__(self) -> str:
        from planner.report.step_text import render_summary

        return render_summary(self)

    def to_plain(self) -> dict[str, Any]:
        """Plain data, for JSON: everything but the single actions, which are in the trace."""
        return {
            "plan": self.plan.name,
            "schedule": self.step.schedule.name,
            "microbatches": self.step.schedule.microbatches,
            "changes": list(self.changes),
            "step_time_s": self.makespan_s,
            "pipeline_s": self.step.pipeline_s,
            "unchanged_step_time_s": self.unchanged_s,
            "planned_step_time_s": self.plan.prediction.step_time_s,
            "fits": self.fits,
            "groups": [asdict(row) | {"fits": row.fits} for row in self.groups],
            "critical_path": [
                {"what": path_words(self.plan, share), "count": share.count, "time_s": share.time_s}
                for share in self.path
            ],
            "what_ifs": [asdict(entry) for entry in self.what_ifs],
            "notes": list(self.notes),
        }


def simulate(
    plan: Plan | str | Path,
    *,
    schedule: str | None = None,
    slow: Mapping[str, float] | None = None,
    delay_s: Mapping[str, float] | None = None,
    fail: Sequence[str] = (),
    jitter: float = 0.0,
    seed: int = 0,
    share_nics: bool = False,
    compute_slowdown: float = 1.0,
    early_reduction: float = 0.0,
    most_what_ifs: int = 6,
) -> StepSimulation:
    """Simulates a step of a plan, as it is or with changes.

    Args:
        plan: a plan or its file: its schedule and predicted times, nothing else is needed.
        schedule: name of another schedule to run instead.
        slow: place -> factor; above 1 slower, below faster. A place is ``stage2``, one of its groups ``stage2/group0``,
            a part of its time ``stage2.B`` (F, B, W, reduce, exchange, update), or a link ``link1-2``. Stages have the
            plan's numbers; all on the same devices change together, and all messages between the same devices.
        delay_s: link ``1-2`` -> seconds by which its messages arrive later.
        fail: groups ``stage1/group0`` that fail and whose microbatches go to the other groups of their stages.
        jitter: each action and message takes a factor in [1 - jitter, 1 + jitter] of its time.
        seed: of the jitter.
        share_nics: each node has one network card, which its messages share in each direction.
        compute_slowdown: compute takes this many times as long while its group sends, receives or reduces gradients.
        early_reduction: share of the gradient reduction that runs beside a group's last action.
        most_what_ifs: how many improvements to show at most.

    Raises:
        InputError: MP190 to MP194 for changes that cannot be made; MP146 for an unknown schedule, MP195 or MP196 for
            one that the plan has no times for; MP140 to MP148 and MP615 if the plan's schedule cannot be read or run.

    Example:
        planner.simulate(plan, slow={"stage2": 1.5}, delay_s={"1-2": 3e-3}).makespan_s
    """
    plan = require_plan(plan, "planner.simulate(plan)")
    problem, changes = problem_of(plan, schedule), []
    if schedule is not None and schedule != plan.schedule.name:
        changes.append(f"schedule {schedule} instead of {plan.schedule.name}")
    for text in fail:
        problem, words = failed(plan, problem, text)
        changes.append(words)
    for text, factor in (slow or {}).items():
        problem, words = slowed(plan, problem, text, factor)
        changes.append(words)
    for text, time_s in (delay_s or {}).items():
        problem, words = delayed(plan, problem, text, time_s)
        changes.append(words)
    contention = None
    if share_nics or compute_slowdown != 1.0 or early_reduction != 0.0:
        shared = shared_nics(plan, problem.schedule) if share_nics else {}
        contention = Contention(shared=shared, compute_slowdown=compute_slowdown, early_reduction=early_reduction)
    changes += _ways(jitter, seed, share_nics, compute_slowdown, early_reduction)
    step = simulate_schedule(
        problem.schedule,
        problem.times,
        problem.sends,
        waits=problem.waits,
        contention=contention,
        jitter=jitter,
        seed=seed,
    )
    unchanged_s = step.makespan_s
    if changes:
        before = problem_of(plan)
        unchanged_s = simulate_schedule(
            before.schedule, before.times, before.sends, waits=before.waits, keep_timeline=False
        ).makespan_s
    chain, parts = critical_path(step), device_stages(plan)
    memory = memory_over_time(step, held_of(plan, problem.schedule))
    return StepSimulation(
        plan=plan,
        changes=tuple(changes),
        unchanged_s=unchanged_s,
        step=step,
        groups=_rows(plan, step, memory),
        memory=memory,
        chain=chain,
        path=path_shares(chain),
        what_ifs=what_ifs(
            problem,
            step,
            chain,
            most=most_what_ifs,
            contention=contention,
            jitter=jitter,
            seed=seed,
            stage_name=lambda home: stage_label(parts, home),
            link_name=lambda ends: link_label(parts, ends),
        ),
        notes=tuple(_notes(plan, step)),
    )


def path_words(plan: Plan, share: PathShare) -> str:
    """Such as ``F of stage 1``, ``send stage 0 to stage 1``."""
    here = actor_label(plan, share.actor)
    if share.target is not None:
        return f"{share.part} {here} to {actor_label(plan, share.target)}"
    return f"{share.part} of {here}"


def _ways(jitter: float, seed: int, share_nics: bool, compute_slowdown: float, early_reduction: float) -> list[str]:
    words = []
    if share_nics:
        words.append("messages of a node share one network card in each direction")
    if compute_slowdown != 1.0:
        words.append(f"compute takes {compute_slowdown:g}x as long beside communication")
    if early_reduction != 0.0:
        words.append(f"{early_reduction:.0%} of each gradient reduction runs beside the last action")
    if jitter:
        words.append(f"all times jitter by up to {100 * jitter:.4g}%, seed {seed}")
    return words


def _rows(plan: Plan, step: Simulation, memory: tuple[MemoryCurve, ...]) -> tuple[GroupRow, ...]:
    rows, parts = [], device_stages(plan)
    for use, row, curve in zip(step.actors, step.schedule.actions, memory, strict=True):
        span_s = use.last_end_s - use.first_start_s
        rows.append(
            GroupRow(
                label=actor_label(plan, use.actor),
                stages=parts[use.actor.stage],
                stage=parts[use.actor.stage][0],
                group=use.actor.group,
                microbatches=len({action.microbatch for action in row.actions}),
                busy_s=use.busy_s,
                bubble_s=use.bubble_s,
                bubble_share=use.bubble_s / span_s if span_s > 0 else 0.0,
                end_s=use.step_end_s,
                in_flight=use.peak_in_flight,
                peak_bytes=curve.peak_bytes,
                limit_bytes=curve.limit_bytes,
            )
        )
    return tuple(rows)


def _notes(plan: Plan, step: Simulation) -> list[str]:
    notes, schedule, parts = [], step.schedule, device_stages(plan)
    if assumes_weights(plan, schedule):
        notes.append(f"weight gradients are assumed to take {WEIGHT_SHARE:.0%} of each backward")
    if is_moved(plan, schedule):
        notes.append("stages run on other devices than in the plan, of the same kind, and take their times along")
    if not as_planned(plan, schedule):
        if schedule.stages > len(plan.stages):
            each = schedule.stages / len(plan.stages)
            notes.append(f"each stage's time and saved bytes are spread evenly over its {each:g} virtual stages")
        else:
            joined = ", ".join(stage_label(parts, home) for home in parts)
            notes.append(f"the stages of each set of devices are joined to one ({joined}): times and memory add up")
    return notes
