"""Plan files on disk."""

import os
from pathlib import Path

from costmodel.errors import InputError
from planner.planfile.codec import decode, encode
from planner.planfile.schema import Plan
from profiles.whole_file import write_whole


def read_plan(path: str | Path) -> Plan:
    """Reads and checks a plan file.

    Raises:
        InputError: MP150 if the file cannot be read, MP151 to MP153 if it holds no plan, MP157 if `path` is no path.
    """
    _require_path(path, "planner.load_plan(path)")
    return decode(read_bytes(path), source=str(path))


def write_plan(path: str | Path, plan: Plan) -> None:
    """Writes a plan file whole or not at all: equal plans give equal bytes.

    Raises:
        InputError: MP156 if the file cannot be written, MP157 if `path` is no path or `plan` no plan.
    """
    call = "planner.save_plan(path, plan)"
    if isinstance(path, Plan):
        raise InputError("MP157", f"the first argument is a Plan and the second a {_kind(plan)}", f"swap them: {call}")
    _require_path(path, call)
    if not isinstance(plan, Plan):
        raise InputError("MP157", f"the plan to save is a Plan, as planner.plan returns it; got a {_kind(plan)}", call)
    write_bytes(path, encode(plan))


def _require_path(path: object, call: str) -> None:
    if not isinstance(path, str | os.PathLike):
        raise InputError("MP157", f"the path of a plan file is a str or a pathlib.Path; got a {_kind(path)}", call)


def _kind(value: object) -> str:
    return type(value).__name__


def read_bytes(path: str | Path) -> bytes:
    """A file's bytes, or InputError MP150 that names it."""
    try:
        return Path(path).read_bytes()
    except IsADirectoryError:
        raise InputError("MP150", f"{path} is a folder, not a file", "give the path of a plan file") from None
    except OSError as error:
        raise InputError("MP150", f"cannot read {path}: {error.strerror or error}", "check the path") from None


def require_writable(path: str | Path) -> None:
    """That `write_bytes` can write a file there, as far as can be said without writing; asked before long work.

    Raises:
        InputError: MP156, with the folder that is missing or not writable.
    """
    target = Path(os.path.realpath(path))
    if not str(path):
        raise InputError("MP156", "cannot write a file without a name", "give the path of a file")
    if target.is_dir():
        raise InputError("MP156", f"cannot write {path}: it is a folder", "give the path of a file in it")
    if target.exists() and not target.is_file():
        return  # a pipe or a device
    folder = target.parent
    if not folder.is_dir():
        reason = "is a file" if folder.exists() else "does not exist"
        raise InputError("MP156", f"cannot write {path}: the folder {folder} {reason}", "make the folder first")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise InputError("MP156", f"cannot write {path}: no right to write in {folder}", "check folder and rights")


def write_bytes(path: str | Path, data: bytes) -> None:
    """Writes a file through a temporary one beside it, so that readers see the old bytes or all of the new ones."""
    target = Path(os.path.realpath(path))
    if target.exists() and not target.is_file():  # a pipe or a device such as /dev/stdout
        _write_through(target, data)
        return
    try:
        mode = target.stat().st_mode & 0o777 if target.exists() else 0o666 & ~_umask()
        write_whole(target, data, mode)
    except OSError as error:
        message = f"cannot write {path}: {error.strerror or error}"
        raise InputError("MP156", message, "check folder and rights") from None


def _write_through(target: Path, data: bytes) -> None:
    try:
        target.write_bytes(data)
    except OSError as error:
        raise InputError("MP156", f"cannot write {target}: {error.strerror or error}", "give a file's path") from None


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
