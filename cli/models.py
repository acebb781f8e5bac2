"""`meshplan models`: what --model can name."""

import json
import math

import click

from cli.options import COUNT, json_option, output_option, require_effect
from cli.output import emit

MOST_PARAMETERS = 30


@click.command("models", short_help="List built-in models, or show one.")
@click.argument("spec", metavar="[SPEC]", required=False)
@click.option("--seq", type=COUNT, help="Sequence length instead of the model's own.")
@json_option
@output_option("the list")
def command(spec: str | None, seq: int | None, as_json: bool, output: str | None) -> None:
    """List built-in models, or show one.

    SPEC is whatever --model takes: a built-in name, family(key=value,...), a config.json, or path.py:function.
    """
    require_effect("seq", spec is not None, "the list has each model with its own; name one SPEC")
    if spec is None:
        _list(as_json, output)
    else:
        _show(spec, seq, as_json, output)


def _list(as_json: bool, output: str | None) -> None:
    from planner.models import list_models
    from planner.report.table import format_table

    rows = list_models()
    if as_json:
        names = ("name", "family", "parameters", "dims", "seq")
        emit(json.dumps({"models": [{n: getattr(row, n) for n in names} for row in rows]}, indent=1) + "\n", output)
        return
    cells = [(row.name, row.family, f"{row.parameters:,}", str(row.seq or "-"), row.dims) for row in rows]
    emit(format_table(("name", "family", "parameters", "seq", "dimensions"), cells, right=(2, 3)) + "\n", output)


def _show(spec: str, seq: int | None, as_json: bool, output: str | None) -> None:
    import jax

    from planner.frontend.task import path_string
    from planner.models import load_model
    from planner.report.table import format_table

    task = load_model(spec, seq=seq)
    leaves = [(path_string(path), leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(task.params)]
    batch = [(path_string(path), leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(task.batch)]
    count = sum(math.prod(leaf.shape) for _, leaf in leaves)
    if as_json:
        document = {
            "name": task.name,
            "parameters": count,
            "reduction": task.reduction,
            "tokens_per_example": task.tokens_per_example,
            "parameter_shapes": {path: [list(leaf.shape), str(leaf.dtype)] for path, leaf in leaves},
            "batch": {path: [list(leaf.shape), str(leaf.dtype)] for path, leaf in batch},
        }
        emit(json.dumps(document, indent=1) + "\n", output)
        return
    lines = [
        f"{task.name}: {count:,} parameters in {len(leaves)} arrays, loss reduces by {task.reduction}"
        + (f", {task.tokens_per_example} tokens an example" if task.tokens_per_example else ""),
        "",
    ]
    cells = [(path, str(list(leaf.shape)), str(leaf.dtype), f"{math.prod(leaf.shape):,}") for path, leaf in leaves]
    shown = cells[:MOST_PARAMETERS]
    lines.append(format_table(("parameter", "shape", "dtype", "elements"), shown, right=(3,)))
    if len(cells) > len(shown):
        lines.append(f"({len(cells) - len(shown)} more)")
    rows = [(path, str(list(leaf.shape)), str(leaf.dtype)) for path, leaf in batch]
    lines += ["", format_table(("batch leaf", "shape", "dtype"), rows)]
    emit("\n".join(lines) + "\n", output)
