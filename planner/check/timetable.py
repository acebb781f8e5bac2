"""Whether a plan's schedule is complete, can run, and is that of the plan's groups."""

from collections.abc import Iterator

from costmodel.cluster import Cluster
from costmodel.errors import InputError
from costmodel.schedule.actions import Actor, ActorActions, Schedule, parse_actions
from costmodel.schedule.registry import FAMILIES
from costmodel.schedule.sequence import keeps_causal_order, units_of
from costmodel.schedule.validate import held_at_peak, validate_schedule
from costmodel.simulate import UpdateWait
from costmodel.units import format_count
from planner.check.finding import finding, group_label, group_path
from planner.planfile.schema import Finding, GroupPlan, Plan


def schedule_of(plan: Plan) -> Schedule:
    """The schedule that the plan writes as text.

    Raises:
        InputError: MP140 to MP143 if it cannot be read; MP615 if it has fewer actions than microbatches, which no
            schedule has (a number of microbatches is only as large as the file that spells out their actions).
    """
    count = sum(len(actor.actions.split()) for actor in plan.schedule.actors)
    if count < plan.schedule.microbatches:
        runs = format_count(plan.schedule.microbatches, "microbatch", "microbatches")
        message = f"the schedule is for {runs} and lists {count} actions"
        raise InputError("MP615", message, "each microbatch has a forward and a backward on every stage")
    return Schedule(
        name=plan.schedule.name,
        microbatches=plan.schedule.microbatches,
        actions=tuple(
            ActorActions(
                stage=actor.stage,
                group=actor.group,
                actions=parse_actions(actor.actions, where=f"schedule.actors[{at}]"),
            )
            for at, actor in enumerate(plan.schedule.actors)
        ),
    )


def waits_of(plan: Plan) -> dict[int, UpdateWait]:
    """What the updates of stages wait for.

    Raises:
        InputError: MP617 if that is a stage that the plan does not have.
    """
    count = len(plan.stages)
    for join in plan.update_joins:
        if not all(0 <= stage < count for stage in (join.stage, *join.waits_for)):
            message = f"the update of stage {join.stage} waits for stages {join.waits_for}, the plan has {count} stages"
            raise InputError("MP617", message)
    return {
        join.stage: UpdateWait(stages=frozenset({join.stage, *join.waits_for}), time_s=join.time_s)
        for join in plan.update_joins
    }


def updates_wait(plan: Plan, cluster: Cluster) -> Iterator[Finding]:
    """MP617."""
    try:
        waits_of(plan)
    except InputError as error:
        yield finding("MP617", "update_joins", error.message)


def actors_of(plan: Plan) -> dict[Actor, Actor]:
    """(Stage, group) of the plan -> the actor that runs it: itself, unless the schedule has fewer actors than the plan
    stages (virtual stages: one actor runs several)."""
    own = {Actor(s, g): Actor(s, g) for s, stage in enumerate(plan.stages) for g in range(len(stage.groups))}
    if not is_virtual(plan):
        return own
    try:
        schedule = schedule_of(plan)
    except InputError:
        return own
    runs = {Actor(action.stage, row.group): row.actor for row in schedule.actions for action in row.actions}
    return {place: runs.get(place, place) for place in own}


def is_virtual(plan: Plan) -> bool:
    """Whether the schedule has fewer stages of actors than the plan has stages."""
    return len({actor.stage for actor in plan.schedule.actors}) < len(plan.stages)


def schedule_runs(plan: Plan, cluster: Cluster) -> Iterator[Finding]:
    """MP610 to MP614 as the schedule's own validator finds them, MP615 and MP622 for what ties it to the plan."""
    try:
        schedule = schedule_of(plan)
    except InputError as error:
        message = error.message if error.code == "MP615" else f"{error.code}: {error.message}"
        yield finding("MP615", "schedule.actors", message, error.hint)
        return
    chunks = plan.schedule.chunks
    if chunks < 1:
        yield finding("MP615", "schedule.chunks", f"the schedule cuts sequences into {chunks} chunks")
        return
    if schedule.microbatches != plan.microbatches * chunks:
        runs = format_count(schedule.microbatches, "microbatch", "microbatches")
        message = f"the schedule is for {runs}, the plan has {plan.microbatches}"
        message += f" in {chunks} chunks each" if chunks > 1 else ""
        yield finding("MP615", "schedule.microbatches", message)
        return
    groups = {Actor(at, group) for at, stage in enumerate(plan.stages) for group in range(len(stage.groups))}
    actors = set(schedule.actors)
    if is_virtual(plan):
        actors = {Actor(action.stage, row.group) for row in schedule.actions for action in row.actions}
    for stage, group in sorted(groups - actors):
        message = f"{group_label(plan, stage, group)} has no action list in the schedule"
        yield finding("MP615", "schedule.actors", message)
    for at, actor in enumerate(schedule.actors):
        if actor not in groups:
            message = f"the schedule names {actor}, which the plan does not have"
            yield finding("MP615", f"schedule.actors[{at}]", message)
    if groups != actors:
        return
    virtual = max(len(plan.stages), schedule.stages)
    order = {actor: at for at, actor in enumerate(schedule.actors)}
    bad = validate_schedule(schedule, virtual)
    for entry in bad:
        where = "schedule.actors" if entry.actor is None else f"schedule.actors[{order[entry.actor]}].actions"
        yield finding(entry.code, where, entry.message)
    if bad:
        return
    if chunks > 1 and (schedule.splits_backward or not keeps_causal_order(schedule, chunks)):
        message = f"the {chunks} chunks of a sequence do not run forward in order and backward, unsplit, in reverse"
        yield finding("MP612", "schedule.actors", message, "a chunk reads the keys and values of those before it")
        return
    yield from _named(plan, schedule)
    for at, (row, stated) in enumerate(zip(schedule.actions, plan.schedule.actors, strict=True)):
        if stated.warm_up is not None and stated.warm_up != row.warm_up:
            message = (
                f"{group_label(plan, row.stage, row.group)} states {stated.warm_up} forwards of warm-up, its action "
            )
            message += f"list runs {row.warm_up}"
            yield finding("MP615", f"schedule.actors[{at}].warm_up", message)
    saved = {place: max(0.0, float(_record(plan, place).memory.saved_per_microbatch_bytes)) for place in groups}
    peaks = held_at_peak(schedule, saved)
    for at, row in enumerate(schedule.actions):
        places = [Actor(stage, row.group) for stage in sorted({action.stage for action in row.actions})]
        for place in places:
            record, label = _record(plan, place), group_label(plan, *place)
            own = set(units_of(record.microbatches, chunks))
            run = {action.microbatch for action in row.actions if action.stage == place.stage}
            if own != run:
                message = f"{label} has microbatches {sorted(own)}, its action list runs {sorted(run)}"
                yield finding("MP615", f"schedule.actors[{at}].actions", message)
        # Virtual stages of one actor need not be at their peaks at one time: together they claim no less.
        wrong = [place for place in places if _record(plan, place).memory.in_flight != peaks[place]]
        claimed = sum(_record(plan, place).memory.in_flight * saved[place] for place in places)
        if wrong and (len(places) == 1 or claimed < sum(peaks[place] * saved[place] for place in places)):
            label, record = group_label(plan, *wrong[0]), _record(plan, wrong[0])
            counted = format_count(record.memory.in_flight, "microbatch", "microbatches")
            message = f"{label}: memory is counted for {counted} in flight, the schedule holds {peaks[wrong[0]]}"
            yield finding("MP622", group_path(*wrong[0], "memory.in_flight"), message, "plan again")


def _record(plan: Plan, place: Actor) -> GroupPlan:
    return plan.stages[place.stage].groups[place.group]


def _named(plan: Plan, schedule: Schedule) -> Iterator[Finding]:
    """MP619, where the name is one of a schedule that is generated from the stages and shares or chunks alone."""
    family = FAMILIES.get(schedule.name)
    if family is None or "shares" not in family.optional or is_virtual(plan):
        return
    shares = [tuple(group.microbatches for group in stage.groups) for stage in plan.stages]
    chunks = {"chunks": plan.schedule.chunks} if family.slices else {}
    try:
        made = family.generate(len(plan.stages), plan.microbatches, shares=shares, **chunks)
    except InputError:
        return  # MP609 says so
    expected = {row.actor: row.actions for row in made.actions}
    for at, row in enumerate(schedule.actions):
        if row.actions != expected.get(row.actor):
            message = (
                f"{group_label(plan, row.stage, row.group)} does not run its actions in the order of the schedule "
            )
            message += f"{schedule.name!r}"
            hint = "times and memory were predicted for the order of that name; plan again"
            yield finding("MP619", f"schedule.actors[{at}].actions", message, hint)
            return
