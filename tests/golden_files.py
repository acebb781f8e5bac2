"""Golden files: texts that commands must print to the byte.

After a wanted change, write them anew with

    MESHPLAN_UPDATE_GOLDEN=1 python -m pytest tests/planfile tests/report tests/cli

and read the difference in git. Refused where CI is set.
"""

import os
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent / "golden"


def check_golden(name: str, text: str | bytes) -> None:
    """Compares bytes with the golden file `name`, or writes it where that was asked for."""
    data = text.encode() if isinstance(text, str) else text
    path = FOLDER / name
    if os.environ.get("MESHPLAN_UPDATE_GOLDEN"):
        if os.environ.get("CI", "").lower() not in ("", "0", "false"):
            pytest.fail("golden files are not rewritten in CI: run the command of tests/golden_files.py and commit")
        path.write_bytes(data)
    assert path.is_file(), f"no golden file {path}: see tests/golden_files.py"
    assert data.decode() == path.read_bytes().decode()
