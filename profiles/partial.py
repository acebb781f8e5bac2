"""The profile of a run that is not finished, beside the place where the whole one will be.

It is a profile like any other, written whole after each measurement, and gone when the run is finished. The old profile
stays where it is until then.
"""

from pathlib import Path

from costmodel.errors import ProfileError
from profiles.schema import Profile
from profiles.store import read_profile, write_profile

SUFFIX = ".partial"


def partial_path(target: Path) -> Path:
    """Where the unfinished profile of `target` lies."""
    return target.with_name(target.name + SUFFIX)


def read_partial(target: Path) -> Profile | None:
    """What an earlier run that was to write `target` left, if any.

    Raises:
        ProfileError: it is there and cannot be used (as `store.decode_profile`), with how to do without it.
    """
    path = partial_path(target)
    if not path.is_file():
        return None
    try:
        return read_profile(path)
    except ProfileError as error:
        hint = f"measure afresh with --fresh, or move {path} away; nothing was changed"
        raise ProfileError(error.code, f"an earlier run left {path}: {error.message}", hint) from None


def write_partial(target: Path, profile: Profile) -> None:
    """Leaves a profile as it stands.

    Raises:
        ProfileError: MP300 if the place cannot be written.
    """
    path = partial_path(target)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ProfileError("MP300", f"cannot make {path.parent}: {error.strerror or error}", "") from None
    write_profile(path, profile)


def remove_partial(target: Path) -> None:
    """Drops what a run left, now that the whole profile is written."""
    partial_path(target).unlink(missing_ok=True)
