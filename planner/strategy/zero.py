"""Over how many devices ZeRO splits the state of a parameter: those of data parallelism and of context parallelism,
which all hold the same values. An expert's parameters lie on as many fewer devices as share out the experts.

A framework that keeps state in one flat array splits all of it. The planner's own programs split each parameter along
dims that the degrees divide; what has no such dim stays whole, its gradient is reduced like that of data parallelism.
"""

from planner.strategy.strategy import Strategy
from planner.strategy.work import Leaf


def state_ways(leaf: Leaf, strategy: Strategy, *, flat: bool) -> int:
    """Parts of a parameter's state under a strategy with ZeRO; 1 where it stays whole.

    Args:
        flat: whether the stack splits state as one array (`costmodel.stack.Stack.flat_state`).
    """
    dp = strategy.dp // strategy.ep if leaf.expert else strategy.dp
    if flat:
        return dp * strategy.cp
    left, ways = list(leaf.shape), 1
    for size in (dp, strategy.cp):
        dim = next((d for d, n in enumerate(left) if n % size == 0), None)
        if dim is not None:
            left[dim] //= size
            ways *= size
    return ways
