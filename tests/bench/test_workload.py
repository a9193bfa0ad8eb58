"""Groups of prompts, and prompts made to a length."""

from __future__ import annotations

from pathlib import Path

import pytest

from pard_jax.bench.workload import Workload, fit, read_groups


def test_fit_keeps_the_end() -> None:
    assert fit([1, 2, 3], None) == [1, 2, 3]
    assert fit([1, 2, 3], 3) == [1, 2, 3]
    assert fit([1, 2, 3], 2) == [2, 3]
    assert fit([1, 2, 3], 7) == [3, 1, 2, 3, 1, 2, 3]


def test_a_batch_is_of_one_group() -> None:
    workload = Workload(None, {"a": [[1], [2], [3]], "b": [[4, 4]]})
    assert list(workload.batches(2)) == [("a", [[1], [2]]), ("a", [[3]]), ("b", [[4, 4]])]
    assert workload.longest == 2


def test_groups_of_files(tmp_path: Path) -> None:
    for name in ("one.txt", "two.txt", "total.txt"):
        (tmp_path / name).write_text(f"{name}\nsecond\nthird\n")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "one.jsonl").write_text('{"prompt": "x"}\n')
    one, two, total = (str(tmp_path / name) for name in ("one.txt", "two.txt", "total.txt"))
    groups = read_groups([], [one, two], 2)
    assert {name: [p.given for p in prompts] for name, prompts in groups.items()} == {
        "one": ["one.txt", "second"],
        "two": ["two.txt", "second"],
    }
    assert list(read_groups(["x", "y"], None, None)) == ["prompts"]
    assert list(read_groups([], [total], None)) == ["total"]
    with pytest.raises(ValueError, match="two files of prompts are called 'one'"):
        read_groups([], [one, str(tmp_path / "other" / "one.jsonl")], None)
    with pytest.raises(ValueError, match="'total'"):
        read_groups([], [one, total], None)
    with pytest.raises(ValueError, match="choose one"):
        read_groups(["x"], [one], None)
