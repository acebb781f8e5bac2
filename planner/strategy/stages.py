"""Which blocks each stage of a strategy runs."""

from collections.abc import Sequence

from costmodel.errors import InputError
from planner.strategy.blocks import Blocks
from planner.strategy.scheduled import parts_count
from planner.strategy.strategy import Strategy
from planner.strategy.work import Work


def parts_of(work: Work, strategy: Strategy) -> list[Blocks]:
    """The model cut into the parts that the schedule runs: layers as the partition says,
    else in equal numbers (what is left over to the middle ones; those at the ends also run what stands before and
    after the layers, be it alone).

    Raises:
        InputError: MP184 if there are fewer layers than parts, the partition counts other layers than the model's, or
            one part would run the whole model. Parts may be without layers, as DeepSpeed's are that run what stands
            before or after them.
    """
    layered = _layered(work)
    sizes = layers_of_parts(work, strategy)
    count = len(sizes)
    if count == 1:
        return [Blocks.of(work.order, range(len(work.order)))]
    parts, at = list[Blocks](), 0
    for i in range(count):
        last = i == len(sizes) - 1
        end = len(work.order) if last else _end(layered, sum(sizes[: i + 1]))
        parts.append(Blocks.of(work.order, range(at, end)))
        at = end
    if any(len(part.positions) == len(work.order) for part in parts):
        whole = "+".join(map(str, sizes))
        message = f"partition={whole}: one of {count} parts runs all {len(work.order)} blocks, the others nothing"
        raise InputError("MP184", message, "give another part some of the layers, or leave out pp and partition")
    return parts


def layers_of_parts(work: Work, strategy: Strategy) -> tuple[int, ...]:
    """Layers of each part.

    Raises:
        InputError: MP184 if there are fewer layers than parts, or the partition counts other layers than the model's.
    """
    count, layers = parts_count(strategy), len(_layered(work))
    if count == 1:
        return (layers,)
    sizes = strategy.partition
    if sizes is None:
        if layers < count:
            message = f"{count} parts (pp={strategy.pp}, {count // strategy.pp} a stage), {layers} layers"
            raise InputError("MP184", message, "lower pp or interleave")
        sizes = equal_parts(layers, count)
    if len(sizes) != count:
        raise InputError("MP184", f"the partition names {len(sizes)} parts, the schedule runs {count}", "")
    if sum(sizes) != layers:
        message = f"the partition has {sum(sizes)} layers, the model {layers}"
        raise InputError("MP184", message, "name each layer once")
    return sizes


def _layered(work: Work) -> list[int]:
    """Positions of the layers among the model's blocks."""
    return [i for i, key in enumerate(work.order) if work.classes[key].layered]


def _end(layered: list[int], layers: int) -> int:
    """Block after the first `layers` layers; of none, after what stands before them."""
    return layered[layers - 1] + 1 if layers else min(layered, default=0)


def equal_parts(layers: int, count: int) -> tuple[int, ...]:
    """Layers of each of `count` parts."""
    base, left = divmod(layers, count)
    order = sorted(range(count), key=lambda i: (abs(i - (count - 1) / 2), i))
    more = set(order[:left])
    return tuple(base + (i in more) for i in range(count))


def cut_bytes(work: Work, parts: Sequence[Blocks]) -> float:
    """Bytes of one microbatch of a replica, whole, that cross the busiest cut between parts one way: half of what goes
    forward and comes back there."""
    if len(parts) == 1:
        return 0.0
    cuts = [min(part.positions, default=len(work.order)) for part in parts[1:]]
    whole = max(float(work.border_bytes[cut - 1].mean()) for cut in cuts if 0 < cut < len(work.order))
    return whole / work.replicas
