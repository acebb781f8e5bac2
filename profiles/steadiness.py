"""Whether a profile's measurements can be relied on: drift within a measurement, and a device that slows down."""

from profiles.records import drift_of, records_of, spread_of, time_of
from profiles.schema import Profile

DRIFTED = 0.1
"""Later runs that take more than this share longer or shorter than earlier ones: no steady state was reached."""

SLOWED = 0.05
"""A reference product that takes this share longer at the end than at its best: heat, power, or other work."""

NOISY = 0.2
"""A median absolute deviation above this share of the median."""


def steadiness(profile: Profile) -> tuple[str, ...]:
    """Sentences about what was not steady; none where all was."""
    found = []
    if len(profile.pulses) > 1:
        best, last = min(profile.pulses, key=lambda one: one.time_s), profile.pulses[-1]
        slower = last.time_s / best.time_s - 1
        if slower > SLOWED:
            when = f"{last.after_s - best.after_s:.0f} s later" if last.after_s > best.after_s else "in the end"
            found.append(
                f"the device slowed down: the same product took {slower:.0%} longer {when} (heat, a power limit, or "
                "other work on it)"
            )
    held_back = tuple(dict.fromkeys(words for one in profile.pulses for words in one.held_back))
    if held_back:
        clocks = [one.sm_clock_hz for one in profile.pulses if one.sm_clock_hz is not None]
        fell = (
            f"; its clock fell from {max(clocks) / 1e6:.0f} to {min(clocks) / 1e6:.0f} MHz" if len(clocks) > 1 else ""
        )
        found.append(f"the driver held the device back while it was measured: {', '.join(held_back)}{fell}")
    records = list(records_of(profile))
    drifted = sorted(((abs(drift_of(record)), key) for key, record in records), reverse=True)
    drifted = [(share, key) for share, key in drifted if share > DRIFTED]
    noisy = [(spread_of(record) / time_of(record), key) for key, record in records if time_of(record) > 0]
    noisy = sorted(((share, key) for share, key in noisy if share > NOISY), reverse=True)
    if drifted:
        share, key = drifted[0]
        found.append(
            f"{len(drifted)} of {len(records)} measurements drifted by over {DRIFTED:.0%}, most {key}: {share:.0%}"
        )
    if noisy:
        share, key = noisy[0]
        found.append(
            f"{len(noisy)} of {len(records)} measurements scatter by over {NOISY:.0%}, most {key}: {share:.0%}"
        )
    return tuple(found)
