"""A tokenizer that goes through GGUF comes back the same: same ids, same text, for every pre-tokenizer known."""

from __future__ import annotations

import json

import gguf
import pytest
from tokenizers import Tokenizer

from convert.gguf_tokenizer import PRE_TOKENIZERS, build_tokenizer, write_tokenizer
from tests.convert.gguf_files import tokenizer_fields
from tests.convert.tokenizers_of import PLAIN, SPECIAL, TEXTS, VOCAB_SIZE, reference

MERGE = tokenizer_fields(reference("smollm"), VOCAB_SIZE)[2][0]
KINDS = ["smollm", "gpt-2", "qwen2", "llama-bpe"]


def metadata(pre: str, size: int = VOCAB_SIZE + 8, **changes):
    tokens, types, merges = tokenizer_fields(reference(pre), size)
    fields = {
        "model": "gpt2", "pre": pre, "tokens": tokens, "token_type": types, "merges": merges, "bos_token_id": 1,
        "eos_token_id": 2, "padding_token_id": 0, "add_bos_token": False,
    } | changes  # fmt: skip
    return {f"tokenizer.ggml.{key}": value for key, value in fields.items() if value is not None}


@pytest.mark.parametrize("pre", KINDS)
def test_same_ids_and_same_text(pre):
    ours, theirs = build_tokenizer(metadata(pre)), reference(pre)
    assert ours.get_vocab() == theirs.get_vocab()
    for text in TEXTS:
        ids = theirs.encode(text).ids
        assert ours.encode(text).ids == ids, text
        for skip in (False, True):
            assert ours.decode(ids, skip_special_tokens=skip) == theirs.decode(ids, skip_special_tokens=skip)
        if pre != "qwen2":  # which normalizes
            assert ours.decode(ids, skip_special_tokens=False) == text


@pytest.mark.parametrize("pre", KINDS)
def test_the_kinds_differ_where_they_should(pre):
    """So that the comparison above can tell them apart."""
    others = [reference(other) for other in KINDS if other != pre]
    for other in others:
        tokenizer = Tokenizer.from_str(reference(pre).to_str())
        tokenizer.pre_tokenizer, tokenizer.normalizer = other.pre_tokenizer, other.normalizer
        assert any(tokenizer.encode(text).ids != reference(pre).encode(text).ids for text in TEXTS)


def test_smollm_splits_every_digit_from_everything():
    """As llama.cpp's `\\p{N}` before GPT-2's regex; without it `\\n\\n1` loses the token `\\n\\n`."""
    tokenizer = build_tokenizer(metadata("smollm"))
    pieces = [piece for piece, _ in tokenizer.pre_tokenizer.pre_tokenize_str("a12  3\n\n4 ½")]
    assert pieces == ["a", "1", "2", "ĠĠ", "3", "ĊĊ", "4", "Ġ", "Â½"]


def test_llama_adds_bos_unless_the_file_says_otherwise():
    for change, expected in ((None, [1]), (True, [1]), (False, [])):
        tokenizer = build_tokenizer(metadata("llama-bpe", add_bos_token=change))
        bare = tokenizer.encode("hi", add_special_tokens=False).ids
        assert tokenizer.encode("hi").ids == expected + bare
        assert tokenizer.encode("hi", "hi").ids == 2 * (expected + bare)
    assert build_tokenizer(metadata("smollm", add_bos_token=None)).encode("").ids == []


def test_eos_behind_where_the_file_wants_it():
    tokenizer = build_tokenizer(metadata("smollm", add_bos_token=True, add_eos_token=True))
    assert tokenizer.encode("").ids == [1, 2]


def test_llama_takes_a_word_of_the_vocabulary_whole():
    """`ignore_merges`: a word that no merges build is still one token."""
    fields = metadata("llama-bpe")
    at = fields["tokenizer.ggml.tokens"].index("[PAD600]")
    fields["tokenizer.ggml.tokens"][at], fields["tokenizer.ggml.token_type"][at] = "Ġzyzzyva", 1
    assert build_tokenizer(fields).encode(" zyzzyva").ids == [at]
    fields["tokenizer.ggml.pre"] = "gpt-2"
    assert at not in build_tokenizer(fields).encode(" zyzzyva").ids


def test_control_tokens_are_special_and_user_defined_ones_are_not():
    tokenizer = build_tokenizer(metadata("smollm"))
    special = {token.content: token.special for token in tokenizer.get_added_tokens_decoder().values()}
    assert special == dict.fromkeys(SPECIAL, True) | dict.fromkeys(PLAIN, False)
    ids = tokenizer.encode("<|im_start|>a<think>b</think><|im_end|>").ids
    assert tokenizer.decode(ids, skip_special_tokens=True) == "a<think>b</think>"


def test_unused_tokens_are_left_out():
    tokenizer = build_tokenizer(metadata("smollm"))
    assert tokenizer.get_vocab_size() == VOCAB_SIZE
    assert tokenizer.token_to_id("[PAD600]") is None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": "llama"}, r"tokenizer model 'llama' is not supported; only byte-level BPE \('gpt2'\) is"),
        ({"model": None}, "tokenizer model None is not supported"),
        ({"pre": "tekken"}, "pre-tokenizer 'tekken' is not supported; supported are smollm"),
        ({"pre": "default"}, "pre-tokenizer 'default' is not supported"),
        ({"pre": None}, "pre-tokenizer None is not supported"),
        ({"merges": None}, r"holds no tokenizer\.ggml\.merges"),
        ({"tokens": None}, r"holds no tokenizer\.ggml\.tokens"),
        ({"token_type": [1, 2]}, "token_type has 2 entries for 608 tokens"),
        ({"merges": [MERGE, "nosuch token"]}, "1 merges give no token of the vocabulary, the first is 'nosuch token'"),
        ({"merges": ["a b c"]}, "the first is 'a b c'"),
        ({"add_bos_token": True, "bos_token_id": None}, "adds BOS to every text, but the file names no bos_token_id"),
        ({"add_bos_token": True, "bos_token_id": 608}, "bos id 608 is outside of the vocabulary of 608 tokens"),
    ],
)
def test_what_cannot_be_rebuilt_is_refused(changes, message):
    fields = metadata("smollm") | {f"tokenizer.ggml.{key}": value for key, value in changes.items()}
    with pytest.raises(ValueError, match=message):
        build_tokenizer(fields)


def test_a_token_that_is_there_twice_is_refused():
    fields = metadata("smollm")
    fields["tokenizer.ggml.tokens"][300] = fields["tokenizer.ggml.tokens"][299]
    with pytest.raises(ValueError, match="is in the vocabulary twice: 299 and 300"):
        build_tokenizer(fields)


def test_every_known_name_is_one_of_llama_cpp_or_its_short_form():
    assert set(PRE_TOKENIZERS) == {"smollm", "starcoder", "gpt-2", "gpt2", "qwen2", "llama-bpe", "llama3", "llama-v3"}


@pytest.mark.parametrize("pre", KINDS)
def test_transformers_reads_it(tmp_path, pre):
    from transformers import AutoTokenizer

    template = "{% for m in messages %}{{ bos_token }}{{ m['role'] }}: {{ m['content'] }}{{ eos_token }}{% endfor %}"
    write_tokenizer(metadata(pre) | {"tokenizer.chat_template": template}, tmp_path, 77)
    architecture = {"qwen2": "qwen2", "llama-bpe": "llama", "gpt-2": "qwen3", "smollm": "llama"}[pre]
    (tmp_path / "config.json").write_text(json.dumps({"model_type": architecture}))
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    assert (tokenizer.bos_token, tokenizer.eos_token, tokenizer.pad_token) == (
        "<|im_start|>",
        "<|im_end|>",
        "<|endoftext|>",
    )
    assert tokenizer.model_max_length == 77 and len(tokenizer) == VOCAB_SIZE
    for text in TEXTS:
        ids = tokenizer(text, verbose=False).input_ids
        assert ids == reference(pre).encode(text).ids
        assert tokenizer.decode(ids) == reference(pre).decode(ids, skip_special_tokens=False)
    messages = [{"role": "user", "content": "hi"}]
    expected = "<|im_start|>user: hi<|im_end|>"
    assert tokenizer.apply_chat_template(messages, tokenize=False) == expected
    assert tokenizer.apply_chat_template(messages).input_ids == reference(pre).encode(expected).ids


def test_token_types_are_the_librarys():
    """The numbers in the files; a change there would silently turn special tokens into text."""
    kinds = gguf.TokenType
    assert (kinds.NORMAL, kinds.UNKNOWN, kinds.CONTROL, kinds.USER_DEFINED, kinds.UNUSED) == (1, 2, 3, 4, 5)
