"""Why nothing fits: the plan that comes nearest, what its worst stage holds, and the smallest change that would do."""

from typing import TYPE_CHECKING

from costmodel.errors import InfeasibleError
from costmodel.units import format_bytes, format_count
from planner.search.candidates import Candidates
from planner.search.layout import GroupChoice, Layout, StageChoice, held_parameters
from planner.search.meshes import meshes, pool_devices
from planner.search.score import GroupScore, Score, score
from planner.space.decision import Decision
from planner.space.parameters import state_bytes
from planner.space.setting import Setting

if TYPE_CHECKING:
    from planner.search.joint import Request


def explain_miss(request: "Request", missed: list[Score], candidates: Candidates) -> InfeasibleError:
    """The error for a request that nothing satisfies."""
    nearest = min(missed, key=lambda s: s.missing_bytes, default=None) or _least_memory(request, candidates)
    if nearest is None or nearest.missing_bytes == 0.0:
        return InfeasibleError(
            "MP202",
            "no way to split this model over these devices exists, memory aside"
            + (f", for schedule {request.schedule}" if request.schedule else ""),
            "loosen the pins, or allow other stage counts or schedules",
        )
    needs = nearest.device_bytes
    worst = max(needs, key=lambda actor: needs[actor] - nearest.groups[nearest.places[actor][0]].limit_bytes)
    actor = max(nearest.places[worst], key=lambda place: nearest.groups[place].total_bytes)
    group, total_bytes = nearest.groups[actor], needs[worst]
    stage = nearest.layout.stages[actor.stage]
    blocks = nearest.layout.graph.blocks[stage.start : stage.stop]
    devices = stage.groups[actor.group].devices
    others = [str(place.stage) for place in nearest.places[worst] if place != actor]
    along = (
        f", {format_bytes(group.total_bytes)} without stages {', '.join(others)} on the same devices" if others else ""
    )
    message = (
        f"no plan fits: the nearest needs {format_bytes(total_bytes)} on each of {len(devices)} x "
        f"{devices[0].kind.name}, {format_bytes(total_bytes - group.limit_bytes)} more than its "
        f"{format_bytes(group.limit_bytes)}, in stage {actor.stage} ({blocks[0].name} to {blocks[-1].name}{along}): "
        f"{_items(group)}; largest tensors: {_tensors(nearest, actor.stage, actor.group)}"
    )
    factor = total_bytes / group.limit_bytes
    kept = "" if "full" in request.remats else "remat=full keeps less; "
    hint = (
        f"{kept}what would fit: about {factor:.2f} times the devices, devices with {format_bytes(total_bytes)}, "
        f"or a shorter sequence; the microbatch is at {nearest.layout.graph.microbatch} of "
        f"{request.global_batch} examples"
    )
    return InfeasibleError("MP201", message, hint)


def _items(group: GroupScore) -> str:
    """What a group's devices hold, largest first."""
    cost = group.cost
    items = {
        "parameters": cost.parameter_bytes,
        "gradients": cost.gradient_bytes,
        "a microbatch's gradient": cost.arising_bytes,
        "optimizer state": cost.optimizer_bytes,
        "batch and carried state": cost.inputs_bytes,
        f"activations of {format_count(group.in_flight, 'microbatch', 'microbatches')}": group.saved_bytes,
        "transients": cost.transient_bytes,
        "buffers": group.buffers_bytes,
        "update": group.update_bytes,
        "runtime reserve": float(group.reserve_bytes),
    }
    largest_first = sorted(items, key=lambda name: -items[name])
    return ", ".join(f"{name} {format_bytes(items[name])}" for name in largest_first if items[name])


def _tensors(nearest: Score, stage: int, group: int) -> str:
    """The three largest parameters of a stage, with all that belongs to them."""
    choice = nearest.layout.stages[stage]
    decision, graph = choice.groups[group].decision, nearest.layout.graph
    sizes = {}
    for name, items in held_parameters(graph, choice.start, choice.stop).items():
        facts = graph.params[name]
        elements = facts.elements if items is None else facts.elements // facts.shape[0] * (items[1] - items[0])
        sizes[name] = sum(state_bytes(facts, elements, decision.storage[name], decision.space.mesh))
    largest = sorted(sizes, key=lambda n: (-sizes[n], n))[:3]
    return ", ".join(f"{n} {format_bytes(sizes[n])}" for n in largest)


def _least_memory(request: "Request", candidates: Candidates) -> Score | None:
    """The one-stage plan of the largest pool that needs least memory, at the smallest microbatch."""
    size = request.sizes[-1]
    count = request.global_batch // size
    best: Score | None = None
    for pool in request.cluster.groups:
        devices = pool_devices(request.cluster, pool.name)
        for mesh in meshes(len(devices), pool.devices_per_node) if devices else ():
            decision: Decision | None = candidates.nearest(
                pool, mesh, size, Setting(microbatches=count, stages=1, in_flight=1, remat="full")
            )
            if decision is None:
                continue
            graph = request.graph_of(size)
            group = GroupChoice(pool=pool.name, devices=devices, decision=decision, microbatches=tuple(range(count)))
            layout = Layout(
                graph=graph,
                transfers=candidates.transfers,
                schedule="1f1b",
                microbatches=count,
                stages=(StageChoice(start=0, stop=len(graph.blocks), groups=(group,)),),
            )
            found = score(layout)
            if best is None or found.missing_bytes < best.missing_bytes:
                best = found
    return best
