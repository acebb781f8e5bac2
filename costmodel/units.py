"""The only place where bytes, seconds and rates become text. Everything is stored as int bytes and float seconds."""

KIB, MIB, GIB, TIB = 1 << 10, 1 << 20, 1 << 30, 1 << 40


def format_bytes(count: float) -> str:
    """`format_bytes(3 << 30)` is ``'3.00 GiB'``."""
    for size, name in ((TIB, "TiB"), (GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB")):
        if abs(count) >= size:
            return f"{count / size:.2f} {name}"
    return f"{count:.0f} B"


def format_seconds(time_s: float) -> str:
    """`format_seconds(0.0123)` is ``'12.3 ms'``."""
    for size, name in ((1.0, "s"), (1e-3, "ms"), (1e-6, "us")):
        if abs(time_s) >= size:
            return f"{time_s / size:.3g} {name}" if time_s < 1000 else f"{time_s:.0f} s"
    return "0 s" if time_s == 0 else f"{time_s / 1e-9:.3g} ns"


def format_rate(per_s: float, unit: str) -> str:
    """`format_rate(3.12e14, 'FLOP/s')` is ``'312 TFLOP/s'``."""
    for size, prefix in ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(per_s) >= size:
            return f"{per_s / size:.3g} {prefix}{unit}"
    return f"{per_s:.3g} {unit}"


def format_count(count: int, noun: str, plural: str = "") -> str:
    """A number of things in words.

    Example:
        >>> format_count(1, "microbatch", "microbatches"), format_count(2, "device")
        ('1 microbatch', '2 devices')
    """
    return f"{count} {noun if count == 1 else plural or noun + 's'}"
