"""Bytes on one device of each stage of a strategy, itemised.

State is the model's own (values, gradients, the optimizer's) or, with a stack that keeps it otherwise, that many bytes
an element. ZeRO splits it over the devices of data and context parallelism: the optimizer's from stage 1 on, gradients
from 2, values from 3.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from costmodel.device_kind import DeviceKind
from costmodel.graph import Parameter
from costmodel.stack import Stack
from planner.strategy.blocks import Blocks
from planner.strategy.one_program import StepBytes
from planner.strategy.scheduled import CLOSED, held_microbatches, homes
from planner.strategy.strategy import ITEMSIZE, Strategy
from planner.strategy.work import ClassWork, Work, reruns_full
from planner.strategy.zero import state_parts


@dataclass(frozen=True)
class StageMemory:
    """One stage's bytes on each of its devices.

    Attributes:
        saved_bytes: activations of all microbatches in flight; transient_bytes: the most that comes and goes with one
            block; buffers_bytes: of what arrives from and leaves for other stages, and gathered parameters; of a step
            that is one program, of the batch.
        limit_bytes: what the device has, the smallest if they are of several `kinds` (names).
    """

    parameters_bytes: float
    gradients_bytes: float
    optimizer_bytes: float
    saved_bytes: float
    transient_bytes: float
    buffers_bytes: float
    fragmentation_bytes: float
    reserve_bytes: float
    in_flight: float
    limit_bytes: int
    kinds: tuple[str, ...]

    @property
    def peak_bytes(self) -> int:
        return math.ceil(
            self.parameters_bytes
            + self.gradients_bytes
            + self.optimizer_bytes
            + self.saved_bytes
            + self.transient_bytes
            + self.buffers_bytes
            + self.fragmentation_bytes
            + self.reserve_bytes
        )

    @property
    def fits(self) -> bool:
        return self.peak_bytes <= self.limit_bytes


def in_flight(strategy: Strategy, stage: int, microbatches: int) -> float:
    """Microbatches whose activations a stage holds under a schedule with a formula, in whole passes over its blocks.

    1F1B holds ``p - s``; interleaved, ``2 (p - s - 1) + (v - 1) p + 1`` parts of 1/v (Narayanan et al. 2021, section
    2.2); GPipe all of them.
    """
    p, v = strategy.pp, strategy.interleave
    if strategy.schedule == "gpipe":
        return float(microbatches)
    if v > 1:
        parts = 2 * (p - stage - 1) + (v - 1) * p + 1
        return min(parts, microbatches * v) / v
    return float(min(p - stage, microbatches))


def stage_memory(
    work: Work,
    blocks: Blocks,
    kind: DeviceKind,
    strategy: Strategy,
    stack: Stack,
    flying: float,
    devices: Sequence[DeviceKind],
    crossing_bytes: float,
) -> StageMemory:
    """Bytes of one stage that holds `flying` microbatches of its blocks, of which one is `crossing_bytes` where it goes
    from stage to stage.

    Args:
        kind: that decides what is reserved; devices: kinds that the stage's devices are of.
    """
    parameters = gradients = optimizer = 0.0
    gathered: dict[int, float] = {}  # for one block
    for one in work.held(blocks):
        leaf, elements, facts = one.leaf, one.elements, one.leaf.facts
        weight = elements * (facts.itemsize if stack.weight_bytes is None else stack.weight_bytes)
        ways = math.prod(state_parts(leaf, strategy, flat=stack.flat_state)) if strategy.zero else 1
        parameters += weight / (ways if strategy.zero == 3 else 1)
        if strategy.zero == 3 and ways > 1:
            reading = leaf.readers & blocks.positions
            for block in reading:
                gathered[block] = gathered.get(block, 0.0) + weight / (len(reading) if leaf.layered else 1)
        if not facts.trained:
            continue
        gradients += elements * _gradient_bytes(facts, strategy, stack) / (ways if strategy.zero >= 2 else 1)
        kept = facts.optimizer_bytes_per_element if stack.optimizer_bytes is None else stack.optimizer_bytes
        optimizer += elements * kept / (ways if strategy.zero >= 1 else 1)
    saved = 0.0
    peaks = [0.0]
    for key, count in blocks.classes.items():
        one = work.classes[key]
        saved += count * flying * kept_bytes(one, strategy, stack)
        whole = one.saved[stack.saves]
        again = whole.core_bytes if strategy.remat == "selective" else 0.0
        if reruns_full(one, strategy.remat, stack.reruns):
            again = whole.kept_bytes
        peaks.append(again + one.live_bytes)
    transient = sum(peaks) if stack.pooled else max(peaks)
    parts = strategy.tp if strategy.sp else 1
    buffers = 4.0 * crossing_bytes / strategy.cp / strategy.ep / parts
    buffers += 2.0 * max(gathered.values(), default=0.0)
    used = parameters + gradients + optimizer + saved + transient + buffers
    return StageMemory(
        parameters_bytes=parameters,
        gradients_bytes=gradients,
        optimizer_bytes=optimizer,
        saved_bytes=saved,
        transient_bytes=transient,
        buffers_bytes=buffers,
        fragmentation_bytes=(stack.fragmentation - 1.0) * used,
        reserve_bytes=float(kind.reserve_bytes if stack.reserve_bytes is None else stack.reserve_bytes),
        in_flight=flying,
        limit_bytes=min(one.memory_bytes for one in devices),
        kinds=tuple(dict.fromkeys(one.name for one in devices)),
    )


def one_program_memory(
    step: StepBytes, kind: DeviceKind, stack: Stack, flying: float, microbatches: int, devices: Sequence[DeviceKind]
) -> StageMemory:
    """Bytes of the one stage of a strategy whose step is one program; its buffers are the batch."""
    saved, inputs = flying * step.lying_bytes, step.input_bytes + microbatches * step.batch_bytes
    used = step.parameter_bytes + step.gradient_bytes + step.optimizer_bytes + saved + step.transient_bytes + inputs
    return StageMemory(
        parameters_bytes=step.parameter_bytes,
        gradients_bytes=step.gradient_bytes,
        optimizer_bytes=step.optimizer_bytes,
        saved_bytes=saved,
        transient_bytes=step.transient_bytes,
        buffers_bytes=inputs,
        fragmentation_bytes=(stack.fragmentation - 1.0) * used,
        reserve_bytes=float(kind.reserve_bytes if stack.reserve_bytes is None else stack.reserve_bytes),
        in_flight=flying,
        limit_bytes=min(one.memory_bytes for one in devices),
        kinds=tuple(dict.fromkeys(one.name for one in devices)),
    )


def _gradient_bytes(facts: Parameter, strategy: Strategy, stack: Stack) -> float:
    """Of one element as it is accumulated: what the stack says, else the dtype that gradients are reduced in, else the
    model's. Where that is wider than the weights, gradients arise in the weights' width beside it."""
    if stack.gradient_bytes is not None:
        return stack.gradient_bytes
    if strategy.gradient_dtype is not None:
        wide = float(ITEMSIZE[strategy.gradient_dtype])
        weight = float(facts.itemsize) if stack.weight_bytes is None else stack.weight_bytes
        return wide + (weight if wide > weight else 0.0)
    return float(facts.gradient_itemsize)


def microbatches_held(
    work: Work, parts: Sequence[Blocks], strategy: Strategy, stack: Stack, microbatches: int
) -> list[float]:
    """For each stage, microbatches whose activations it holds, counted in whole passes over its blocks."""
    if strategy.schedule in CLOSED:
        return [in_flight(strategy, stage, microbatches) for stage in range(strategy.pp)]
    saved = [
        sum(n * kept_bytes(work.classes[key], strategy, stack) for key, n in part.classes.items()) for part in parts
    ]
    counts, home = held_microbatches(strategy, microbatches, saved), homes(strategy)
    out = []
    for stage in range(strategy.pp):
        own = [part for part in range(len(parts)) if home[part] == stage]
        whole = sum(saved[part] for part in own)
        out.append(sum(counts[part] * saved[part] for part in own) / whole if whole else 0.0)
    return out


def kept_bytes(one: ClassWork, strategy: Strategy, stack: Stack) -> float:
    """What a block keeps for its backward pass of one microbatch."""
    if reruns_full(one, strategy.remat, stack.reruns):
        return one.entry_bytes
    saved = one.saved[stack.saves]
    return saved.kept_bytes - (saved.core_bytes if strategy.remat == "selective" else 0.0)


def worst(memory: Sequence[StageMemory]) -> StageMemory:
    """The stage that comes nearest to its devices' limit, or exceeds it by most."""
    return max(memory, key=lambda one: one.peak_bytes / one.limit_bytes)
