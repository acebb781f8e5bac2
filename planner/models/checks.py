"""Checks of model dimensions, with numbers and the nearest legal sizes in every message (codes MP122)."""

from typing import Any

import jax.numpy as jnp
import optax

from costmodel.errors import InputError

DTYPES = ("bfloat16", "float16", "float32")


def positive_integers(family: str, **dims: Any) -> None:
    """Every dim must be an integer of at least 1."""
    for name, value in dims.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise InputError(
                "MP122", f"{family}: {name}={value!r} must be an integer of at least 1", f"give {name} as a count"
            )


def booleans(family: str, **flags: Any) -> None:
    """Every flag must be True or False, so that a word such as ``no`` does not count as true."""
    for name, value in flags.items():
        if not isinstance(value, bool):
            raise InputError(
                "MP122", f"{family}: {name}={value!r} must be True or False", f"write {name}=True or False"
            )


def positive_numbers(family: str, **numbers: Any) -> None:
    """Every number must be above 0."""
    for name, value in numbers.items():
        if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
            raise InputError(
                "MP122", f"{family}: {name}={value!r} must be a number above 0", f"leave out {name} for the default"
            )


def divides(family: str, part: str, parts: int, whole: str, size: int) -> None:
    """`size` must be a multiple of `parts`."""
    if size % parts:
        below, above = size // parts * parts, -(-size // parts) * parts
        near = f"{whole}={above}" if below == 0 else f"{whole}={below} or {above}"
        around = (d for off in range(max(parts, size)) for d in (parts - off, parts + off))
        nearest = next(d for d in around if d > 0 and size % d == 0)
        raise InputError(
            "MP122",
            f"{family}: {whole}={size} is not divisible by {part}={parts} (remainder {size % parts})",
            f"use {near}, or {part}={nearest}",
        )


def even(family: str, name: str, value: int, why: str) -> None:
    """`value` must be even."""
    if value % 2:
        raise InputError(
            "MP122", f"{family}: {name}={value} must be even: {why}", f"use {name}={value - 1} or {value + 1}"
        )


def one_of(family: str, name: str, value: Any, legal: tuple[str, ...]) -> None:
    """`value` must be one of the named choices."""
    if value not in legal:
        raise InputError("MP122", f"{family}: {name}={value!r} is not understood", f"use one of {', '.join(legal)}")


def fraction(family: str, name: str, value: Any, *, whole: bool = False) -> None:
    """`value` must be a number in ``[0, 1)``, or in ``[0, 1]`` if the whole is legal."""
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not 0 <= value <= 1 or (value == 1 and not whole):
        legal = "[0, 1]" if whole else "[0, 1)"
        raise InputError("MP122", f"{family}: {name}={value!r} must be in {legal}", f"{name}=0 turns it off")


def within(family: str, name: str, value: int, limit_name: str, limit: int) -> None:
    """`value` must not exceed `limit`."""
    if value > limit:
        raise InputError(
            "MP122",
            f"{family}: {name}={value} exceeds {limit_name}={limit}",
            f"use {name}<={limit}, or build the family with {limit_name}={value}",
        )


def compute_dtype(family: str, dtype: str) -> jnp.dtype:
    """The dtype of matrix products and activations; master weights stay float32."""
    one_of(family, "dtype", dtype, DTYPES)
    return jnp.dtype(dtype)


def optimizer_or_default(optimizer: optax.GradientTransformation | None) -> optax.GradientTransformation:
    """AdamW at 1e-4 unless the caller has chosen."""
    return optax.adamw(1e-4) if optimizer is None else optimizer
