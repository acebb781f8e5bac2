"""Files that are written whole or not at all."""

import os
import tempfile
from pathlib import Path


def write_whole(target: Path, data: bytes, mode: int | None = None) -> None:
    """Writes a file through a temporary one beside it, so that readers see the old bytes or all of the new ones.

    Args:
        mode: permissions; None for a file that its owner alone reads.

    Raises:
        OSError: the place cannot be written; nothing is left there.
    """
    draft = ""
    try:
        with tempfile.NamedTemporaryFile(dir=target.parent, prefix=f".{target.name}.", delete=False) as file:
            draft = file.name
            file.write(data)
        if mode is not None:
            os.chmod(draft, mode)
        os.replace(draft, target)
        draft = ""
    finally:
        if draft:
            Path(draft).unlink(missing_ok=True)
