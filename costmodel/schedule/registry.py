"""Every schedule by name, with the parameters that each takes beyond the numbers of stages and microbatches."""

from collections.abc import Callable, Collection
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

from costmodel.errors import InputError
from costmodel.schedule.actions import Schedule
from costmodel.schedule.early_backward import dapple_pa, dapple_pb, hetero_1f1b
from costmodel.schedule.generate import gpipe, one_f_one_b
from costmodel.schedule.looped import breadth_first, interleaved, layer_major
from costmodel.schedule.sequence import sequence_chunks
from costmodel.schedule.v_shape import v_half, v_min, zb_v
from costmodel.schedule.zero_bubble import zb_h1, zb_h2


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleFamily:
    """A named generator.

    Args:
        name: what `--schedule` takes.
        generate: called with stages, microbatches and the parameters.
        summary: one line for a list of schedules.
        required: parameters without a default.
        optional: parameters with one.
        splits_backward: whether W is an action of its own.
        chunks: virtual stages on each stage: 1, 2 for a V-shape, or the name of the parameter that sets them.
        slices: whether it cuts microbatches into slices, its units.
    """

    name: str
    generate: Callable[..., Schedule]
    summary: str
    required: tuple[str, ...] = ()
    optional: tuple[str, ...] = ()
    splits_backward: bool = False
    chunks: int | str = 1
    slices: bool = False

    def virtual_stages(self, stages: int, **parameters: Any) -> int:
        """Number of virtual stages that the schedule runs on `stages` stages."""
        if self.chunks == "layers":
            return parameters["layers"]
        return stages * (parameters.get("chunks", 2) if isinstance(self.chunks, str) else self.chunks)


FAMILIES: dict[str, ScheduleFamily] = {
    family.name: family
    for family in (
        ScheduleFamily(name="gpipe", generate=gpipe, summary="all forwards, then all backwards", optional=("shares",)),
        ScheduleFamily(
            name="1f1b",
            generate=one_f_one_b,
            summary="one forward and one backward in turn",
            optional=("shares", "windows"),
        ),
        ScheduleFamily(
            name="dapple-pa", generate=dapple_pa, summary="early backward, warm-up p - i", optional=("shares",)
        ),
        ScheduleFamily(
            name="dapple-pb",
            generate=dapple_pb,
            summary="early backward, warm-up 2(p - i) - 1",
            optional=("shares",),
        ),
        ScheduleFamily(
            name="hetero-1f1b",
            generate=hetero_1f1b,
            summary="1F1B with extra early forwards that hide slow links",
            required=("delays_s", "stage_times_s"),
            optional=("memory_cap",),
        ),
        ScheduleFamily(
            name="interleaved",
            generate=interleaved,
            summary="1F1B over several chunks a stage",
            optional=("chunks", "shares"),
            chunks="chunks",
        ),
        ScheduleFamily(
            name="breadth-first",
            generate=breadth_first,
            summary="all microbatches chunk by chunk, there and back",
            optional=("chunks", "shares"),
            chunks="chunks",
        ),
        ScheduleFamily(
            name="layer-major",
            generate=layer_major,
            summary="all microbatches layer by layer, layers placed in turn",
            required=("layers",),
            optional=("shares",),
            chunks="layers",
        ),
        ScheduleFamily(
            name="zb-h1",
            generate=zb_h1,
            summary="zero bubble in 1F1B's memory",
            optional=("shares",),
            splits_backward=True,
        ),
        ScheduleFamily(
            name="zb-h2",
            generate=zb_h2,
            summary="zero bubble in twice 1F1B's memory",
            optional=("shares",),
            splits_backward=True,
        ),
        ScheduleFamily(
            name="zb-v",
            generate=zb_v,
            summary="zero bubble, two chunks in a V",
            splits_backward=True,
            optional=("shares",),
            chunks=2,
        ),
        ScheduleFamily(
            name="v-half",
            generate=v_half,
            summary="a V in half of 1F1B's memory",
            splits_backward=True,
            optional=("shares",),
            chunks=2,
        ),
        ScheduleFamily(
            name="v-min",
            generate=v_min,
            summary="a V in a third of 1F1B's memory",
            splits_backward=True,
            optional=("shares",),
            chunks=2,
        ),
        ScheduleFamily(
            name="sequence-chunks",
            generate=sequence_chunks,
            summary="1F1B over slices of long sequences",
            optional=("chunks", "shares"),
            slices=True,
        ),
    )
}


def schedule_family(name: str, known: Collection[str] = FAMILIES) -> ScheduleFamily:
    """The generator of a name.

    Args:
        known: the names that an error lists, where not all are of use.

    Raises:
        InputError: MP146 for a name that there is not.
    """
    if name not in FAMILIES:
        near = get_close_matches(name, known, n=1, cutoff=0.5)
        hint = f"did you mean {near[0]}? " if near else ""
        raise InputError("MP146", f"there is no schedule {name!r}", f"{hint}known: {', '.join(known)}")
    return FAMILIES[name]


def make_schedule(name: str, stages: int, microbatches: int, **parameters: Any) -> Schedule:
    """The schedule of a name.

    Args:
        name: a key of `FAMILIES`.
        stages: number of stages p.
        microbatches: number of microbatches m (sequences, for ``sequence-chunks``).
        parameters: those that the family names; None stands for the default.

    Raises:
        InputError: MP146 for a name or parameter that there is not, or a parameter that is missing; and what the
            generator raises.

    Example:
        >>> make_schedule("interleaved", 2, 4, chunks=3).stages
        6
    """
    family = schedule_family(name)
    given = {key: value for key, value in parameters.items() if value is not None}
    takes = (*family.required, *family.optional)
    for key in given:
        if key not in takes:
            raise InputError(
                "MP146", f"schedule {name} takes no {key}", f"it takes {', '.join(takes) or 'nothing else'}"
            )
    for key in family.required:
        if key not in given:
            raise InputError("MP146", f"schedule {name} needs {key}", f"it takes {', '.join(takes)}")
    return family.generate(stages, microbatches, **given)
