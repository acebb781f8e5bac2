"""From the text that a user gives for a model to a `TrainingTask`.

gpt2                                          a built-in name
gpt(hidden=3072,layers=30,heads=32,...)       a family and its dimensions
mixtral-8x7b(capacity_factor=1.25)            a built-in name, some dimensions changed
config.json, or a folder that has one         the published configuration of a transformer
train.py:task                                 a function of the user's that returns a TrainingTask
"""

import ast
import difflib
import inspect
import re
from pathlib import Path
from typing import Any

from costmodel.errors import InputError
from planner.frontend.task import TrainingTask
from planner.models.catalog import BUILT_IN, FAMILIES, build
from planner.models.config_import import import_config
from planner.models.user_function import load_function

# Arguments of the families that no literal can write.
NOT_LITERAL = ("optimizer", "rope_scaling", "name")


def load_model(spec: str, *, seq: int | None = None, batch: int | None = None) -> TrainingTask:
    """The training task that `spec` describes; nothing is allocated.

    Args:
        spec: one of the forms in the module's docstring.
        seq: sequence length instead of the model's own.
        batch: examples in the abstract batch (a placeholder: the plan decides the microbatch).

    Raises:
        InputError: MP120 unknown name, MP121 malformed dimensions, MP122 dimensions that do not fit together, MP123 a
            configuration that is not understood, MP124 trouble in the user's function, MP125 an unreadable file.
    """
    spec = spec.strip()
    changes = {name: value for name, value in (("seq", seq), ("batch", batch)) if value is not None}
    if python := re.fullmatch(r"(.+\.py)(?::(\w*))?", spec):
        if not python[2]:
            raise InputError("MP124", f"{spec} names no function", f"write {python[1]}:task")
        return load_function(Path(python[1]), python[2], seq=seq, batch=batch)
    if ".py:" in spec:
        raise InputError(
            "MP124", f"{spec!r} is not path.py:function", "name one function after one colon: train.py:task"
        )
    if not re.search(r"\w", spec):
        raise InputError("MP120", f"{spec!r} names no model", "`meshplan models` lists what --model takes")
    if spec.endswith(".json") or (spec not in BUILT_IN and Path(spec, "config.json").is_file()):
        path = Path(spec) if spec.endswith(".json") else Path(spec, "config.json")
        return import_config(path, seq=seq, batch=batch)
    if "(" in spec:
        name, dims = parse_dims(spec)
        return _build(name, dims | changes)
    if spec in BUILT_IN:
        return _build(spec, changes)
    raise _unknown(spec)


def parse_dims(spec: str) -> tuple[str, dict[str, Any]]:
    """``'gpt(hidden=64,tied=True)'`` is ``('gpt', {'hidden': 64, 'tied': True})``: literals only, no code runs."""
    form = "write family(key=value,...), for example gpt(hidden=768,layers=12,heads=12,vocab=50257,seq=1024)"
    # Built-in names have dots and dashes, so the name is split off before Python's parser sees the rest.
    match = re.fullmatch(r"([\w.\-]+)\s*(\(.*\))", spec, re.DOTALL)
    if match is None:
        raise InputError("MP121", f"cannot read the dimensions in {spec!r}", form)
    try:
        call = ast.parse(f"_{match[2]}", mode="eval").body
    except (SyntaxError, ValueError) as error:
        raise InputError("MP121", f"cannot read the dimensions in {spec!r}: {error}", form) from error
    if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name) or call.args:
        raise InputError("MP121", f"cannot read the dimensions in {spec!r}: only key=value pairs are understood", form)
    dims: dict[str, Any] = {}
    for keyword in call.keywords:
        try:
            value = ast.literal_eval(keyword.value)
        except ValueError as error:
            # A bare word, such as norm=group, can only mean the text.
            if not isinstance(keyword.value, ast.Name):
                raise InputError("MP121", f"{keyword.arg}= is not a literal value in {spec!r}", form) from error
            value = keyword.value.id
        if keyword.arg is None:
            raise InputError("MP121", f"cannot read the dimensions in {spec!r}: ** is not understood", form)
        if keyword.arg in dims:
            raise InputError("MP121", f"{keyword.arg}= is given twice in {spec!r}", "give each dimension once")
        dims[keyword.arg] = value
    return match[1], dims


def _build(name: str, dims: dict[str, Any]) -> TrainingTask:
    if name not in BUILT_IN and name not in FAMILIES:
        raise _unknown(name)
    family = BUILT_IN[name][0] if name in BUILT_IN else name
    parameters = inspect.signature(FAMILIES[family]).parameters
    legal = [key for key in parameters if key not in NOT_LITERAL]
    for key in dims:
        if key not in legal:
            near = difflib.get_close_matches(key, legal, 1)
            hint = (f"did you mean {near[0]}? " if near else "") + f"legal keys: {', '.join(legal)}"
            raise InputError("MP121", f"{family} has no dimension {key!r}", hint)
    if name in BUILT_IN:
        return build(name, **dims)
    missing = [key for key in legal if parameters[key].default is inspect.Parameter.empty and key not in dims]
    if missing:
        raise InputError(
            "MP121", f"{family} needs {', '.join(missing)}", f"add {','.join(f'{key}=...' for key in missing)}"
        )
    return FAMILIES[family](**dims)


def _unknown(name: str) -> InputError:
    if name in FAMILIES:
        required = [
            f"{key}=..."
            for key, parameter in inspect.signature(FAMILIES[name]).parameters.items()
            if parameter.default is inspect.Parameter.empty
        ]
        return InputError(
            "MP120", f"{name} is a family, not a model", f"give its dimensions: {name}({','.join(required)})"
        )
    near = difflib.get_close_matches(name.lower(), [*BUILT_IN, *FAMILIES], 3)
    hint = f"did you mean {' or '.join(near)}?" if near else f"built-in models: {', '.join(BUILT_IN)}"
    return InputError(
        "MP120", f"unknown model {name!r}", f"{hint} (or a config.json, path.py:function, family(key=value,...))"
    )
