"""Profiles of one kind of device, from several machines or runs, as one."""

from collections.abc import Sequence
from dataclasses import dataclass

from costmodel.errors import ProfileError
from costmodel.units import format_count, format_seconds
from profiles.fitting import fitted
from profiles.records import Record, drift_of, records_of, spread_of, time_of, with_records
from profiles.schema import BlockTime, Gap, Profile, Rates

DISAGREE = 0.2
"""Two measurements of one thing that differ by more than this share are a conflict."""


@dataclass(frozen=True)
class Merged:
    """A merged profile, and sentences about what its parts do not agree on."""

    profile: Profile
    conflicts: tuple[str, ...] = ()


def merge_profiles(parts: Sequence[tuple[str, Profile]]) -> Merged:
    """One profile with the measurements of all.

    What several have measured is taken from the steadiest: the least drift, then the least scatter; of blocks, from
    those that timed most layers in one loop. Constants are
    fitted again to all samples; where a part has constants without samples, the first part's stay.

    Args:
        parts: profiles by name (their files), for messages; at least one.

    Raises:
        ProfileError: MP301 they are of different kinds; MP309 of different versions of JAX, which compile differently.
    """
    if not parts:
        raise ValueError("merge_profiles() needs at least one profile")
    first_name, first = parts[0]
    for name, one in parts[1:]:
        if one.device_kind != first.device_kind:
            message = f"{name} is of {one.device_kind!r}, {first_name} of {first.device_kind!r}"
            raise ProfileError("MP301", message, "a profile is of one kind of device: merge those of each kind apart")
    conflicts = list(_software(parts))
    counts = {name: one.devices for name, one in parts}
    if len(set(counts.values())) > 1:
        each = ", ".join(f"{count} in {name}" for name, count in counts.items())
        conflicts.append(f"devices that ran together: {each}; fewer share less power and fewer links")
    found: dict[str, list[tuple[str, Record]]] = {}
    for name, one in parts:
        for key, record in records_of(one):
            found.setdefault(key, []).append((name, record))
    chosen: list[Record] = []
    for key, several in found.items():
        name, record = min(
            several, key=lambda pair: (-_layers(pair[1]), round(abs(drift_of(pair[1])), 2), _scatter(pair[1]))
        )
        chosen.append(record)
        if len({_layers(other) for _, other in several}) > 1:
            each = ", ".join(
                f"{format_count(_layers(other), 'layer', 'layers')} in {where}" for where, other in several
            )
            conflicts.append(f"{key}: timed in loops of {each}; that of {name} is kept")
            continue
        times = [time_of(other) for _, other in several]
        if max(times) > (1 + DISAGREE) * min(times):
            each = ", ".join(f"{format_seconds(time_of(other))} in {where}" for where, other in several)
            conflicts.append(f"{key}: {each}; that of {name} is kept")
    usable = [one.usable_memory_bytes for _, one in parts if one.usable_memory_bytes is not None]
    gaps = {gap.what: gap.cause for _, one in parts for gap in one.gaps if gap.what not in found}
    names = ", ".join(name for name, _ in parts)
    base = Profile(
        device_kind=first.device_kind,
        jax_device_kind=first.jax_device_kind,
        platform=first.platform,
        devices=max(counts.values()),
        measured_at=max(one.measured_at for _, one in parts),
        software={key: value for _, one in reversed(parts) for key, value in one.software.items()},
        usable_memory_bytes=min(usable, default=None),
        rates=_rates([one.rates for _, one in parts]),
        microbatches=tuple(sorted({size for _, one in parts for size in one.microbatches})),
        collective_lines=_first(
            [(line.kind, line.size, line.stride, line) for _, one in parts for line in one.collective_lines]
        ),
        copy_lines=_first([(line.route, line.lanes, line) for _, one in parts for line in one.copy_lines]),
        pulses=first.pulses if len(parts) == 1 else (),
        sources=tuple(dict.fromkeys([*(source for _, one in parts for source in one.sources), f"merged of {names}"])),
        gaps=tuple(Gap(what=what, cause=cause) for what, cause in gaps.items()),
    )
    return Merged(fitted(with_records(base, chosen)), tuple(conflicts))


def _software(parts: Sequence[tuple[str, Profile]]) -> list[str]:
    """Sentences about versions that differ a little; an error for those that differ much."""
    known = [(name, one.software) for name, one in parts if one.software]
    notes = []
    for what in sorted({what for _, versions in known for what in versions}):
        each = {name: versions.get(what, "none") for name, versions in known}
        if len(set(each.values())) < 2:
            continue
        text = ", ".join(f"{version} in {name}" for name, version in each.items())
        if what in ("jax", "jaxlib") and len({version.split(".")[:2][-1] for version in each.values()}) > 1:
            hint = "measure again with one version of JAX: what it compiles to differs"
            raise ProfileError("MP309", f"the profiles are of different versions of {what}: {text}", hint)
        notes.append(f"{what}: {text}")
    return notes


def _layers(record: Record) -> int:
    return record.layers if isinstance(record, BlockTime) else 1


def _scatter(record: Record) -> float:
    time_s = time_of(record)
    return spread_of(record) / time_s if time_s > 0 else 0.0


def _rates(several: Sequence[Rates]) -> Rates:
    """Each constant of the first that has it."""
    products = {dtype: fit for one in reversed(several) for dtype, fit in one.matmul_flops_per_s.items()}
    return Rates(
        matmul_flops_per_s=dict(sorted(products.items())),
        memory_bandwidth_bytes_per_s=next(
            (one.memory_bandwidth_bytes_per_s for one in several if one.memory_bandwidth_bytes_per_s is not None), None
        ),
        launch_s=next((one.launch_s for one in several if one.launch_s is not None), None),
    )


def _first(keyed: Sequence[tuple]) -> tuple:
    """The first entry of each key; an entry stands last in its tuple."""
    found: dict[tuple, object] = {}
    for *key, entry in keyed:
        found.setdefault(tuple(key), entry)
    return tuple(found.values())
