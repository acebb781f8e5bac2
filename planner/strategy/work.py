"""What a model does on the devices of one replica of one stage, as amounts that no constant of a device has touched.

A decision of the planner's space on the mesh (context, tensor, expert) becomes kernels, collectives and bytes by class.
All of them grow with the microbatch as ``a + b * microbatch``, so that two captures give every size; only the shapes of
the kernels make time curve, and those are kept. (A lookup that takes more rows than its table has grows no more: below
that its bytes are overstated by at most the table's.)
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from costmodel.kernels import KernelTable
from costmodel.stack import Reruns, Saves
from planner.strategy.blocks import Blocks
from planner.strategy.leaves import HeldLeaf, Leaf, held
from planner.strategy.strategy import RematPolicy

Floats = NDArray[np.float64]
MoveKey = tuple[str, str, int]  # phase, kind, axis


@dataclass(frozen=True)
class Moves:
    """Bytes and starts of collectives by (phase, kind, axis), as rows in the order of `keys`."""

    keys: tuple[MoveKey, ...]
    amounts: Floats  # (n, 2): bytes, starts


@dataclass(frozen=True)
class Saved:
    """Bytes that one block keeps for its backward pass without remat; of these core_bytes are attention's own."""

    kept_bytes: float
    core_bytes: float


@dataclass(frozen=True)
class ClassWork:
    """One block of a class, for one microbatch of one size, on one device.

    Attributes:
        blocks: how many the model has; layered: whether they are its layers (`planner.strategy.layers`).
        kernels: of both passes; backward: which run backward; again, core: which of the forward pass full remat runs
            again as far as the backward pass needs them, and which selective remat runs again; flash: which are
            products inside attention that never stores its scores.
        weight: share of each that only weight gradients need.
        moves: collectives, without and with full remat, which runs those again that the backward pass needs.
        saved: by what a stack saves; entry_bytes: what is kept under full remat.
        group_bytes: what is live while each op group runs.
    """

    key: str
    blocks: int
    layered: bool
    kernels: KernelTable
    backward: NDArray[np.bool_]
    again: NDArray[np.bool_]
    core: NDArray[np.bool_]
    flash: NDArray[np.bool_]
    weight: Floats
    moves: Mapping[str, Moves]
    saved: Mapping[Saves, Saved]
    entry_bytes: float
    group_bytes: Floats

    @property
    def live_bytes(self) -> float:
        """The most that is live while one op group runs."""
        return float(self.group_bytes.max(initial=0.0))


def reruns_full(one: ClassWork, remat: RematPolicy, reruns: Reruns) -> bool:
    """Whether a block of a class runs again, and keeps but its inputs until then."""
    return remat == "full" and (one.layered or reruns == "blocks")


@dataclass(frozen=True)
class Work:
    """All classes of a model at one microbatch size, its leaves, and the order of its blocks.

    Attributes:
        microbatch: examples of all devices of expert parallelism together, and of all replicas where these compute on
            them together; replicas: how many then, else 1; parted: whether each of these
            holds a part of the parameters.
        border_bytes: of so many examples, whole: what crosses between each two consecutive blocks, (n, 2): forward, and
            its cotangents.
    """

    microbatch: int
    classes: Mapping[str, ClassWork]
    leaves: tuple[Leaf, ...]
    order: tuple[str, ...]
    border_bytes: Floats
    replicas: int = 1
    parted: bool = False

    def held(self, blocks: Blocks) -> list[HeldLeaf]:
        """Leaves that a stage of these blocks holds."""
        if blocks.positions not in self._held:
            self._held[blocks.positions] = list(held(self.leaves, blocks.positions))
        return self._held[blocks.positions]

    @cached_property
    def _held(self) -> dict[frozenset[int], list[HeldLeaf]]:
        return {}


def interpolated(one: Work, other: Work, microbatch: int) -> Work:
    """The amounts at another microbatch size, on the line through two.

    Raises:
        ValueError: the two differ in more than amounts: the model is not the same at both sizes.
    """
    if microbatch == one.microbatch:
        return one
    t = (microbatch - one.microbatch) / (other.microbatch - one.microbatch)
    if one.order != other.order and len(one.order) != len(other.order):
        raise ValueError("the model has other blocks at another microbatch size")
    classes = {}
    for (key, a), b in zip(one.classes.items(), other.classes.values(), strict=True):
        shapes = [(len(w.kernels.matmul_s), len(w.group_bytes), w.moves["none"].keys) for w in (a, b)]
        if shapes[0] != shapes[1]:
            raise ValueError("the model has other ops at another microbatch size")
        kernels = KernelTable(
            **{
                f.name: _line(getattr(a.kernels, f.name), getattr(b.kernels, f.name), t)
                for f in fields(KernelTable)
                if f.name != "misaligned"
            },
            misaligned=a.kernels.misaligned,
        )
        moves = {remat: Moves(m.keys, _line(m.amounts, b.moves[remat].amounts, t)) for remat, m in a.moves.items()}
        saved = {
            saves: Saved(
                _between(own.kept_bytes, b.saved[saves].kept_bytes, t),
                _between(own.core_bytes, b.saved[saves].core_bytes, t),
            )
            for saves, own in a.saved.items()
        }
        entry_bytes = _between(a.entry_bytes, b.entry_bytes, t)
        group_bytes = _line(a.group_bytes, b.group_bytes, t)
        classes[key] = replace(
            a, kernels=kernels, moves=moves, saved=saved, entry_bytes=entry_bytes, group_bytes=group_bytes
        )
    borders = _line(one.border_bytes, other.border_bytes, t)
    return replace(one, microbatch=microbatch, classes=classes, border_bytes=borders)


def _between(a: float, b: float, t: float) -> float:
    return a + t * (b - a)


def _line(a: Floats, b: Floats, t: float) -> Floats:
    with np.errstate(invalid="ignore"):
        return np.where(np.isfinite(a), a + t * (b - a), a)
