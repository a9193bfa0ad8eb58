"""The file of samples: what a kill leaves is mended, and what does not belong together is refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from pard_jax.synthesize.store import Store

SETTINGS = {"model": "m", "seed": 0, "shares": (0.5, 1)}


def record(index: int, prompt: list[int] | None = None, answer: list[int] | None = None) -> dict[str, Any]:
    prompt = [1, index] if prompt is None else prompt
    answer = [3, index, 2] if answer is None else answer
    loss = [[len(prompt), len(prompt) + len(answer)]]
    return {"id": index, "token_ids": prompt + answer, "loss_ranges": loss, "messages": [], "finish_reason": "stop"}


def fill(store: Store, until: int) -> None:
    """Every third conversation gives none."""
    while store.next_id < until:
        if store.next_id % 3 == 2:
            store.drop("empty")
        else:
            store.add(record(store.next_id), unique_prompt=True)


def ids(path: Path) -> list[int]:
    return [json.loads(line)["id"] for line in path.read_text().splitlines()]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "train.jsonl"


def test_what_was_added_is_in_the_file(path):
    with Store(path, SETTINGS) as store:
        fill(store, 10)
        assert (store.next_id, store.kept, store.dropped, store.num_tokens) == (10, 7, {"empty": 3}, 21)
    assert ids(path) == [0, 1, 3, 4, 6, 7, 9]
    assert json.loads(path.read_text().splitlines()[2]) == record(3)


def test_it_is_gone_on_with(path):
    with Store(path, SETTINGS) as store:
        fill(store, 5)
    with Store(path, SETTINGS) as store:
        assert (store.next_id, store.kept, store.dropped, store.num_tokens) == (5, 4, {"empty": 1}, 12)
        fill(store, 10)
    whole = path.with_name("whole.jsonl")
    with Store(whole, SETTINGS) as store:
        fill(store, 10)
    assert path.read_bytes() == whole.read_bytes()


@pytest.mark.parametrize("torn", [0, 1, 20, None])
def test_what_a_kill_leaves_is_made_again(path, torn):
    """Samples of the last seconds that are not counted yet, the last one cut anywhere; or none that were flushed."""
    with Store(path, SETTINGS) as store:
        fill(store, 4)
    meta = path.with_name("train.jsonl.meta.json")
    kept = meta.read_text()
    with Store(path, SETTINGS) as store:
        fill(store, 8)
    whole = path.read_bytes()
    meta.write_text(kept)
    path.write_bytes(whole[: len(whole) - torn] if torn is not None else b"".join(whole.splitlines(True)[:3]))
    with Store(path, SETTINGS) as store:
        assert store.next_id == 4
        assert not store.is_duplicate(record(6)["token_ids"][:2])
        fill(store, 8)
    assert path.read_bytes() == whole


def test_duplicates(path):
    with Store(path, SETTINGS) as store:
        store.add(record(0, [1, 5], [7]), unique_prompt=True)
        assert store.is_duplicate([1, 5]) and not store.is_duplicate([7])
        store.add(record(1, [1, 5], [8]), unique_prompt=True)
        store.add(record(2, [1, 5], [9]), unique_prompt=False)
        store.add(record(3, [1, 6], [7]), unique_prompt=False)
        assert store.dropped == {"duplicate prompt": 1, "duplicate answer": 1}
    with Store(path, SETTINGS) as store:  # known again
        assert store.is_duplicate([1, 5])
        store.add(record(4, [1, 7], [9]), unique_prompt=True)
        assert store.dropped == {"duplicate prompt": 1, "duplicate answer": 2}
    assert ids(path) == [0, 2]


def test_other_settings_are_refused(path):
    with Store(path, SETTINGS) as store:
        fill(store, 4)
    before = path.read_bytes()
    with pytest.raises(ValueError, match=r"other settings \(seed: 0 then, 1 now, more: None then, 2 now\)"):
        Store(path, SETTINGS | {"seed": 1, "more": 2})
    assert path.read_bytes() == before


def test_a_file_of_something_else_is_refused(path):
    path.write_text("mine\n")
    with pytest.raises(ValueError, match=r"no train\.jsonl\.meta\.json says how"):
        Store(path, SETTINGS)
    assert path.read_text() == "mine\n"
    path.write_text("")  # an empty one is as good as none
    Store(path, SETTINGS).close()


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda path, meta: meta.write_text("{"), "damaged"),
        (lambda path, meta: meta.write_text("[]"), "damaged"),
        (lambda path, meta: meta.write_text('{"settings": {}, "progress": {}}'), "damaged"),
        (lambda path, meta: path.unlink(), "holds 0 bytes"),
        (lambda path, meta: path.write_bytes(path.read_bytes()[:-1]), "bytes of the"),
        (lambda path, meta: path.write_bytes(path.read_bytes().replace(b"\n", b" ", 1)), "."),
    ],
)
def test_damage_is_told(path, damage, message):
    with Store(path, SETTINGS) as store:
        fill(store, 6)
    copy = shutil.copy(path, path.with_name("copy"))
    damage(path, path.with_name("train.jsonl.meta.json"))
    with pytest.raises(ValueError, match=message):
        Store(path, SETTINGS)
    assert Path(copy).stat().st_size
