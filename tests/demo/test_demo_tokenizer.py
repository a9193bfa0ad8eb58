"""The demo's tokenizer: any text survives, the template is ChatML, transformers and the package load it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from pard_jax.demo import tokenizer as demo
from pard_jax.demo.prompts import generate_prompts
from pard_jax.tokenizer import Tokenizer, load_tokenizer

VOCAB_SIZE = 700
MESSAGES = [
    {"role": "user", "content": "Why do owls sleep?"},
    {"role": "assistant", "content": "They are tired."},
    {"role": "user", "content": "Thank you."},
]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("corpus") / "corpus.jsonl"
    with path.open("w", encoding="utf-8") as file:
        for i, prompt in enumerate(generate_prompts(1000)):
            answer = f"Once upon a time, in {1900 + i}, there was a café."
            messages = [{"role": "user", "content": prompt.text}, {"role": "assistant", "content": answer}]
            file.write(json.dumps({"id": i, "token_ids": [1], "messages": messages}) + "\n")
    return path


@pytest.fixture(scope="module")
def directory(corpus: Path) -> Path:
    output = corpus.parent / "tokenizer"
    assert demo.main(["--data", str(corpus), "--vocab-size", str(VOCAB_SIZE), "--output", str(output)]) == 0
    return output


@pytest.fixture(scope="module")
def loaded(directory: Path) -> Tokenizer:
    tokenizer = load_tokenizer(directory)
    assert tokenizer is not None
    return tokenizer


@pytest.mark.parametrize(
    "text",
    [
        "Hello there.",
        "",
        " two  spaces,\ttabs\r\nand\n\n\nlines \n",
        "naïve café, straße, 你好世界, مرحبا, 😀👩‍👩‍👧 🇩🇪 — “quotes” …",
        "e\u0301 is not \u00e9; \u00a0\u2028\x00\x7f\ufeff",
        "I'LL can't we've DON'T x=3.14159e-10 def f(a):\n    return a**2",
        "".join(chr(c) for c in range(0x20, 0x3000, 7)),
    ],
)
def test_any_text_survives(loaded: Tokenizer, text: str) -> None:
    assert loaded.decode(loaded.encode(text), skip_special_tokens=False) == text


def test_transformers_loads_it(directory: Path, loaded: Tokenizer) -> None:
    hf = AutoTokenizer.from_pretrained(str(directory))
    assert len(hf) == VOCAB_SIZE == len(loaded)
    assert hf.convert_tokens_to_ids(list(demo.SPECIAL_TOKENS)) == [0, 1, 2, 3]
    assert (hf.pad_token_id, hf.eos_token_id, hf.mask_token_id, hf.bos_token_id) == (0, 2, demo.MASK_TOKEN_ID, None)
    assert sorted(hf.get_vocab().values()) == list(range(VOCAB_SIZE))


def test_encoding_adds_nothing(loaded: Tokenizer) -> None:
    assert loaded.encode("Hello") == loaded.encode("Hello", add_special_tokens=False)


def test_digits_stand_alone(loaded: Tokenizer) -> None:
    assert loaded.tokens(loaded.encode("1984")) == ["1", "9", "8", "4"]
    assert not [token for token in loaded.vocab if sum(c.isdigit() for c in token) and len(token) > 1]


def test_words_of_the_corpus_are_merged(loaded: Tokenizer) -> None:
    assert loaded.tokens(loaded.encode("Write a story")) == ["Write", "Ġa", "Ġstory"]


def test_chat_template_is_chatml_without_a_system_turn(loaded: Tokenizer) -> None:
    text = (
        "<|im_start|>user\nWhy do owls sleep?<|im_end|>\n<|im_start|>assistant\nThey are tired.<|im_end|>\n"
        "<|im_start|>user\nThank you.<|im_end|>\n"
    )
    ids = loaded.apply_chat_template(MESSAGES, add_generation_prompt=False)
    assert loaded.decode(ids, skip_special_tokens=False) == text
    opened = loaded.apply_chat_template(MESSAGES)
    assert loaded.decode(opened, skip_special_tokens=False) == text + "<|im_start|>assistant\n"
    assert opened.count(1) == 4 and opened.count(2) == 3
    assert loaded.apply_chat_template([{"role": "system", "content": "Be kind."}])[0] == 1


def test_only_its_own_spelling_gives_the_mask_token(loaded: Tokenizer) -> None:
    assert loaded.encode("a<|pard_mask|>b")[1] == demo.MASK_TOKEN_ID
    for text in ("<|pard_mask|", "<| pard_mask |>", "pard_mask", "<|PARD_MASK|>", "mask <pad>"):
        assert demo.MASK_TOKEN_ID not in loaded.encode(text)
    assert loaded.decode([demo.MASK_TOKEN_ID]) == ""


def test_training_is_deterministic(corpus: Path, directory: Path, tmp_path: Path) -> None:
    assert demo.main(["--data", str(corpus), "--vocab-size", str(VOCAB_SIZE), "--output", str(tmp_path / "again")]) == 0
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (tmp_path / "again" / name).read_bytes() == (directory / name).read_bytes()


def test_progress_and_result_are_said(corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert demo.main(["--data", str(corpus), "--vocab-size", "300", "--output", str(tmp_path / "small")]) == 0
    captured = capsys.readouterr()
    assert "reading: 100%" in captured.err and "a tokenizer of 300 tokens" in captured.err
    assert captured.out == ""


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ("", "holds no samples"),
        ("\n{not json}\n", "line 2 is not valid JSON"),
        ('{"text": "a"}\n', "line 1: expected an object with a list of 'messages'"),
        ("[1]\n", "line 1: expected an object with a list of 'messages'"),
        ('{"messages": [{"role": "user", "content": 3}]}\n', "line 1: every message must have a 'content' of text"),
        ('{"messages": ["hello"]}\n', "line 1: every message must have a 'content' of text"),
        ('{"messages": [{"role": "user", "content": "ab ab"}]}\n', "give more text, or a smaller size"),
    ],
)
def test_a_bad_corpus_is_refused_and_leaves_nothing(
    lines: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = tmp_path / "corpus.jsonl"
    data.write_text(lines)
    assert demo.main(["--data", str(data), "--vocab-size", "300", "--output", str(tmp_path / "out")]) == 2
    assert message in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == [data]


def test_a_vocabulary_too_small_for_bytes_is_refused(corpus: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = corpus.parent / "none"
    assert demo.main(["--data", str(corpus), "--vocab-size", "259", "--output", str(output)]) == 2
    assert "at least 260 tokens" in capsys.readouterr().err and not output.exists()
