"""Roofline R1, peaks by dtype, and where the result comes from."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from costmodel.compute import op_time_s, peak_flops_per_s, roofline_provenance, utilisation_peak
from costmodel.device_kind import DeviceKind

PEAKS = {"float64": 5e12, "float32": 10e12, "tfloat32": 40e12, "bfloat16": 80e12, "float8": 160e12}


def kind(peaks=PEAKS, platform="gpu", **facts) -> DeviceKind:
    return DeviceKind(
        name="k",
        platform=platform,
        peak_flops_per_s=dict(peaks),
        memory_bytes=1 << 34,
        memory_bandwidth_bytes_per_s=1e12,
        matmul_efficiency=0.5,
        bandwidth_efficiency=0.8,
        launch_s=2e-6,
        **facts,
    )


def test_r1_takes_the_largest_of_compute_memory_and_launch():
    assert op_time_s(40e12, 1e9, "bfloat16", kind(), is_matmul=True) == pytest.approx(1.0)
    assert op_time_s(1e9, 0.8e12, "bfloat16", kind(), is_matmul=True) == pytest.approx(1.0)
    assert op_time_s(1.0, 1.0, "bfloat16", kind(), is_matmul=True) == 2e-6
    assert op_time_s(1.0, 1.0, "bfloat16", kind(), is_matmul=True, launch_s=0) == pytest.approx(1 / 0.8e12)


def test_no_work_is_no_op():
    assert op_time_s(0, 0, "float32", kind(), is_matmul=False) == 0


@pytest.mark.parametrize(
    ("dtype", "matmul", "peak", "provenance"),
    [
        ("bfloat16", True, 80e12, "datasheet"),
        ("float32", True, 40e12, "datasheet"),
        ("float64", True, 5e12, "datasheet"),
        ("float8_e4m3fn", True, 160e12, "datasheet"),
        ("float16", True, 10e12, "assumed"),
        ("int8", True, 10e12, "assumed"),
        ("bfloat16", False, 10e12, "datasheet"),
        ("float64", False, 5e12, "datasheet"),
        ("int32", False, 10e12, "datasheet"),
    ],
)
def test_peaks_by_dtype(dtype, matmul, peak, provenance):
    figure = peak_flops_per_s(dtype, kind(), is_matmul=matmul)
    assert (figure.value, figure.provenance) == (peak, provenance)


def test_bfloat16_on_a_kind_without_it_is_never_float16():
    volta = kind({"float32": 15.7e12, "float16": 125e12})
    figure = peak_flops_per_s("bfloat16", volta, is_matmul=True)
    assert (figure.value, figure.provenance) == (15.7e12, "assumed")
    assert roofline_provenance("bfloat16", volta, is_matmul=True) == "assumed"


def test_float32_products_on_a_tpu_are_one_bfloat16_pass():
    tpu = kind({"float32": 4e12, "bfloat16": 275e12}, platform="tpu")
    assert peak_flops_per_s("float32", tpu, is_matmul=True).value == 275e12


def test_provenance_is_that_of_the_weakest_figure():
    said = dict.fromkeys(("matmul_efficiency", "bandwidth_efficiency", "launch_s"), "measured")
    known = kind(provenance=said)
    assert roofline_provenance("bfloat16", known, is_matmul=True) == "datasheet"
    assert roofline_provenance("bfloat16", kind(), is_matmul=True) == "assumed"
    assert roofline_provenance("float16", known, is_matmul=True) == "assumed"


def test_arrays_give_what_numbers_give():
    flops, traffic = np.array([0.0, 1e6, 1e12]), np.array([0.0, 1e9, 1e3])
    many = op_time_s(flops, traffic, "bfloat16", kind(), is_matmul=True)
    alone = [op_time_s(float(f), float(t), "bfloat16", kind(), is_matmul=True) for f, t in zip(flops, traffic)]
    assert many.tolist() == alone


@given(flops=st.floats(0, 1e15), traffic=st.floats(0, 1e12), more=st.floats(1, 8), matmul=st.booleans())
def test_time_grows_with_work_and_never_beats_the_peak(flops, traffic, more, matmul):
    time = op_time_s(flops, traffic, "bfloat16", kind(), is_matmul=matmul)
    assert time <= op_time_s(flops * more, traffic * more, "bfloat16", kind(), is_matmul=matmul)
    assert time >= flops / 80e12
    assert time >= traffic / 1e12


def test_utilisation_is_a_share_of_the_peak_or_of_what_was_reached_above_it():
    own = kind({"float32": 50e12})
    assert utilisation_peak("float32", own, own) == 50e12
    assert utilisation_peak("float32", own, kind({"float32": 400e12})) == 200e12
    assert utilisation_peak("float32", own, kind({"float32": 80e12})) == 50e12
