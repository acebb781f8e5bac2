"""How a value lies along the sequence while one chunk runs."""

from collections.abc import Sequence
from typing import NamedTuple


class Cut(NamedTuple):
    """What chunk j of c has of a value.

    Args:
        chunk: the dim of which it has its own slice, j of c; -1 for none.
        prefix: the dim of which it has the slices 0 to j; -1 for none.
        partial: the value is the sum of what the chunks have.
    """

    chunk: int = -1
    prefix: int = -1
    partial: bool = False

    def shifted(self, by: int) -> "Cut":
        """The cut of the value with `by` leading dims more (or, below zero, less)."""
        chunk, prefix = (d + by if d >= 0 else d for d in (self.chunk, self.prefix))
        return Cut(chunk, prefix, self.partial)


WHOLE = Cut()


def cut_shape(shape: Sequence[int], cut: Cut, chunks: int, at: int) -> tuple[int, ...]:
    """Shape of what chunk `at` has of a value of some shape."""
    out = list(shape)
    if cut.chunk >= 0:
        out[cut.chunk] //= chunks
    if cut.prefix >= 0:
        out[cut.prefix] = out[cut.prefix] // chunks * (at + 1)
    return tuple(out)


def text_of(cut: Cut) -> str:
    """Words for a message."""
    if cut.partial:
        return "a sum over all tokens"
    if cut.prefix >= 0:
        return f"the tokens so far along dim {cut.prefix}"
    return f"one chunk along dim {cut.chunk}" if cut.chunk >= 0 else "whole"
