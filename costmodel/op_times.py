"""Measured op times carried over to another microbatch size.

A profile has a model's ops at one microbatch size, the search tries many. The same op at another size takes

* O1  time(m) = time(m0) x work(m) / work(m0)

with FLOPs for work, or bytes of operands and results for an op without any: the rate that was achieved is kept, where
the roofline would only know the rate of large matrix products. Where products near both shapes were measured, work is
the time that these say a product takes (`matmul_table`): small ones achieve less.
"""

from collections.abc import Container, Iterable

from costmodel.estimator import MeasuredOp, OpTimes
from costmodel.graph import BlockClass, ModelGraph, Op
from costmodel.kernels import is_matmul, measured_product_s, op_dtype, product_shape
from costmodel.matmul_table import MatmulTable

NEARLY_ALL = 0.9
"""Share of the measured ops, or of a graph's FLOPs, from which on no other graph is looked at."""


def scaled_op_times(
    op_times: OpTimes, measured: ModelGraph, wanted: ModelGraph, products: MatmulTable | None = None
) -> dict[str, MeasuredOp]:
    """`op_times` with what is missing of `wanted`'s ops, taken from the same ops of `measured`.

    Args:
        op_times: by `Op.key`.
        measured, wanted: one model at two microbatch sizes; blocks and ops that do not correspond are left out.
        products: measured matrix products.
    """
    times = dict(op_times)
    pairs = {(one.class_key, other.class_key) for one, other in zip(measured.blocks, wanted.blocks, strict=False)}
    for one, other in sorted(pairs):
        source, target = measured.classes[one], wanted.classes[other]
        for known, op in zip(source.ops, target.ops, strict=False):
            found = op_times.get(known.key)
            if found is None or op.key in times or op.primitive != known.primitive:
                continue
            ratio = _ratio(known, source, op, target, products)
            times[op.key] = MeasuredOp(found.forward_s * ratio, found.backward_s * ratio, "interpolated")
    return times


def measured_graph(op_times: OpTimes, graphs: Iterable[ModelGraph]) -> ModelGraph | None:
    """The graph of which most ops were measured; None where none was.

    Args:
        op_times: by `Op.key`.
        graphs: one model at several microbatch sizes, the likeliest first. They are taken one at a time, and no more of
            them once one holds nearly all ops that were measured, or has nearly all of its own FLOPs measured.
    """
    best, most = None, 0
    for graph in graphs:
        found = {op.key for cls in graph.classes.values() for op in cls.ops if op.key in op_times}
        if len(found) > most:
            best, most = graph, len(found)
        if found and (len(found) >= NEARLY_ALL * len(op_times) or _share_of_flops(graph, found) >= NEARLY_ALL):
            return graph
    return best


def _share_of_flops(graph: ModelGraph, keys: Container[str]) -> float:
    ops = [op for block in graph.blocks for op in graph.classes[block.class_key].ops]
    total = sum(op.flops for op in ops)
    return sum(op.flops for op in ops if op.key in keys) / total if total else 0.0


def _ratio(known: Op, source: BlockClass, op: Op, target: BlockClass, products: MatmulTable | None) -> float:
    """Time of an op over that of the same op at the measured size."""
    if is_matmul(op) and op.inside is None:
        there, here = (
            measured_product_s(products, product_shape(one, (), ()), op_dtype(one, cls.tensors))
            for one, cls in ((known, source), (op, target))
        )
        if there is not None and here is not None:
            return here[0] / there[0]
    return _work(op, target) / _work(known, source)


def _work(op: Op, cls: BlockClass) -> float:
    return op.flops or float(max(1, sum(cls.tensors[name].bytes for name in (*op.inputs, *op.outputs) if name)))
