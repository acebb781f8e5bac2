"""What crosses the cuts of a pipeline."""

import pytest

from planner.models.families.gpt import gpt
from planner.models.families.t5 import t5
from planner.search.facts import Facts
from planner.strategy.captured import CapturedModel
from planner.strategy.stages import cut_bytes, parts_of
from planner.strategy.strategy import Strategy
from planner.strategy.work import Work
from profiles.catalogue import device_kind

STREAM = 3 * 16 * 64 * 2  # three sequences of 16 positions, 64 wide, bfloat16


def cut(task: object, strategy: Strategy) -> float:
    facts = Facts(device_kind("A100-SXM4-80GB"))
    work: Work = CapturedModel(task).work(facts, strategy)  # type: ignore[arg-type]
    return cut_bytes(work, parts_of(work, strategy))


def test_a_decoder_also_hands_on_what_the_encoder_made() -> None:
    """Two cuts of six layers: before the decoder's one stream crosses, inside of it the encoder's result beside it."""
    task = t5(hidden=64, layers=3, heads=4, vocab=128, seq=16, ffn=128)
    inside = Strategy(pp=2, microbatch=3, partition=(4, 2))
    assert cut(task, inside) == pytest.approx(2 * STREAM)
    assert cut(task, Strategy(pp=2, microbatch=3, partition=(2, 4))) == pytest.approx(STREAM)
    assert cut(task, Strategy(pp=3, microbatch=3)) == pytest.approx(2 * STREAM)


def test_equal_layers_hand_on_one_stream() -> None:
    task = gpt(hidden=64, layers=4, heads=4, vocab=128, seq=16)
    assert cut(task, Strategy(pp=4, microbatch=3)) == pytest.approx(STREAM)
    assert cut(task, Strategy(microbatch=3)) == 0.0
