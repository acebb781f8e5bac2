"""Which stages' updates wait for which, where the optimizer joins values of parameters that lie on several stages.

The joined values are single numbers or small: what it takes is that the last of the stages has its gradients, and one
way to the pipeline's first device and one back for each round of joining (`lowering/staged.py`).
"""

from costmodel.collectives import transfer_time_s
from costmodel.simulate import UpdateWait
from planner.search.layout import Layout, held_parameters

NUMBER_BYTES = 4.0


def update_waits(layout: Layout) -> dict[int, UpdateWait]:
    """For each stage whose update reads gradients of other stages, all stages that it waits for."""
    homes: dict[str, list[int]] = {}  # parameter -> stages that update it: a tied one is its first reader's
    for s, stage in enumerate(layout.stages):
        for name, items in held_parameters(layout.graph, stage.start, stage.stop).items():
            if items is not None or name not in homes:
                homes.setdefault(name, []).append(s)
    needs: dict[int, set[int]] = {}
    numbers: dict[int, int] = {}
    for name, others in layout.graph.joins.reads.items():
        for s in homes.get(name, ()):
            needs.setdefault(s, {s}).update(t for other in others for t in homes.get(other, ()))
            numbers[s] = numbers.get(s, 0) + 1
    found = {}
    for s, stages in sorted(needs.items()):
        if len(stages) > 1:
            way_s = max(_there_and_back_s(layout, t, numbers[s] * NUMBER_BYTES) for t in stages)
            found[s] = UpdateWait(stages=frozenset(stages), time_s=layout.graph.joins.rounds * way_s)
    return found


def _there_and_back_s(layout: Layout, stage: int, size_bytes: float) -> float:
    """From a stage to the pipeline's first device and back."""
    home, own = layout.stages[0].groups[0].devices[:1], layout.stages[stage].groups[0].devices[:1]
    return sum(
        transfer_time_s(size_bytes, layout.transfers.link(one, other)) for one, other in ((own, home), (home, own))
    )
