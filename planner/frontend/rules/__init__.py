"""What each JAX primitive's loop dims are, what it costs and how it runs on shards. Importing fills the registry."""

from planner.frontend.rules import (  # noqa: F401
    contraction,
    convolution,
    custom_derivatives,
    elementwise,
    indexing,
    linear_algebra,
    loops,
    ordering,
    randomness,
    reduction,
    structure,
    unknown,
    windows,
)
