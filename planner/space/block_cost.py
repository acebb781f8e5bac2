"""What one block of a class costs on one device of a group: the terms that the stage DP needs.

Seconds per microbatch forward and backward, seconds once a step, and bytes that are state, saved per microbatch in
flight, and transient.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

Collective = tuple[str, str, int]  # phase (forward, backward, once), kind, axis


@dataclass(frozen=True, slots=True)
class Move:
    """Collectives of one kind on one axis that a block runs in a phase: seconds are ``starts * fixed + bytes * slope``
    of the axis's line, and linear in both.

    Attributes:
        moved_bytes: of all of them together, as `costmodel.collectives.collective_time_s` counts them.
        weight: whether only weight gradients need it. A stored parameter's own gathers are `gathers`.
    """

    phase: str
    kind: str
    axis: int
    moved_bytes: float
    starts: float
    weight: bool = False
    gathers: bool = False


@dataclass(kw_only=True)
class BlockCost:
    """What one block of a class costs on one device of the group. Seconds per microbatch unless said otherwise.

    Attributes:
        forward_s, backward_s: of computation; the accumulation of gradients is part of the latter.
        forward_cast_s, backward_cast_s: of casts, parameters' gathers included.
        weight_s: the part of `backward_s` and `backward_cast_s` together that only weight gradients need.
        once_s: gradient reduction and gather of the update, once a step.
        update_s: optimizer update, once a step.
        collectives: phase, kind and axis -> count per microbatch.
        arising_bytes: a microbatch's gradient, beside the accumulator. inputs_bytes: batch and carried state.
        moves: the collectives behind the seconds of casts and gradients.
        lying_bytes: of a stage that is one program, what the compiler has lie there of `saved_bytes`.
        run_cast_s, run_collectives: of forward casts that a scan does once for all its layers, as JAX hoists what does
            not change from layer to layer. Each layer's share is part of `forward_cast_s`, not of `collectives`.
    """

    forward_s: float = 0.0
    backward_s: float = 0.0
    forward_cast_s: float = 0.0
    backward_cast_s: float = 0.0
    weight_s: float = 0.0
    once_s: float = 0.0
    update_s: float = 0.0
    parameter_bytes: float = 0.0
    gradient_bytes: float = 0.0
    arising_bytes: float = 0.0
    optimizer_bytes: float = 0.0
    inputs_bytes: float = 0.0
    saved_bytes: float = 0.0
    lying_bytes: float = 0.0
    transient_bytes: float = 0.0
    collectives: Counter[Collective] = field(default_factory=Counter)
    moves: list[Move] = field(default_factory=list)
    run_cast_s: float = 0.0
    run_collectives: Counter[Collective] = field(default_factory=Counter)

    @property
    def state_bytes(self) -> float:
        gradients = self.gradient_bytes + self.arising_bytes
        return self.parameter_bytes + gradients + self.optimizer_bytes + self.inputs_bytes


def equal_moves(phases: Sequence[str], kind: str, axis: int, size: float, count: float = 1.0) -> list[Move]:
    """`count` equal collectives in each of some phases."""
    return [Move(phase, kind, axis, count * size, count) for phase in phases]


__all__ = ["BlockCost", "Collective", "Move", "equal_moves"]
