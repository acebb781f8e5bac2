"""Constants of a software stack that are written among a strategy: ``dp=8,microbatch=1,stack=selene,step_s=0.2``."""

from collections.abc import Mapping
from typing import Any

from costmodel.documents import suggestion
from costmodel.errors import InputError
from costmodel.stack import WORDS, Stack
from planner.strategy.strategy import AnyStrategy, on_or_off

STACK = "stack"
_NAMES = frozenset({STACK, *Stack.__struct_fields__}) - {"name", "fitted_on", "attention"}


def split_constants(strategy: AnyStrategy) -> tuple[AnyStrategy, dict[str, Any]]:
    """A strategy, and the constants that are written among it, as they are written.

    Raises:
        InputError: MP182 one is given twice.
    """
    if isinstance(strategy, str):
        own, found = list[str](), dict[str, Any]()
        for part in filter(None, (part.strip() for part in strategy.split(","))):
            key, _, value = (word.strip() for word in part.partition("="))
            if key not in _NAMES:
                own.append(part)
            elif key in found:
                raise InputError("MP182", f"the strategy gives {key!r} twice", "give it once")
            else:
                found[key] = value
        return ",".join(own), found
    if isinstance(strategy, Mapping):
        rest = {key: value for key, value in strategy.items() if key not in _NAMES}
        return rest, {key: value for key, value in strategy.items() if key in _NAMES}
    return strategy, {}


def constant_value(key: str, value: Any) -> Any:
    """The value of a constant that was written as text.

    Raises:
        InputError: MP182 it is no number, or not among the words that the constant can be.
    """
    if not isinstance(value, str):
        return value
    if key in ("flat_state", "pooled"):
        return on_or_off(key, value)
    if key in WORDS:
        if value not in WORDS[key]:
            raise InputError("MP182", f"{key}={value} is not known", suggestion(value, WORDS[key], "it is one of"))
        return value
    try:
        return int(value) if key == "reserve_bytes" else float(value)
    except ValueError:
        hint = "separate fields by commas: dp=8,step_s=0.1" if "=" in value else f"write {key}=0.1, say"
        raise InputError("MP182", f"{key}={value} is no number", hint) from None
