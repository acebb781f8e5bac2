"""What a profile changes in prices: the device kind's rates, ops' times, collectives and copies between devices."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

import msgspec

from costmodel.block_times import MeasuredBlock
from costmodel.collective_lines import CollectiveLines
from costmodel.compute import matmul_peak_key
from costmodel.device_kind import DeviceKind
from costmodel.errors import ProfileError
from costmodel.estimator import MeasuredOp
from costmodel.matmul_table import MatmulTable
from costmodel.provenance import Provenance, weakest
from costmodel.transfers import CopyLines
from profiles.lookup import matmul_table_of
from profiles.schema import Profile
from profiles.steadiness import steadiness
from profiles.store import profile_id


@dataclass(frozen=True)
class AppliedProfile:
    """A profile in the cost model's terms, for `costmodel.estimator.Pricing`.

    Attributes:
        kind: with achieved rates for peaks; for prices only, as utilisation is a share of the kind's own peak.
        op_times: by `Op.key`.
        collectives: lines of collectives inside a node.
        copies: lines of copies between devices of a node.
        products: matrix products at any shape near the measured ones; None where none was measured.
        blocks: whole blocks on one device, by class.
        profile_id: names the profile by its content.
        notes: sentences about how the profile was used, for reports.
    """

    kind: DeviceKind
    op_times: Mapping[str, MeasuredOp]
    collectives: CollectiveLines
    copies: CopyLines
    profile_id: str
    products: MatmulTable | None = None
    blocks: Mapping[str, MeasuredBlock] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


def apply_profile(kind: DeviceKind, profile: Profile, *, devices: int | None = None) -> AppliedProfile:
    """Puts measured figures in the place of a kind's facts.

    Args:
        kind: as the cluster has it.
        profile: of that kind, by its name or by what JAX calls it.
        devices: how many of the kind the cluster has; noted where the profile saw fewer run together.

    Raises:
        ProfileError: MP301 the profile is of another kind.
    """
    if profile.device_kind != kind.name and profile.jax_device_kind not in kind.jax_names:
        message = f"the profile is of {profile.device_kind!r}, the cluster's devices are {kind.name!r}"
        raise ProfileError("MP301", message, "give the profile of that kind, or measure one with `meshplan profile`")
    # A line without a cost per byte comes of too few samples: of it, a collective of any size would cost the same.
    lines = {
        (one.kind, one.size, one.stride): (one.fixed_s, one.s_per_byte)
        for one in profile.collective_lines
        if one.s_per_byte > 0
    }
    return AppliedProfile(
        kind=_limited_memory(rated_kind(kind, profile), profile),
        op_times=MappingProxyType(
            {key: MeasuredOp(op.forward_s, op.backward_s, op.provenance) for key, op in profile.ops.items()}
        ),
        collectives=CollectiveLines(lines),
        copies=MappingProxyType(
            {
                one.lanes: (one.fixed_s, one.s_per_byte)
                for one in profile.copy_lines
                if one.route == "device_to_device" and one.s_per_byte > 0
            }
        ),
        profile_id=profile_id(profile),
        products=matmul_table_of(profile) if profile.matmuls else None,
        blocks=MappingProxyType(
            {
                one.block_class: MeasuredBlock(one.forward_s, one.gradients_s, one.provenance, one.weight_s)
                for one in profile.blocks
                if math.prod(one.mesh) == 1 and "/" not in one.block_class  # layers of others' models are no classes
            }
        ),
        notes=_notes(kind, profile, devices),
    )


def rated_kind(kind: DeviceKind, profile: Profile) -> DeviceKind:
    """The kind with the profile's rates.

    A peak becomes the achieved rate over the matmul efficiency, so that their product is what was measured; bandwidth
    and launch time become the measured ones.
    """
    rates = profile.rates
    peaks, sources = dict(kind.peak_flops_per_s), dict(kind.provenance)
    changes: dict[str, object] = {}
    if rates.matmul_flops_per_s:
        share = kind.provenance_of("matmul_efficiency")
        for dtype in peaks:
            sources[f"peak_flops_per_s.{dtype}"] = weakest(kind.provenance_of(f"peak_flops_per_s.{dtype}"), share)
        for dtype, fit in rates.matmul_flops_per_s.items():
            key = matmul_peak_key(dtype, kind)
            peaks[key] = fit.value / kind.matmul_efficiency
            sources[f"peak_flops_per_s.{key}"] = fit.provenance
        sources["matmul_efficiency"] = "fitted"
    if (bandwidth := rates.memory_bandwidth_bytes_per_s) is not None:
        changes |= {"memory_bandwidth_bytes_per_s": bandwidth.value, "bandwidth_efficiency": 1.0}
        sources |= {"memory_bandwidth_bytes_per_s": bandwidth.provenance, "bandwidth_efficiency": bandwidth.provenance}
    if (host := _host_bytes_per_s(profile)) is not None:
        changes["host_bandwidth_bytes_per_s"] = host
        sources["host_bandwidth_bytes_per_s"] = "fitted"
    if (launch := rates.launch_s) is not None:
        changes["launch_s"] = launch.value
        sources["launch_s"] = launch.provenance
    return msgspec.structs.replace(kind, peak_flops_per_s=peaks, provenance=sources, **changes)


def _host_bytes_per_s(profile: Profile) -> float | None:
    """What each device gets of the host's memory, in the slower direction, when as many copy as were measured."""
    lines = [one for one in profile.copy_lines if one.route != "device_to_device" and one.s_per_byte > 0]
    most = max((one.lanes for one in lines), default=0)
    return min((1 / one.s_per_byte for one in lines if one.lanes == most), default=None)


def _limited_memory(kind: DeviceKind, profile: Profile) -> DeviceKind:
    """The kind with no more usable memory than a program had on the device; a profile never adds any."""
    usable = profile.usable_memory_bytes
    if usable is None or not 0 < usable < kind.usable_bytes:
        return kind
    measured: Provenance = "measured"
    sources = {**kind.provenance, "reserve_bytes": measured}
    return msgspec.structs.replace(kind, reserve_bytes=kind.memory_bytes - usable, provenance=sources)


def _notes(kind: DeviceKind, profile: Profile, devices: int | None) -> tuple[str, ...]:
    notes = []
    if devices is not None and devices > profile.devices:
        notes.append(
            f"{profile.devices} devices ran together when {kind.name} was profiled; the cluster has {devices}: "
            "larger groups are priced from the measured ones"
        )
    if profile.gaps:
        notes.append(f"the profile of {kind.name} has {len(profile.gaps)} gaps; they are priced by its fitted rates")
    flat = [f"{one.kind} of {one.size}" for one in profile.collective_lines if one.s_per_byte <= 0]
    flat += [f"copies in {one.lanes} lanes" for one in profile.copy_lines if one.s_per_byte <= 0]
    if flat:
        notes.append(
            f"the profile of {kind.name} found no cost per byte for {', '.join(flat)}: not used; a longer --budget "
            "measures more sizes"
        )
    notes += [f"the profile of {kind.name}: {sentence}" for sentence in steadiness(profile)]
    if not profile.rates.matmul_flops_per_s:
        notes.append(f"the profile of {kind.name} has no matmul rate: the kind's own peak is used")
    return tuple(notes)
