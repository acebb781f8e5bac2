"""What ZeRO splits of a stage's state over data-parallel devices, and what stays whole on each.

A framework that keeps state in one flat array splits all of it. The planner's own programs split each parameter along a
dim that the degree divides; a parameter without such a dim stays whole, its gradient is reduced like that of data
parallelism.
"""

from planner.strategy.work import Leaf


def splits(leaf: Leaf, dp: int, *, flat: bool) -> bool:
    """Whether `dp` devices can split the state of a parameter.

    Args:
        flat: whether the stack splits state as one array (`costmodel.stack.Stack.flat_state`).
    """
    return dp > 1 and (flat or any(n % dp == 0 for n in leaf.shape))
