"""Plans of one group a stage under any schedule."""

from collections.abc import Sequence

from costmodel.cluster import Cluster
from planner.frontend.task import TrainingTask
from planner.planfile.codec import decode, encode
from planner.planfile.schema import Plan
from planner.search.pinned import StagePin
from planner.sequence_plan import in_chunks
from planner.space.setting import Remat
from tests.lowering.execution import assembled, executed_plan, pinned_score, pins, slow_cluster
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


def chunked_plan(
    task: TrainingTask,
    chunks: int,
    devices: Sequence[int],
    *,
    microbatches: int = 2,
    microbatch: int = 4,
    remat: Remat | None = None,
    restrict=None,
    stages: tuple[StagePin, ...] | None = None,
    cluster: Cluster | None = None,
) -> Plan:
    """A plan whose sequences run in chunks, through the file format and back.

    Args:
        devices: of each stage's one group, where `stages` and `cluster` do not say more.
    """
    stages = pins(*((on("g0", n),) for n in devices)) if stages is None else stages
    captured, score = pinned_score(
        task,
        stages,
        cluster or slow_cluster(sum(devices)),
        microbatch=microbatch,
        microbatches=microbatches,
        remat=remat,
        restrict=restrict,
    )
    return decode(encode(in_chunks(assembled(score, task, score.layout.graph), score, captured, chunks)))
