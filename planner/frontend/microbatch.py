"""Whether a task may be split into microbatches: what its batch factor meets in the graph.

A microbatched step sums over microbatches. That equals the whole batch's loss only if examples meet nowhere but in the
declared reduction. The check follows the batch dims through the program (`joint.spread`): every op must treat them as
a parallel loop or sum over them, and such sums may pass only through linear ops up to the loss. Then the factor between
the sums and the loss must fall with the batch size for a mean, and not depend on it for a sum.
"""

import math
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np

import planner.frontend.rules  # noqa: F401  (fills the registry)
from costmodel.sharding import PARTIAL, PASS
from planner.frontend import jax_compat as jc
from planner.frontend.flat import Equation, Program, Value, prune, scalar_of
from planner.frontend.gradients import annotated, depends
from planner.frontend.joint import SUMS, Classes, Obstacle, Spread, spread
from planner.frontend.ops import op_from_equation, rule_for
from planner.frontend.rules.region import Region, join_program
from planner.frontend.task import TrainingTask
from planner.frontend.trace import input_names, trace
from planner.frontend.user_code import defined_at

CARRIES_SCALE = (
    "reshape",
    "transpose",
    "squeeze",
    "broadcast_in_dim",
    "convert_element_type",
    "reduce_sum",
    "copy",
    "neg",
)
LARGEST_TAIL = 1 << 20  # elements; the tail is evaluated on ones to compare its factor at two batch sizes


@dataclass(frozen=True)
class MicrobatchCheck:
    """Whether microbatches keep the task's meaning; if not, why, which op says so where one does, and the line of the
    user's code: the op's, or that which made the loss."""

    splits: bool
    reason: str = ""
    op: str = ""
    source: str = ""

    @property
    def message(self) -> str:
        """Why the batch cannot be split, and where it says so."""
        return f"the batch cannot be split into microbatches: {self.why}"

    @property
    def why(self) -> str:
        """The reason, and where it stands."""
        op, line = f" in {self.op}" if self.op else "", f" ({self.source})" if self.source else ""
        return f"{self.reason}{op}{line}"


DECLARE = (
    "declare what the loss is: reduction='weighted' and return (sum, weight) for a masked mean; "
    "independent_microbatches=True where each microbatch's own statistics are wanted"
)
"""What to do about a batch that cannot be split."""


def check_microbatches(task: TrainingTask) -> MicrobatchCheck:
    """Checks the task at two batch sizes. A task that declares its microbatches independent is taken at its word."""
    if task.independent_microbatches:
        return MicrobatchCheck(True)
    small, large = (_at(task, size) for size in (2, 4))
    if isinstance(small, MicrobatchCheck):
        return small
    if isinstance(large, MicrobatchCheck):
        return large
    losses = 2 if task.reduction == "weighted" else 1
    expected = 0.5 if task.reduction == "mean" else 1.0
    for position in range(losses):
        ratio = _ratio(small, large, position)
        if ratio is not None and abs(ratio - expected) > 1e-3:
            what = (
                "a mean: its factor should halve when the batch doubles"
                if expected == 0.5
                else "a sum: its factor should not depend on the batch"
            )
            reason = f"the loss is declared {what}, but it changes by {ratio:.3g}"
            return MicrobatchCheck(False, reason, source=_line(task, large.program, large.program.outputs[position]))
    return MicrobatchCheck(True)


@dataclass(frozen=True)
class _Followed:
    program: Program
    spread: Spread


def _at(task: TrainingTask, size: int) -> _Followed | MicrobatchCheck:
    program, _, _ = trace(task, size)
    losses = 2 if task.reduction == "weighted" else 1
    outputs = (*program.outputs[:1], *(_counted(program, o) for o in program.outputs[1:losses]))
    program = prune(Program(program.inputs, program.equations, outputs, program.constants))
    dims = task.batch_dim_list
    starts: dict[str, int] = {}
    for name, info in input_names(task).items():
        if info.role == "batch" and dims[info.leaf] is not None:
            starts[name] = dims[info.leaf]  # type: ignore[assignment]

    def join(classes: Classes) -> None:
        for place in starts.items():
            classes.join("batch", place)

    moved = depends(program, [name for name, info in input_names(task).items() if info.trained])
    program = annotated(program, moved)
    joined = join_program(
        program, lambda e: op_from_equation(e, rule_for(e.primitive.name), lambda v: v.name in moved), join
    )
    program = joined.program
    used = {o.name for e in program.equations for o in e.inputs if isinstance(o, Value)}
    mean = task.reduction == "mean"  # a mean of (mean + constant) is the mean plus the constant
    batch = {n: d for n, d in starts.items() if n in used}
    found = spread(joined, joined.classes.find("batch"), batch, affine=mean, redrawn=True)
    if isinstance(found, Obstacle):
        line = _line(task, program, *found.equation.outputs[:1], *found.equation.inputs)
        return MicrobatchCheck(False, found.reason, found.equation.name, found.equation.source or line)
    for operand in program.outputs:
        if isinstance(operand, Value) and found.states.get(operand.name, -2) >= 0:
            return MicrobatchCheck(False, "the loss keeps a batch dim", source=_line(task, program, operand))
    return _Followed(program, found)


def _line(task: TrainingTask, program: Program, *operands: Any) -> str:
    """The line of the user's code that made the first of these values that one did, or what they were made of; else
    where the loss function begins."""
    makers = {v.name: e for e in program.equations for v in e.outputs}
    waiting, seen = list(operands), set[str]()
    while waiting:
        operand = waiting.pop(0)
        if not isinstance(operand, Value) or operand.name in seen or operand.name not in makers:
            continue
        seen.add(operand.name)
        maker = makers[operand.name]
        if maker.source:
            return maker.source
        waiting += maker.inputs
    return defined_at(task.loss_fn)


def _counted(program: Program, weight: Any) -> Any:
    """A weight that is a count made a real number, before it was one: a sum of counts is the count of the whole."""
    makers = {v.name: e for e in program.equations for v in e.outputs}
    while isinstance(weight, Value) and weight.name in makers:
        maker = makers[weight.name]
        if maker.primitive.name not in ("convert_element_type", "copy"):
            break
        weight = maker.inputs[0]
    return weight


def _ratio(small: _Followed, large: _Followed, position: int) -> float | None:
    """Factor between the sums over the batch and the loss, at the larger batch over that at the smaller one."""
    factors = [_factor(f.program, f.spread, position) for f in (small, large)]
    if factors[0] is None or factors[1] is None or factors[0] == 0.0:
        return None
    return factors[1] / factors[0]


def _factor(program: Program, follow: Spread, position: int) -> float | None:
    """An output as a function of the pending sums that it is made of, all of which are set to one.

    None where the output is no pending sum, or the linear tail is too large to evaluate.
    """
    states, codes = follow.states, follow.codes
    out = program.outputs[position]
    if not isinstance(out, Value) or states.get(out.name) != PARTIAL:
        return None
    env: dict[str, Any] = {}

    def value(operand: Any) -> Any:
        if not isinstance(operand, Value):
            return jnp.asarray(operand.value, operand.aval.dtype)
        if operand.name not in env:
            env[operand.name] = jnp.ones(operand.shape, operand.aval.dtype)
        return env[operand.name]

    scales: dict[str, float] = {}
    for e in program.equations:
        if not any(_pending(o, states) for o in e.outputs):
            scales.update(dict.fromkeys((v.name for v in e.outputs), _scale(e, scales)))
            continue
        if any(
            np.prod(o.shape, initial=1) > LARGEST_TAIL
            for o in (*e.outputs, *(i for i in e.inputs if _pending(i, states)))
        ):
            return None
        if codes[e.name] > PASS:  # the sum arises here; inside a loop it may have been scaled already
            before = math.prod(scales.get(o.name, 1.0) for o in e.inputs if isinstance(o, Value))
            for i, made in enumerate(e.outputs):
                env[made.name] = jnp.full(made.shape, before * _inner_factor(e, codes[e.name], i), made.aval.dtype)
            continue
        args = [value(o) for o in e.inputs]
        if e.primitive.name in SUMS:  # constant terms are not part of the factor
            args = [x if _pending(o, states) else jnp.zeros_like(x) for x, o in zip(args, e.inputs, strict=True)]
        results = jc.bind(e.primitive, args, e.params)
        env.update(zip((v.name for v in e.outputs), results, strict=True))
    return float(jnp.mean(value(out)))


def _scale(equation: Equation, scales: dict[str, float]) -> float:
    """The number that a value was multiplied by since something other than a multiplication made it: sums are scaled
    before as well as after (``sum(x / n)``)."""
    name, inputs = equation.primitive.name, equation.inputs
    given = [scales.get(o.name, 1.0) if isinstance(o, Value) else scalar_of(o) for o in inputs]
    if not given or None in given:
        return 1.0
    if name == "mul":
        return given[0] * given[1]  # type: ignore[operator]
    if name == "div":
        return given[0] / given[1] if given[1] else 1.0  # type: ignore[operator]
    if name in SUMS:
        return given[0] if len(set(given)) == 1 and all(isinstance(o, Value) for o in inputs) else 1.0  # type: ignore[return-value]
    return given[0] if name in CARRIES_SCALE else 1.0  # type: ignore[return-value]


def _inner_factor(equation: Equation, code: int, position: int) -> float:
    """Factor that a loop or branch applies to the sum it makes; one for plain ops."""
    rule = rule_for(equation.primitive.name)
    if not isinstance(rule, Region):
        return 1.0
    inner = rule.inner(equation)
    solution = inner.solutions[inner.roots[code]]
    assert not isinstance(solution, Obstacle)
    name, follow = next(iter(solution.programs.items()))
    return _factor(inner.programs[name].program, follow, position) or 1.0


def _pending(operand: Any, states: dict[str, int]) -> bool:
    return isinstance(operand, Value) and states.get(operand.name) == PARTIAL
