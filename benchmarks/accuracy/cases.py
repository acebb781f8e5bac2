"""Published measurements as cases: a model, a cluster, a strategy, and what was measured."""

import csv
import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Row = dict[str, str]


@dataclass(frozen=True)
class Fabric:
    """Nodes of one kind. Bandwidths in bytes per second and direction: `intra` a device's, `inter` a node's."""

    device: str
    per_node: int
    intra: float
    inter: float
    nics: int = 8
    intra_latency_s: float = 2e-6
    inter_latency_s: float = 8e-6


@dataclass(frozen=True, kw_only=True)
class Case:
    """One measured configuration.

    Attributes:
        table: the published table; row: its line; note: what of the configuration is not stated there, and assumed.
        model: family and dims.
        fabrics: node kinds in order, with the number of nodes of each.
        stack: the software stack that it ran on.
        group: configurations among which a planner would choose.
        fits: whether it ran, where that is known; memory_bytes: as it was measured, on the first stage alone where
            `first_stage_measured`.
        layer_model: whose measured layer times the case is predicted from, where it is.
    """

    table: str
    row: int
    model: tuple[str, tuple[tuple[str, Any], ...]]
    fabrics: tuple[tuple[Fabric, int], ...]
    stack: str
    strategy: dict[str, Any]
    global_batch: int
    measured_s: float | None = None
    memory_bytes: float | None = None
    fits: bool | None = None
    group: tuple[Any, ...] = ()
    note: str = ""
    scored: bool = True
    first_stage_measured: bool = False
    layer_model: str = ""

    @property
    def configuration(self) -> str:
        """What repeats of one configuration share."""
        text = repr((self.model, self.fabrics, sorted(self.strategy.items()), self.global_batch, self.stack))
        return text

    def measured_stage_bytes(self, stages: Sequence[float]) -> float:
        """Of predicted bytes by stage, those of the stages whose devices were looked at."""
        return stages[0] if self.first_stage_measured else max(stages)

    def fold(self, salt: int) -> int:
        """0 or 1, by a hash of the configuration."""
        return hashlib.sha256(f"{salt}|{self.configuration}".encode()).digest()[0] & 1


def read(folder: Path, name: str) -> list[Row]:
    """Rows of a table, or none where the folder does not have it."""
    path = folder / f"{name}.csv"
    if not path.exists():
        return []
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def gpt(
    hidden: int, layers: int, heads: int, seq: int, vocab: int, **more: Any
) -> tuple[str, tuple[tuple[str, Any], ...]]:
    dims = {"hidden": hidden, "layers": layers, "heads": heads, "seq": seq, "vocab": vocab, **more}
    return "gpt", tuple(sorted(dims.items()))


def padded(vocab: int, tp: int, to: int = 128) -> int:
    """Megatron's vocabulary, rounded up to a multiple of `to` rows on each tensor-parallel device."""
    return math.ceil(vocab / (to * tp)) * to * tp


def whole(row: Row, name: str, default: int | None = None) -> int:
    value = row.get(name, "")
    if value == "" and default is not None:
        return default
    return int(float(value))


def number(text: str) -> bool:
    """Whether a cell holds a positive number."""
    try:
        return float(text) > 0
    except ValueError:
        return False
