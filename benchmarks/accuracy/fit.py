"""Which constants of which kind and stack are fitted to which tables."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np

from benchmarks.accuracy.cases import Case
from benchmarks.accuracy.predict import Predictor
from costmodel.device_kind import DeviceKind
from costmodel.stack import Stack
from profiles.calibrate import Calibration, Constant, calibrate
from profiles.datasheets import datasheet_kinds

EPOCHS = {"jeanzay-before-numa": "jeanzay", "selene-2022": "selene"}
"""Stacks that are another one at a time when it ran slower as a whole: only their slowdown is their own."""

FAMILIES = {
    "megatron-a100": ("vtrain", "selene", "jeanzay"),
    "megatron-h100": ("megatron-core", "nemo-fp8", "nemo"),
    "amp": ("amp-t4", "amp-mixed"),
}
"""Stacks that are the same software on other fabrics: a constant of the family is that of each member, times what the
member deviates by. Deviations have narrow priors, so that a stack of few rows takes after the others."""

_AT_MOST_ONE = ("tier_share", "inter_share", "send_exposed", "tensor_overlap")

ALIKE = {
    "A100-SXM4-40GB": "A100-SXM4-80GB",
    "H200-SXM-141GB": "H100-SXM5-80GB",
    "TPU-v5e": "TPU-v6e",
    "TPU-v5p": "TPU-v6e",
    "TPU7x-core": "TPU-v6e",
}
"""Device kinds of the same chip, or of one line of chips, whose achieved shares are taken to be the same."""

_SHARED = (
    "matmul_efficiency",
    "matmul_half_depth",
    "matmul_half_area",
    "bandwidth_efficiency",
    "attention_efficiency",
)


@dataclass(frozen=True)
class Free:
    """Constants to fit: of a device kind or of a stack, by field."""

    of: str  # a device kind's or stack's name
    constants: tuple[Constant, ...]


def bind(
    values: Mapping[str, float], kinds: Mapping[str, DeviceKind], stacks: Mapping[str, Stack]
) -> tuple[dict[str, DeviceKind], dict[str, Stack]]:
    """Kinds and stacks with constants named ``owner.field`` put in."""
    own_kinds, own_stacks = dict(kinds), dict(stacks)
    for name, value in _of_members(values, stacks).items():
        owner, field = name.rsplit(".", 1)
        if owner in own_kinds:
            own_kinds[owner] = msgspec.structs.replace(own_kinds[owner], **{field: value})
        else:
            own_stacks[owner] = msgspec.structs.replace(own_stacks[owner], **{field: value})
    for other, base in ALIKE.items():
        if base in own_kinds:
            shared = {field: getattr(own_kinds[base], field) for field in _SHARED}
            own_kinds[other] = msgspec.structs.replace(datasheet_kinds()[other], **shared)
    for epoch, base in EPOCHS.items():
        if epoch in own_stacks and base in own_stacks:
            slowdown = own_stacks[epoch].slowdown
            own_stacks[epoch] = msgspec.structs.replace(own_stacks[base], name=epoch, slowdown=slowdown)
    return own_kinds, own_stacks


def _of_members(values: Mapping[str, float], stacks: Mapping[str, Stack]) -> dict[str, float]:
    """Constants with those of families given to their members."""
    own = dict(values)
    for family, members in FAMILIES.items():
        for name in [name for name in values if name.startswith(f"{family}.")]:
            field, value = name.rsplit(".", 1)[1], own.pop(name)
            for member in members:
                if member in stacks:
                    deviating = value * own.get(f"{member}.{field}", 1.0)
                    own[f"{member}.{field}"] = min(1.0, deviating) if field in _AT_MOST_ONE else deviating
    return own


def fitted_kinds(free: Sequence[Free], stacks: Mapping[str, Stack]) -> dict[str, DeviceKind]:
    """Device kinds of which some constant is fitted, as their datasheets have them, without earlier fits."""
    known = datasheet_kinds()
    return {one.of: known[one.of] for one in free if one.of not in stacks and one.of not in FAMILIES}


def named(free: Sequence[Free]) -> list[Constant]:
    return [Constant(f"{one.of}.{c.name}", c.prior, c.spread, c.low, c.high) for one in free for c in one.constants]


def fit(
    cases: Sequence[Case],
    free: Sequence[Free],
    stacks: Mapping[str, Stack],
    predictor: Predictor,
    *,
    evaluations: int = 12,
) -> Calibration:
    """Constants fitted to cases that have a measured time."""
    kinds = fitted_kinds(free, stacks)
    constants = named(free)
    depends = np.array([[_depends(case, constant.name) for constant in constants] for case in cases])

    def predict(values: Mapping[str, float]) -> np.ndarray:
        own_kinds, own_stacks = bind(values, kinds, stacks)
        return np.array([predictor.step(c, own_kinds, own_stacks[c.stack]).step_s for c in cases])

    return calibrate(constants, predict, [c.measured_s or 0.0 for c in cases], evaluations=evaluations, depends=depends)


def _depends(case: Case, constant: str) -> bool:
    owner = constant.rsplit(".", 1)[0]
    devices = {fabric.device for fabric, _ in case.fabrics}
    stacks = (case.stack, EPOCHS.get(case.stack))
    if owner in FAMILIES:
        return any(member in stacks for member in FAMILIES[owner])
    return owner in (*stacks, *devices, *(ALIKE.get(device) for device in devices))
