"""Executed plans equal one device: every family on every kind of layout, every layout with one model.

Two steps of SGD with momentum behind a clip by global norm; loss, updates, carried state and aux are compared. The
small matrix runs by default; ``-m slow`` runs families x layouts.
"""

import dataclasses

import jax
import pytest

from costmodel.errors import InputError
from planner.frontend.task import TrainingTask
from tests.lowering.execution import assert_equals_one_device, gentle
from tests.lowering.layouts import LAYOUTS, VARIANTS, PinnedLayout
from tests.models.tiny import TINY

MODEL = "gpt"
PIPELINE = "3+5"
ONE_EACH = ("gpt", "gpt-dropout", "llama", "bert", "t5", "moe", "vit", "wide_resnet")
SMALL = [("tensor x data", n) for n in TINY] + [(PIPELINE, n) for n in ONE_EACH]
FULL = [(layout, n) for layout in LAYOUTS for n in TINY if (layout, n) not in SMALL and n != MODEL]


def family(name: str, monkeypatch: pytest.MonkeyPatch) -> TrainingTask:
    if name.startswith("wide_resnet"):
        # Rounding decides on which side of its kink a ReLU is, and one pixel's gradient shows: some smooth function.
        monkeypatch.setattr(jax.nn, "relu", jax.nn.silu)
    task = gentle(TINY[name](dtype="float32"))
    # Batch norm joins the examples of a microbatch, and of no other: the reference does the same.
    return dataclasses.replace(task, independent_microbatches=True) if task.state is not None else task


@pytest.mark.parametrize(("layout", "name"), SMALL)
def test_every_family(layout: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    task = family(name, monkeypatch)
    assert_equals_one_device(task, LAYOUTS[layout].plan(task))


@pytest.mark.parametrize("layout", [*(n for n in LAYOUTS if (n, MODEL) not in SMALL), *VARIANTS])
def test_every_layout(layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    task = family(MODEL, monkeypatch)
    assert_equals_one_device(task, {**LAYOUTS, **VARIANTS}[layout].plan(task))


@pytest.mark.slow
@pytest.mark.parametrize(("layout", "name"), FULL)
def test_every_family_on_every_layout(layout: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    task = family(name, monkeypatch)
    pinned: PinnedLayout = LAYOUTS[layout]
    if task.state is not None:  # carried state goes from microbatch to microbatch: one group a stage
        pinned = dataclasses.replace(
            pinned, stages=tuple(dataclasses.replace(s, groups=s.groups[:1]) for s in pinned.stages)
        )
    if name in ("wide_resnet", "moe-capacity") and layout == "1+2+2+3":
        # Layers that each make an item of one stacked value (state, balance losses) stay on one stage.
        with pytest.raises(InputError, match="cannot be cut into the 4 stages"):
            pinned.plan(task)
        return
    assert_equals_one_device(task, pinned.plan(task))
