"""Extends words to more microbatches by repeating a piece of their steady state."""

from collections.abc import Iterator, Sequence

from costmodel.schedule.straight import Word

_LONGEST_PERIOD = 8


def extended_words(words: Sequence[Word], microbatches: int, wanted: int) -> Iterator[tuple[Word, ...]]:
    """Longer words, for each piece of the steady state that can be repeated; they may deadlock.

    A piece runs from forward n to just before forward n + r on every stage. It can be repeated if it also has r
    backwards (and r weight gradients, where words have any) on each stage: memory is then the same after it as before.
    Pieces in the middle come first, short ones before long ones.

    Args:
        words: one a stage.
        microbatches: how many they run.
        wanted: how many the longer words run.
    """
    if wanted <= microbatches:
        return
    forwards = [[at for at, kind in enumerate(word) if kind == 0] for word in words]
    for period in range(1, _LONGEST_PERIOD + 1):
        repeats, rest = divmod(wanted - microbatches, period)
        if rest:
            continue
        found = 0
        for first in sorted(range(1, microbatches - period), key=lambda n: (abs(2 * n + period - microbatches), n)):
            pieces = [word[at[first] : at[first + period]] for word, at in zip(words, forwards)]
            if all(
                len(piece) == period * len(word) // microbatches and piece.count(1) == period
                for piece, word in zip(pieces, words)
            ):
                yield tuple(
                    word[: at[first]] + piece * repeats + word[at[first] :]
                    for word, at, piece in zip(words, forwards, pieces)
                )
                found += 1
                if found == 2:
                    break
