"""Tables of others as text."""

from pathlib import Path

from costmodel.errors import InputError


def read_table(path: str | Path) -> str:
    """The text of a table.

    Raises:
        InputError: MP165 for a file that cannot be read or is not UTF-8.
    """
    try:
        return Path(path).read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise InputError("MP165", f"{path} is not UTF-8 text: byte {error.start} cannot be read") from None
    except OSError as error:
        raise InputError("MP165", f"cannot read table {path}: {error.strerror or error}") from None
