"""Block classes of a model as programs: what they compute is what the model computes, and their times add up."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import export

from planner import TrainingTask
from planner.frontend import block_programs as programs_module
from planner.frontend.block_passes import evaluate
from planner.frontend.block_programs import block_programs
from planner.frontend.capture import Capture, capture
from profiles import blockbench
from profiles.blockbench import BlockProgram, time_block
from profiles.collect import profile_devices
from profiles.device_loop import DeviceLoop
from profiles.jobs import Job, block_jobs, rate_jobs
from profiles.records import Record
from profiles.runner import LocalRunner
from profiles.schema import Sample
from profiles.timing import MeasurementError
from tests.models.tiny import TINY


def call(artefact: bytes | None, given: list[Any]) -> list[Any]:
    assert artefact is not None
    return export.deserialize(bytearray(artefact)).call(*given)


def arrays(artefact: bytes, below: int) -> list[Any]:
    source = np.random.default_rng(0)
    found = []
    for aval in export.deserialize(bytearray(artefact)).in_avals:
        whole = jnp.issubdtype(aval.dtype, jnp.inexact) is False
        values = source.integers(0, below, aval.shape) if whole else source.normal(size=aval.shape)
        found.append(jnp.asarray(values, aval.dtype))
    return found


@pytest.mark.parametrize("name", ["gpt-dropout", "t5", "moe"])
def test_every_class_exports_and_its_passes_are_those_of_jax(name: str) -> None:
    captured = capture(TINY[name](dtype="float32"), 4)
    programs = block_programs(captured)
    assert [(one.problem, one.update_problem) for one in programs] == [("", "")] * len(captured.classes)
    assert {one.block_class for one in programs} == set(captured.classes)
    assert sum(one.count for one in programs) == len(captured.blocks)
    program = next(one for one in programs if one.backward_activations not in (None, one.backward))
    cls = captured.classes[program.block_class].program
    given = arrays(program.forward, program.below)
    tensors = [captured.classes[program.block_class].tensors[v.name] for v in cls.inputs]
    moving = [i for i, (v, t) in enumerate(zip(cls.inputs, tensors)) if t.needs_grad and _floats(v.aval.dtype)]

    def inexact(*moved: Any) -> list[Any]:
        inputs = list(given)
        for at, array in zip(moving, moved, strict=True):
            inputs[at] = array
        return [one for one in _layers_one_by_one(captured, program, inputs) if _floats(one.dtype)]

    results = call(program.forward, given)
    direct, pull = jax.vjp(jax.jit(inexact), *[given[at] for at in moving])
    mine = [one for one in results[: len(cls.outputs)] if _floats(one.dtype)]
    for one, other in zip(mine, direct, strict=True):
        np.testing.assert_allclose(one, other, rtol=2e-3, atol=2e-3)

    cotangents = [jnp.full(one.shape, 0.5, one.dtype) for one in direct]
    taken = _taken(program, len(results) - len(cls.outputs), len(cotangents))
    arguments = [*_inputs_read(program, given, taken), *results[len(cls.outputs) :], *cotangents]
    gradients = call(program.backward, arguments)
    wanted = list(pull(cotangents))
    assert len(gradients) == len(wanted)
    for one, other in zip(gradients, wanted, strict=True):
        np.testing.assert_allclose(one, other, rtol=5e-3, atol=5e-3)
    activations = [i for i, at in enumerate(moving) if tensors[at].role != "param"]
    for one, at in zip(call(program.backward_activations, arguments), activations, strict=True):
        np.testing.assert_allclose(one, wanted[at], rtol=5e-3, atol=5e-3)


def _layers_one_by_one(captured: Capture, program: BlockProgram, given: list[Any]) -> list[Any]:
    """What blocks make in turn, each from its own items of the stacks and from what the one before handed on."""
    cls = captured.classes[program.block_class].program
    if program.layers == 1:
        return evaluate(cls, given)
    run = next(captured.runs[b.run] for b in captured.blocks if b.cls.key == program.block_class)
    carries = [at for at, kind in enumerate(run.kinds) if kind == "carry"]
    held, stacks = list(given), []
    for layer in range(program.layers)[:: -1 if run.reverse else 1]:
        taken = [x[layer] if kind == "stacked" else x for x, kind in zip(held, run.kinds, strict=True)]
        made = evaluate(cls, taken)
        for at, x in zip(carries, made, strict=False):
            held[at] = x
        stacks.append(made[len(carries) :])
    ordered = stacks[:: -1 if run.reverse else 1]
    return [*(held[at] for at in carries), *(jnp.stack(each) for each in zip(*ordered, strict=True))]


def looped_task(layers: int, *, reverse: bool = False, constant: bool = False) -> TrainingTask:
    """A scan over layers that hand on what they made; `constant`: and a number that is the same in all of them."""

    def loss_fn(params: Any, batch: Any) -> Any:
        def layer(h: Any, w: Any) -> tuple[Any, Any]:
            return jnp.tanh(h @ w), 1.0 if constant else None

        h, ones = jax.lax.scan(layer, batch["x"], params["w"], reverse=reverse)
        return jnp.mean(h**2) + (jnp.mean(ones) if constant else 0.0)

    params = {"w": jax.ShapeDtypeStruct((layers, 16, 16), jnp.float32)}
    batch = {"x": jax.ShapeDtypeStruct((4, 16), jnp.float32)}
    return TrainingTask(loss_fn=loss_fn, params=params, batch=batch, optimizer=optax.adamw(1e-3))


def looped_program(task: TrainingTask) -> tuple[Capture, BlockProgram]:
    captured = capture(task, 4)
    run = captured.runs[0]
    key = captured.blocks[run.first].cls.key
    return captured, next(one for one in block_programs(captured) if one.block_class == key)


@pytest.mark.parametrize(("layers", "looped"), [(2, 2), (6, programs_module.MOST_LAYERS)])
def test_layers_in_a_loop_are_timed_in_one_no_longer_than_needed(layers: int, looped: int) -> None:
    _, program = looped_program(looped_task(layers))
    assert (program.layers, program.problem) == (looped, "")


@pytest.mark.parametrize("reverse", [False, True])
def test_a_loop_hands_on_from_layer_to_layer_in_its_own_direction(reverse: bool) -> None:
    captured, program = looped_program(looped_task(3, reverse=reverse))
    given = arrays(program.forward, program.below)
    made = call(program.forward, given)
    for one, other in zip(made, _layers_one_by_one(captured, program, given), strict=False):
        np.testing.assert_allclose(one, other, rtol=1e-3, atol=1e-3)


def test_a_layer_that_makes_a_constant_has_a_backward_pass() -> None:
    _, program = looped_program(looped_task(3, constant=True))
    assert program.problem == "" and program.backward is not None


def test_a_loop_is_as_long_as_what_its_blocks_keep_allows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Residuals are results of the one pass and inputs of the other: they count too."""
    _, whole = looped_program(looped_task(6))
    each = whole.memory_bytes + whole.saved_bytes
    monkeypatch.setattr(programs_module, "MOST_BYTES", 3 * each)
    assert looped_program(looped_task(6))[1].layers == 3
    monkeypatch.setattr(programs_module, "MOST_BYTES", 2 * each - 1)
    _, alone = looped_program(looped_task(6))
    assert (alone.layers, alone.saved_bytes) == (1, whole.saved_bytes)


def test_times_of_loops_are_shared_out_among_layers_and_updates_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    _, program = looped_program(looped_task(6))
    seconds = {program.forward: 4.0, program.backward: 12.0, program.backward_activations: 8.0, program.update: 1.0}

    def timed(artefact: bytes, *_: Any, **__: Any) -> Sample:
        return Sample(time_s=seconds[artefact], spread_s=0.0, drift=0.0, samples=3)

    monkeypatch.setattr(blockbench, "time_exported", timed)
    block = time_block(program, DeviceLoop(devices=()), 0.1)
    assert (block.layers, block.forward_s, block.backward_s, block.weight_s, block.update_s) == (4, 1.0, 2.0, 1.0, 1.0)
    (job,) = block_jobs([program])
    assert (job.flops, job.memory_bytes) == (4 * program.flops, 4 * program.memory_bytes)


def _floats(dtype: Any) -> bool:
    return bool(jnp.issubdtype(dtype, jnp.inexact))


def _taken(program: BlockProgram, kept: int, cotangents: int) -> int:
    assert program.backward is not None
    return len(export.deserialize(bytearray(program.backward)).in_avals) - kept - cotangents


def _inputs_read(program: BlockProgram, given: list[Any], count: int) -> list[Any]:
    """The block's inputs that its backward pass reads again stand first, in the order of the inputs."""
    assert program.taken is not None and len(program.taken) == count
    return [given[at] for at in program.taken]


def small_task() -> TrainingTask:
    """Two products: few and short programs."""

    def loss_fn(params: Any, batch: Any) -> Any:
        return jnp.mean(jnp.tanh(jnp.tanh(batch["x"] @ params["w"]) @ params["v"]))

    params = {"w": jax.ShapeDtypeStruct((16, 32), jnp.float32), "v": jax.ShapeDtypeStruct((32, 8), jnp.float32)}
    batch = {"x": jax.ShapeDtypeStruct((4, 16), jnp.float32)}
    return TrainingTask(loss_fn=loss_fn, params=params, batch=batch, optimizer=optax.adamw(1e-3))


def test_what_is_kept_does_not_count_parameters() -> None:
    task = small_task()
    programs = block_programs(capture(task, 4))
    x, h, y = 4 * 16 * 4, 4 * 32 * 4, 4 * 8 * 4
    assert x + h + y <= sum(program.saved_bytes for program in programs) <= x + 3 * h + 3 * y
    assert programs[0].backward is not None and programs[0].backward_activations is None
    states = [len(export.deserialize(bytearray(one.update)).in_avals) for one in programs if one.update is not None]
    trained = sum(len([t for t in (one.update,) if t]) for one in programs)
    assert sum(states) == 2 * (1 + 1 + 2) + trained, "values, gradients and two moments of both, and a count each"


class OnlyBlocks(LocalRunner):
    """Leaves out what is measured between the first product and blocks."""

    def run(self, job: Job, runs_s: float) -> Record:
        if job.part != "blocks" and job.key != rate_jobs("cpu")[0].key:
            raise MeasurementError("left out")
        return super().run(job, runs_s)


def test_blocks_are_timed_into_the_profile_and_one_that_fails_is_a_gap() -> None:
    programs = block_programs(capture(small_task(), 2))
    whole = next(one for one in programs if one.backward_activations is not None and one.update is not None)
    bad = BlockProgram(block_class="bad", microbatch=2, problem="not exported: TypeError: no")
    half = BlockProgram(block_class="half", microbatch=2, forward=programs[0].forward, update_problem="not exported: x")
    profile = profile_devices(budget_s=30.0, programs=(bad, whole, half), runner=OnlyBlocks(1))
    assert {one.block_class for one in profile.blocks} == {whole.block_class, "half"}
    block = next(one for one in profile.blocks if one.block_class == whole.block_class)
    assert block.mesh == (1,) and block.microbatch == 2 and min(block.forward_s, block.backward_s) > 0
    assert block.weight_s is not None and block.gradients_s == block.backward_s + block.weight_s
    assert block.update_s is not None and block.saved_bytes == whole.saved_bytes
    assert block.peak_bytes is not None and block.peak_bytes > whole.saved_bytes
    gaps = {gap.what: gap.cause for gap in profile.gaps}
    assert gaps["block bad at microbatch 2"].endswith("not exported: TypeError: no")
    assert gaps["update of block half at microbatch 2"] == "not exported: x"
    (alone,) = (one for one in profile.blocks if one.block_class == "half")
    assert (alone.update_s, alone.backward_s, alone.weight_s) == (None, 0.0, 0.0)


def test_blocks_come_in_the_order_of_their_share_of_a_step() -> None:
    small = BlockProgram(block_class="a", microbatch=1, flops=10.0)
    many = BlockProgram(block_class="b", microbatch=1, flops=5.0, count=9)
    assert [job.key for job in block_jobs([small, many])] == ["block b at microbatch 1", "block a at microbatch 1"]
    with pytest.raises(MeasurementError, match="no way"):
        time_block(BlockProgram(block_class="a", microbatch=1, problem="no way"), DeviceLoop(devices=()), 0.1)
