"""Runs of block names."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from costmodel.errors import InputError
from planner.planfile.names import compress_names, expand_names


@pytest.mark.parametrize(
    ("names", "runs"),
    [
        ([], ()),
        (["embedding"], ("embedding",)),
        (["layers[3]"], ("layers[3]",)),
        (["layers[0]", "layers[1]"], ("layers[0:2]",)),
        (["a[1]", "a[2]", "b[3]", "a[3]"], ("a[1:3]", "b[3]", "a[3]")),
        (["a[2]", "a[1]"], ("a[2]", "a[1]")),
        (["a[0]", "a[0]"], ("a[0]", "a[0]")),
        (["a[0]/x", "a[1]/x", "a[1]/y"], ("a[0:2]/x", "a[1]/y")),
        (["stack[1].layers[0]", "stack[1].layers[1]"], ("stack[1].layers[0:2]",)),
        (["a[007]", "a[008]"], ("a[007]", "a[008]")),
        (["a[x]", "a[]", "[0]", "[1]"], ("a[x]", "a[]", "[0:2]")),
        ([f"layers[{i}]" for i in range(100)], ("layers[0:100]",)),
    ],
)
def test_compress(names, runs):
    assert compress_names(names) == runs
    assert expand_names(runs) == tuple(names)


heads = st.sampled_from(["layers", "x", "", "a[0].b", "é"])
names = st.builds(
    lambda head, index, tail: f"{head}[{index}]{tail}", heads, st.integers(0, 12), st.sampled_from(["", "/y"])
)


@given(st.lists(names | st.sampled_from(["embedding", "head", "a[01]"])))
def test_expand_is_the_inverse(given_names):
    assert expand_names(compress_names(given_names)) == tuple(given_names)


def test_a_name_that_reads_as_a_run_is_refused():
    with pytest.raises(ValueError, match="reads as a run"):
        compress_names(["layers[0:2]"])


@pytest.mark.parametrize("run", ["a[3:3]", "a[4:2]", "a[0:999999999]"])
def test_bad_runs(run):
    with pytest.raises(InputError) as caught:
        expand_names([run])
    assert caught.value.code == "MP155" and repr(run) in caught.value.message
