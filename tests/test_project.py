"""What holds for the project as a whole: packages, file sizes, names, import contracts, and that the README is true."""

import doctest
import importlib
import os
import re
import runpy
import subprocess
import sys
import tomllib
from pathlib import Path

import click
import pytest

from cli.main import COMMANDS, main

ROOT = Path(__file__).parents[1]
PACKAGES = ("cli", "costmodel", "planner", "profiles")
MOST_LINES = 600
GRAB_BAGS = {"utils", "util", "misc", "helpers", "common"}
MODULES = sorted(path.relative_to(ROOT) for name in PACKAGES for path in (ROOT / name).rglob("*.py"))
TEXTS = sorted(
    [
        ROOT / "README.md",
        *(ROOT / "docs").glob("*.md"),
        *(ROOT / "examples").glob("*.py"),
        ROOT / "examples" / "demo.sh",
    ]
)
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def test_no_file_is_too_long():
    paths = [
        *MODULES,
        *(p.relative_to(ROOT) for name in ("tests", "examples", "benchmarks") for p in (ROOT / name).rglob("*.py")),
    ]
    counts = {str(path): len((ROOT / path).read_text().splitlines()) for path in paths}
    assert not {path: count for path, count in counts.items() if count > MOST_LINES}


def test_no_module_is_a_grab_bag():
    assert not [path for path in MODULES if GRAB_BAGS & {path.stem, *path.parts[:-1]}]


def test_no_module_is_empty():
    empty = [path for path in MODULES if path.name != "__init__.py" and not (ROOT / path).read_text().strip()]
    assert not empty


def test_the_top_level_holds_four_packages():
    top = {path.parent.name for path in ROOT.glob("*/__init__.py") if not path.parent.name.startswith(".")}
    assert top == {*PACKAGES, "tests"}
    assert PYPROJECT["tool"]["setuptools"]["packages"]["find"]["include"] == [
        "planner*",
        "costmodel*",
        "profiles*",
        "cli*",
    ]


def test_the_packages_are_those_that_setuptools_finds():
    """Every folder with modules is a package, so that an installed meshplan has all of it."""
    assert not [folder for folder in {path.parent for path in MODULES} if not (ROOT / folder / "__init__.py").is_file()]


def test_every_module_says_what_it_is():
    silent = []
    for path in MODULES:
        text = (ROOT / path).read_text()
        if text.strip() and not text.startswith('"""'):
            silent.append(str(path))
    assert not silent


def test_import_contracts():
    command = [sys.executable, "-c", "from importlinter.cli import lint_imports_command; lint_imports_command()"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


PURE = [
    path
    for path in MODULES
    if path.parts[0] == "costmodel"
    or path.parts[:2] in {("planner", name) for name in ("space", "search", "planfile", "check")}
]


@pytest.mark.parametrize("path", PURE, ids=str)
def test_doctests(path):
    module = importlib.import_module(".".join(path.with_suffix("").parts).removesuffix(".__init__"))
    assert doctest.testmod(module).failed == 0


def commands_in(path):
    """Arguments of the `meshplan ...` lines of blocks (indented, in a workflow, in the demo, in a docstring)."""
    text = re.sub(r"\s*\\\n\s*", " ", path.read_text())
    start = "" if path.suffix == ".py" else r"(?: {4,}(?:- )?(?:run: )?|run )"
    for line in re.findall(rf"^{start}meshplan (.*)$", text, re.MULTILINE):
        yield from (part.removeprefix("meshplan ") for part in re.split(r"\s+(?:;|&&)\s+", line.split("  #")[0]))


@pytest.mark.parametrize("path", TEXTS, ids=lambda path: path.name)
def test_commands_in_texts_exist(path):
    for line in commands_in(path):
        check_words(line.replace("'", "").replace("[", "").replace("]", "").split(), line)


def check_words(words, line):
    """Every subcommand and option of a command line is one that the command has."""
    assert words[0] in COMMANDS, line
    command = main.get_command(click.Context(main), words[0])
    does_itself = isinstance(command, click.Group) and command.invoke_without_command and words[1].startswith("-")
    if isinstance(command, click.Group) and not does_itself:
        assert words[1] in command.commands, line
        command = command.commands[words[1]]
    options = {name for parameter in command.params for name in (*parameter.opts, *parameter.secondary_opts)}
    used = [word.split("=")[0] for word in words if re.match(r"--?[a-z]", word)]
    assert set(used) <= options | {"--help"}, line


def test_files_named_in_texts_exist():
    missing = []
    for path in TEXTS:
        for name in re.findall(
            r"\b(?:docs|examples|benchmarks|tests|profiles|planner|costmodel|cli)/[\w./]+\.\w+\b", path.read_text()
        ):
            if not (ROOT / name).exists():
                missing.append(f"{path.name}: {name}")
    assert not missing


def test_readme_links_lead_somewhere():
    for name in ("README.md", *(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md"))):
        base = (ROOT / name).parent
        for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", (ROOT / name).read_text()):
            assert (base / target).exists(), f"{name}: {target}"


def test_contributing_is_short():
    text = (ROOT / "README.md").read_text()
    section = text.split("## Contributing\n")[1].split("\n## ")[0]
    assert len(section.splitlines()) <= 45


def test_no_machine_paths_or_addresses_of_registries():
    paths = [
        path for path in ROOT.rglob("*.md") if not any(part.startswith(".") for part in path.relative_to(ROOT).parts)
    ]
    for path in paths:
        assert not re.search(r"/tmp/|/work/|/root/|/home/", path.read_text()), path


@pytest.mark.parametrize("path", sorted((ROOT / "benchmarks").glob("*.py")), ids=lambda path: path.name)
def test_benchmarks_start(path):
    command = [sys.executable, str(path), "--help"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, env=environment)
    assert done.returncode == 0 and "usage:" in done.stdout, done.stderr


def test_a_benchmark_says_why_its_process_failed():
    found = runpy.run_path(str(ROOT / "benchmarks" / "planning_time.py"))["run_case"]("no such case")
    assert found.startswith("planning exited with 2: ") and "invalid choice: 'no such case'" in found
