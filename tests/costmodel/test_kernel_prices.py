"""Kernels: what shapes cost, and that arrays and single kernels are priced alike."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax import lax

from costmodel.device_kind import DeviceKind
from costmodel.graph import Factor, Op, Tensor
from costmodel.kernels import (
    Kernel,
    KernelTable,
    backward_kernels,
    backward_shapes,
    forward_kernels,
    kernel_s,
    product_shape,
    shape_share,
)
from planner.frontend.capture import capture
from planner.frontend.graph import model_graph
from planner.frontend.task import TrainingTask

KIND = DeviceKind(
    name="x",
    platform="gpu",
    peak_flops_per_s={"float32": 1e12, "bfloat16": 100e12},
    memory_bytes=1 << 30,
    memory_bandwidth_bytes_per_s=1e12,
    matmul_efficiency=0.8,
    bandwidth_efficiency=0.5,
    launch_s=1e-6,
    matmul_half_depth=100.0,
    matmul_half_area=1e6,
    misaligned_efficiency=0.25,
)
PRODUCT = Op(
    name="dot",
    primitive="dot_general",
    inputs=("x", "w"),
    outputs=("y",),
    factors=(Factor("b", 4), Factor("m", 1000), Factor("k", 300, combine="sum"), Factor("n", 2000)),
    in_dims=(((0,), (1,), (2,)), ((0,), (2,), (3,))),
    out_dims=(((0,), (1,), (3,)),),
    flops=2.0 * 4 * 1000 * 300 * 2000,
    backward_flops=4.0 * 4 * 1000 * 300 * 2000,
    work="matmul",
)
TENSORS = {
    "x": Tensor("x", (4, 1000, 300), "bfloat16", 2, needs_grad=True),
    "w": Tensor("w", (4, 300, 2000), "bfloat16", 2, role="param", needs_grad=True),
    "y": Tensor("y", (4, 1000, 2000), "bfloat16", 2, needs_grad=True),
}


def test_a_product_of_half_depth_runs_at_half_the_rate_and_so_does_one_of_half_a_wave() -> None:
    huge = Kernel(1.0, 0.0, 0.0, 1.0, (1e15, 1e9))
    assert shape_share(huge, KIND) == pytest.approx(1.0, rel=1e-6)
    assert shape_share(Kernel(1.0, 0.0, 0.0, 1.0, (1e15, 100.0)), KIND) == pytest.approx(0.5, rel=1e-6)
    assert shape_share(Kernel(1.0, 0.0, 0.0, 1.0, (1e6, 100.0)), KIND) == pytest.approx(0.25, rel=1e-6)
    assert kernel_s(huge, KIND) == pytest.approx(1 / 0.8, rel=1e-6)


@pytest.mark.parametrize(("area", "depth"), [(1e4, 1e5), (3e5, 4000.0), (1e6, 200.0)])
def test_a_deep_product_of_few_results_is_split_as_is_fastest(area: float, depth: float) -> None:
    """Half a wave is 1e6 elements, half depth 100."""

    def in_parts(parts: float) -> float:
        return (depth / parts) / (depth / parts + 100.0) * parts * area / (parts * area + 1e6)

    best = max(in_parts(parts) for parts in np.geomspace(1.0, 1e4, 20_001))
    assert shape_share(Kernel(1.0, 0.0, 0.0, 1.0, (area, depth)), KIND) == pytest.approx(best, rel=1e-6)
    assert best > in_parts(1.0)


def test_the_weight_gradient_of_a_convolution_sums_over_positions() -> None:
    images, side, channels = 2, 32, 16
    kernels = [jax.ShapeDtypeStruct((3, 3, channels, channels), jnp.float32)] * 2

    def loss(params, batch):
        x = batch
        for kernel in params:
            x = lax.conv_general_dilated(x, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
        return jnp.mean(x**2)

    batch = jax.ShapeDtypeStruct((images, side, side, channels), jnp.float32)
    task = TrainingTask(loss_fn=loss, params=kernels, batch=batch, optimizer=optax.sgd(0.1))
    graph, rows = model_graph(capture(task, images)), images * side * side
    convolutions = [(cls, op) for cls in graph.classes.values() for op in cls.ops if op.work == "conv"]
    assert convolutions
    for cls, op in convolutions:
        assert product_shape(op, (), ()) == (1, rows, 9 * channels, channels)
        assert (1, 9 * channels, rows, channels) in backward_shapes(op, (), (), cls.tensors)


def test_a_kernel_takes_what_binds_it() -> None:
    assert kernel_s(Kernel(0.0, 0.0, 1.0, 1.0), KIND) == pytest.approx(2.0)
    assert kernel_s(Kernel(0.0, 0.0, 0.0, 3.0), KIND) == pytest.approx(3e-6)
    assert kernel_s(Kernel(0.0, 0.7, 0.1, 1.0), KIND) == pytest.approx(0.7)
    assert kernel_s(Kernel(0.0, 0.0, 0.0, 0.0), KIND) == 0.0


def test_the_shape_of_a_split_product_is_that_of_one_device() -> None:
    assert product_shape(PRODUCT, (), ()) == (4, 1000, 300, 2000)
    assert product_shape(PRODUCT, (3, 0), (5, 2)) == (2, 1000, 300, 400)


def test_backward_products_exchange_the_roles_of_dims() -> None:
    (ahead,) = forward_kernels(PRODUCT, "bfloat16", KIND, 1.0, 8.0, (), ())
    back = backward_kernels(PRODUCT, "bfloat16", KIND, 1.0, 16.0, (), (), TENSORS)
    assert ahead.dims == (4 * 1000 * 2000, 300)
    assert [kernel.dims for kernel in back] == [(4 * 1000 * 300, 2000), (4 * 300 * 2000, 1000)]
    assert sum(kernel.matmul_s for kernel in back) == pytest.approx(2 * ahead.matmul_s)
    assert sum(kernel.memory_s for kernel in back) == pytest.approx(2 * ahead.memory_s)


def test_only_the_product_that_an_operand_wants_runs_backward() -> None:
    frozen = TENSORS | {"w": replace(TENSORS["w"], needs_grad=False)}
    one = replace(PRODUCT, backward_flops=PRODUCT.flops)
    back = backward_kernels(one, "bfloat16", KIND, 1.0, 8.0, (), (), frozen)
    assert [kernel.dims for kernel in back] == [(4 * 1000 * 300, 2000)]


def test_misaligned_dims_of_16_bits_are_slow_and_others_are_not() -> None:
    def shaped(k: int, n: int, dtype: str) -> Kernel:
        factors = (Factor("m", 4096), Factor("k", k, combine="sum"), Factor("n", n))
        op = Op(
            name="dot",
            primitive="dot_general",
            inputs=("x", "w"),
            outputs=("y",),
            factors=factors,
            in_dims=(((0,), (1,)), ((1,), (2,))),
            out_dims=(((0,), (2,)),),
            flops=2.0 * 4096 * k * n,
            work="matmul",
        )
        return forward_kernels(op, dtype, KIND, 1.0, 0.0, (), ())[0]

    assert shaped(108, 4096, "bfloat16").misaligned and shaped(4096, 4100, "bfloat16").misaligned
    assert not shaped(112, 4096, "bfloat16").misaligned
    assert not shaped(108, 4096, "float32").misaligned


@given(
    st.lists(
        st.tuples(
            st.floats(0, 1),
            st.floats(0, 1),
            st.floats(0, 1),
            st.floats(0, 50),
            st.one_of(st.none(), st.tuples(st.floats(1, 1e9), st.floats(1, 1e6))),
            st.booleans(),
        ),
        min_size=1,
        max_size=6,
    )
)
def test_arrays_cost_what_single_kernels_cost(
    rows: list[tuple[float, float, float, float, tuple[float, float], bool]],
) -> None:
    kernels = [Kernel(*row) for row in rows]
    assert KernelTable.of(kernels).seconds(KIND) == pytest.approx(np.array([kernel_s(k, KIND) for k in kernels]))
