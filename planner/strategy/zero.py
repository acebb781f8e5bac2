"""Over which devices ZeRO splits the state of a parameter: those of data parallelism and of context parallelism, which
all hold the same values. An expert's parameters lie on as many fewer devices as share out the experts, and those of
which each replica uses a part of its own on one.

A framework that keeps state in one flat array splits all of it. The planner's own programs split each parameter along
dims that the degrees divide; what has no such dim, or is small, stays whole, its gradient is reduced like that of data
parallelism.
"""

from functools import lru_cache

from planner.strategy.leaves import Leaf
from planner.strategy.strategy import Strategy


def holders(leaf: Leaf, strategy: Strategy) -> tuple[tuple[str, int], tuple[str, int]]:
    """The axes, of data and of context parallelism, whose devices use the same values of a parameter, with how many
    they are; of one device where each uses its own."""
    each = strategy.dp // strategy.ep
    data = {
        (False, False): ("dp", strategy.dp),
        (False, True): ("edp", each),
        (True, False): ("ep", strategy.ep),
        (True, True): ("dp", 1),
    }["batch" in leaf.split, "expert" in leaf.split]
    return data, ("cp", 1 if "context" in leaf.split else strategy.cp)


def replicas(leaf: Leaf, strategy: Strategy) -> tuple[int, int]:
    """Devices of data and of context parallelism that use the same values of a parameter."""
    (_, dp), (_, cp) = holders(leaf, strategy)
    return dp, cp


def state_parts(leaf: Leaf, strategy: Strategy, *, flat: bool) -> tuple[int, int]:
    """Parts of a parameter's state under a strategy with ZeRO over its `replicas`; 1 where it stays whole.

    Of the ways to split dims the one with most parts.

    Args:
        flat: whether the stack splits state as one array (`costmodel.stack.Stack.flat_state`).
    """
    sizes = replicas(leaf, strategy)
    if flat or sizes == (1, 1):
        return sizes
    return (1, 1) if leaf.small else _most_parts(leaf.shape, *sizes)


@lru_cache(maxsize=4096)
def _most_parts(shape: tuple[int, ...], dp: int, cp: int) -> tuple[int, int]:
    both = any(n % (dp * cp) == 0 for n in shape)
    apart = any(n % dp == 0 and other % cp == 0 for i, n in enumerate(shape) for j, other in enumerate(shape) if i != j)
    if both or apart:
        return dp, cp
    alone = [(dp, 1) if any(n % dp == 0 for n in shape) else (1, 1)]
    alone += [(1, cp)] if any(n % cp == 0 for n in shape) else []
    return max(alone, key=lambda parts: parts[0] * parts[1])
