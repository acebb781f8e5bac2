"""Jitter: repeatable noise without state. A factor depends on the seed, the actor, the step and what it is for only, so
that two simulations of one seed see the same noise whatever else differs between them."""

from costmodel.errors import InputError

_MASK = (1 << 64) - 1


def check_jitter(jitter: float) -> None:
    """Raises MP191 unless the jitter is at least 0 and below 1."""
    if not 0.0 <= jitter < 1.0:
        raise InputError(
            "MP191", f"the jitter is {jitter:g}, it must be at least 0 and below 1", "write 0.05 (or 5%) for ±5%"
        )


def factors(count: int, jitter: float, seed: int, *stream: int) -> list[float]:
    """`count` factors, uniform in [1 - jitter, 1 + jitter], of mean 1.

    Args:
        count: how many.
        jitter: at least 0 and below 1.
        seed: any whole number.
        stream: numbers that tell this sequence from others of the seed.

    Example:
        >>> factors(2, 0.0, 7)
        [1.0, 1.0]
    """
    state = seed & _MASK
    for number in stream:
        state = _mixed(state + 0x9E3779B97F4A7C15 * (number + 1))
    scale = 2.0 * jitter / (1 << 53)
    return [1.0 - jitter + scale * (_mixed(state + 0x9E3779B97F4A7C15 * (at + 1)) >> 11) for at in range(count)]


def _mixed(state: int) -> int:
    """The finaliser of splitmix64: every bit of the result depends on every bit of `state`."""
    state &= _MASK
    state = (state ^ (state >> 30)) * 0xBF58476D1CE4E5B9 & _MASK
    state = (state ^ (state >> 27)) * 0x94D049BB133111EB & _MASK
    return state ^ (state >> 31)
