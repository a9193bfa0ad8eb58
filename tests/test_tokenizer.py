from __future__ import annotations

import json
import logging
import subprocess
import sys

import pytest
import tokenizers
from transformers import AutoTokenizer

from pard_jax.tokenizer import Tokenizer, check_same_vocabulary, load_generation_config, load_tokenizer
from tests.helpers.tokenizer import SPECIAL_TOKENS, make_tokenizer

TEXT = "The dog, 你好 😀 , said: naïve !"
MESSAGES = [{"role": "user", "content": "hi"}]


def load(directory, **keys) -> Tokenizer:
    tokenizer = load_tokenizer(make_tokenizer(directory, **keys))
    assert tokenizer is not None
    return tokenizer


def test_importing_the_module_imports_no_transformers():
    code = "import sys, pard_jax.tokenizer; assert 'transformers' not in sys.modules and 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("model_type", ["llama", "qwen2", "qwen3", None])
@pytest.mark.parametrize("tokenizer_class", ["PreTrainedTokenizerFast", "TokenizersBackend", "Qwen2Tokenizer"])
def test_the_tokenizer_is_the_one_that_transformers_chooses(tmp_path, model_type, tokenizer_class):
    path = make_tokenizer(tmp_path) / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"tokenizer_class": tokenizer_class}))
    if model_type is not None:
        (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type}))
    ours, theirs = load_tokenizer(tmp_path), AutoTokenizer.from_pretrained(tmp_path)
    assert ours is not None and type(ours.hf) is type(theirs)
    assert ours.hf.backend_tokenizer.to_str() == theirs.backend_tokenizer.to_str()
    assert ours.hf.init_kwargs == theirs.init_kwargs and ours.hf.chat_template == theirs.chat_template


def test_encode_and_decode_are_the_tokenizers_librarys(tokenizer, tokenizer_dir):
    raw = tokenizers.Tokenizer.from_file(str(tokenizer_dir / "tokenizer.json"))
    ids = tokenizer.encode(TEXT)
    assert ids == raw.encode(TEXT).ids
    assert tokenizer.decode(ids) == TEXT
    assert len(tokenizer) == 300
    assert (tokenizer.eos_token_id, tokenizer.bos_token_id) == (2, None)


def test_a_checkpoint_that_asks_to_clean_text_up_does_not_change_it(tmp_path):
    path = make_tokenizer(tmp_path) / "tokenizer_config.json"
    config = json.loads(path.read_text())
    config["clean_up_tokenization_spaces"] = True
    config["clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output"] = True
    path.write_text(json.dumps(config))
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer is not None
    assert tokenizer.decode(tokenizer.encode(TEXT)) == TEXT


def test_special_tokens_in_text(tokenizer):
    ids = [1, *tokenizer.encode("dog"), 2, 299 + 50]
    assert tokenizer.decode(ids) == "dog"
    assert tokenizer.decode(ids, skip_special_tokens=False) == "<|im_start|>dog<|im_end|>"


def test_one_id_as_text(tokenizer):
    ids = tokenizer.encode("😃")
    assert len(ids) > 1
    assert "\ufffd" in "".join(map(tokenizer.convert_id_to_piece, ids))
    assert tokenizer.convert_id_to_piece(2) == "<|im_end|>"
    (space_a,) = tokenizer.encode(" a")
    assert tokenizer.convert_id_to_piece(space_a) == " a"
    assert tokenizer.tokens([2, space_a, 5000]) == ["<|im_end|>", "Ġa", None]


def test_chat_template(tokenizer):
    def text(**keys):
        return tokenizer.decode(tokenizer.apply_chat_template(MESSAGES, **keys), skip_special_tokens=False)

    turn = "<|im_start|>user\nhi<|im_end|>\n"
    assert text() == turn + "<|im_start|>assistant\n"
    assert text(add_generation_prompt=False) == turn
    assert text(enable_thinking=True) == text()
    assert text(enable_thinking=False) == text() + "<think>\n\n</think>\n\n"
    assert text(chat_template="{{ messages[0].content }}{{ tail }}", tail="!") == "hi!"
    ids = tokenizer.apply_chat_template(MESSAGES)
    assert isinstance(ids, list) and ids[0] == SPECIAL_TOKENS.index("<|im_start|>")


def test_chat_template_refusals(tokenizer, tmp_path):
    with pytest.raises(ValueError, match="refused the messages: unknown role robot"):
        tokenizer.apply_chat_template([{"role": "robot", "content": "hi"}])
    without = load(tmp_path, chat_template=False)
    assert tokenizer.has_chat_template and not without.has_chat_template
    with pytest.raises(ValueError, match="no chat template"):
        without.apply_chat_template(MESSAGES)


def test_a_directory_without_tokenizer_files(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    assert load_tokenizer(tmp_path) is None


def test_broken_tokenizers_are_refused(tmp_path):
    (tmp_path / "tokenizer_config.json").write_text("{}")
    with pytest.raises(ValueError, match=r"no vocabulary; expected one of tokenizer\.json"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{not json")
    with pytest.raises(ValueError, match="cannot be loaded"):
        load_tokenizer(tmp_path)


def swapped(directory, first: int, second: int) -> Tokenizer:
    """The same tokens with two ids exchanged."""
    path = directory / "tokenizer.json"
    data = json.loads(path.read_text())
    vocab = data["model"]["vocab"]
    by_id = {i: token for token, i in vocab.items()}
    vocab[by_id[first]], vocab[by_id[second]] = second, first
    path.write_text(json.dumps(data))
    loaded = load_tokenizer(directory)
    assert loaded is not None
    return loaded


def test_one_tokenizer_with_two_paddings(tokenizer, tmp_path):
    assert check_same_vocabulary(tokenizer, load(tmp_path), 384, 320) == 320
    assert check_same_vocabulary(tokenizer, tokenizer, 300, 512) == 300


def test_permuted_vocabularies_of_one_size_are_refused_at_the_first_difference(tokenizer, tmp_path):
    other = swapped(make_tokenizer(tmp_path), 290, 270)
    ours, theirs = tokenizer.tokens([270, 290])
    with pytest.raises(ValueError) as refusal:
        check_same_vocabulary(tokenizer, other, 300, 300)
    assert f"token id 270 is {ours!r} in the target and {theirs!r} in the draft" in str(refusal.value)


def test_a_token_of_one_side_only_is_a_difference(tokenizer, tmp_path):
    bigger = load(tmp_path, added_tokens=["<tool>"])
    with pytest.raises(ValueError, match="token id 300 is no token in the target and '<tool>' in the draft"):
        check_same_vocabulary(tokenizer, bigger, 320, 320)
    with pytest.raises(ValueError, match="token id 300 is '<tool>' in the target and no token in the draft"):
        check_same_vocabulary(bigger, tokenizer, 320, 320)


def test_the_drafts_mask_token_is_no_difference(tokenizer, tmp_path):
    draft = load(tmp_path / "draft", added_tokens=["<mask>"])
    assert check_same_vocabulary(tokenizer, draft, 320, 320, mask_token_id=300) == 320
    # its row need not exist in the target
    assert check_same_vocabulary(tokenizer, draft, 300, 320, mask_token_id=300) == 300
    # but a token that the target has there is a token
    target = load(tmp_path / "target", added_tokens=["<tool>"])
    with pytest.raises(ValueError, match="token id 300 is '<tool>' in the target and '<mask>' in the draft"):
        check_same_vocabulary(target, draft, 320, 320, mask_token_id=300)
    with pytest.raises(ValueError, match="token id 300 is '<tool>' in the target and no token in the draft"):
        check_same_vocabulary(target, tokenizer, 320, 320, mask_token_id=300)


def test_a_token_outside_the_shared_vocabulary_is_refused(tokenizer):
    with pytest.raises(ValueError, match=r"token id 290 .* lies outside the shared vocabulary of 290 ids"):
        check_same_vocabulary(tokenizer, tokenizer, 320, 290)


@pytest.mark.parametrize("missing", ["target", "draft", "both"])
def test_without_a_tokenizer_the_sizes_must_agree(tokenizer, missing):
    target = None if missing in ("target", "both") else tokenizer
    draft = None if missing in ("draft", "both") else tokenizer
    assert check_same_vocabulary(target, draft, 300, 300) == 300
    with pytest.raises(ValueError, match=r"should have the same vocabulary size. Target model vocab_size=300. Draft "):
        check_same_vocabulary(target, draft, 300, 320)


def test_generation_config(tmp_path, caplog):
    assert load_generation_config(tmp_path) == {"eos_token_id": []}
    path = tmp_path / "generation_config.json"
    path.write_text('{"eos_token_id": 5, "do_sample": true}')
    assert load_generation_config(tmp_path) == {"eos_token_id": [5]}
    path.write_text('{"eos_token_id": [5, 3], "temperature": 0.6, "top_p": 0.95, "top_k": 20, "max_new_tokens": 9}')
    assert load_generation_config(tmp_path) == {
        "eos_token_id": [5, 3], "temperature": 0.6, "top_p": 0.95, "top_k": 20, "max_tokens": 9,
    }  # fmt: skip
    assert not caplog.records
    path.write_text('{"top_k": null, "repetition_penalty": 1.1}')
    with caplog.at_level(logging.WARNING):
        assert load_generation_config(tmp_path) == {"eos_token_id": []}
    assert "repetition_penalty=1.1, which is not supported" in caplog.text


@pytest.mark.parametrize(("content", "message"), [("{", "is not valid JSON"), ("[]", "holds a list")])
def test_broken_generation_configs_are_refused(tmp_path, content, message):
    (tmp_path / "generation_config.json").write_text(content)
    with pytest.raises(ValueError, match=message):
        load_generation_config(tmp_path)
