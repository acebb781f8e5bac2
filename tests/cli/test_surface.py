"""The command line as a whole is frozen: a change here is a change for users, to be made on purpose."""

import click
import pytest

import planner
from cli.main import COMMANDS, main
from tests.golden_files import check_golden


def walk(group, prefix=""):
    context = click.Context(group)
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        path = f"{prefix}{name}"
        if isinstance(command, click.Group):
            if command.invoke_without_command:
                yield path, command
            yield from walk(command, f"{path} ")
        else:
            yield path, command


def describe(param):
    if isinstance(param, click.Argument):
        return f"  {param.make_metavar(click.Context(click.Command('x')))}"
    names = ", ".join(param.opts)
    kind = "" if param.is_flag else f" {param.type.name}"
    if isinstance(param.type, click.Choice):
        kind = f" {{{','.join(param.type.choices)}}}"
    marks = " required" * param.required + " repeatable" * param.multiple
    return f"  {names}{kind}{marks}"


def test_surface():
    lines = []
    for path, command in walk(main):
        lines += [f"meshplan {path}", *sorted(describe(param) for param in command.params)]
    check_golden("cli_surface.txt", "\n".join(lines) + "\n")


def test_help_of_the_group_is_that_of_the_commands():
    for name, command in walk(main):
        if name in COMMANDS:
            assert command.short_help == COMMANDS[name][1]


@pytest.mark.parametrize("path", [path for path, _ in walk(main)])
def test_every_option_has_help(path):
    for _, command in ((p, c) for p, c in walk(main) if p == path):
        for param in command.params:
            assert isinstance(param, click.Argument) or param.help, (path, param.name)


def test_public_names_of_the_library():
    assert sorted(planner.__all__) == [
        "Calibrated", "Estimate", "Estimator", "Plan", "TrainingTask", "calibrate", "capture_record", "compile_plan",
        "estimate", "explain", "load_cluster", "load_plan", "load_task", "models", "plan", "reference",
        "save_plan", "simulate", "synthesize_schedule", "validate",
    ]  # fmt: skip
    assert set(planner.__all__) <= set(dir(planner))
    with pytest.raises(AttributeError, match="no attribute 'plann'"):
        _ = planner.plann
    assert callable(planner.explain) and callable(planner.explain)
    assert planner.models.load_model and planner.TrainingTask
