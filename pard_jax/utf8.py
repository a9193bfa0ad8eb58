"""Text that people bring along must be UTF-8; where it is not, the message says where."""

from __future__ import annotations

from pathlib import Path


def read_text(path: str | Path) -> str:
    """The text of a file.

    Raises:
        ValueError: it is not UTF-8; names the file and the line.
        OSError: it cannot be read.
    """
    try:
        return Path(path).read_text(encoding="utf-8")
    except UnicodeDecodeError as e:
        raise ValueError(f"{path}, {not_utf8(e)}") from None


def not_utf8(error: UnicodeDecodeError, first_line: int = 1) -> str:
    """``line N: ...``, what is wrong there and what to do; ``first_line`` is the number of the line decoded first."""
    data, at = error.object, error.start
    line = first_line + data.count(b"\n", 0, at)
    column = at - data.rfind(b"\n", 0, at)
    return (
        f"line {line}: byte {column} of it is {data[at]:#04x}, which is not UTF-8 ({error.reason}); the file must be "
        "UTF-8: save it again so, or convert it (iconv -f ITS_ENCODING -t UTF-8)"
    )
