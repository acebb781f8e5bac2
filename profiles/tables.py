"""Tables of others as text."""

from pathlib import Path

from costmodel.errors import ProfileError


def read_table(path: str | Path) -> str:
    """The text of a table.

    Raises:
        ProfileError: MP310 for a file that cannot be read or is not UTF-8.
    """
    try:
        return Path(path).read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ProfileError("MP310", f"{path} is not UTF-8 text: byte {error.start} cannot be read") from None
    except OSError as error:
        raise ProfileError("MP310", f"cannot read table {path}: {error.strerror or error}") from None
