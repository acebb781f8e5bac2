"""Stage times from a table of measured layer times in place of kernels' prices (`profiles.block_table`).

`layer_entries` says which entry stands for which blocks. Times are of a layer on the devices of one tensor-parallel
group, their collectives included. A layer that was measured on one device alone is divided among more (B3), and the
cost model's collectives come on top: no time of one device has any. With ``remat=full`` layers run forward again, as
in the frameworks whose times these are; what stands beside them, the embedding and the head, does not.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from costmodel.errors import InputError
from costmodel.provenance import Provenance, weakest
from costmodel.units import format_seconds
from planner.check.codes import Severity
from planner.planfile.schema import Finding
from planner.strategy.layer_entries import Entries, entries_of
from planner.strategy.scheduled import CLOSED
from planner.strategy.stages import layers_of_parts
from planner.strategy.strategy import Strategy
from planner.strategy.work import Work
from profiles.block_table import LayerTimes, layer_degrees, layer_microbatches, layer_names, layer_times
from profiles.schema import Profile

Passes = tuple[float, float]  # seconds of the forward and of the backward pass

FASTEST, SLOWEST = 0.5, 10.0
"""Times beyond which a table is hardly the model's: of its matrix products at the full rate (a causal kernel computes
half of attention's), and of what the cost model says (host-bound software may take several times as long)."""


class MeasuredStage(NamedTuple):
    """Seconds of one stage's layers: of a microbatch, and of their update once a step (None where not measured), were
    they not split by ZeRO; and where the figures come from.

    Attributes:
        modelled_s: of the former two, each, collectives that the cost model added.
    """

    forward_s: float
    backward_s: float
    update_s: float | None
    provenance: Provenance
    modelled_s: Passes = (0.0, 0.0)

    def on(self, slowdown: float) -> "MeasuredStage":
        """The same on devices that take `slowdown` times as long as those that were measured."""
        ahead, behind = self.modelled_s
        return self._replace(
            forward_s=slowdown * (self.forward_s - ahead) + ahead,
            backward_s=slowdown * (self.backward_s - behind) + behind,
            update_s=None if self.update_s is None else slowdown * self.update_s,
        )


class _Entry(NamedTuple):
    """One entry, the classes of the blocks that it stands for, and whether it is a layer."""

    name: str
    blocks: tuple[str, ...]
    layer: bool


@dataclass
class LayerTable:
    """Layer times of one model of a profile.

    Args:
        kind: name of the cluster's device kind that the profile is of.
    """

    profile: Profile
    model: str
    kind: str
    _known: dict[tuple[str, int, int], tuple[LayerTimes, bool]] = field(default_factory=dict, repr=False)
    _placed: dict[tuple[str, ...], tuple[list[_Entry], Entries]] = field(default_factory=dict, repr=False)

    def stages(self, work: Work, strategy: Strategy, collectives: Mapping[str, Passes]) -> list[MeasuredStage]:
        """Times of each stage of a strategy.

        Args:
            collectives: what the cost model takes for those of one block, by class: added where no entry has them.

        Raises:
            InputError: MP189 the table is of a model with another number of layers, or knows nothing of what the
                strategy asks for.
        """
        _require_known(strategy, self.model)
        found: list[list[_Entry]] = [[] for _ in range(strategy.pp)]
        for i, entries in enumerate(self._parts(work, strategy)):
            found[i % strategy.pp] += entries
        return [self._stage(entries, strategy, collectives) for entries in found]

    def findings(self, work: Work, strategy: Strategy, priced: Mapping[str, float]) -> Iterator[Finding]:
        """MP179: what of the strategy the layer times do not tell and what is taken in its place, and times that are
        hardly the model's.

        Args:
            priced: what the cost model takes for both passes of one block, by class.
        """
        divided = strategy.tp > 1 and any(
            layer_degrees(self.profile, name, model=self.model) == (1,)
            for name in layer_names(self.profile, self.model)
        )
        if divided:
            yield _said(
                f"the layer times of {self.model} are of one device alone: at tp={strategy.tp} they are divided by "
                f"{strategy.tp}, and the cost model's collectives come on top",
                "import rows that were measured at that tp",
            )
        elif strategy.sp and strategy.tp > 1:
            yield _said(
                f"the layer times of {self.model} do not say whether they were measured with sp: sp=on decides memory "
                "and sends here"
            )
        if strategy.attention != "graph":
            yield _said(
                f"the layer times of {self.model} have the attention that was measured: attention={strategy.attention} "
                "decides memory here"
            )
        yield from self._implausible(work, strategy, priced)

    def _implausible(self, work: Work, strategy: Strategy, priced: Mapping[str, float]) -> Iterator[Finding]:
        """Times that no device of the kind reaches, or far above what the cost model says."""
        entries, _ = self._place(work)
        whole = self._stage(entries, strategy, dict.fromkeys(work.classes, (0.0, 0.0)))
        took_s = whole.forward_s + whole.backward_s
        blocks = [key for entry in entries for key in entry.blocks]
        least_s = sum(float(work.classes[key].kernels.matmul_s.sum()) for key in blocks)
        priced_s = sum(priced[key] for key in blocks)
        took = f"the layer times of {self.model} add up to {format_seconds(took_s)} a microbatch"
        hint = "see whether the table is of this model, sequence length, and device kind"
        if took_s < FASTEST * least_s:
            rate = f"what the model's matrix products take at the full rate of {self.kind}, {format_seconds(least_s)}"
            yield _said(f"{took}, less than half of {rate}", hint, "warning")
        elif took_s > SLOWEST * priced_s:
            times = f"{took_s / priced_s:.0f} times what the cost model says, {format_seconds(priced_s)}"
            yield _said(f"{took}, {times}", hint, "warning")

    def _parts(self, work: Work, strategy: Strategy) -> list[list[_Entry]]:
        """Entries of each part of the model."""
        entries, at = self._place(work)
        sizes = layers_of_parts(work, strategy)
        start, parts = at.layers.start, list[list[_Entry]]()
        for size in sizes:
            parts.append(entries[start : start + size])
            start += size
        parts[0] = [*entries[: at.before.stop], *parts[0]]
        parts[-1] = [*parts[-1], *entries[at.behind.start :]]
        return parts

    def _place(self, work: Work) -> tuple[list[_Entry], Entries]:
        """The table's entries, each with the blocks that it stands for: a layer and what stands before it and behind
        the one before; blocks before and behind all layers belong to the entries there, if there are any."""
        if work.order not in self._placed:
            names = layer_names(self.profile, self.model)
            layered = [i for i, key in enumerate(work.order) if work.classes[key].layered]
            at = entries_of(self._sample(names), [work.order[i] for i in layered], self.model)
            blocks: list[tuple[str, ...]] = [()] * len(names)
            for entry, begin, end in zip(at.layers, [layered[0] - 1, *layered[:-1]], layered, strict=True):
                blocks[entry] = work.order[begin + 1 : end + 1]
            if at.before:
                blocks[0] = work.order[: layered[0]]
            if at.behind:
                blocks[-1] = work.order[layered[-1] + 1 :]
            entries = [
                _Entry(name, own, i in at.layers) for i, (name, own) in enumerate(zip(names, blocks, strict=True))
            ]
            self._placed[work.order] = entries, at
        return self._placed[work.order]

    def _sample(self, names: Sequence[str]) -> list[Passes]:
        """Times of all entries at one size that tells them apart: the fewest devices, the largest microbatch."""
        profile, model = self.profile, self.model
        tp = min(layer_degrees(profile, names[0], model=model))
        microbatch = max(layer_microbatches(profile, names[0], model=model))
        times = [layer_times(profile, name, tp, microbatch, model=model) for name in names]
        return [(one.forward_s, one.backward_s) for one in times]

    def _times(self, name: str, strategy: Strategy) -> tuple[LayerTimes, bool]:
        """Times of an entry, and whether they are of one device divided among several.

        Raises:
            InputError: MP189 the degree is beyond the measured ones, and there compute and collectives cannot be told
                apart.
        """
        key = (name, strategy.tp, strategy.microbatch)
        if key not in self._known:
            degrees = layer_degrees(self.profile, name, model=self.model)
            if not min(degrees) <= strategy.tp <= max(degrees) and degrees != (1,):
                measured = ", ".join(map(str, degrees))
                message = (
                    f"layer {name} of {self.model} was measured at tp={measured}, collectives included: what it takes "
                    f"at tp={strategy.tp} does not follow"
                )
                raise InputError("MP189", message, "estimate a degree among these, or import rows of that one too")
            times = layer_times(self.profile, name, strategy.tp, strategy.microbatch, model=self.model)
            self._known[key] = times, degrees == (1,) and strategy.tp > 1
        return self._known[key]

    def _stage(self, entries: Sequence[_Entry], strategy: Strategy, collectives: Mapping[str, Passes]) -> MeasuredStage:
        forward = backward = ahead = behind = again = 0.0
        updates: list[float | None] = []
        known: list[Provenance] = ["measured"]
        for entry in entries:
            times, divided = self._times(entry.name, strategy)
            if strategy.overlap_tensor and strategy.tp > 1 and not divided:
                message = f"the layer times of {self.model} at tp={strategy.tp} have their collectives inside"
                raise InputError("MP189", message, "leave overlap_tensor out: what was hidden is hidden in them")
            forward, backward = forward + times.forward_s, backward + times.backward_s
            again += times.forward_s if entry.layer and strategy.remat == "full" else 0.0
            updates.append(times.update_s)
            known.append(times.provenance)
            if divided:
                ahead += sum(collectives[key][0] for key in entry.blocks)
                behind += sum(collectives[key][1] for key in entry.blocks)
        whole = sum(one for one in updates if one is not None) if entries and None not in updates else None
        return MeasuredStage(forward + ahead, backward + again + behind, whole, weakest(*known), (ahead, behind))


def _require_known(strategy: Strategy, model: str) -> None:
    asked = None
    if strategy.cp > 1 or strategy.ep > 1:
        asked = f"cp={strategy.cp}" if strategy.cp > 1 else f"ep={strategy.ep}"
    elif strategy.remat == "selective":
        asked = "remat=selective"
    elif strategy.schedule not in CLOSED:
        asked = f"schedule={strategy.schedule}, which splits or orders them as no formula does"
    elif strategy.matmul_dtype is not None:
        asked = f"matmul_dtype={strategy.matmul_dtype}"
    if asked is not None:
        message = f"the layer times of {model} say nothing of {asked}"
        raise InputError("MP189", message, "leave it out, or estimate without the profile")


def _said(message: str, hint: str = "", severity: Severity = "note") -> Finding:
    return Finding(code="MP179", severity=severity, message=message, hint=hint)
