"""The demo's prompts: distinct, deterministic, grammatical, and never both trained on and held out."""

from __future__ import annotations

import json
import re
from itertools import islice
from pathlib import Path

import pytest

from pard_jax.demo import patterns, words
from pard_jax.demo.prompts import DemoPrompt, expand, generate_prompts, main

NUM = 100_000


@pytest.fixture(scope="module")
def prompts() -> list[DemoPrompt]:
    return list(generate_prompts(NUM, seed=3))


def test_prompts_are_distinct(prompts: list[DemoPrompt]) -> None:
    assert len({prompt.text for prompt in prompts}) == NUM


def test_the_first_of_a_longer_run_are_the_same(prompts: list[DemoPrompt]) -> None:
    assert list(generate_prompts(500, seed=3)) == prompts[:500]


def test_another_seed_gives_other_prompts(prompts: list[DemoPrompt]) -> None:
    ours = {prompt.text for prompt in prompts[:1000]}
    assert len(ours & {prompt.text for prompt in generate_prompts(1000, seed=4)}) < 50


def test_three_of_five_ask_for_stories_from_first_to_last(prompts: list[DemoPrompt]) -> None:
    for part in (prompts[:10_000], prompts[-10_000:]):
        # 60 % ± 5 standard deviations of 10000 draws.
        assert sum(prompt.is_story for prompt in part) / len(part) == pytest.approx(0.6, abs=0.025)


def test_there_are_prompts_for_more_than_200_000() -> None:
    # Questions are the scarce kind: 200 000 prompts need 80 000 of them, and they are distinct by construction.
    cores = {core for pattern in patterns.QUESTIONS for core in expand(pattern)}
    assert len(cores) * len(set(patterns.QUESTION_OPENERS)) * len(set(patterns.QUESTION_CLOSERS)) > 200_000


def test_articles_fit_the_words_that_follow(prompts: list[DemoPrompt]) -> None:
    # By words as they are spoken, not by the generator's own pattern.
    an_despite_consonant = {"honest", "hour"}
    a_despite_vowel = {"unicorn", "useful", "one"}
    for prompt in prompts:
        for article, word in re.findall(r"\b(an?) (\w+)", prompt.text, re.IGNORECASE):
            vowel = word in an_despite_consonant or (word[0] in "aeiou" and word not in a_despite_vowel)
            assert (article.lower() == "an") == vowel, prompt.text


def test_prompts_are_clean_sentences(prompts: list[DemoPrompt]) -> None:
    for prompt in prompts:
        text = prompt.text
        assert not re.search(r"[{}()]|  |\s$|^\s|\.\.|\?\.|[^\x20-\x7e]", text), text
        assert text[0].isupper() and text[-1] in '.?!"', text
        assert text.count('"') % 2 == 0, text
        assert len(text) < 300, text
        assert not re.search(r"\b(\w{3,}) \1\b", text), text


def test_every_pattern_names_lists_that_exist_and_every_list_is_used() -> None:
    with_slots = (
        *patterns.QUESTIONS,
        *patterns.STORY_HEROES,
        *patterns.STORY_EVENTS,
        *patterns.STORY_STARTS,
        *patterns.STORY_CLOSERS,
    )
    assert {slot for pattern in with_slots for slot in re.findall(r"\{(\w+)\}", pattern)} == set(words.WORDS)
    for name, items in words.WORDS.items():
        assert len(set(items)) == len(items), name


def test_every_story_request_says_how_long() -> None:
    for request in (*patterns.STORY_REQUESTS, *patterns.STORY_STARTS):
        assert re.search(r"\b(two|three|four|few) ([a-z]+ )?sentences|one short paragraph|begin with", request), request


def test_expand_gives_every_combination() -> None:
    expanded = list(expand("a(n) {conditions} day in {season}"))
    assert len(set(expanded)) == len(words.WORDS["conditions"]) * 4
    assert "an icy day in spring" in expanded and "a warm day in winter" in expanded


@pytest.mark.parametrize("seed", [3, 8])
def test_held_out_cores_are_never_trained_on_whatever_the_seed(prompts: list[DemoPrompt], seed: int) -> None:
    held_out = list(generate_prompts(1000, seed, held_out=True))
    assert len({prompt.text for prompt in held_out}) == 1000
    assert not {prompt.core for prompt in held_out} & {prompt.core for prompt in prompts}
    assert sum(prompt.is_story for prompt in held_out) / 1000 == pytest.approx(0.6, abs=0.08)
    # Of every kind: not a handful of questions in many forms.
    assert len({prompt.core for prompt in held_out if not prompt.is_story}) > 100


def test_the_patterns_can_be_exhausted(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("STORY_HEROES", "STORY_EVENTS", "STORY_REQUESTS", "STORY_CLOSERS", "STORY_STARTS"):
        monkeypatch.setattr(patterns, name, ("{}",) if name == "STORY_REQUESTS" else ("one",))
    with pytest.raises(ValueError, match="there are not so many prompts: asked for 100"):
        list(generate_prompts(100))


def test_the_number_must_be_positive() -> None:
    with pytest.raises(ValueError, match="must be at least 1, got 0"):
        next(generate_prompts(0))


def test_command_writes_both_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output, held_out = tmp_path / "prompts.jsonl", tmp_path / "held_out.jsonl"
    assert main(["--num", "300", "--seed", "3", "--output", str(output), "--held-out", str(held_out)]) == 0
    assert "300 prompts" in capsys.readouterr().err
    written = [json.loads(line) for line in output.read_text().splitlines()]
    assert written == [{"prompt": prompt.text} for prompt in islice(generate_prompts(NUM, seed=3), 300)]
    assert len(held_out.read_text().splitlines()) == 200


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--num-held-out", "5"], "--held-out FILE"),
        (["--held-out", "p.jsonl"], "name two files"),
        (["--held-out", "missing/h.jsonl"], "there is no directory"),
    ],
)
def test_command_refuses(
    flags: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["--num", "5", "--output", "p.jsonl", *flags]) == 2
    assert message in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
