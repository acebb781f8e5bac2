"""Memory of a strategy whose step is one program, as the planner counts it for the plan that the strategy names.

The compiler of such a step sees both passes: what the backward pass reads lies in memory, or is computed again, as it
sees fit (`planner.space.in_memory`, L6), and gradients come and go with the blocks that make them
(`planner.search.backward_peak`).
"""

from dataclasses import dataclass

from planner.search.backward_peak import Gradients, PassBytes, fullest, gradients_of, pass_bytes
from planner.search.layout import HeldState, held_state, inputs_held_bytes
from planner.search.update_memory import one_program_update_bytes
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


@dataclass(frozen=True)
class StepState:
    """What the state of parameters takes on one device, whatever the size of microbatches.

    Attributes:
        gradients: of each run of blocks.
        update_bytes: of gradients, and what is made of them, while the update runs.
        accumulates: whether gradients of several microbatches add up.
        fuses: whether the compiler fuses (`planner.space.model_space.ModelSpace.fuses`).
    """

    held: HeldState
    gradients: tuple[Gradients, ...]
    update_bytes: float
    accumulates: bool
    fuses: bool


@dataclass(frozen=True)
class StepPasses:
    """What the passes of one microbatch take on one device beside state; `StepBytes` says of which bytes."""

    passes: PassBytes
    batch_bytes: float
    input_bytes: float


def step_state(decision: Decision) -> StepState:
    """The state of a decision's parameters."""
    graph, stop = decision.space.graph, len(decision.space.graph.blocks)
    return StepState(
        held=held_state(graph, decision, 0, stop),
        gradients=tuple(gradients_of(graph, decision, graph.runs(0, stop))),
        update_bytes=one_program_update_bytes(graph, decision),
        accumulates=decision.setting.accumulates,
        fuses=decision.space.fuses,
    )


def step_passes(decision: Decision) -> StepPasses:
    """The passes of a decision's microbatch, of as many examples as its graph has."""
    graph, stop = decision.space.graph, len(decision.space.graph.blocks)
    inputs, one = (inputs_held_bytes(graph, decision, 0, stop, count) for count in (0, 1))
    return StepPasses(pass_bytes(graph, decision, 0, stop, alone=True), one - inputs, inputs)


def step_bytes(state: StepState, passes: StepPasses) -> StepBytes:
    """What a step takes on one device."""
    held = state.held
    moment = fullest(passes.passes, state.gradients, accumulates=state.accumulates, fuses=state.fuses)
    gradients, arising, lying, transient = moment.items(
        held.gradient_bytes, held.arising_bytes, accumulates=state.accumulates
    )
    passing = arising + transient
    return StepBytes(
        parameter_bytes=held.parameter_bytes,
        gradient_bytes=gradients,
        optimizer_bytes=held.optimizer_bytes,
        lying_bytes=lying,
        transient_bytes=passing + max(0.0, state.update_bytes - gradients - lying - passing),
        batch_bytes=passes.batch_bytes,
        input_bytes=passes.input_bytes,
    )


__all__ = ["StepBytes", "StepPasses", "StepState", "is_one_program", "step_bytes", "step_passes", "step_state"]
