"""Runs a plan whose units are slices of sequences: unit n·c + j is chunk j of microbatch n.

Every stage has programs for each chunk. What a chunk hands to later chunks of its stage lies there until its own
backward has run, as all that read it have run theirs by then; the cotangents that they send are summed meanwhile.
"""

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import jax
import numpy as np

from costmodel.sharding import split_factor
from planner.frontend.chunks.cut import WHOLE
from planner.frontend.chunks.walk import ChunkedModel
from planner.lowering.chunk_programs import ChunkPrograms
from planner.lowering.group_programs import GroupPrograms
from planner.lowering.pipeline import Actor, PipelineTrainer
from planner.lowering.pipeline_step import Key, PipelineStep
from planner.lowering.state import TrainState
from planner.lowering.written import Counts, written


@dataclass(frozen=True, kw_only=True)
class ChunkedTrainer(PipelineTrainer):
    """`init`, `step` and `params` of a plan in sequence chunks.

    Attributes:
        programs: those of the first chunk. shares: the units that each group runs.
        of_chunk: by (stage, group) and chunk.
    """

    model: ChunkedModel
    of_chunk: Mapping[tuple[Actor, int], ChunkPrograms] = field(default_factory=dict)

    @property
    def chunks(self) -> int:
        return self.model.chunks

    @cached_property
    def slices(self) -> frozenset[str]:
        """Names of the values that chunks hand to later chunks of their stage."""
        return frozenset(n for p in self.of_chunk.values() for n in p.own)

    def heaviest(self, actor: Actor) -> ChunkPrograms:
        return self.of_chunk[actor, self.chunks - 1]

    def held_bytes(self, actor: Actor) -> int:
        """Bytes that a device holds of a unit from its F to its B, of the chunk that holds most: what its backward
        reads, and the slices that later chunks read."""
        found = []
        for j in range(self.chunks):
            programs = self.of_chunk[actor, j]
            held = programs.residual_bytes
            for name in programs.own:
                parts = split_factor(programs.kept.specs[name], programs.placement.sizes)
                held += math.ceil(programs.micro.tensor(name).bytes / parts)
            found.append(held)
        return max(found)

    def written_collectives(self, actor: Actor) -> Counts:
        """Collectives of the last chunk's programs and of the update, as traced."""
        found: Counts = Counter()
        for phase, traced in self.traces(actor):
            found.update(written(traced, phase))
        return found

    def begin(self, state: TrainState, leaves: dict[str, Any]) -> "ChunkedStep":
        return ChunkedStep(self, state, leaves)


class ChunkedStep(PipelineStep):
    """One step of a `ChunkedTrainer`.

    Attributes:
        slices: those that later chunks of a microbatch read, or whose backward has yet to run.
    """

    def __init__(self, trainer: ChunkedTrainer, state: TrainState, leaves: dict[str, Any]):
        super().__init__(trainer, state, leaves)
        self.of_chunk, self.chunks, self.names = trainer.of_chunk, trainer.chunks, trainer.slices
        self.cuts = trainer.model.cuts
        self.slices: dict[Key, Any] = {}

    def _programs(self, actor: Actor, i: int) -> ChunkPrograms:
        return self.of_chunk[actor, i % self.chunks]

    def _arriving(self, programs: GroupPrograms, name: str, i: int) -> Any:
        if name in self.leaves:
            return super()._arriving(programs, name, i // self.chunks)
        if name in self.names:
            return jax.device_put(self.slices[name, i // self.chunks], programs.sharding(programs.value_specs[name]))
        return super()._arriving(programs, name, i)

    def _hand_on(self, programs: GroupPrograms, name: str, x: Any, i: int) -> None:
        if name in self.names:
            self.slices[name, i // self.chunks] = x
        else:
            super()._hand_on(programs, name, x, i)

    def _run_backward(self, programs: GroupPrograms, actor: Actor, i: int, given: tuple[Any, Any, Any]) -> Any:
        assert isinstance(programs, ChunkPrograms)
        params, residuals, arrived = given
        n = i // self.chunks
        lent = {
            name: jax.device_put(self.slices[name, n], programs.sharding(programs.value_specs[name]))
            for name in programs.lent
        }
        found = programs.backward(params, lent, residuals, arrived, self.totals[actor])
        for name in programs.own:
            del self.slices[name, n]
        return found

    def _key(self, programs: GroupPrograms, name: str, i: int) -> Key:
        return (name, i // self.chunks) if name in self.names else (name, i)

    def _maker(self, actor: Actor, name: str, i: int) -> GroupPrograms:
        if name not in self.names:
            return super()._maker(actor, name, i)
        return next(p for j in range(self.chunks) if name in (p := self.of_chunk[actor, j]).own)

    def _result(self, name: str, i: int) -> np.ndarray:
        parts = [np.asarray(self.results[name, i * self.chunks + j]) for j in range(self.chunks)]
        cut = self.cuts.get(name, WHOLE)
        if cut.partial:
            return np.sum(parts, axis=0, dtype=parts[0].dtype)
        return np.concatenate(parts, cut.chunk) if cut.chunk >= 0 else parts[-1]


__all__ = ["ChunkedStep", "ChunkedTrainer"]
