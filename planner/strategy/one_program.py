"""Memory of a strategy whose step is one program, as the planner counts it for the plan that the strategy names.

The compiler of such a step sees both passes: what the backward pass reads lies in memory, or is computed again, as it
sees fit (`planner.space.in_memory`, L6), and gradients come and go with the blocks that make them
(`planner.search.backward_peak`).
"""

from dataclasses import dataclass

from planner.search.layout import charge_memory, inputs_held_bytes
from planner.search.update_memory import one_program_update_bytes
from planner.space.block_cost import BlockCost
from planner.space.decision import Decision
from planner.strategy.strategy import Strategy


def is_one_program(strategy: Strategy) -> bool:
    """Whether a strategy's step is one program of the planner's: of one stage, and with nothing asked for that plans
    leave to frameworks."""
    plain = strategy.attention == "graph" and strategy.gradient_dtype is None and strategy.matmul_dtype is None
    return strategy.pp == 1 and strategy.interleave == 1 and strategy.remat != "selective" and plain


@dataclass(frozen=True)
class StepBytes:
    """Bytes of a step on one device, as in a plan.

    Attributes:
        lying_bytes: of what one microbatch keeps for its backward pass; transient_bytes: the most beside it, in the
            backward pass, its own gradients included, or while the update runs.
        batch_bytes: of one microbatch's part of the batch; input_bytes: of inputs that all microbatches share.
    """

    parameter_bytes: float
    gradient_bytes: float
    optimizer_bytes: float
    lying_bytes: float
    transient_bytes: float
    batch_bytes: float
    input_bytes: float


def step_bytes(decision: Decision) -> StepBytes:
    """What a step takes on one device of the decision's mesh."""
    graph, cost = decision.space.graph, BlockCost()
    stop = len(graph.blocks)
    charge_memory(graph, decision, 0, stop, 0, cost, alone=True)
    passing = cost.arising_bytes + cost.transient_bytes
    update = one_program_update_bytes(graph, decision) - cost.gradient_bytes - cost.lying_bytes - passing
    return StepBytes(
        parameter_bytes=cost.parameter_bytes,
        gradient_bytes=cost.gradient_bytes,
        optimizer_bytes=cost.optimizer_bytes,
        lying_bytes=cost.lying_bytes,
        transient_bytes=passing + max(0.0, update),
        batch_bytes=inputs_held_bytes(graph, decision, 0, stop, 1) - cost.inputs_bytes,
        input_bytes=cost.inputs_bytes,
    )


__all__ = ["StepBytes", "is_one_program", "step_bytes"]
