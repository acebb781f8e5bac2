"""Reading collectives out of HLO text: groups, loops, bytes, joined and asynchronous ones."""

import pytest

from costmodel.errors import LoweringError
from profiles.compiled.hlo import collectives

AXES, SIZES = ("data", "model"), (2, 4)


def module(*lines: str, computations: str = "") -> str:
    body = "\n".join(f"  {line}" for line in lines)
    return f"HloModule jit_step\n\n{computations}\nENTRY %main.1 (p.1: f32[8]) -> f32[8] {{\n{body}\n}}\n"


def gather(shape: str, groups: str, kind: str = "all-gather", name: str = "jit(f)/jvp()/all_gather") -> str:
    return f'%c.1 = {shape} {kind}(%p.1), channel_id=1, replica_groups={groups}, metadata={{op_name="{name}"}}'


@pytest.mark.parametrize(
    ("groups", "axes"),
    [
        ("{{0,1,2,3},{4,5,6,7}}", ("model",)),
        ("{{0,4},{1,5},{2,6},{3,7}}", ("data",)),
        ("{{0,1,2,3,4,5,6,7}}", ("data", "model")),
        ("[2,4]<=[8]", ("model",)),
        ("[4,2]<=[2,4]T(1,0)", ("data",)),
        ("[1,8]<=[8]", ("data", "model")),
    ],
)
def test_replica_groups_are_mesh_axes(groups: str, axes: tuple[str, ...]) -> None:
    (found,) = collectives(module(gather("f32[8,16]{1,0}", groups)), AXES, SIZES)
    assert (found.kind, found.axes, found.bytes, found.elements) == ("all_gather", axes, 512, 128)
    assert sorted(d for group in found.groups for d in group) == list(range(8))


def test_groups_that_are_no_mesh_axis_are_an_error() -> None:
    with pytest.raises(LoweringError, match=r"MP505.*no mesh axis"):
        collectives(module(gather("f32[8]{0}", "{{0,1},{2,3},{4,5},{6,7}}")), AXES, SIZES)


@pytest.mark.parametrize(
    ("shape", "kind", "read_as", "size", "arrays"),
    [
        ("bf16[4,8]{1,0}", "all-reduce", "all_reduce", 64, 1),
        ("(f32[4]{0}, bf16[2,2]{1,0})", "all-reduce", "all_reduce", 24, 2),  # joined
        ("f32[4]{0}", "reduce-scatter", "reduce_scatter", 64, 1),  # of the whole operand
        ("(f32[2]{0}, f32[2]{0}, /*index=2*/f32[2]{0}, f32[2]{0})", "all-to-all", "all_to_all", 32, 1),
        ("pred[16]{0}", "all-gather", "all_gather", 16, 1),
        ("(f32[4]{0}, f32[16]{0})", "all-gather-start", "all_gather", 64, 1),
        ("f8e4m3fn[16]{0}", "all-gather", "all_gather", 16, 1),
        ("f32[4]{0}", "all-reduce-start", "all_reduce", 16, 1),  # GPUs: of a reduction the results alone
        ("((f32[16]{0}, f32[8]{0}), (f32[4]{0}, f32[2]{0})) ", "reduce-scatter-start", "reduce_scatter", 96, 2),
        ("((bf16[8]{0}), bf16[8]{0})", "all-to-all-start", "all_to_all", 16, 1),
    ],
)
def test_bytes_are_those_of_the_whole_tensor(shape: str, kind: str, read_as: str, size: int, arrays: int) -> None:
    (found,) = collectives(module(gather(shape, "[2,4]<=[8]", kind)), AXES, SIZES)
    assert (found.kind, found.bytes, found.arrays) == (read_as, size, arrays)


LOOP = """%body.1 (p.2: f32[8]) -> f32[8] {
  INNER
}
%cond.1 (p.3: f32[8]) -> pred[] {
  ROOT %lt.1 = pred[] constant(true)
}
"""


def while_loop(trips: str) -> str:
    count = f',"known_trip_count":{{"n":"{trips}"}}' if trips else ""
    return f"%w.1 = f32[8] while(%p.1), condition=%cond.1, body=%body.1, backend_config={{{count.lstrip(',')}}}"


def test_a_collective_in_a_loop_runs_once_each_trip() -> None:
    inner = gather("f32[8]{0}", "[2,4]<=[8]", name="jit(f)/transpose(jvp())/while/body/all_gather")
    text = module(while_loop("6"), computations=LOOP.replace("INNER", inner))
    (found,) = collectives(text, AXES, SIZES)
    assert (found.loops, found.runs, found.backward, found.computation) == ((6,), 6, True, "body.1")


def test_a_collective_in_a_loop_of_unknown_length_is_an_error() -> None:
    text = module(while_loop(""), computations=LOOP.replace("INNER", gather("f32[8]{0}", "[2,4]<=[8]")))
    with pytest.raises(LoweringError, match=r"MP505.*unknown length"):
        collectives(text, AXES, SIZES)


def test_a_loop_without_collectives_may_be_of_any_length() -> None:
    text = module(while_loop(""), computations=LOOP.replace("INNER", "%a.1 = f32[8] add(%p.2, %p.2)"))
    assert collectives(text, AXES, SIZES) == []


def test_called_computations_and_branches_count() -> None:
    called = "%f.1 (p.4: f32[8]) -> f32[8] {\n  " + gather("f32[8]{0}", "[2,4]<=[8]") + "\n}\n"
    text = module(
        "%a.1 = f32[8] call(%p.1), to_apply=%f.1",
        "%b.1 = f32[8] conditional(%p.1, %p.1), branch_computations={%f.1, %f.1}",
        computations=called,
    )
    assert len(collectives(text, AXES, SIZES)) == 3


def test_computations_that_nothing_runs_do_not_count() -> None:
    orphan = "%f.1 (p.4: f32[8]) -> f32[8] {\n  " + gather("f32[8]{0}", "[2,4]<=[8]") + "\n}\n"
    assert collectives(module("%a.1 = f32[8] copy(%p.1)", computations=orphan), AXES, SIZES) == []
