"""Stage times from a table of measured layer times in place of kernels' prices (`profiles.block_table`).

The table's entries are the model's in order: the first stands before the layers (the embedding), then come the layers,
then what follows them (a last norm, the head). A table with as many entries as layers has nothing beside them. Times
are of a layer on the devices of one tensor-parallel group, their collectives included.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from costmodel.errors import InputError
from costmodel.provenance import Provenance, weakest
from planner.strategy.scheduled import CLOSED
from planner.strategy.stages import layers_of_parts
from planner.strategy.strategy import Strategy
from planner.strategy.work import Work
from profiles.block_table import LayerTimes, layer_names, layer_times
from profiles.schema import Profile


class MeasuredStage(NamedTuple):
    """Seconds of one stage's layers: of a microbatch, and of their update once a step (None where not measured), were
    they not split by ZeRO; and where the figures come from."""

    forward_s: float
    backward_s: float
    update_s: float | None
    provenance: Provenance


@dataclass
class LayerTable:
    """Layer times of one model of a profile.

    Args:
        kind: name of the cluster's device kind that the profile is of.
    """

    profile: Profile
    model: str
    kind: str
    _known: dict[tuple[str, int, int], LayerTimes] = field(default_factory=dict, repr=False)

    def stages(self, work: Work, strategy: Strategy) -> list[MeasuredStage]:
        """Times of each stage of a strategy.

        Raises:
            InputError: MP189 the table has fewer entries than the model has layers, or knows nothing of what the
                strategy asks for.
        """
        _require_known(strategy, self.model)
        found: list[list[LayerTimes]] = [[] for _ in range(strategy.pp)]
        for i, names in enumerate(self._parts(work, strategy)):
            found[i % strategy.pp] += [self._times(name, strategy) for name in names]
        return [_stage(times, strategy) for times in found]

    def _parts(self, work: Work, strategy: Strategy) -> list[tuple[str, ...]]:
        """Entries of each part of the model."""
        names = layer_names(self.profile, self.model)
        sizes = layers_of_parts(work, strategy)
        beside = len(names) - sum(sizes)
        if beside < 0:
            message = f"the table has {len(names)} layers of {self.model}, the model {sum(sizes)}"
            raise InputError("MP189", message, "import the model's own table, or name the model that was measured")
        at, parts = min(1, beside), list[tuple[str, ...]]()
        for size in sizes:
            parts.append(names[at : at + size])
            at += size
        parts[0] = (*names[: min(1, beside)], *parts[0])
        parts[-1] = (*parts[-1], *names[at:])
        return parts

    def _times(self, name: str, strategy: Strategy) -> LayerTimes:
        key = (name, strategy.tp, strategy.microbatch)
        if key not in self._known:
            self._known[key] = layer_times(self.profile, name, strategy.tp, strategy.microbatch, model=self.model)
        return self._known[key]


def _stage(times: Sequence[LayerTimes], strategy: Strategy) -> MeasuredStage:
    forward = sum(one.forward_s for one in times)
    backward = sum(one.backward_s for one in times)
    if strategy.remat == "full":
        backward += forward
    updates = [one.update_s for one in times if one.update_s is not None]
    whole = sum(updates) if times and len(updates) == len(times) else None
    known: list[Provenance] = ["measured", *(one.provenance for one in times)]
    return MeasuredStage(forward, backward, whole, weakest(*known))


def _require_known(strategy: Strategy, model: str) -> None:
    asked = None
    if strategy.cp > 1:
        asked = f"cp={strategy.cp}"
    elif strategy.remat == "selective":
        asked = "remat=selective"
    elif strategy.schedule not in CLOSED:
        asked = f"schedule={strategy.schedule}, which splits or orders them as no formula does"
    elif strategy.matmul_dtype is not None:
        asked = f"matmul_dtype={strategy.matmul_dtype}"
    if asked is not None:
        message = f"the layer times of {model} say nothing of {asked}"
        raise InputError("MP189", message, "leave it out, or estimate without the profile")
