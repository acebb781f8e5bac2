"""From a training task to blocks: trace on abstract values, flatten, cut, classify."""

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import planner.frontend.rules  # noqa: F401  (fills the registry)
from costmodel.graph import Tensor
from planner.frontend.block_builder import BlockBuilder, BlockInstance, Run
from planner.frontend.blocks import BlockClass
from planner.frontend.early_results import early_results
from planner.frontend.flat import Operand, Program, Value
from planner.frontend.folding import fold_picks
from planner.frontend.gradients import annotated, depends
from planner.frontend.keys import keys_first
from planner.frontend.task import TrainingTask
from planner.frontend.trace import InputInfo, input_names, trace


@dataclass(frozen=True, eq=False)
class Capture:
    """A task captured at one microbatch size.

    Attributes:
        inputs: program-wide input name -> what it is.
        values: every value that crosses blocks, by name.
        loss: names of the loss, or of the sum and the weight.
        state, aux: names of the new state's and the aux outputs' leaves (None for constants).
        program: the flat program, scans whole.
    """

    task: TrainingTask
    microbatch: int
    program: Program
    inputs: dict[str, InputInfo]
    values: dict[str, Tensor]
    blocks: tuple[BlockInstance, ...]
    runs: tuple[Run, ...]
    loss: tuple[Operand, ...]
    state: tuple[Operand, ...]
    aux: tuple[Operand, ...]
    aux_tree: Any
    classes: dict[str, BlockClass] = field(default_factory=dict)

    @cached_property
    def flops(self) -> float:
        return sum(block.cls.flops for block in self.blocks)

    @cached_property
    def param_inputs(self) -> dict[str, InputInfo]:
        return {name: info for name, info in self.inputs.items() if info.role == "param"}


def capture(task: TrainingTask, microbatch: int) -> Capture:
    """Captures a task at one microbatch size (examples over the whole group that runs a microbatch).

    Raises:
        InputError: the function does not trace, or what it returns is not what the task declares.
    """
    program, aux_tree, aux_count = trace(task, microbatch)
    infos = input_names(task)
    program = annotated(program, depends(program, [name for name, info in infos.items() if info.trained]))
    losses = 2 if task.reduction == "weighted" else 1
    program = fold_picks(program)
    program = keys_first(program, [v for v in program.inputs if infos[v.name].role == "rng"])
    program = early_results(program, losses)
    loss = program.outputs[:losses]
    state = program.outputs[losses : len(program.outputs) - aux_count]
    aux = program.outputs[len(program.outputs) - aux_count :]
    builder = BlockBuilder(program, infos, loss)
    builder.build()
    values = {v.name: builder.tensor(v) for v in program.inputs} | builder.values
    for operand in program.outputs:
        if isinstance(operand, Value):
            values.setdefault(operand.name, builder.tensor(operand))
    return Capture(
        task=task,
        microbatch=microbatch,
        program=program,
        inputs=infos,
        values=values,
        blocks=tuple(builder.blocks),
        runs=tuple(builder.runs),
        loss=loss,
        state=state,
        aux=aux,
        aux_tree=aux_tree,
        classes=builder.classes,
    )


__all__ = ["BlockInstance", "Capture", "InputInfo", "Run", "capture"]
