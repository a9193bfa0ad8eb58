"""Reading prompts and turning them into token ids."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from pard_jax.prompts import Prompt, encode_prompt, read_prompts
from pard_jax.tokenizer import Tokenizer, load_tokenizer
from tests.helpers.tokenizer import make_tokenizer


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tokenizer]:
    root = tmp_path_factory.mktemp("tokenizers")
    found = {}
    for name, template in (("chat", True), ("plain", False)):
        tokenizer = load_tokenizer(make_tokenizer(root / name, chat_template=template))
        assert tokenizer is not None
        found[name] = tokenizer
    return found


class Stdin(io.StringIO):
    def __init__(self, text: str, terminal: bool = False) -> None:
        super().__init__(text)
        self._terminal = terminal

    def isatty(self) -> bool:
        return self._terminal


def given(prompts: list[Prompt]) -> list[Any]:
    return [prompt.given for prompt in prompts]


def test_from_arguments_and_stdin(monkeypatch: pytest.MonkeyPatch) -> None:
    assert given(read_prompts(["one", "two"])) == ["one", "two"]
    monkeypatch.setattr(sys, "stdin", Stdin("several\n\nlines\n"))
    assert given(read_prompts([])) == ["several\n\nlines"]
    monkeypatch.setattr(sys, "stdin", Stdin("in between"))
    assert given(read_prompts(["one", "-", "three"])) == ["one", "in between", "three"]
    monkeypatch.setattr(sys, "stdin", Stdin("a\n\nb\nc\n"))
    assert given(read_prompts([], "-", limit=2)) == ["a", "b"]
    monkeypatch.setattr(sys, "stdin", Stdin("never read", terminal=True))
    with pytest.raises(ValueError, match="no prompt was given"):
        read_prompts([])
    monkeypatch.setattr(sys, "stdin", Stdin(""))
    with pytest.raises(ValueError, match="no prompt was given"):
        read_prompts([])
    with pytest.raises(ValueError, match="prompt 2 is empty"):
        read_prompts(["x", ""])


def test_stdin_in_another_encoding(monkeypatch: pytest.MonkeyPatch) -> None:
    for texts, file in (([], "-"), (["-"], None)):
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"fine\nna\xefve\n"), encoding="utf-8"))
        with pytest.raises(ValueError, match=r"stdin, line 2: byte 3 of it is 0xef, .* must be UTF-8"):
            read_prompts(texts, file)


def test_from_text(tmp_path: Path) -> None:
    file = tmp_path / "prompts.txt"
    file.write_bytes("one\r\n\n  two \u2028 still two\n{}\n".encode())
    assert given(read_prompts([], str(file))) == ["one", "  two \u2028 still two", "{}"]
    assert read_prompts([], str(file))[1].where == f"{file}, line 3"
    with pytest.raises(ValueError, match="choose one"):
        read_prompts(["x"], str(file))
    with pytest.raises(ValueError, match="--limit must be at least 1, got 0"):
        read_prompts([], str(file), limit=0)
    with pytest.raises(ValueError, match="--limit takes the first prompts of a file"):
        read_prompts(["x"], limit=1)
    file.write_text("\n \n")
    with pytest.raises(ValueError, match="holds no prompts"):
        read_prompts([], str(file))
    file.write_bytes(b"\xff\xfe")
    with pytest.raises(ValueError, match=r"prompts\.txt, line \d+: .* must be UTF-8"):
        read_prompts([], str(file))


def test_from_json_lines(tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    messages = [{"role": "user", "content": "hi"}]
    entries = [{"prompt": "a"}, {"data": "b", "task": 3}, {"messages": messages}, {"prompt_token_ids": [1, 2]}]
    file.write_text("\n".join(map(json.dumps, entries)) + "\n")
    prompts = read_prompts([], str(file))
    assert given(prompts) == ["a", "b", messages, [1, 2]]
    assert [prompt.kind for prompt in prompts] == ["text", "text", "messages", "ids"]
    # What the limit leaves out is not looked at.
    file.write_text('{"data": "b"}\nno JSON\n')
    assert given(read_prompts([], str(file), limit=1)) == ["b"]


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("{", "is not valid JSON"),
        ('"text"', "got 'text'"),
        ("[1, 2]", r"got \[1, 2\]"),
        ("{}", "got the keys none"),
        ('{"prompt": "a", "data": "b"}', "one of the keys .*; got the keys 'prompt', 'data'"),
        ('{"data": null}', "'data' must be a string, got None"),
        ('{"messages": []}', "'messages' must be a list"),
        ('{"messages": [{"role": "user"}]}', "'messages' must be a list"),
        ('{"messages": [{"role": "user", "content": [1]}]}', "'messages' must be a list"),
        ('{"prompt_token_ids": []}', "'prompt_token_ids' must be a list of integers"),
        ('{"prompt_token_ids": [true]}', "'prompt_token_ids' must be a list of integers"),
        ('{"prompt_token_ids": "12"}', "'prompt_token_ids' must be a list of integers"),
    ],
)
def test_bad_json_lines(line: str, expected: str, tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text(f'{{"prompt": "fine"}}\n{line}\n')
    with pytest.raises(ValueError, match=f"line 2.*{expected}"):
        read_prompts([], str(file))


def text(value: str) -> Prompt:
    return Prompt("text", value, "prompt 1")


def test_chat_template(tokenizers: dict[str, Tokenizer]) -> None:
    chat = tokenizers["chat"]

    def rendered(prompt: Prompt, **options: Any) -> str:
        return chat.decode(encode_prompt(prompt, chat, **options), skip_special_tokens=False)

    user = "<|im_start|>user\nhi<|im_end|>\n"
    reply = "<|im_start|>assistant\n"
    system = "<|im_start|>system\nbe brief<|im_end|>\n"
    assert rendered(text("hi")) == user + reply
    assert rendered(text("hi"), system="be brief") == system + user + reply
    assert rendered(text("hi"), enable_thinking=False) == user + reply + "<think>\n\n</think>\n\n"
    assert rendered(text("hi"), chat=False) == "hi"
    messages = Prompt("messages", [{"role": "user", "content": "hi"}], "line 1")
    assert rendered(messages, system="be brief") == system + user + reply
    assert encode_prompt(text("hi"), tokenizers["plain"]) == chat.encode("hi")
    assert encode_prompt(Prompt("ids", [7, 8], "line 1"), None) == [7, 8]


def test_what_cannot_be_encoded(tokenizers: dict[str, Tokenizer]) -> None:
    chat, plain = tokenizers["chat"], tokenizers["plain"]
    messages = Prompt("messages", [{"role": "system", "content": "x"}], "line 4")
    ids = Prompt("ids", [1], "line 5")
    for prompt, tokenizer, options, expected in [
        (text("x"), None, {}, "prompt 1: the checkpoint holds no tokenizer"),
        (messages, chat, {"chat": False}, "line 4: messages, --system and --no-thinking need the chat template"),
        (text("x"), chat, {"chat": False, "system": "y"}, "need the chat template, which --raw turns off"),
        (text("x"), plain, {"system": "y"}, "the tokenizer has no chat template"),
        (text("x"), plain, {"enable_thinking": False}, "the tokenizer has no chat template"),
        (messages, plain, {}, "line 4: the tokenizer has no chat template"),
        (messages, chat, {"system": "y"}, "a system turn of their own"),
        (ids, chat, {"system": "y"}, "line 5: token ids reach the model as they are"),
        (ids, chat, {"enable_thinking": False}, "token ids reach the model as they are"),
    ]:
        with pytest.raises(ValueError, match=expected):
            encode_prompt(prompt, tokenizer, **options)
