"""How much of a model's time a profile has measured, and which ops it lacks."""

import math
from collections import Counter
from collections.abc import Container
from dataclasses import dataclass

from costmodel.device_kind import DeviceKind
from costmodel.graph import BlockClass, ModelGraph, Op
from costmodel.kernels import forward_kernels, kernel_s, op_dtype
from costmodel.traffic import Traffic
from profiles.schema import BlockTime, Profile


@dataclass(frozen=True, slots=True)
class Coverage:
    """Keys of a model's ops, views left out.

    Attributes:
        measured: keys in the profile, in order of the time that they take.
        carried: keys whose time comes from the same op at another microbatch size, in that order.
        rated: keys that are priced by the roofline instead, in that order.
        measured_share, carried_share: shares of the forward time, by the roofline, that `measured` and `carried` take.
        drifted: of `measured`, those whose later runs took over a tenth longer or shorter than the earlier ones.
        blocks: classes whose time is in the block table at this microbatch, whole on one device; blocks_missing: the
            model's others. Both in the model's order.
    """

    measured: tuple[str, ...]
    carried: tuple[str, ...]
    rated: tuple[str, ...]
    measured_share: float
    carried_share: float
    drifted: tuple[str, ...]
    blocks: tuple[str, ...] = ()
    blocks_missing: tuple[str, ...] = ()

    def describe(self) -> str:
        """One sentence for a report."""
        total = len(self.measured) + len(self.carried) + len(self.rated)
        text = f"{len(self.measured)} of {total} op shapes are measured ({self.measured_share:.0%} of the forward time)"
        if self.carried:
            text += f", {len(self.carried)} are carried over from another microbatch size ({self.carried_share:.0%})"
        if self.rated:
            text += f"; the largest that is {'neither' if self.carried else 'not'}: {self.rated[0]}"
        if self.blocks:
            text += f"; {len(self.blocks)} of {len(self.blocks) + len(self.blocks_missing)} block classes are measured"
        return text


def op_coverage(
    graph: ModelGraph, profile: Profile, kind: DeviceKind, op_times: Container[str] | None = None
) -> Coverage:
    """Which ops of a model the profile has.

    Args:
        graph: captured at the microbatch size of interest: keys hold shapes.
        kind: whose roofline weighs the ops; `AppliedProfile.kind` for fitted rates.
        op_times: keys that have a time at this microbatch size; those of the profile if None.
    """
    weights: Counter[str] = Counter()
    counts = Counter(block.class_key for block in graph.blocks)
    for class_key, count in counts.items():
        cls = graph.classes[class_key]
        for op in cls.ops:
            if op.work != "view":
                weights[op.key] += count * _alone_s(op, cls, kind)
    ordered = sorted(weights, key=lambda key: (-weights[key], key))
    timed = profile.ops if op_times is None else op_times
    measured = tuple(key for key in ordered if key in profile.ops)
    carried = tuple(key for key in ordered if key in timed and key not in profile.ops)
    total = sum(weights.values()) or 1.0
    timed_blocks = {one.block_class for one in whole_blocks(profile, graph.microbatch)}
    return Coverage(
        measured=measured,
        carried=carried,
        rated=tuple(key for key in ordered if key not in profile.ops and key not in timed),
        measured_share=sum(weights[key] for key in measured) / total,
        carried_share=sum(weights[key] for key in carried) / total,
        drifted=tuple(key for key in measured if abs(profile.ops[key].drift) > 0.1),
        blocks=tuple(key for key in counts if key in timed_blocks),
        blocks_missing=tuple(key for key in counts if key not in timed_blocks),
    )


def whole_blocks(profile: Profile, microbatch: int) -> tuple[BlockTime, ...]:
    """Entries of the block table for one device at a microbatch."""
    return tuple(one for one in profile.blocks if math.prod(one.mesh) == 1 and one.microbatch == microbatch)


def _alone_s(op: Op, cls: BlockClass, kind: DeviceKind) -> float:
    """Seconds of an op that shares no traffic with its neighbours."""
    moved = Traffic(cls.tensors, frozenset()).alone(op, (), ())
    return sum(kernel_s(one, kind) for one in forward_kernels(op, op_dtype(op, cls.tensors), kind, 1.0, moved, (), ()))
