"""The demo's corpus: whole sentences that neither echo nor repeat, in a form that the tokenizer and training read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pard_jax.demo import tokenizer as demo_tokenizer
from pard_jax.demo.corpus import cut_back, main, repetition, select
from pard_jax.tokenizer import load_tokenizer
from pard_jax.train.data import read_samples

OWL = "The owl is tired."  # 4 words
STORY = f'{OWL} It says, "Good night. Sleep well." Then it sleeps! The moon is'


def sample(answer: str, request: str = "Why do owls sleep?", **more: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": request}, {"role": "assistant", "content": answer}]
    return {"id": 7, "token_ids": [1, 2], "loss_ranges": [[1, 2]], "messages": messages} | more


def selected(answer: str, *, max_words: int = 70, max_repetition: float = 0.15, **more: Any) -> str:
    """The answer as it is kept, or why it is not."""
    result = select(sample(answer, **more), max_words=max_words, max_repetition=max_repetition)
    return result if isinstance(result, str) else result["messages"][-1]["content"]


@pytest.mark.parametrize(
    ("text", "share"),
    [
        ("a b c d e f g h i j k l", 0),
        ("a b a b a b a b a b a", 0),  # eleven
        ("a b a b a b a b a b a b", 7 / 9),  # nine runs, two of them different
        ("a a a a a a a a a a a a", 8 / 9),
        ("a b c d e f g h i j a b c d", 1 / 11),
        ("", 0),
    ],
)
def test_repetition(text: str, share: float) -> None:
    assert repetition(text.split()) == pytest.approx(share)


@pytest.mark.parametrize(
    ("max_words", "kept"),
    [
        (3, None),
        (4, OWL),
        (7, OWL),  # to end within the quotation would leave it open
        (9, OWL),
        (10, f'{OWL} It says, "Good night. Sleep well."'),
        (13, f'{OWL} It says, "Good night. Sleep well." Then it sleeps!'),
        (99, f'{OWL} It says, "Good night. Sleep well." Then it sleeps!'),
    ],
)
def test_answers_are_cut_back_to_whole_sentences(max_words: int, kept: str | None) -> None:
    assert cut_back(STORY, ended=False, max_words=max_words, max_repetition=1) == kept


@pytest.mark.parametrize(
    ("text", "first"),
    [
        ("Mr. Fox met Dr. Owl, Mrs. Hen and St. Nick. They ran.", "Mr. Fox met Dr. Owl, Mrs. Hen and St. Nick."),
        ("J. B. Fox ran home. He slept.", "J. B. Fox ran home."),
        ("1. Eat apples. 2. Sleep.", "1. Eat apples."),
        ("It costs 3.50 today. Yes.", "It costs 3.50 today."),
        ("Is it so?! Yes.", "Is it so?!"),
        ("It waited... Then it ran.", "It waited..."),
        ("(An owl hoots.) Then it flies.", "(An owl hoots.)"),
        ("\u201cCome here.\u201d They did.", "\u201cCome here.\u201d"),
        ("It ran home.\nIt slept.", "It ran home."),
    ],
)
def test_where_sentences_end(text: str, first: str) -> None:
    most = len(first.split())
    # Room for one word more, where the next sentence has more: what is kept ends with the sentence, not at the limit.
    assert cut_back(f"{text} And on it went.", ended=True, max_words=most, max_repetition=1) == first


@pytest.mark.parametrize(
    ("text", "ended", "kept"),
    [
        ("Apples and pears", True, "Apples and pears"),
        ("Apples and pears", False, None),
        (f" {OWL} Good night, owl\n", True, f"{OWL} Good night, owl"),
        (f" {OWL} Good night, owl\n", False, OWL),
        (f'{OWL} It says, "Good night', True, OWL),
        ("Never ending", False, None),
    ],
)
def test_an_end_of_its_own_counts_as_a_sentences(text: str, ended: bool, kept: str | None) -> None:
    assert cut_back(text, ended=ended, max_words=70, max_repetition=1) == kept


def test_sentences_end_before_they_repeat() -> None:
    start = "A small fox went out to look for a red ball in the snow. It found one there."
    text = f"{start} A small fox went out to look for a red ball in the snow. The end came."
    assert cut_back(text, ended=True, max_words=70, max_repetition=0.1) == start
    assert cut_back(text, ended=True, max_words=70, max_repetition=0.9) == text
    # 11 of the 29 runs up to the third sentence's end are repeated, and 11 of the 32 in all: with a limit in between,
    # the whole would pass, but it is not reached.
    assert cut_back(text, ended=True, max_words=70, max_repetition=0.36) == start
    # The cut is made at half of the share that is asked for.
    again = f"{start} It found a red ball in the snow."
    assert repetition(again.split()) == pytest.approx(3 / 23)
    assert selected(again, max_repetition=0.15) == start
    assert selected(again, max_repetition=0.30) == again


def test_a_first_sentence_that_repeats_itself_is_left_out_with_its_answer() -> None:
    text = "It met a bear, a bear, a bear, a bear, a bear, and a bear. Then it slept."
    assert selected(text) == "repeat themselves"
    assert selected(text, max_repetition=1) == text
    # Signs stand apart: by words with their signs, only one run of ten returns.
    text = "It met a bear, then a bear; next a bear, then a bear."
    assert repetition(text.split()) == pytest.approx(1 / 10)
    assert selected(text) == "repeat themselves"
    assert selected(text, max_repetition=0.22) == text  # 3 of 14


def test_echoes_are_left_out() -> None:
    assert selected(" Why do owls sleep?\n") == "echo the request"
    assert selected("owls sleep") == "echo the request"
    assert selected("") == "echo the request"
    assert selected("Why do owls sleep? They are tired.") == "Why do owls sleep? They are tired."


def test_what_was_cut_off_serves_as_well() -> None:
    assert selected(f"{OWL} And the", finish_reason="length") == OWL
    assert selected(f"{OWL} And the", finish_reason="stop") == f"{OWL} And the"
    assert selected("Owls are tired because", finish_reason="length") == "have no whole sentence that is short enough"


def test_system_turns_and_tokens_go() -> None:
    given = sample(OWL)
    given["messages"].insert(0, {"role": "system", "content": "Be kind."})
    expected = {"messages": sample(OWL)["messages"]}
    assert select(given, max_words=70, max_repetition=0.15) == expected
    assert len(given["messages"]) == 3  # as it was


def write(path: Path, samples: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(s) + "\n" for s in samples), encoding="utf-8")
    return path


def test_command_makes_what_the_tokenizer_and_training_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    # As by another tokenizer: its ids do not fit this vocabulary.
    answers = [f"Owl {i} sleeps in a tree. It likes the café, and" for i in range(40)]
    samples = [sample(answer, finish_reason="length", token_ids=[49_000]) for answer in [*answers, "Why", "Never"]]
    data, output, tokenizer = write(tmp_path / "stories.jsonl", samples), tmp_path / "corpus.jsonl", tmp_path / "tok"
    assert main(["--data", str(data), "--output", str(output)]) == 0
    captured = capsys.readouterr()
    assert captured.out == "" and "reading: 100%" in captured.err
    assert captured.err.endswith(
        "corpus.jsonl: 40 samples; 2 left out (1 echo the request, 1 have no whole sentence that is short enough)\n"
    )
    lines = [json.loads(line) for line in output.read_text(encoding="utf-8").splitlines()]
    assert lines == [{"messages": sample(f"Owl {i} sleeps in a tree.")["messages"]} for i in range(40)]
    assert sorted(tmp_path.iterdir()) == [output, data]

    argv = ["--data", str(output), "--vocab-size", "280", "--output", str(tokenizer)]
    assert demo_tokenizer.main(argv) == 0
    loaded = load_tokenizer(tokenizer)
    assert loaded is not None
    rows = read_samples([output], loaded, vocab_size=280, include_prompt=False, retokenize=True, progress=False)
    assert len(rows) == 40
    labels = rows[3].token_ids[rows[3].loss_mask]
    assert loaded.decode(labels.tolist(), skip_special_tokens=False).startswith("Owl 3 sleeps in a tree.<|im_end|>")


def test_flags_reach_the_selection(tmp_path: Path) -> None:
    bears = "It met a bear, a bear, a bear, a bear, a bear, and a bear."
    data, output = write(tmp_path / "stories.jsonl", [sample(STORY), sample(bears)]), tmp_path / "corpus.jsonl"

    def kept(*flags: str) -> list[str]:
        assert main(["--data", str(data), "--output", str(output), *flags]) == 0  # over what stands there
        return [json.loads(line)["messages"][1]["content"] for line in output.read_text().splitlines()]

    assert kept() == [STORY]
    assert kept("--max-words", "13") == [f'{OWL} It says, "Good night. Sleep well." Then it sleeps!']
    assert kept("--max-repetition", "1") == [STORY, bears]


@pytest.mark.parametrize(
    ("lines", "flags", "message"),
    [
        ([sample("Why")], "", "none of the answers is of use (1 echo the request)"),
        ([sample(OWL), {"messages": [{"role": "user", "content": "Hi"}]}], "",
         "line 2: expected one turn of the user and one of the assistant, got turns of ['user']"),
        ([sample(OWL), {"text": OWL}], "", "line 2: expected an object with a list of 'messages'"),
        ([sample(OWL)], "--max-words 0", "--max-words must be at least 1, got 0"),
        ([sample(OWL)], "--max-repetition 1.5", "--max-repetition is a share and must lie in [0, 1], got 1.5"),
        ([sample(OWL)], "--max-repetition nan", "must lie in [0, 1], got nan"),
        ([sample(OWL)], "--output ./stories.jsonl", "are both stories.jsonl; name two files"),
        ([sample(OWL)], "--output missing/c.jsonl", "there is no directory"),
        ([sample(OWL)], "--data other.jsonl", "other.jsonl: No such file or directory"),
    ],
)  # fmt: skip
def test_command_refuses_and_leaves_all_as_it_was(
    lines: list[dict[str, Any]],
    flags: str,
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    data, output = write(tmp_path / "stories.jsonl", lines), tmp_path / "corpus.jsonl"
    output.write_text("as it was")
    before = data.read_bytes()
    assert main(["--data", "stories.jsonl", "--output", "corpus.jsonl", *flags.split()]) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("error: ") and message in error
    assert sorted(tmp_path.iterdir()) == [output, data]
    assert output.read_text() == "as it was" and data.read_bytes() == before
