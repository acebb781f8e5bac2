"""The shipped catalogue of node types: `catalog/nodes_*.toml`, links as tiers, each number with its source.

What joins the devices of a node follows from the node, never from the device's name: the same GPU stands in nodes with
and without NVSwitch, and behind one NIC or sixteen.
"""

import tomllib
from collections.abc import Mapping
from functools import lru_cache
from importlib.resources import files
from types import MappingProxyType
from typing import Any

import msgspec

from costmodel.cluster import Link, LinkTier
from costmodel.documents import convert, suggestion
from costmodel.errors import InputError


class NodeType(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Equal nodes that one can buy or rent.

    Attributes:
        name: as its vendor or site calls it.
        device: name of its device kind in the catalogue; devices_per_node: how many of them.
        intra: tiers inside a node, narrow to wide. inter: what joins nodes; None for a single machine.
        source: where the figures were read. notes: anything that the reader should know.
    """

    name: str
    device: str
    devices_per_node: int
    intra: tuple[LinkTier, ...]
    inter: Link | None = None
    source: str
    notes: str = ""


@lru_cache(maxsize=1)
def load_node_types() -> Mapping[str, NodeType]:
    """Every shipped node type by name, read once.

    Raises:
        InputError: MP131 for a catalogue file with a mistake; MP134 for a name that stands twice.
    """
    found: dict[str, NodeType] = {}
    for entry in sorted(files("profiles").joinpath("catalog").iterdir(), key=lambda one: one.name):
        if not entry.name.endswith(".toml"):
            continue
        for at, table in enumerate(tomllib.loads(entry.read_text(encoding="utf-8")).get("node", ())):
            node = convert(table, NodeType, code="MP131", root=f"catalog/{entry.name}: node[{at}]")
            if node.name in found:
                raise InputError("MP134", f"catalog/{entry.name}: {node.name!r} is in the catalogue already")
            found[node.name] = node
    return MappingProxyType(found)


def node_type(name: str, path: str = "node") -> NodeType:
    """The catalogue's node type called `name`; `path` says where the name stands, for messages.

    Raises:
        InputError: MP132, with the names that were probably meant.
    """
    known = load_node_types()
    if name not in known:
        hint = f"{suggestion(name, known, 'node types are')}; `meshplan cluster nodes` lists them"
        raise InputError("MP132", f"{path}: unknown node type {name!r}", hint)
    return known[name]


def with_node_types(document: Mapping[str, Any]) -> dict[str, Any]:
    """A cluster document in which each group's `node = "NAME"` is written out; what the group states itself stays.

    Raises:
        InputError: MP132 an unknown node type; MP131 a `node` that is no text.
    """
    groups = document.get("group")
    if not isinstance(groups, list):
        return dict(document)
    return {**document, "group": [_written_out(group, f"group[{at}]") for at, group in enumerate(groups)]}


def _written_out(group: Any, path: str) -> Any:
    if not isinstance(group, dict) or "node" not in group:
        return group
    name = group["node"]
    if not isinstance(name, str):
        raise InputError(
            "MP131",
            f"{path}.node must be str, got {type(name).__name__}",
            "`node` names a node type; `nodes` says how many nodes the group has",
        )
    node = node_type(name, f"{path}.node")
    facts: dict[str, Any] = {
        "device": node.device,
        "devices_per_node": node.devices_per_node,
        "intra": msgspec.to_builtins(node.intra),
    }
    if node.inter is not None:
        facts["inter"] = msgspec.to_builtins(node.inter)
    own = {key: value for key, value in group.items() if key != "node"}
    if own.get("devices_per_node", node.devices_per_node) != node.devices_per_node:
        facts.pop("intra")  # tiers of another count of devices; the group states its own, or the kind's are assumed
    return {**facts, **own}
