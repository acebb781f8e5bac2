"""Which entry of a layer table stands for what, and tables that are not the model's."""

import pytest

from costmodel.errors import InputError
from planner.strategy.layer_entries import Entries, entries_of

E, N, H = (0.003, 0.0), (0.001, 0.003), (0.09, 0.18)
L, WIDE = (0.1, 0.2), (0.3, 0.6)


@pytest.mark.parametrize(
    ("times", "expected"),
    [
        ([L, L, L], Entries(range(0), range(3), range(3, 3))),
        ([E, L, L, L], Entries(range(1), range(1, 4), range(4, 4))),
        ([L, L, L, (0.05, 0.1)], Entries(range(0), range(3), range(3, 4))),
        ([E, L, L, L, H], Entries(range(1), range(1, 4), range(4, 5))),
        ([E, L, L, L, N, H], Entries(range(1), range(1, 4), range(4, 6))),
    ],
)
def test_entries_have_their_places(times: list[tuple[float, float]], expected: Entries) -> None:
    assert entries_of(times, "kkk", "m") == expected


def test_layers_of_several_classes_are_compared_with_their_like() -> None:
    assert entries_of([E, L, WIDE, L, WIDE, H], "abab", "m").layers == range(1, 5)
    with pytest.raises(InputError, match=r"entry 2 takes 0\.9 s where other layers take 0\.3 s"):
        entries_of([E, L, WIDE, L, L, H], "aaaa", "m")


@pytest.mark.parametrize(
    ("times", "words"),
    [
        ([L, L], "1 too few"),
        ([L, L, L, L], "entry 0, which would stand beside them, takes what a layer takes"),
        ([E, L, L, (0.05, 0.1)], "entry 3 takes"),
        ([L, L, L, L, L], "entry 0, which would stand beside them"),
        ([E, L, L, N, H], "entry 3 takes"),
        ([E, L, L, L, L, H], "entry 4, which would stand beside them"),
        ([E, L, L, L, L, N, H], "4 stand beside the layers"),
    ],
)
def test_another_number_of_layers_is_refused(times: list[tuple[float, float]], words: str) -> None:
    with pytest.raises(InputError, match=words) as caught:
        entries_of(times, "kkk", "m")
    assert caught.value.code == "MP189" and "the model 3 layers" in caught.value.message


def test_one_layer() -> None:
    with pytest.raises(InputError, match="which of the two stands for the layer cannot be told"):
        entries_of([E, L], "k", "m")
    assert entries_of([E, L, H], "k", "m").layers == range(1, 2)
