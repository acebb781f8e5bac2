"""Measured op times carried over to another microbatch size.

A profile has a model's ops at one microbatch size, the search tries many. The same op at another size takes

* O1  time(m) = time(m0) x work(m) / work(m0)

with FLOPs for work, or bytes of operands and results for an op without any: the rate that was achieved is kept, where
the roofline would only know the rate of large matrix products.
"""

from collections.abc import Container

from costmodel.estimator import MeasuredOp, OpTimes
from costmodel.graph import BlockClass, ModelGraph, Op


def scaled_op_times(op_times: OpTimes, measured: ModelGraph, wanted: ModelGraph) -> dict[str, MeasuredOp]:
    """`op_times` with what is missing of `wanted`'s ops, taken from the same ops of `measured`.

    Args:
        op_times: by `Op.key`.
        measured, wanted: one model at two microbatch sizes; blocks and ops that do not correspond are left out.
    """
    times = dict(op_times)
    pairs = {(one.class_key, other.class_key) for one, other in zip(measured.blocks, wanted.blocks, strict=False)}
    for one, other in sorted(pairs):
        source, target = measured.classes[one], wanted.classes[other]
        for known, op in zip(source.ops, target.ops, strict=False):
            found = op_times.get(known.key)
            if found is None or op.key in times or op.primitive != known.primitive:
                continue
            ratio = _work(op, target) / _work(known, source)
            times[op.key] = MeasuredOp(found.forward_s * ratio, found.backward_s * ratio, "interpolated")
    return times


def measured_graph(op_times: Container[str], graphs: list[ModelGraph]) -> ModelGraph | None:
    """The graph of which most ops were measured; None where none was."""

    def count(graph: ModelGraph) -> int:
        return sum(op.key in op_times for cls in graph.classes.values() for op in cls.ops)

    best = max(graphs, key=count, default=None)
    return best if best is not None and count(best) else None


def _work(op: Op, cls: BlockClass) -> float:
    return op.flops or float(max(1, sum(cls.tensors[name].bytes for name in (*op.inputs, *op.outputs) if name)))
