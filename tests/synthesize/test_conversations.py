"""Conversations on the engine: what the model was asked and said, whatever runs beside it, and through kills."""

from __future__ import annotations

import collections
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pard_jax.config import EngineConfig
from pard_jax.loading import Loaded, load_engine
from pard_jax.sampling_params import SamplingParams
from pard_jax.synthesize.conversations import Magpie, Prompts, Sampling, Source, Synthesis
from pard_jax.synthesize.store import Store
from pard_jax.synthesize.turns import Turns, derive_turns
from tests.synthesize.talker import END, make_talker, talker_table

ROWS = {"few": 3, "many": 16}


@pytest.fixture(scope="module")
def talker(tmp_path_factory: pytest.TempPathFactory, tokenizer_dir: Path) -> Path:
    return make_talker(tmp_path_factory.mktemp("talker"), tokenizer_dir)


@pytest.fixture(scope="module")
def table(tokenizer_dir: Path) -> np.ndarray:
    return talker_table(tokenizer_dir)


@pytest.fixture(scope="module")
def loaded(talker: Path) -> dict[str, Loaded]:
    """The same model with few and with many slots, other chunks and other dispatches."""
    return {
        name: load_engine(
            talker,
            EngineConfig(max_model_len=120, max_num_seqs=rows, prefill_chunk_size=16, steps_per_dispatch=1 + rows // 8),
            progress=False,
        )
        for name, rows in ROWS.items()
    }


@pytest.fixture(scope="module")
def turns(tokenizer) -> Turns:
    return derive_turns(tokenizer)


def sampling_of(**keys: Any) -> Sampling:
    ids: dict[str, Any] = {"detokenize": False}
    given: dict[str, Any] = {
        "seed": 0,
        "user": SamplingParams(temperature=1.0, min_p=0.01, max_tokens=30, **ids),
        "greedy": SamplingParams(temperature=0.0, max_tokens=25, **ids),
        "sampled": SamplingParams(temperature=0.8, max_tokens=25, **ids),
        "greedy_share": 0.3,
    }
    return Sampling(**given | keys)


def synthesize(
    loaded: Loaded, source: Source, path: Path, count: int, sampling: Sampling | None = None, on_progress: Any = None
) -> list[dict[str, Any]]:
    closing = source.turns.closing if isinstance(source, Magpie) else ()
    with Store(path, {}) as store:
        synthesis = Synthesis(
            loaded.engine, loaded.tokenizer, source, sampling or sampling_of(), store,
            num_rows=loaded.parts.engine_config.max_num_seqs, closing=closing,
        )  # fmt: skip
        synthesis.run(count, *([] if on_progress is None else [on_progress]))
    return [json.loads(line) for line in path.read_text().splitlines()]


def dropped(path: Path) -> dict[str, int]:
    return json.loads(path.with_name(path.name + ".meta.json").read_text())["progress"]["dropped"]


def walk(table: np.ndarray, last: int, most: int) -> list[int]:
    """The greedy answer behind a token."""
    ids: list[int] = []
    while len(ids) < most and END not in ids:
        last = int(table[last].argmax())
        ids.append(last)
    return ids


@pytest.fixture(scope="module")
def samples(loaded, turns, tmp_path_factory) -> tuple[Path, list[dict[str, Any]]]:
    """A run of its own on few slots: what the others are compared with."""
    path = tmp_path_factory.mktemp("samples") / "few.jsonl"
    return path, synthesize(loaded["few"], Magpie(turns), path, 40)


def test_samples_are_whole_conversations(samples, turns, tokenizer):
    _, records = samples
    assert len(records) == 40
    assert [r["id"] for r in records] == sorted({r["id"] for r in records})
    for r in records:
        assert list(r) == ["id", "token_ids", "loss_ranges", "messages", "finish_reason", "greedy"]
        [[start, end]] = r["loss_ranges"]
        ids = r["token_ids"]
        assert end == len(ids) and ids[-1] == END and r["finish_reason"] == "stop"
        opening, closing = turns.opening, turns.closing
        assert ids[: len(opening)] == opening
        assert ids[start - len(closing) : start] == closing
        user, answer = ids[len(opening) : start - len(closing)], ids[start : end - 1]
        assert {0, 1, 2}.isdisjoint(user + answer)
        roles = {"user": tokenizer.decode(user), "assistant": tokenizer.decode(answer)}
        assert r["messages"] == [{"role": role, "content": text} for role, text in roles.items()]
        assert all(text.strip() for text in roles.values())


def test_nothing_is_said_twice(samples):
    path, records = samples
    for role in (0, 1):
        assert len({r["messages"][role]["content"] for r in records}) == 40
    assert dropped(path)["duplicate answer"] > 0  # greedy answers of a table soon repeat


def test_what_was_dropped_is_counted(samples):
    path, records = samples
    progress = json.loads(path.with_name("few.jsonl.meta.json").read_text())["progress"]
    assert progress["next_id"] == records[-1]["id"] + 1 == 40 + sum(progress["dropped"].values())
    assert {"user turn cut off", "answer cut off"} <= set(progress["dropped"])


def test_the_file_is_the_same_whatever_runs_at_once(samples, loaded, turns, tmp_path):
    path = tmp_path / "many.jsonl"
    synthesize(loaded["many"], Magpie(turns), path, 40)
    assert path.read_bytes() == samples[0].read_bytes()
    assert dropped(path) == dropped(samples[0])


def test_a_run_that_is_killed_again_and_again_makes_the_same_file(samples, loaded, turns, tmp_path):
    path, engine = tmp_path / "killed.jsonl", loaded["many"].engine
    kills = 0
    for after in (3, 25, 9, 40, 10**6):
        calls = iter(range(after))

        def progress(calls: Any = calls) -> None:
            if next(calls, None) is None:
                raise KeyboardInterrupt

        try:
            synthesize(loaded["many"], Magpie(turns), path, 40, on_progress=progress)
        except KeyboardInterrupt:
            kills += 1
            # The process would be gone.
            engine.abort(list(engine._known))
            while engine.has_work():
                engine.step()
            with path.open("ab") as file:
                file.write(b'{"id": 7, "token_i')
    assert kills >= 3
    assert path.read_bytes() == samples[0].read_bytes()
    assert dropped(path) == dropped(samples[0])


def test_more_samples_make_the_file_longer(samples, loaded, turns, tmp_path):
    path = tmp_path / "longer.jsonl"
    first = synthesize(loaded["many"], Magpie(turns), path, 10)
    assert len(first) == 10
    assert synthesize(loaded["few"], Magpie(turns), path, 40) == samples[1]


def test_another_seed_makes_other_samples(samples, loaded, turns, tmp_path):
    other = synthesize(loaded["many"], Magpie(turns), tmp_path / "x.jsonl", 40, sampling_of(seed=1))
    prompts = [{r["messages"][0]["content"] for r in records} for records in (other, samples[1])]
    assert len(prompts[0] & prompts[1]) < 10


def test_greedy_answers_are_the_models_likeliest(loaded, turns, table, tmp_path):
    records = synthesize(loaded["many"], Magpie(turns), tmp_path / "x.jsonl", 60, sampling_of(greedy_share=0.0))
    sampled = sum(r["token_ids"][r["loss_ranges"][0][0] :] != walk(table, 201, 25) for r in records)
    assert sampled > 50
    source = Prompts([([i], None) for i in range(10, 60)])
    records = synthesize(loaded["many"], source, tmp_path / "y.jsonl", 50, sampling_of(greedy_share=1.0))
    assert records
    for r in records:
        assert r["greedy"] and r["token_ids"] == [10 + r["id"], *walk(table, 10 + r["id"], 25)]
        assert "messages" not in r


def test_the_greedy_share_is_kept_to(loaded, table, tmp_path):
    """Of one prompt that is asked many times: the greedy answers are one answer."""
    prompt = next(i for i in range(10, 300) if 4 < len(walk(table, i, 25)) < 25)
    path = tmp_path / "x.jsonl"
    records = synthesize(loaded["many"], Prompts([([prompt], None)], 300), path, 300)
    answer = [prompt, *walk(table, prompt, 25)]
    assert [r["token_ids"] for r in records if r["greedy"]] == [answer]
    assert answer not in [r["token_ids"] for r in records if not r["greedy"]]
    assert 60 < dropped(path)["duplicate answer"] < 300


def test_prompts_come_in_turns_and_end(loaded, tmp_path):
    path = tmp_path / "x.jsonl"
    prompts = [([20 + i], [{"role": "user", "content": str(i)}]) for i in range(5)]
    records = synthesize(loaded["few"], Prompts(prompts, 3), path, 1000, sampling_of(keep_cut_off=True))
    assert len(records) + sum(dropped(path).values()) == 15
    for r in records:
        assert r["token_ids"][0] == 20 + r["id"] % 5
        assert r["messages"][0] == {"role": "user", "content": str(r["id"] % 5)}
    assert len({r["id"] % 5 for r in records}) > 1


def test_cut_off_answers_are_kept_on_demand(loaded, turns, tmp_path):
    records = synthesize(loaded["many"], Magpie(turns), tmp_path / "x.jsonl", 60, sampling_of(keep_cut_off=True))
    reasons = collections.Counter(r["finish_reason"] for r in records)
    assert set(reasons) == {"stop", "length"}
    for r in records:
        [[start, end]] = r["loss_ranges"]
        assert end == len(r["token_ids"])
        assert (r["token_ids"][-1] == END) == (r["finish_reason"] == "stop")
        assert end - start == 25 or r["finish_reason"] == "stop"


def test_openers_begin_their_share_of_user_turns(loaded, turns, tokenizer, tmp_path):
    openers = ["Who is", "Tell me"]
    encoded = [tokenizer.encode(text) for text in openers]
    source = Magpie(turns, "Be kind.", encoded, 0.6)
    records = synthesize(loaded["many"], source, tmp_path / "x.jsonl", 80)
    assert all(r["messages"][0] == {"role": "system", "content": "Be kind."} for r in records)
    starts = collections.Counter(
        next((o for o in openers if r["messages"][1]["content"].startswith(o)), "") for r in records
    )
    assert 30 < starts["Who is"] + starts["Tell me"] < 66
    assert min(starts[o] for o in openers) > 8
    assert all(r["messages"][1]["content"] not in openers for r in records)  # nothing was added to it


def test_prompts_that_are_too_long_are_dropped(loaded, tmp_path):
    path = tmp_path / "x.jsonl"
    source = Prompts([([20] * 120, None), ([20], None), ([21] * 200, None)])
    records = synthesize(loaded["few"], source, path, 3, sampling_of(keep_cut_off=True))
    assert [r["id"] for r in records] == [1]
    assert dropped(path) == {"prompt too long": 2}


def test_a_model_that_gives_nothing_is_given_up(loaded, turns, tmp_path):
    sampling = sampling_of(user=SamplingParams(temperature=1.0, max_tokens=1, detokenize=False))
    with pytest.raises(ValueError, match=r"1000 conversations gave no sample: \d+ user turn cut off, \d+ user turn"):
        synthesize(loaded["many"], Magpie(turns), tmp_path / "x.jsonl", 5, sampling)
    engine = loaded["many"].engine
    engine.abort(list(engine._known))
    while engine.has_work():
        engine.step()


def test_the_slots_are_kept_busy(loaded, turns, tmp_path):
    """As long as conversations are left, every slot has one."""
    engine, busy = loaded["few"].engine, []
    synthesize(
        loaded["few"], Magpie(turns), tmp_path / "x.jsonl", 40,
        on_progress=lambda: busy.append(sum(slot is not None for slot in engine._slots)),
    )  # fmt: skip
    assert np.mean(np.asarray(busy[: len(busy) // 2]) >= 2) > 0.8
