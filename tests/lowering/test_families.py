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
SMALL = ("tensor x data", "3+5")


def family(name: str, monkeypatch: pytest.MonkeyPatch) -> TrainingTask:
    if name.startswith("wide_resnet"):
        # Rounding decides on which side of its kink a ReLU is, and one pixel's gradient shows: some smooth function.
        monkeypatch.setattr(jax.nn, "relu", jax.nn.silu)
    task = gentle(TINY[name](dtype="float32"))
    # Batch norm joins the examples of a microbatch, and of no other: the reference does the same.
    return dataclasses.replace(task, independent_microbatches=True) if task.state is not None else task


@pytest.mark.parametrize("layout", SMALL)
@pytest.mark.parametrize("name", TINY)
def test_every_family(name: str, layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    task = family(name, monkeypatch)
    assert_equals_one_device(task, LAYOUTS[layout].plan(task))


@pytest.mark.parametrize("layout", [*(n for n in LAYOUTS if n not in SMALL), *VARIANTS])
def test_every_layout(layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    task = family(MODEL, monkeypatch)
    assert_equals_one_device(task, {**LAYOUTS, **VARIANTS}[layout].plan(task))


@pytest.mark.slow
@pytest.mark.parametrize("layout", [n for n in LAYOUTS if n not in SMALL])
@pytest.mark.parametrize("name", [n for n in TINY if n != MODEL])
def test_every_family_on_every_layout(name: str, layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    task = family(name, monkeypatch)
    pinned: PinnedLayout = LAYOUTS[layout]
    if task.state is not None:  # carried state goes from microbatch to microbatch: one group a stage
        pinned = dataclasses.replace(
            pinned, stages=tuple(dataclasses.replace(s, groups=s.groups[:1]) for s in pinned.stages)
        )
    if name == "wide_resnet" and layout == "1+2+2+3":  # four blocks, one of whose borders carried state holds together
        with pytest.raises(InputError, match="cannot be cut into the 4 stages"):
            pinned.plan(task)
        return
    assert_equals_one_device(task, pinned.plan(task))
