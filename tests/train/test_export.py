"""The choice of a mask token, and an exported draft as transformers, its tokenizer and this package load it."""

from __future__ import annotations

import json
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pard_jax.config import ModelConfig
from pard_jax.tokenizer import load_tokenizer
from pard_jax.train.export import choose_mask_token, export
from pard_jax.weights import CheckpointMismatchError, load_params
from tests.helpers.models import full_forward, hf_config, random_params
from tests.helpers.tokenizer import make_tokenizer
from tests.weights.files import transformers_model

# The mask token. The tokenizer of the tests has 300 ids; 0 to 2 are <|endoftext|>, <|im_start|>, <|im_end|>.


def test_the_first_row_without_a_name(tokenizer):
    assert choose_mask_token(tokenizer, 320, None) == 300
    assert choose_mask_token(tokenizer, 320, None, used_token_ids=[5, 300, 301]) == 302
    assert choose_mask_token(tokenizer, 320, 317, used_token_ids=range(300)) == 317


def test_else_a_reserved_special_token(tmp_path):
    reserved = ["<|im_sep|>", "<repo_name>", "<file_sep>"]
    tokenizer = load_tokenizer(make_tokenizer(tmp_path, added_tokens=reserved))
    assert tokenizer is not None
    tokenizer.hf.chat_template = tokenizer.hf.chat_template.replace("<|im_start|>assistant", "<|im_sep|>assistant")
    assert choose_mask_token(tokenizer, 303, None) == 301  # 300 stands in the template
    assert choose_mask_token(tokenizer, 303, None, used_token_ids=[301]) == 302
    assert choose_mask_token(tokenizer, 304, None) == 303  # a row without a name comes first
    assert choose_mask_token(tokenizer, 303, 302) == 302
    with pytest.raises(ValueError, match=r"mask token id 300 is '<\|im_sep\|>', which the tokenizer uses"):
        choose_mask_token(tokenizer, 303, 300)
    with pytest.raises(ValueError, match="each of the 303 ids of the vocabulary is in use"):
        choose_mask_token(tokenizer, 303, None, used_token_ids=[301, 302])


def test_a_special_token_without_a_part_in_the_template(tmp_path):
    """<|endoftext|> is the padding token and <|im_end|> EOS; <|im_start|> is neither, but begins every turn."""
    tokenizer = load_tokenizer(make_tokenizer(tmp_path, chat_template=False))
    assert choose_mask_token(tokenizer, 300, None) == 1
    tokenizer = load_tokenizer(make_tokenizer(tmp_path / "chat"))
    with pytest.raises(ValueError, match=r"each of the 300 ids .* add a reserved special token to the tokenizer"):
        choose_mask_token(tokenizer, 300, None)


@pytest.mark.parametrize(
    ("asked", "used", "message"),
    [
        (320, [], "320 lies outside the vocabulary; expected 0 to 319"),
        (-1, [], "-1 lies outside"),
        (310, [310], "310 occurs in the samples"),
        (70, [], "70 is .*, which the tokenizer uses; expected an id that names no token"),
        (2, [], r"2 is '<\|im_end\|>', which the tokenizer uses"),
    ],
)
def test_an_id_that_text_uses_is_refused(tokenizer, asked, used, message):
    with pytest.raises(ValueError, match=f"mask token id {message}"):
        choose_mask_token(tokenizer, 320, asked, used)


def test_without_a_tokenizer_the_id_must_be_given():
    assert choose_mask_token(None, 64, 63, [1, 2]) == 63
    with pytest.raises(ValueError, match="63 occurs in the samples"):
        choose_mask_token(None, 64, 63, [1, 63])
    with pytest.raises(ValueError, match=r"without a tokenizer .* \(mask_token_id\)"):
        choose_mask_token(None, 64, None)


# Export

TRAINING = {
    "settings": {"model": "org/base", "layers": None, "num_blocks": 8, "learning_rate": 3e-5},
    "steps": 120,
    "evaluation": {"acceptance_length": 3.25, "per_position": [0.9, 0.75]},
}


@pytest.mark.parametrize("family", ["qwen3", "qwen2", "llama"])
def test_transformers_gives_our_logits(tmp_path, family):
    torch = pytest.importorskip("torch")
    tied = family != "llama"
    config_json = hf_config(family, tie_word_embeddings=tied)
    config = ModelConfig.from_hf(config_json)
    params = random_params(config, seed=1)
    export(
        params, config_json, tmp_path / "out", tokenizer_directory=None, mask_token_id=100, training={}, progress=False
    )
    tokens = np.random.default_rng(0).integers(0, 128, 9)
    model = transformers_model(tmp_path / "out")
    with torch.no_grad():
        expected = model(torch.from_numpy(tokens[None])).logits.numpy()[0]
    np.testing.assert_allclose(full_forward(config, params, 9)(tokens.tolist()), expected, atol=2e-4, rtol=2e-4)
    assert model.config.pard_token == 100 and model.config.spd_type == "pard"


def test_bfloat16_and_the_keys_of_the_config(tmp_path):
    stale = {"torch_dtype": "float16", "mask_token_id": 3, "dflash_config": {"mask_token_id": 4}, "pard_token": 5}
    config_json = hf_config("qwen3", **stale)
    before = json.loads(json.dumps(config_json))
    params = jax.tree.map(lambda x: x.astype(jnp.bfloat16), random_params(ModelConfig.from_hf(config_json), 0))
    export(
        params, config_json, tmp_path / "a", tokenizer_directory=None, mask_token_id=100, training={}, progress=False
    )
    assert config_json == before
    written = json.loads((tmp_path / "a" / "config.json").read_text())
    kept = {key: value for key, value in config_json.items() if key not in stale}
    assert written == kept | {"dtype": "bfloat16", "pard_token": 100, "spd_type": "pard"}
    config = ModelConfig.from_pretrained(tmp_path / "a")
    assert config.mask_token_id == 100 and config.dtype == "bfloat16"
    loaded = load_params(tmp_path / "a", config, dtype=None, progress=False)
    jax.tree.map(np.testing.assert_array_equal, loaded, params)
    # A model that is no draft.
    export(
        params, config_json, tmp_path / "b", tokenizer_directory=None, mask_token_id=None, training={}, progress=False
    )
    assert json.loads((tmp_path / "b" / "config.json").read_text()) == kept | {"dtype": "bfloat16"}
    assert "pard" not in (tmp_path / "b" / "README.md").read_text().split("# b")[0]


def small(tmp_path, **kwargs):
    config_json = hf_config("llama", num_hidden_layers=1, vocab_size=320)
    given = {
        "params": random_params(ModelConfig.from_hf(config_json), 0),
        "config_json": config_json,
        "directory": tmp_path / "out",
        "tokenizer_directory": None,
        "mask_token_id": 300,
        "training": TRAINING,
        "progress": False,
    }
    export(**(given | kwargs))
    return tmp_path / "out"


def test_the_tokenizer_comes_along(tmp_path, tokenizer_dir):
    (tokenizer_dir / "generation_config.json").write_text('{"eos_token_id": [2, 0]}')
    (tokenizer_dir / "pytorch_model.bin").write_text("no part of a tokenizer")
    out = small(tmp_path, tokenizer_directory=tokenizer_dir)
    ours, theirs = load_tokenizer(out), load_tokenizer(tokenizer_dir)
    assert ours is not None and theirs is not None and ours.vocab == theirs.vocab
    messages = [{"role": "user", "content": "hello"}]
    assert ours.apply_chat_template(messages) == theirs.apply_chat_template(messages)
    assert sorted(p.name for p in out.iterdir()) == [
        "README.md",
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
        "training.json",
    ]


def test_what_is_said_about_it(tmp_path):
    out = small(tmp_path)
    assert json.loads((out / "training.json").read_text()) == TRAINING
    card = (out / "README.md").read_text()
    assert card.startswith("---\nlibrary_name: transformers\n")
    for part in (
        "# out\n",
        "trained from `org/base`",
        "token 300 as mask token",
        "| learning rate | 3e-05 |",
        "| steps | 120 |",
        "| acceptance length | 3.25 |",
        "| per position | 0.9, 0.75 |",
        "## Licence",
    ):
        assert part in card
    assert "layers" not in card
    small(tmp_path, training={"name": "My draft"}, overwrite=True)
    assert "# My draft\n" in (out / "README.md").read_text()


def test_what_cannot_be_exported(tmp_path):
    config_json = hf_config("llama", num_hidden_layers=2, vocab_size=320)
    with pytest.raises(CheckpointMismatchError, match=r"missing model\.layers\.1\.input_layernorm"):
        small(tmp_path, config_json=config_json)
    with pytest.raises(ValueError, match="mask token id 320 lies outside the vocabulary of 320 ids"):
        small(tmp_path, mask_token_id=320)
    params = random_params(ModelConfig.from_hf(hf_config("llama", num_hidden_layers=1, vocab_size=320)), 0)
    with pytest.raises(ValueError, match="of the dtypes bfloat16, float32; expected one for all"):
        small(tmp_path, params=params | {"norm": params["norm"].astype(jnp.bfloat16)})
    with pytest.raises(ValueError, match=r"cannot be written as JSON: .*SimpleNamespace"):
        small(tmp_path, training={"settings": types.SimpleNamespace()})
    assert not (tmp_path / "out").exists()
    out = small(tmp_path)
    with pytest.raises(FileExistsError, match="exists and is not empty"):
        small(tmp_path)
    assert small(tmp_path, overwrite=True) == out
