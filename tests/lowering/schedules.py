"""Plans of one group a stage under any schedule."""

from collections.abc import Sequence

from planner.frontend.task import TrainingTask
from planner.planfile.schema import Plan
from planner.space.setting import Remat
from tests.lowering.execution import executed_plan, pins, slow_cluster
from tests.lowering.layouts import on


def scheduled_plan(
    task: TrainingTask, name: str, devices: Sequence[int], *, microbatches: int = 6, remat: Remat | None = None
) -> Plan:
    """A plan of microbatches of four examples.

    Args:
        name: of the schedule; devices: of each of its actors, which run all of their virtual stages on them.
    """
    return executed_plan(
        task, pins(*((on("g0", n),) for n in devices)), slow_cluster(sum(devices)), microbatch=4,
        microbatches=microbatches, schedule=name, remat=remat,
    )  # fmt: skip
