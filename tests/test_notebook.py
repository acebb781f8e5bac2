"""The example notebook runs from top to bottom, trains, and equals one device."""

import os
from ast import literal_eval
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

ROOT = Path(__file__).parents[1]


def output_of(cell, kind):
    return next(one["data"][kind] for one in cell["outputs"] if kind in one.get("data", {}))


def test_notebook(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH")))))
    notebook = nbformat.read(ROOT / "examples" / "plan_in_a_notebook.ipynb", as_version=4)
    resources = {"metadata": {"path": str(ROOT / "examples")}}
    NotebookClient(notebook, timeout=300, kernel_name="python3", resources=resources).execute()
    planned, checked, trained, compared = [cell for cell in notebook.cells if cell["cell_type"] == "code"][2:]
    assert "<table>" in output_of(planned, "text/html") and "predicted step time" in output_of(planned, "text/plain")
    assert output_of(checked, "text/plain") == "()"
    losses = literal_eval(output_of(trained, "text/plain"))
    assert losses[-1] < losses[0]
    assert literal_eval(output_of(compared, "text/plain")) == pytest.approx(losses, rel=1e-5)
