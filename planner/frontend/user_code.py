"""Where in the user's code an error arose, for messages."""

import functools
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

_OWN = str(Path(__file__).parents[1])


def user_line(error: BaseException) -> str:
    """`` at file.py:12 (function)``: the innermost frame of the user's own code, or of a package that is not JAX."""
    trace, own, package = error.__traceback__, "", ""
    while trace is not None:
        code = trace.tb_frame.f_code
        if "site-packages/jax" not in code.co_filename and not code.co_filename.startswith(_OWN):
            package = f" at {code.co_filename.rsplit('/', 1)[-1]}:{trace.tb_lineno} ({code.co_name})"
            own = own if "site-packages" in code.co_filename else package
        trace = trace.tb_next
    return own or package


def first_line(error: BaseException) -> str:
    """``ValueError: what is wrong``, one line."""
    text = str(error).strip()
    return f"{type(error).__name__}: {text.splitlines()[0]}" if text else type(error).__name__


def defined_at(function: Callable[..., Any]) -> str:
    """``file.py:12 (function)``: where a function begins, what wraps it left aside; '' if it is not Python's."""
    plain: Any = inspect.unwrap(function)
    while isinstance(plain, functools.partial):
        plain = inspect.unwrap(plain.func)
    if not inspect.isroutine(plain):
        plain = type(plain).__call__  # an object that is called
    code = getattr(plain, "__code__", None)
    return "" if code is None else f"{code.co_filename.rsplit('/', 1)[-1]}:{code.co_firstlineno} ({code.co_name})"
