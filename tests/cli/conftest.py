"""Files that commands read, and a way to call a command in process."""

from dataclasses import dataclass
from pathlib import Path

import pytest
from click.testing import CliRunner

from cli.main import main
from planner.plan_files import write_plan
from profiles.cluster_files import write_cluster
from tests.plans import tiny_cluster, tiny_plan


@dataclass(frozen=True)
class Outcome:
    """What a command did: exit code, stdout, stderr."""

    code: int
    out: str
    err: str


@pytest.fixture
def call(tmp_path, monkeypatch):
    """Runs ``meshplan ARGS`` in a folder with a good plan, its cluster and a cluster of too few devices."""
    monkeypatch.chdir(tmp_path)
    write_plan("good.plan.json", tiny_plan())
    write_cluster("mixed.toml", tiny_cluster())
    write_cluster("small.toml", tiny_cluster(2))

    def run(*args: str | Path) -> Outcome:
        result = CliRunner().invoke(main, [str(arg) for arg in args])
        assert "Traceback" not in result.output
        return Outcome(result.exit_code, result.stdout, result.stderr)

    return run
