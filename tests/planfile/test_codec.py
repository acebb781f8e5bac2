"""Plan documents: round trip, canonical bytes, and every way in which a file can be bad."""

import json
import math
import random

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from costmodel.errors import InputError
from planner.planfile.codec import decode, encode
from planner.planfile.layout import WIDTH, dumps
from tests.golden_files import check_golden
from tests.plans import tiny_plan

replace = msgspec.structs.replace


@pytest.mark.parametrize("stages", [1, 2, 4])
@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_round_trip(stages, zero):
    plan = tiny_plan(stages=stages, zero=zero, devices=8, tied=zero == 1)
    data = encode(plan)
    assert decode(data) == plan
    assert encode(decode(data)) == data


@settings(max_examples=30, deadline=None)
@given(
    time_s=st.floats(min_value=1e-300, max_value=1e300),
    count=st.integers(0, 2**62),
    text=st.text(st.characters(exclude_categories=["Cs"])),
    table=st.dictionaries(st.text(st.characters(exclude_categories=["Cs"]), max_size=5), st.floats(0, 1), max_size=4),
)
def test_round_trip_of_any_values(time_s, count, text, table):
    plan = tiny_plan()
    prediction = replace(
        plan.prediction, step_time_s=time_s, peak_memory_bytes=count, exposed_communication_s=table, tokens_per_s=None
    )
    plan = replace(plan, name=text, prediction=prediction)
    again = decode(encode(plan))
    assert again == plan and encode(again) == encode(plan)


def test_bytes_do_not_depend_on_the_order_of_tables():
    plan = tiny_plan()
    shuffled = list(plan.prediction.provenance.items())
    random.Random(1).shuffle(shuffled)
    other = replace(plan, prediction=replace(plan.prediction, provenance=dict(reversed(shuffled))))
    assert encode(plan) == encode(other)


def test_numbers_of_numpy_and_ints_for_floats_are_written_as_floats():
    plan = tiny_plan()
    prediction = replace(
        plan.prediction,
        step_time_s=np.float64(plan.prediction.step_time_s),
        model_flops=round(plan.prediction.model_flops),
        optimizer_s=np.float64(plan.prediction.optimizer_s),
    )
    assert encode(replace(plan, prediction=prediction)) == encode(plan)


def test_the_document_is_for_people_too():
    text = encode(tiny_plan()).decode()
    assert text.endswith("}\n") and json.loads(text)["name"] == "tiny"
    assert max(map(len, text.splitlines())) <= WIDTH + 20


def test_golden_plan():
    check_golden("tiny.plan.json", encode(tiny_plan()))


@given(st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.text(), inner, max_size=5), max_leaves=60,
))  # fmt: skip
def test_layout_is_json(data):
    assert json.loads(dumps(data)) == data


def test_not_a_number_is_refused():
    plan = tiny_plan()
    with pytest.raises(InputError, match=r"certificate\.gap is nan") as caught:
        encode(replace(plan, certificate=replace(plan.certificate, gap=math.nan)))
    assert caught.value.code == "MP154"


def test_wrong_types_are_refused_when_writing():
    plan = tiny_plan()
    with pytest.raises(InputError) as caught:
        encode(replace(plan, microbatches="four"))
    assert caught.value.code == "MP152" and "microbatches" in caught.value.message


def bad(data, code, *parts):
    with pytest.raises(InputError) as caught:
        decode(data, source="x.plan.json")
    assert caught.value.code == code
    for part in ("x.plan.json", *parts):
        assert part in caught.value.message + caught.value.hint
    assert caught.value.hint


def test_every_cut_is_named():
    data = encode(tiny_plan(stages=1))
    for length in range(1, len(data) - 2, 7):
        bad(data[:length], "MP151", "cut short")
    bad(data[: len(data) // 2], "MP151", "cut short", "line ", "byte ", f"of {len(data) // 2}")


@pytest.mark.parametrize(
    ("data", "part"),
    [
        (b"", "empty"),
        (b"  \n", "empty"),
        (b"\xff\xfe{}", "UTF-8"),
        (b"step: 1", "line 1"),
        (b'{"a": NaN}', "NaN"),
        (b'{"a": -Infinity}', "Infinity"),
        (b'{"a": 1, "a": 2}', "twice"),
        (b"[" * 100_000, ""),
        (b'{"a": ' + b"9" * 10_000 + b"}", ""),
        (b"{} trailing", "line 1"),
    ],
)
def test_not_json(data, part):
    bad(data, "MP151", part)


@pytest.mark.parametrize("data", [b"[]", b'"plan"', b"3", b"null", b"true"])
def test_not_an_object(data):
    bad(data, "MP152", "object")


def edited(change):
    document = json.loads(encode(tiny_plan()))
    change(document)
    return json.dumps(document).encode()


def test_unknown_field_with_what_was_meant():
    bad(edited(lambda d: d.update(global_bach=3)), "MP152", "global_bach", "global_batch")
    bad(edited(lambda d: d["stages"][1]["groups"][0].update(meshes=[])), "MP152", "stages[1].groups[0]", "mesh")


def test_missing_field():
    bad(edited(lambda d: d["stages"][0]["groups"][0]["memory"].pop("total_bytes")), "MP152", "memory", "total_bytes")
    bad(edited(lambda d: d.pop("certificate")), "MP152", "certificate")


@pytest.mark.parametrize("value", ["4", 4.5, None, [4], True])
def test_wrong_type(value):
    bad(edited(lambda d: d.update(microbatches=value)), "MP152", "microbatches")


def test_wrong_choice():
    bad(edited(lambda d: d["stages"][0]["groups"][0]["strategies"][0].update(remat="all")), "MP152", "remat")


@pytest.mark.parametrize(("version", "part"), [(2, "newer"), (0, "older"), ("1", "not a plan"), (None, "not a plan")])
def test_schema_version(version, part):
    bad(edited(lambda d: d.update(schema_version=version)), "MP153", part)


def test_version_is_looked_at_before_fields():
    bad(b'{"schema_version": 99, "whatever": 1}', "MP153", "newer")
    bad(b"{}", "MP153", "no schema_version")


def test_byte_order_mark_is_skipped():
    plan = tiny_plan()
    assert decode(b"\xef\xbb\xbf" + encode(plan)) == plan


@pytest.mark.parametrize("path", ["microbatches", "global_batch", "stages[0].groups[0].microbatches[0]"])
def test_integers_beyond_64_bits_are_refused(path):
    text = encode(tiny_plan()).decode()
    old = {"microbatches": '"microbatches": 4,', "global_batch": '"global_batch": 32,'}.get(path, "[0, 1, 2, 3]")
    new = old.replace("4", str(10**30)).replace("32", str(10**30)).replace("[0,", f"[{10**30},")
    with pytest.raises(InputError, match=r"MP152: .*whole number of 31 digits") as caught:
        decode(text.replace(old, new, 1).encode())
    assert path in caught.value.message
