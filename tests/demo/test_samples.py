"""Samples are read line by line; whatever is no sample is named with its line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pard_jax.demo.samples import read_samples

GOOD = {"messages": [{"role": "user", "content": "Ein Café?"}], "id": 3}


def test_samples_come_with_their_places_one_at_a_time(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "samples.jsonl"
    line = json.dumps(GOOD, ensure_ascii=False)
    path.write_bytes(b"\xef\xbb\xbf" + f"{line}\n\n  \r\n{line}\nno sample".encode())
    samples = read_samples(path)
    assert next(samples) == (f"{path}, line 1", GOOD)  # the byte order mark is none of it
    assert next(samples) == (f"{path}, line 4", GOOD)
    with pytest.raises(ValueError, match="line 5 is not valid JSON"):
        next(samples)
    assert "reading" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b"[1]", "line 2: expected an object with a list of 'messages', got \\[1\\]"),
        (b'{"messages": []}', "line 2: expected an object with a list of 'messages'"),
        (b'{"messages": {"content": "a"}}', "line 2: expected an object with a list of 'messages'"),
        (b'{"messages": [{"role": "user"}]}', "line 2: every message must have a 'content' of text"),
        (b'{"messages": [{"content": "a"}, {"content": 3}]}', "line 2: every message must have a 'content' of text"),
        ('{"messages": [{"content": "Café"}]}'.encode("latin-1"), "line 2: byte 31 of it is 0xe9, which is not UTF-8"),
    ],
)
def test_what_is_no_sample(line: bytes, message: str, tmp_path: Path) -> None:
    path = tmp_path / "samples.jsonl"
    path.write_bytes(json.dumps(GOOD).encode() + b"\n" + line + b"\n")
    with pytest.raises(ValueError, match=message):
        list(read_samples(path))


@pytest.mark.parametrize("text", ["", "\n \n"])
def test_a_file_of_none(text: str, tmp_path: Path) -> None:
    path = tmp_path / "samples.jsonl"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"samples\.jsonl holds no samples"):
        list(read_samples(path))
