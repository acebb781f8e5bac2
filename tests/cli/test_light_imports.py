"""`--help` answers without the heavy packages; explain and validate run where JAX is not installed."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from cli.main import COMMANDS
from planner.plan_files import write_plan
from profiles.cluster_files import write_cluster
from tests.plans import tiny_cluster, tiny_plan

HEAVY = ("jax", "jaxlib", "ortools", "numpy", "rich", "optax", "networkx", "pandas", "scipy")
BLOCKED = ("jax", "jaxlib", "ortools", "numpy", "optax", "flax")


ROOT = str(Path(__file__).parents[2])


def python(code, cwd=ROOT):
    env = {**os.environ, "PYTHONPATH": ROOT}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=cwd, env=env, check=False)
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize(
    "args", [["--help"], ["--version"], *([name, "--help"] for name in COMMANDS), ["cluster", "init", "--help"]]
)
def test_help_imports_nothing_heavy(args):
    code = f"""
import json, sys
from cli.main import main
try:
    main({args!r})
finally:
    print(json.dumps(sorted({{name.split('.')[0] for name in sys.modules}} & set({HEAVY!r}))), file=sys.stderr)
"""
    status, out, err = python(code)
    assert status == 0 and out
    assert json.loads(err.splitlines()[-1]) == []


def test_importing_planner_imports_nothing_heavy():
    code = f"import planner, sys; print([m for m in {HEAVY!r} if m in sys.modules], sorted(dir(planner))[:1])"
    assert python(code)[1].startswith("[] ")


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        (["validate", "p.json", "--cluster", "c.toml"], 0),
        (["validate", "p.json", "--cluster", "two.toml", "--format", "sarif"], 1),
        (["explain", "p.json"], 0),
        (["explain", "p.json", "--timeline"], 0),
        (["explain", "p.json", "--html"], 0),
        (["explain", "p.json", "--json"], 0),
        (["simulate", "p.json"], 0),
        (["simulate", "p.json", "--json", "--html", "x.html", "--trace", "x.json", "-o", "y"], 0),
        (["cluster", "show", "c.toml"], 0),
    ],
)
def test_runs_without_jax(tmp_path, args, expected):
    write_plan(tmp_path / "p.json", tiny_plan())
    write_cluster(tmp_path / "c.toml", tiny_cluster())
    write_cluster(tmp_path / "two.toml", tiny_cluster(2))
    code = f"import sys\nfor name in {BLOCKED!r}: sys.modules[name] = None\nfrom cli.main import main\nmain({args!r})"
    status, out, err = python(code, tmp_path)
    assert status == expected, err
    assert "wrote" in err if "-o" in args else out and not err


def test_notebook_views_need_no_jax():
    code = f"""
import sys
for name in {BLOCKED!r}: sys.modules[name] = None
import planner
from tests.plans import tiny_cluster, tiny_plan
plan = tiny_plan()
assert plan._repr_html_() and repr(plan) and planner.explain(plan).text and planner.validate(plan, tiny_cluster()) == ()
"""
    assert python(code)[0] == 0
