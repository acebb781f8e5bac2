"""What is fixed while one intra-op problem is solved."""

from dataclasses import dataclass
from typing import Literal

Remat = Literal["none", "full"]


@dataclass(frozen=True, kw_only=True)
class Setting:
    """Microbatches of a step, stages that the model is assumed to be cut into, microbatches in flight, remat."""

    microbatches: int
    stages: int
    in_flight: int
    remat: Remat

    @property
    def accumulates(self) -> bool:
        """Whether a gradient is added to those of other microbatches. Programs of several stages always add."""
        return self.microbatches > 1 or self.stages > 1
