"""Files in other encodings are refused with the file, the line and the byte."""

from __future__ import annotations

from pathlib import Path

import pytest

from pard_jax.utf8 import not_utf8, read_text


def test_text_comes_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes("naïve\n日本\n".encode())
    assert read_text(tmp_path / "a") == "naïve\n日本\n"


@pytest.mark.parametrize(
    ("content", "line", "column", "byte"),
    [
        (b"\xff\xfea\x00", 1, 1, "0xff"),
        (b"one\ntwo\nna\xefve\n", 3, 3, "0xef"),
        ("ä".encode() + b"\n\n\xe4", 3, 1, "0xe4"),
    ],
)
def test_where_it_is_not_utf8(tmp_path: Path, content: bytes, line: int, column: int, byte: str) -> None:
    (tmp_path / "notes.txt").write_bytes(content)
    with pytest.raises(ValueError, match=rf"notes\.txt, line {line}: byte {column} of it is {byte}, .*must be UTF-8"):
        read_text(tmp_path / "notes.txt")


def test_counted_from_a_line_within_a_file() -> None:
    with pytest.raises(UnicodeDecodeError) as caught:
        b"a\xff".decode()
    assert not_utf8(caught.value, 7).startswith("line 7: byte 2 of it is 0xff")
