"""Documents of fitted constants: what device kinds achieve, and what software stacks add.

`stacks/*.toml` ship with the package, fitted to published measurements; `meshplan profile calibrate` writes one for a
user's own runs. A document names what each of its constants was fitted on.

    [[stack]]                         costmodel.stack.Stack
    name = "megatron"
    step_s = 0.1

    [[fitted]]                        achieved shares of device kinds
    kinds = ["A100-SXM4-80GB"]
    matmul_efficiency = 0.85
"""

import os
import tomllib
from collections.abc import Mapping
from functools import lru_cache
from importlib.resources import files
from pathlib import Path
from typing import Any

import msgspec

from costmodel.cluster import Cluster
from costmodel.device_kind import DeviceKind, check_device_kind
from costmodel.documents import convert, suggestion
from costmodel.errors import InputError
from costmodel.stack import Stack, check_stack
from profiles.datasheets import datasheet_kinds
from profiles.whole_file import write_whole

SHARES = (
    "matmul_efficiency",
    "matmul_half_depth",
    "matmul_half_area",
    "bandwidth_efficiency",
    "misaligned_efficiency",
    "attention_efficiency",
)
"""Fields of a device kind that are fitted."""

COMPILED = Stack(name="compiled", flat_state=False)
"""The planner's own programs, with the links' and kinds' own constants."""


class FittedKinds(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What device kinds achieve, as fitted; fields as in `costmodel.device_kind.DeviceKind`, None for unfitted ones."""

    kinds: tuple[str, ...]
    matmul_efficiency: float | None = None
    matmul_half_depth: float | None = None
    matmul_half_area: float | None = None
    bandwidth_efficiency: float | None = None
    misaligned_efficiency: float | None = None
    attention_efficiency: float | None = None
    fitted_on: str = ""

    def applied(self, kind: DeviceKind) -> DeviceKind:
        """The kind with these constants; they are marked as fitted."""
        given = {name: value for name in SHARES if (value := getattr(self, name)) is not None}
        provenance = {**kind.provenance, **dict.fromkeys(given, "fitted")}
        return msgspec.structs.replace(kind, provenance=provenance, **given)


class Constants(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One document."""

    stacks: tuple[Stack, ...] = msgspec.field(name="stack", default=())
    fitted: tuple[FittedKinds, ...] = ()

    def on(self, cluster: Cluster) -> Cluster:
        """A cluster whose devices achieve what was fitted for their kinds."""
        groups = tuple(msgspec.structs.replace(g, device=self.of(g.device)) for g in cluster.groups)
        return msgspec.structs.replace(cluster, groups=groups)

    def of(self, kind: DeviceKind) -> DeviceKind:
        for one in self.fitted:
            if kind.name in one.kinds:
                return one.applied(kind)
        return kind


def parse_constants(text: str, source: str) -> Constants:
    """Reads and checks a document; `source` names it in messages.

    Raises:
        InputError: MP187 for text that is no TOML or has unknown or mistyped fields; MP182, MP133 for impossible
            numbers.
    """
    try:
        document: Any = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise InputError("MP187", f"{source} is not TOML: {error}", "a document has [[stack]] and [[fitted]]") from None
    constants = convert(document, Constants, code="MP187", root=source)
    for at, stack in enumerate(constants.stacks):
        check_stack(stack, f"{source}: stack[{at}]")
    known = datasheet_kinds()
    for at, one in enumerate(constants.fitted):
        for name in one.kinds:
            if name in known:
                check_device_kind(one.applied(known[name]), f"{source}: fitted[{at}]")
    return constants


def read_constants(path: str | Path) -> Constants:
    """Reads a document's file.

    Raises:
        InputError: MP187 if it cannot be read; else as `parse_constants`.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        hint = f"shipped stacks are {', '.join(shipped_stacks())}"
        raise InputError("MP187", f"cannot read constants {path}: {reason}", hint) from None
    return parse_constants(text, str(path))


def encode_constants(constants: Constants) -> str:
    """The document: stacks, then kinds; fields in the order of the schema, defaults left out."""
    lines: list[str] = []
    for heading, entries in (("stack", constants.stacks), ("fitted", constants.fitted)):
        for entry in entries:
            lines.append(f"[[{heading}]]")
            for name in entry.__struct_fields__:
                value = getattr(entry, name)
                default = _default(type(entry), name)
                if value is not None and value != default:
                    lines.append(f"{name} = {_toml(value)}")
            lines.append("")
    return "\n".join(lines)


def _default(kind: type, name: str) -> Any:
    return next((f.default for f in msgspec.structs.fields(kind) if f.name == name), None)


def _toml(value: Any) -> str:
    if isinstance(value, str):
        return '"' + value.replace("\\", "\\\\").replace('"', '\\"') + '"'
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple):
        return "[" + ", ".join(_toml(one) for one in value) + "]"
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def write_constants(path: str | Path, constants: Constants) -> None:
    """Writes a document, whole or not at all.

    Raises:
        InputError: MP187 if the place cannot be written.
    """
    try:
        write_whole(Path(os.path.realpath(path)), encode_constants(constants).encode(), 0o644)
    except OSError as error:
        raise InputError("MP187", f"cannot write constants {path}: {error.strerror or error}", "") from None


@lru_cache(maxsize=1)
def shipped() -> Constants:
    """Constants of every shipped document."""
    stacks: list[Stack] = []
    fitted: list[FittedKinds] = []
    folder = files("profiles").joinpath("stacks")
    entries = folder.iterdir() if folder.is_dir() else ()  # a folder without a document is in no checkout
    for entry in sorted(entries, key=lambda one: one.name):
        if entry.name.endswith(".toml"):
            one = parse_constants(entry.read_text(encoding="utf-8"), f"stacks/{entry.name}")
            stacks += one.stacks
            fitted += one.fitted
    return Constants(stacks=tuple(stacks), fitted=tuple(fitted))


def shipped_stacks() -> Mapping[str, Stack]:
    """Shipped stacks by name, the planner's own programs first."""
    return {stack.name: stack for stack in (COMPILED, *shipped().stacks)}


def find_stack(name: str) -> tuple[Stack, Constants]:
    """A shipped stack by name, or the first of a document's file, with the constants of device kinds that come with it:
    none with a shipped one, since the catalogue's kinds have theirs, and a cluster may state its own.

    Raises:
        InputError: MP187 for a name that there is not, or a document without a stack.
    """
    known = shipped_stacks()
    if name in known:
        return known[name], Constants()
    if not (name.endswith(".toml") or os.sep in name):
        raise InputError("MP187", f"there is no stack {name!r}", suggestion(name, tuple(known), "shipped stacks are"))
    constants = read_constants(name)
    if not constants.stacks:
        raise InputError("MP187", f"{name} has no [[stack]]", "`meshplan profile calibrate` writes one")
    return constants.stacks[0], constants
