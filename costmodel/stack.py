"""Constants of a software stack on a fabric: what training frameworks add to kernels and links.

The planner's own programs are the default: one compiled program a stage, kernels launched by the device, XLA's fusion.
Frameworks that launch each kernel from the host, fuse less, or hold state in other dtypes have constants of their own,
fitted to their published measurements or, by `meshplan profile calibrate`, to a user's.
"""

from typing import Literal, get_args

import msgspec

from costmodel.documents import require_number, suggestion
from costmodel.errors import InputError

Saves = Literal["residuals", "inputs"]
Reruns = Literal["blocks", "layers", "whole_layers"]

WORDS: dict[str, tuple[str, ...]] = {"reruns": get_args(Reruns), "saves": get_args(Saves)}
"""Fields that are one of some words."""


class Stack(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a software stack does beside what the model's ops ask for.

    Attributes:
        host_launch_s: seconds of the host for each kernel; a pass over a block takes no less than its launches.
        traffic: bytes that memory-bound kernels move, over what they would move fused as XLA does.
        attention: time of the products inside fused attention (``flash``), over what the device kind's take.
        misaligned_efficiency: share of their rate that 16-bit products reach whose k or n is no multiple of 8; None for
            the device kind's own.
        start_s: what any collective takes beside its hops and bytes inside a node; None for the links' own.
        inter_start_s: the same of collectives that leave a node.
        tier_share, inter_share: achieved share of the bandwidth inside and between nodes; None for the links' own.
        send_share: of the bandwidth between nodes, what messages from stage to stage achieve, from device to device and
            not in rings; None where it is that of collectives.
        gradient_overlap: share of a replica's last backward pass that a gradient reduction can hide behind, where the
            strategy overlaps it; parameter_overlap: of each block's compute, for gathers of its parameters;
            tensor_overlap: the same for collectives of tensor and context parallelism.
        send_exposed: share of the sends between stages that a steady pipeline waits for.
        stall_s: what each microbatch waits, on average, where tensor-parallel devices send it to another node at once
            and in parts of less than stall_bytes, as if packets were lost: from a short message TCP misses one only
            after its timeout of 0.2 s, from a long one sooner.
        microbatch_s, step_s: once a microbatch on each stage, and once a step.
        slowdown: factor on everything, of a system that is known to run below its best.
        skew: share by which a step is longer for each doubling of the nodes: the slowest of many sets the pace.
        reruns: what full remat runs again: every block as far as its backward pass needs it (``blocks``, the planner's
            programs); the same of layers alone, not of what stands before and behind them (``layers``, PyTorch's
            checkpoints that stop early); layers to their end (``whole_layers``, its reentrant ones, as in Megatron).
        saves: what a block keeps without remat: what its derivative as captured reads (``residuals``, the planner's
            programs, whose loops keep all of that), or what each fused function reads, in the split in which it was
            made (``inputs``, frameworks' modules).
        weight_bytes, gradient_bytes, optimizer_bytes: of one trained element (a copy of the weights in the compute
            dtype; the rest of the state in `optimizer_bytes`); None for what the model itself keeps.
        reserve_bytes: memory that programs cannot use; None for the device kind's own.
        fragmentation: memory that the allocator holds, over what is in use.
        pooled: whether what one class of blocks frees serves no other class: an allocator that keeps freed memory in
            pieces, which layers cut too small for a head's scores. Else the fullest moment of all counts.
        flat_state: whether ZeRO splits all state of a stage as one array, as frameworks do; else, as the planner's own
            programs do, each parameter along a dim that its degree divides, and one that has none stays whole.
        fitted_on: the measurements behind the constants; '' for assumed ones.
        error: half-width of the interval around a step time that held 90% of those measurements, of the time's natural
            logarithm: it reaches from exp(-error) to exp(error) times the time.
    """

    name: str
    host_launch_s: float = 0.0
    traffic: float = 1.0
    attention: float = 1.0
    misaligned_efficiency: float | None = None
    start_s: float | None = None
    inter_start_s: float | None = None
    tier_share: float | None = None
    inter_share: float | None = None
    send_share: float | None = None
    gradient_overlap: float = 0.0
    parameter_overlap: float = 0.0
    tensor_overlap: float = 0.0
    send_exposed: float = 0.0
    stall_s: float = 0.0
    stall_bytes: float = 0.0
    microbatch_s: float = 0.0
    step_s: float = 0.0
    slowdown: float = 1.0
    skew: float = 0.0
    reruns: Reruns = "blocks"
    saves: Saves = "residuals"
    weight_bytes: float | None = None
    gradient_bytes: float | None = None
    optimizer_bytes: float | None = None
    reserve_bytes: int | None = None
    fragmentation: float = 1.0
    pooled: bool = False
    flat_state: bool = True
    fitted_on: str = ""
    error: float = 0.2

    @property
    def keeps_as_planned(self) -> bool:
        """Whether memory is that of the planner's own programs: nothing about it is said to be another software's."""
        sizes = (self.weight_bytes, self.gradient_bytes, self.optimizer_bytes)
        kept = (self.saves, self.reruns) == ("residuals", "blocks")
        return kept and not self.flat_state and not self.pooled and all(size is None for size in sizes)


WIDEST = 10.0
"""Largest `Stack.error`: the interval then reaches from a 22,000th of a time to 22,000 times it."""

_SHARES = (
    "misaligned_efficiency",
    "tier_share",
    "inter_share",
    "send_share",
    "gradient_overlap",
    "parameter_overlap",
    "tensor_overlap",
    "send_exposed",
)


def check_stack(stack: Stack, path: str, code: str = "MP182") -> None:
    """Raises InputError for a stack with impossible numbers or words; `path` is where it stands in its document."""
    for field, words in WORDS.items():
        if (word := getattr(stack, field)) not in words:
            raise InputError(code, f"{path}.{field} is {word!r}", suggestion(str(word), words, "it is one of"))
    for field in stack.__struct_fields__:
        value = getattr(stack, field)
        if isinstance(value, bool) or not isinstance(value, int | float):
            continue
        if field in _SHARES:
            require_number(value, f"{path}.{field}", code, least=0, most=2)
        elif field in ("traffic", "attention", "fragmentation", "slowdown"):
            require_number(value, f"{path}.{field}", code)
        else:
            require_number(value, f"{path}.{field}", code, least=0)
    if stack.error > WIDEST:
        message = f"{path}.error is {stack.error:g}, above {WIDEST:g}: a step takes up to exp(error) times its estimate"
        raise InputError(code, message, "write the half-width of the interval of log(time), such as 0.2 for about 20%")
