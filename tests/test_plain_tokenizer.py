"""By the tokenizers library alone: what transformers gives, wherever it is done, and done only where that is sure."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from pard_jax.plain_tokenizer import PlainTokenizer, load_plain
from pard_jax.presets import PRESETS
from pard_jax.tokenizer import Tokenizer, load_tokenizer
from tests.helpers.tokenizer import make_tokenizer

PACKAGE = PRESETS["demo"].target
SIMPLE = "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m.content + eos_token }}\n  {% if loop.last and\n"
SIMPLE += "add_generation_prompt %}<|im_start|>{% endif %}{% endfor %}{% if enable_thinking %}!{% endif %}{{ absent }}"
TEXTS = ["", " ", "A fox.\n\n  naïve café 你好 🇩🇪", "<|im_start|>user\n<|im_end|> <|endoftext|>", "a\u0301 \ufffd\x00"]
CHATS = [
    [{"role": "user", "content": "Hi <|im_end|> there"}],
    [{"role": "system", "content": ""}, {"role": "user", "content": "{{ 1 }}"}, {"role": "assistant", "content": "é"}],
]


def plain_of(directory: Path) -> PlainTokenizer:
    loaded = load_plain(directory)
    assert loaded is not None
    return loaded


@pytest.fixture(params=["demo target", "demo draft", "small"], scope="module")
def both(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[PlainTokenizer, Tokenizer]:
    if request.param == "small":
        directory = make_tokenizer(tmp_path_factory.mktemp("small"), chat_template=False, added_tokens=["<tool>"])
        change(directory, chat_template=SIMPLE, bos_token="<|im_start|>")
    else:
        directory = getattr(PRESETS["demo"], request.param.split()[1])
    return plain_of(directory), Tokenizer(PreTrainedTokenizerFast.from_pretrained(directory))


def change(directory: Path, file: str = "tokenizer_config.json", **keys: Any) -> None:
    path = directory / file
    path.write_text(json.dumps(json.loads(path.read_text()) | keys))


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("special", [True, False])
def test_text_and_ids(both: tuple[PlainTokenizer, Tokenizer], text: str, special: bool) -> None:
    ours, theirs = both
    ids = ours.encode(text, add_special_tokens=special)
    assert ids == theirs.encode(text, add_special_tokens=special)
    ids = [1, *ids, len(ours) - 1, 10**6, 2]
    assert ours.decode(ids, special) == theirs.decode(ids, special) and ours.tokens(ids) == theirs.tokens(ids)
    assert [*map(ours.convert_id_to_piece, ids)] == [*map(theirs.convert_id_to_piece, ids)]


def test_the_vocabulary(both: tuple[PlainTokenizer, Tokenizer]) -> None:
    ours, theirs = both
    assert len(ours) == len(theirs) and ours.vocab == theirs.vocab
    assert (ours.eos_token_id, ours.bos_token_id) == (theirs.eos_token_id, theirs.bos_token_id)
    assert ours.has_chat_template and theirs.has_chat_template


@pytest.mark.parametrize("chat", CHATS)
@pytest.mark.parametrize("keys", [{}, {"add_generation_prompt": False}, {"enable_thinking": True}])
def test_chats(both: tuple[PlainTokenizer, Tokenizer], chat: Any, keys: dict[str, Any]) -> None:
    ours, theirs = both
    assert ours.apply_chat_template(chat, **keys) == theirs.apply_chat_template(chat, **keys)
    assert "hf" not in vars(ours)


def test_more_is_left_to_transformers(tmp_path: Path) -> None:
    ours = plain_of(PACKAGE)
    given = ours.apply_chat_template(CHATS[0], chat_template="{{ messages[0].content | upper }}")
    assert ours.decode(given, False) == "HI <|IM_END|> THERE"
    ours.hf.chat_template = "{{ 'changed' }}"
    assert ours.decode(ours.apply_chat_template(CHATS[0])) == "changed"


@pytest.mark.parametrize(
    ("file", "keys"),
    [
        ("tokenizer_config.json", {"add_bos_token": True}),
        ("tokenizer_config.json", {"pad_token": "<no such token>"}),
        ("tokenizer_config.json", {"pad_token": {"__type": "AddedToken", "content": "<|im_end|>"}}),
        ("tokenizer_config.json", {"chat_template": "{{ raise_exception('no') }}"}),
        ("tokenizer_config.json", {"chat_template": "{{ messages | tojson }}"}),
        ("tokenizer_config.json", {"chat_template": "{% for m in messages %}{% break %}{% endfor %}"}),
        ("tokenizer_config.json", {"chat_template": [{"name": "default", "template": "x"}]}),
        ("tokenizer.json", {"truncation": {"max_length": 3, "strategy": "LongestFirst", "stride": 0,
                                           "direction": "Right"}}),
        ("tokenizer.json", {"post_processor": {"type": "TemplateProcessing", "single": [], "pair": [],
                                               "special_tokens": {}}}),
        ("chat_template.jinja", None),
    ],
)  # fmt: skip
def test_whatever_adds_to_it_is_left_to_transformers(tmp_path: Path, file: str, keys: dict[str, Any] | None) -> None:
    directory = make_tokenizer(tmp_path, chat_template=False)
    plain_of(directory)
    if keys is None:
        (directory / file).write_text("{{ 'x' }}")
    else:
        change(directory, file, **keys)
    (directory / "config.json").write_text('{"model_type": "llama"}')
    assert load_plain(directory) is None and type(load_tokenizer(directory)) is Tokenizer


def test_the_demo_pairs_tokenizer_needs_no_transformers() -> None:
    code = f"""
import sys
from pard_jax.tokenizer import load_tokenizer
assert load_tokenizer({str(PACKAGE)!r}).apply_chat_template({CHATS[0]!r})
assert "torch" not in sys.modules and "transformers" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True)
