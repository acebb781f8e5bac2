"""Reads collectives out of compiled HLO text: kind, bytes, mesh axes, and how often each one runs.

The text is what ``jit(f).lower(...).compile().as_text()`` gives, for any backend. A collective inside a loop runs as
often as the loop's trip count says, which XLA knows for every `lax.scan`.
"""

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from costmodel.errors import LoweringError

# What XLA does to collectives once it has them: joins neighbouring all-reduces, merges equal ones, moves those of
# loop-invariant values (a parameter's gather) out of the loop. Without these passes each one that was written is found.
SEPARATE = {
    "xla_disable_hlo_passes": "cpu-all-reduce-combiner,cse,while-loop-invariant-code-motion,"
    "while-loop-expensive-invariant-code-motion,while-loop-invariant-code-motion-sinker"
}

KINDS = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute")
_COMPUTATION = re.compile(r"^(?P<entry>ENTRY )?%?(?P<name>[\w.-]+) \(.*\{$")
_COLLECTIVE = re.compile(rf"= (?P<result>.*?) (?P<kind>{'|'.join(KINDS)})(?P<start>-start)?\(")
_ARRAY = re.compile(r"\b(?P<type>[a-z]+\d*(?:e\d+m\d+\w*)?)\[(?P<shape>[\d,]*)\]")
_WHILE = re.compile(r" while\(.*condition=%?(?P<condition>[\w.-]+), body=%?(?P<body>[\w.-]+)")
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')
_CALL = re.compile(r"(?:calls|to_apply|true_computation|false_computation)=%?([\w.-]+)")
_BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}")
_OP_NAME = re.compile(r'op_name="([^"]*)"')
_IOTA = re.compile(r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?")
_LISTED = re.compile(r"replica_groups=\{((?:\{[\d,]*\},?)*)\}")
_PAIRS = re.compile(r"source_target_pairs=\{((?:\{[\d,]*\},?)*)\}")


@dataclass(frozen=True)
class HloCollective:
    """One collective instruction of a compiled program.

    Attributes:
        kind: all_reduce, all_gather, reduce_scatter, all_to_all or permute.
        bytes: on one device, of the tensor that is whole on the axes (of all_to_all the local operand): what
            `costmodel.sharding.CastStep.full_bytes` means.
        elements: of that tensor; arrays: how many it moves, above one where XLA joined several.
        axes: names of the mesh axes over which it communicates.
        groups: the devices that communicate with each other, as positions in the mesh; of a permute its pairs.
        runs: times that it runs in one run of the program.
        loops: trip counts of the loops around it, outermost first.
        computation: the HLO computation that holds it; op_name: JAX's path of the operation that it came from.
    """

    kind: str
    bytes: int
    elements: int
    arrays: int
    axes: tuple[str, ...]
    groups: tuple[tuple[int, ...], ...]
    loops: tuple[int, ...]
    computation: str
    op_name: str

    @property
    def runs(self) -> int:
        return math.prod(self.loops)

    @property
    def backward(self) -> bool:
        """Whether it came from the transpose of a differentiated function."""
        return "transpose(" in self.op_name


@dataclass
class Computation:
    """A computation of a module: its name and the lines of its instructions."""

    name: str
    lines: list[str] = field(default_factory=list)


def collectives(text: str, axis_names: Sequence[str], sizes: Sequence[int]) -> list[HloCollective]:
    """Every collective that the entry computation reaches, in order of the text.

    Args:
        axis_names, sizes: of the mesh whose devices, row-major, the program was compiled for.

    Raises:
        LoweringError: a collective lies in a loop of unknown length, or its groups are no mesh axes.
    """
    computations, entry = computations_of(text)
    loops = loops_of(computations, entry)
    found = []
    for computation in computations.values():
        for line in computation.lines:
            match = _COLLECTIVE.search(line)
            if match is None or computation.name not in loops:
                continue
            for around in loops[computation.name]:
                if None in around:
                    raise LoweringError(
                        "MP505", f"a collective lies in a loop of unknown length: {line.strip()[:200]}", ""
                    )
                found.append(_collective(match, line, computation.name, around, axis_names, sizes))  # type: ignore[arg-type]
    return found


def computations_of(text: str) -> tuple[dict[str, Computation], str]:
    """The computations of a module by name, and the name of its entry."""
    found: dict[str, Computation] = {}
    entry, current = "", None
    for line in text.splitlines():
        if line and not line[0].isspace() and (match := _COMPUTATION.match(line)):
            current = found[match["name"]] = Computation(match["name"])
            entry = match["name"] if match["entry"] else entry
        elif current is not None:
            current.lines.append(line)
    return found, entry


def loops_of(
    computations: dict[str, Computation], entry: str, *, fusions: bool = True
) -> dict[str, list[tuple[int | None, ...]]]:
    """Computation -> trip counts of the loops around it, once for each place that calls it. None: unknown.

    Args:
        fusions: also what fusions are made of.
    """
    found: dict[str, list[tuple[int | None, ...]]] = {}

    def visit(name: str, around: tuple[int | None, ...]) -> None:
        if name not in computations:
            return
        found.setdefault(name, []).append(around)
        for line in computations[name].lines:
            if not fusions and " fusion(" in line:
                continue
            for called, trips in _called(line):
                visit(called, around if trips is ... else (*around, trips))  # type: ignore[arg-type]

    visit(entry, ())
    return found


def _called(line: str) -> Iterator[tuple[str, object]]:
    """Computations that an instruction runs, with the trip count of a loop (``...`` for plain calls)."""
    if match := _WHILE.search(line):
        trips = _TRIPS.search(line)
        count = int(trips[1]) if trips else None
        yield match["condition"], count
        yield match["body"], count
        return
    for match in _CALL.finditer(line):
        yield match[1], ...
    if branches := _BRANCHES.search(line):
        for name in branches[1].split(","):
            yield name.strip().lstrip("%"), ...


def _collective(
    match: re.Match[str],
    line: str,
    computation: str,
    loops: tuple[int, ...],
    axis_names: Sequence[str],
    sizes: Sequence[int],
) -> HloCollective:
    arrays = [(_itemsize(a["type"]), _elements(a["shape"])) for a in _ARRAY.finditer(match["result"])]
    kind = {"collective-permute": "permute"}.get(match["kind"], match["kind"].replace("-", "_"))
    if match["start"] and kind != "all_reduce":
        arrays = arrays[len(arrays) // 2 :]  # operands, then results
    groups = _groups(line)
    times = len(groups[0]) if kind == "reduce_scatter" else 1
    name = _OP_NAME.search(line)
    return HloCollective(
        kind=kind,
        bytes=times * sum(size * n for size, n in arrays),
        elements=times * sum(n for _, n in arrays),
        arrays=1 if kind == "all_to_all" else len(arrays),
        axes=_axes(groups, axis_names, sizes, line),
        groups=tuple(tuple(group) for group in groups),
        loops=loops,
        computation=computation,
        op_name=name[1] if name else "",
    )


def _itemsize(type_name: str) -> int:
    bits = re.search(r"\d+", type_name)
    return int(bits[0]) // 8 if bits else 1  # pred


def _elements(shape: str) -> int:
    return math.prod(int(n) for n in shape.split(",") if n)


def _groups(line: str) -> list[list[int]]:
    """Device positions that communicate with each other."""
    if match := _IOTA.search(line):
        shape, dims = (tuple(int(n) for n in match[i].split(",")) for i in (1, 2))
        order = tuple(int(n) for n in match[3].split(",")) if match[3] else tuple(range(len(dims)))
        flat = [_transposed(i, dims, order) for i in range(math.prod(dims))]
        return [flat[i : i + shape[-1]] for i in range(0, len(flat), shape[-1])]
    if match := _LISTED.search(line) or _PAIRS.search(line):
        return [[int(n) for n in group.split(",") if n] for group in re.findall(r"\{([\d,]*)\}", match[1])]
    raise LoweringError("MP505", f"the devices of a collective cannot be read: {line.strip()[:300]}", "")


def _transposed(index: int, dims: Sequence[int], order: Sequence[int]) -> int:
    """Value at a flat index of ``iota(prod(dims)).reshape(dims).transpose(order)``."""
    shape = [dims[d] for d in order]
    strides = [math.prod(dims[d + 1 :]) for d in range(len(dims))]
    value = 0
    for size, axis in zip(reversed(shape), reversed(order), strict=True):
        index, place = divmod(index, size)
        value += place * strides[axis]
    return value


def _axes(
    groups: Sequence[Sequence[int]], axis_names: Sequence[str], sizes: Sequence[int], line: str
) -> tuple[str, ...]:
    """Mesh axes along which the devices of each group differ."""
    strides = [math.prod(sizes[i + 1 :]) for i in range(len(sizes))]

    def place(device: int) -> tuple[int, ...]:
        return tuple(device // stride % size for stride, size in zip(strides, sizes, strict=True))

    varying: set[int] = set()
    for group in groups:
        places = [place(device) for device in group]
        varying.update(i for i in range(len(sizes)) if len({p[i] for p in places}) > 1)
    axes = tuple(axis_names[i] for i in sorted(varying))
    expected = math.prod(sizes[i] for i in varying)
    if "source_target_pairs" not in line and any(len(group) != expected for group in groups):
        raise LoweringError("MP505", f"a collective joins devices that are no mesh axis: {line.strip()[:300]}", "")
    return axes


__all__ = ["SEPARATE", "Computation", "HloCollective", "collectives", "computations_of", "loops_of"]
