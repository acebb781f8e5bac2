"""Formula O1: measured op times at other microbatch sizes."""

import pytest

from costmodel.estimator import MeasuredOp
from costmodel.matmul_table import Product, matmul_table
from costmodel.op_times import measured_graph, scaled_op_times
from planner.frontend.capture import capture
from planner.frontend.graph import model_graph
from planner.models import gpt

GRAPHS = {
    size: model_graph(capture(gpt(hidden=32, layers=2, heads=2, vocab=64, seq=8, dtype="float32"), size))
    for size in (1, 2, 8)
}


def ops_of(graph):
    return {op.key: op for block in graph.blocks for op in graph.classes[block.class_key].ops}


def product(graph):
    return next(key for key, op in ops_of(graph).items() if op.work == "matmul" and "128" in key)


def test_o1_products_scale_with_flops():
    key = product(GRAPHS[2])
    times = {key: MeasuredOp(1.0, 2.0)}
    scaled = scaled_op_times(times, GRAPHS[2], GRAPHS[8])
    assert scaled[key] == times[key]
    assert scaled[product(GRAPHS[8])] == MeasuredOp(4.0, 8.0, "interpolated")
    assert len(scaled) == 2


def test_o1_products_near_measured_ones_scale_with_what_these_take():
    (m, k, n), dtype = (16, 32, 128), "float32"  # two sequences of 8 positions through the wide layer
    sides = [(m * r, k, n) for r in (1, 2, 4, 8)]
    table = matmul_table([Product(dtype, *side, 1, side[0] ** 0.5) for side in sides], {dtype: 1e9})
    key = product(GRAPHS[2])
    scaled = scaled_op_times({key: MeasuredOp(1.0, 2.0)}, GRAPHS[2], GRAPHS[8], table)
    assert scaled[product(GRAPHS[8])].forward_s == pytest.approx(2.0)


def test_o1_ops_without_flops_scale_with_bytes():
    key, op = next((key, op) for key, op in ops_of(GRAPHS[1]).items() if op.primitive == "transpose" or not op.flops)
    scaled = scaled_op_times({key: MeasuredOp(1.0, 1.0)}, GRAPHS[1], GRAPHS[2])
    others = [time for other, time in scaled.items() if other != key]
    assert not op.flops and all(1.0 <= time.forward_s <= 2.0 for time in others)


def test_what_was_measured_at_the_wanted_size_stays():
    large = product(GRAPHS[8])
    times = {product(GRAPHS[1]): MeasuredOp(1.0, 1.0), large: MeasuredOp(5.0, 5.0)}
    assert scaled_op_times(times, GRAPHS[1], GRAPHS[8])[large] == MeasuredOp(5.0, 5.0)


def timed(*keys):
    return dict.fromkeys(keys, MeasuredOp(1.0, 1.0))


def test_the_measured_graph_is_found():
    graphs = list(GRAPHS.values())
    assert measured_graph({}, graphs) is None
    assert measured_graph(timed("of another model"), graphs) is None
    assert measured_graph(timed(product(GRAPHS[2])), graphs) is GRAPHS[2]


def test_the_graph_with_most_measured_ops_is_kept_where_none_has_nearly_all():
    others = [f"of another model {i}" for i in range(100)]
    one, two = product(GRAPHS[1]), [key for key in ops_of(GRAPHS[8]) if key not in ops_of(GRAPHS[1])][:2]
    assert measured_graph(timed(one, *two, *others), GRAPHS.values()) is GRAPHS[8]


@pytest.mark.parametrize("size", GRAPHS)
def test_no_graph_is_made_once_one_has_nearly_all_ops(size):
    made = []

    def graphs():
        for graph in GRAPHS.values():
            made.append(graph.microbatch)
            yield graph

    heavy = [key for key, op in ops_of(GRAPHS[size]).items() if op.flops]
    assert measured_graph(timed(*heavy), graphs()) is GRAPHS[size]
    assert made == [one for one in GRAPHS if one <= size]
    made.clear()
    elsewhere = [f"of another microbatch {i}" for i in range(100)]  # FLOPs tell where the profile has several sizes
    assert measured_graph(timed(*heavy, *elsewhere), graphs()) is GRAPHS[size] and made[-1] == size


@pytest.mark.parametrize("size", GRAPHS)
def test_every_measured_op_has_its_like(size):
    times = {key: MeasuredOp(1.0, 1.0) for key in ops_of(GRAPHS[1])}
    assert set(ops_of(GRAPHS[size])) <= set(scaled_op_times(times, GRAPHS[1], GRAPHS[size]))
