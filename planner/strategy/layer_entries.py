"""Which entry of a table of layer times stands for which blocks of the model.

The entries are the model's in order: at most one before the layers (the embedding), the layers, at most two behind them
(a last norm, the head). A table says no more than names and times, so that whose it is must be told from these:

N1  count   as many entries as layers, or one to three more; of two or three, one stands before the layers
N2  layers  layers that are alike in the model take alike: none under half or over twice their median
N3  beside  an embedding or a norm takes not what a layer takes, forward and backward within a quarter of it: such an
            entry is one layer more. A head may
N4  one     a single entry beside the layers, which few tables have, is the first or the last: it is unlike the layers,
            and they are all alike, as N3 has it
"""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from costmodel.errors import InputError

MOST_BEFORE, MOST_BEHIND = 1, 2
UNLIKE, ALIKE = 2.0, 1.25
"""Factors: from a layer to the median of its like (N2), and within which an entry beside them passes for one (N3)."""

Times = tuple[float, float]  # forward, backward seconds


@dataclass(frozen=True)
class Entries:
    """Positions of a table's entries: those before the layers, the layers', those behind them."""

    before: range
    layers: range
    behind: range


def entries_of(times: Sequence[Times], layers: Sequence[str], model: str) -> Entries:
    """How a table's entries fit a model.

    Args:
        times: of each entry, all at one size.
        layers: the block class of each of the model's layers, at least one, in order.
        model: the table's name of it, for messages.

    Raises:
        InputError: MP189 the table has no place for the model's layers, or is of a model with another number of them.
    """
    count, beside = len(layers), len(times) - len(layers)
    have = f"the table has {len(times)} entries of {model}, the model {count} layer{'' if count == 1 else 's'}"
    hint = "import the model's own table, or name the model that was measured"
    if beside < 0:
        raise InputError("MP189", f"{have}: {-beside} too few", hint)
    most = MOST_BEFORE + MOST_BEHIND
    if beside > most:
        message = f"{have}: {beside} stand beside the layers, and an embedding, a norm and a head make {most}"
        raise InputError("MP189", message, hint)
    ways = [(beside, 0), (0, beside)] if beside == 1 else [(min(1, beside), max(0, beside - 1))]
    wrong = [_wrong(times, layers, before, behind) for before, behind in ways]
    fitting = [way for way, why in zip(ways, wrong, strict=True) if not why]
    if not fitting:
        raise InputError("MP189", f"{have}: {wrong[0]}", hint)
    if len(fitting) > 1:
        message = f"{have}: which of the two stands for the layer cannot be told"
        raise InputError("MP189", message, "give the table both entries beside the layer, before and behind it")
    before = fitting[0][0]
    return Entries(range(before), range(before, before + count), range(before + count, len(times)))


def _wrong(times: Sequence[Times], layers: Sequence[str], before: int, behind: int) -> str:
    """Why entries cannot lie so; '' if they can."""
    own = times[before : before + len(layers)]
    usual = {}
    for key in dict.fromkeys(layers):
        of_class = [one for one, k in zip(own, layers, strict=True) if k == key]
        usual[key] = (median(f for f, _ in of_class), median(b for _, b in of_class))
    for at, (one, key) in enumerate(zip(own, layers, strict=True), start=before):
        alike = _like(one, usual[key]) if before + behind == 1 else _within(sum(one), sum(usual[key]), UNLIKE)
        if not alike:
            return f"entry {at} takes {sum(one):.3g} s where other layers take {sum(usual[key]):.3g} s"
    outside = [*range(before), *range(before + len(layers), len(times))]
    if before and behind:  # a head may take what a layer takes
        outside.pop()
    for at in outside:
        if any(_like(times[at], one) for one in usual.values()):
            return f"entry {at}, which would stand beside them, takes what a layer takes"
    return ""


def _like(one: Times, other: Times) -> bool:
    return all(_within(a, b, ALIKE) for a, b in zip(one, other, strict=True))


def _within(a: float, b: float, factor: float) -> bool:
    return a == b or (min(a, b) > 0.0 and max(a, b) <= factor * min(a, b))
