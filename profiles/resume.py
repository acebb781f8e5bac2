"""Going on with a profile that was stopped, and how long one will take."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from costmodel.errors import ProfileError
from profiles.schema import Profile

if TYPE_CHECKING:
    from profiles.jobs import Job, Part
    from profiles.runner import DeviceFacts


def require_same_devices(known: Profile, facts: "DeviceFacts") -> None:
    """Raises unless measurements made now belong with those of a profile.

    Raises:
        ProfileError: MP308 with what differs: kind, count or software.
    """
    pairs = [
        ("devices", f"{known.devices} x {known.device_kind}", f"{facts.count} x {facts.kind.name}"),
        *((name, known.software.get(name, "none"), version) for name, version in sorted(facts.software.items())),
    ]
    if differ := [f"{name}: {was} then, {now} now" for name, was, now in pairs if was != now]:
        hint = "measure afresh (--fresh) into a file of its own; `meshplan profile merge` joins profiles of one kind"
        raise ProfileError("MP308", f"the profile to go on with was measured differently: {'; '.join(differ)}", hint)


@dataclass(frozen=True, kw_only=True)
class Outlook:
    """What a run would measure, and about how long that takes.

    Attributes:
        parts: part -> keys in the order of measurement.
        seconds: part -> about how long all of it takes, compiling included.
        there: measurements that need not be made again.
    """

    parts: Mapping[str, Sequence[str]]
    seconds: Mapping[str, float]
    there: int = 0

    @property
    def total_s(self) -> float:
        return sum(self.seconds.values())


def outlook(facts: "DeviceFacts", plan: "Mapping[Part, Sequence[Job]]", there: int) -> Outlook:
    """What planned jobs take on these devices, by what their kind's facts say."""
    return Outlook(
        parts={str(part): [job.key for job in jobs] for part, jobs in plan.items()},
        seconds={str(part): sum(job.expected_s(facts.kind) for job in jobs) for part, jobs in plan.items()},
        there=there,
    )
