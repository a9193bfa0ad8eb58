"""Where turns begin and end, for the templates of several families."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from pard_jax.synthesize.turns import derive_turns, special_ids
from pard_jax.tokenizer import Tokenizer, load_tokenizer
from tests.helpers.tokenizer import make_tokenizer

LLAMA3 = (
    "{{ bos_token }}{% for m in messages %}<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n"
    "{{ m.content | trim }}<|eot_id|>{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
DEFAULT_SYSTEM = (
    "{% if messages[0].role != 'system' %}<|im_start|>system\nBe kind.<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
PLAIN = "{% for m in messages %}{{ m.role | upper }}: {{ m.content }}\n{% endfor %}"


def templated(directory: Path, template: str, **special: str) -> Tokenizer:
    loaded = load_tokenizer(make_tokenizer(directory, added_tokens=[*special.values()]))
    assert loaded is not None
    loaded.hf.chat_template = template
    return loaded


def text(tokenizer: Tokenizer, ids: list[int]) -> str:
    return tokenizer.decode(ids, skip_special_tokens=False)


def test_chatml(tokenizer):
    turns = derive_turns(tokenizer)
    assert text(tokenizer, turns.opening) == "<|im_start|>user\n"
    assert text(tokenizer, turns.closing) == "<|im_end|>\n<|im_start|>assistant\n"
    assert turns.end_ids == (2,)


@pytest.mark.parametrize("system", [None, "Be brief."])
@pytest.mark.parametrize("thinking", [None, False])
def test_the_turns_make_the_templates_own_prompt(tokenizer, system, thinking):
    turns = derive_turns(tokenizer, system=system, enable_thinking=thinking)
    messages = [] if system is None else [{"role": "system", "content": system}]
    messages.append({"role": "user", "content": "What is it?"})
    expected = tokenizer.apply_chat_template(messages, enable_thinking=thinking)
    assert [*turns.opening, *tokenizer.encode("What is it?"), *turns.closing] == expected


def test_llama3(tmp_path):
    marks = {"start": "<|start_header_id|>", "end": "<|end_header_id|>", "eot": "<|eot_id|>"}
    tokenizer = templated(tmp_path, LLAMA3, **marks)
    turns = derive_turns(tokenizer, system="Be brief.")
    assert text(tokenizer, turns.opening).endswith("<|eot_id|><|start_header_id|>user<|end_header_id|>\n\n")
    assert "Be brief." in text(tokenizer, turns.opening)
    assert text(tokenizer, turns.closing) == "<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n"
    assert turns.end_ids == (302,)


def test_the_templates_own_system_turn_stays(tmp_path):
    tokenizer = templated(tmp_path, DEFAULT_SYSTEM)
    opening = text(tokenizer, derive_turns(tokenizer).opening)
    assert opening == "<|im_start|>system\nBe kind.<|im_end|>\n<|im_start|>user\n"
    assert "Be kind." not in text(tokenizer, derive_turns(tokenizer, system="Go.").opening)


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (PLAIN, "begins with no special token"),
        ("{% for m in messages %}{{ m.content | upper }}<|im_end|>{% endfor %}", "once and as it is"),
        ("{% for m in messages %}{{ m.content }}{{ m.content }}<|im_end|>{% endfor %}", "once and as it is"),
        ("{{ raise_exception('never') }}", "refused"),
    ],
)
def test_a_template_that_will_not_do(tmp_path, template, message):
    with pytest.raises(ValueError, match=message):
        derive_turns(templated(tmp_path, template))


def test_no_template(tmp_path):
    tokenizer = load_tokenizer(make_tokenizer(tmp_path, chat_template=False))
    assert tokenizer is not None
    with pytest.raises(ValueError, match="no chat template"):
        derive_turns(tokenizer)


def test_special_ids(tmp_path):
    tokenizer = templated(tmp_path, LLAMA3, one="<|one|>")
    assert special_ids(tokenizer) == {0, 1, 2, 300}


@pytest.mark.skipif("PARD_SMOLLM2" not in os.environ, reason="PARD_SMOLLM2 names no converted SmolLM2")
def test_smollm2():
    tokenizer = load_tokenizer(os.environ["PARD_SMOLLM2"])
    assert tokenizer is not None
    turns = derive_turns(tokenizer)
    expected = tokenizer.apply_chat_template([{"role": "user", "content": "Why?"}])
    assert [*turns.opening, *tokenizer.encode("Why?"), *turns.closing] == expected
    assert text(tokenizer, turns.opening).startswith("<|im_start|>system\nYou are a helpful AI assistant named SmolLM")
    assert tokenizer.tokens(turns.end_ids) == ["<|im_end|>"]
