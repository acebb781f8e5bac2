"""A plan that does not say what is run is found out: shardings, bytes kept for the backward pass, collectives."""

import jax
import msgspec
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from costmodel.errors import LoweringError
from planner.frontend.task import TrainingTask
from planner.lowering.compile import Trainer, compile_plan
from planner.models import example_batch, init_params
from planner.planfile.schema import GroupPlan, Plan
from tests.lowering.execution import gentle
from tests.lowering.layouts import LAYOUTS, VARIANTS
from tests.lowering.schedules import scheduled_plan
from tests.models.tiny import TINY


@pytest.fixture(scope="module", params=["tensor x data", "pipeline zero-3"])
def planned(request: pytest.FixtureRequest) -> tuple[TrainingTask, Plan]:
    task = gentle(TINY["llama"](dtype="float32"))
    return task, {**LAYOUTS, **VARIANTS}[request.param].plan(task)


def changed(plan: Plan, change) -> Plan:
    """The plan with the first group of its last stage changed."""
    *stages, last = plan.stages
    group: GroupPlan = change(last.groups[0])
    last = msgspec.structs.replace(last, groups=(group, *last.groups[1:]))
    return msgspec.structs.replace(plan, stages=(*stages, last))


def test_a_plan_is_what_is_compiled(planned: tuple[TrainingTask, Plan]) -> None:
    task, plan = planned
    report = compile_plan(plan, task).verify()
    assert len(report.groups) == len(plan.stages)
    for group in report.groups:
        assert group.differences == group.added == {}
        assert abs(group.saved_deviation) < 0.01
        assert group.compiled is not None and set(group.compiled) <= set(group.written)


def test_a_wrong_number_of_kept_bytes_is_an_error(planned: tuple[TrainingTask, Plan]) -> None:
    task, plan = planned

    def change(group: GroupPlan) -> GroupPlan:
        saved = group.memory.saved_per_microbatch_bytes
        memory = msgspec.structs.replace(group.memory, saved_per_microbatch_bytes=round(0.9 * saved) - 1024)
        return msgspec.structs.replace(group, memory=memory)

    with pytest.raises(LoweringError, match=r"MP504: stage \d group 0 keeps \d+ bytes a microbatch .* planned \d+"):
        compile_plan(changed(plan, change), task).verify(compiled=False)


def test_a_wrong_collective_is_an_error(planned: tuple[TrainingTask, Plan]) -> None:
    task, plan = planned

    def change(group: GroupPlan) -> GroupPlan:
        counts = dict(group.time.collectives)
        name = next(n for n in counts if n.startswith("forward all_gather"))
        time = msgspec.structs.replace(group.time, collectives=counts | {name: counts[name] - 1})
        return msgspec.structs.replace(group, time=time)

    with pytest.raises(LoweringError, match=r"MP505: .* planned and written differ: forward all_gather"):
        compile_plan(changed(plan, change), task).verify(compiled=False)


def test_the_first_step_checks_where_its_results_lie(planned: tuple[TrainingTask, Plan]) -> None:
    task, plan = planned
    trainer: Trainer = compile_plan(plan, task)
    state = trainer.init(init_params(task))
    assert trainer.check_shardings(state) >= len(jax.tree.leaves(task.params))
    params = [dict(p) for p in state.params]
    name, x = next((n, x) for n, x in params[-1].items() if not x.sharding.is_fully_replicated)
    params[-1][name] = jax.device_put(x, NamedSharding(x.sharding.mesh, PartitionSpec()))
    with pytest.raises(LoweringError, match=r"MP503: .* lies as"):
        trainer.check_shardings(state._replace(params=tuple(params)))


def test_checks_can_be_left_out(planned: tuple[TrainingTask, Plan], monkeypatch: pytest.MonkeyPatch) -> None:
    task, plan = planned
    trainer = compile_plan(plan, task, verify=False)
    monkeypatch.setattr(type(trainer), "check_shardings", lambda *_: pytest.fail("checked"))
    trainer.step(trainer.init(init_params(task)), example_batch(task, plan.global_batch))


@pytest.mark.parametrize("remat", ["none", "full"])
def test_what_is_kept_for_weight_gradients_is_planned(remat) -> None:
    """Exactly without remat; what a second run leaves for them is planned no smaller."""
    task = gentle(TINY["llama-qwen"](dtype="float32"))
    plan = scheduled_plan(task, "zb-h1", (1, 2, 4), remat=remat)
    for group in compile_plan(plan, task).verify(compiled=False).groups:
        planned_bytes, found_bytes = group.until_weights_planned_bytes, group.until_weights_bytes
        assert found_bytes is not None and 0 < found_bytes <= planned_bytes * 1.001
        if remat == "none":
            assert planned_bytes <= found_bytes * 1.001
        assert plan.stages[group.stage].groups[0].memory.saved_bytes >= found_bytes

    def change(group: GroupPlan) -> GroupPlan:
        until = group.memory.until_weights_bytes
        memory = msgspec.structs.replace(group.memory, until_weights_bytes=round(0.6 * until) - 2048)
        return msgspec.structs.replace(group, memory=memory)

    with pytest.raises(LoweringError, match=r"MP504: stage 2 group 0 keeps \d+ bytes a microbatch for its weight grad"):
        compile_plan(changed(plan, change), task).verify(compiled=False)
