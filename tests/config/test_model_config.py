"""ModelConfig: real configs read as they are published, everything else refused by name."""

from __future__ import annotations

import json
from typing import Any

import pytest

from pard_jax.config import ModelConfig, RopeConfig
from tests.helpers.models import LLAMA3_SCALING, hf_config, hf_model, save_hf

# As the published config.json files have them.
QWEN3 = {
    "architectures": ["Qwen3ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
    "head_dim": 128,
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "max_position_embeddings": 40960,
    "max_window_layers": 28,
    "model_type": "qwen3",
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": None,
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "use_sliding_window": False,
    "vocab_size": 151936,
}


def qwen3(hidden: int, layers: int, heads: int, ffn: int, tied: bool, **more: Any) -> dict[str, Any]:
    return QWEN3 | {
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "intermediate_size": ffn,
        "tie_word_embeddings": tied,
        **more,
    }


QWEN2 = {
    "architectures": ["Qwen2ForCausalLM"],
    "attention_dropout": 0.0,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
    "hidden_act": "silu",
    "max_position_embeddings": 32768,
    "max_window_layers": 21,
    "model_type": "qwen2",
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "sliding_window": 32768,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "use_sliding_window": False,
    "vocab_size": 151936,
}
LLAMA_32_1B = {
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "bos_token_id": 128000,
    "eos_token_id": [128001, 128008, 128009],
    "head_dim": 64,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "max_position_embeddings": 131072,
    "mlp_bias": False,
    "model_type": "llama",
    "num_attention_heads": 32,
    "num_hidden_layers": 16,
    "num_key_value_heads": 8,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "factor": 32.0,
        "high_freq_factor": 4.0,
        "low_freq_factor": 1.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "rope_theta": 500000.0,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "vocab_size": 128256,
}
REAL: dict[str, dict[str, Any]] = {
    "Qwen3-0.6B": qwen3(1024, 28, 16, 3072, True),
    "PARD-Qwen3-0.6B": qwen3(1024, 28, 16, 3072, True, pard_token=151670, spd_type="pard"),
    "Qwen3-1.7B": qwen3(2048, 28, 16, 6144, True),
    "Qwen3-4B": qwen3(2560, 36, 32, 9728, True, max_window_layers=36),
    "Qwen3-8B": qwen3(4096, 36, 32, 12288, False, max_window_layers=36),
    "Qwen3-14B": qwen3(5120, 40, 40, 17408, False, max_window_layers=40),
    "Qwen3-32B": qwen3(5120, 64, 64, 25600, False, max_window_layers=64),
    "Qwen2.5-0.5B": QWEN2
    | {"hidden_size": 896, "num_hidden_layers": 24, "num_attention_heads": 14, "num_key_value_heads": 2,
       "intermediate_size": 4864, "tie_word_embeddings": True, "max_window_layers": 24},
    "Qwen2.5-7B": QWEN2
    | {"hidden_size": 3584, "num_hidden_layers": 28, "num_attention_heads": 28, "num_key_value_heads": 4,
       "intermediate_size": 18944, "vocab_size": 152064, "max_window_layers": 28},
    "PARD-DeepSeek-R1-Distill-Qwen-1.5B": QWEN2
    | {"hidden_size": 1536, "num_hidden_layers": 28, "num_attention_heads": 12, "num_key_value_heads": 2,
       "intermediate_size": 8960, "rope_theta": 10000, "max_position_embeddings": 131072, "sliding_window": 4096,
       "bos_token_id": 151646, "eos_token_id": 151643, "pard_token": 151665, "spd_type": "pard"},
    "Llama-3.2-1B": LLAMA_32_1B,
    "PARD-Llama-3.2-1B": LLAMA_32_1B | {"pard_token": 128020, "spd_type": "pard"},
}  # fmt: skip


@pytest.mark.parametrize("name", REAL)
def test_real_config(name):
    hf = REAL[name]
    config = ModelConfig.from_hf(hf)
    assert config.family == hf["model_type"]
    assert (config.vocab_size, config.hidden_size, config.num_layers, config.num_heads, config.num_kv_heads) == (
        hf["vocab_size"], hf["hidden_size"], hf["num_hidden_layers"], hf["num_attention_heads"],
        hf["num_key_value_heads"],
    )  # fmt: skip
    assert config.head_dim == hf.get("head_dim", hf["hidden_size"] // hf["num_attention_heads"])
    assert config.intermediate_size == hf["intermediate_size"]
    assert config.rms_norm_eps == hf["rms_norm_eps"]
    assert config.rope.theta == hf["rope_theta"]
    assert config.max_position_embeddings == hf["max_position_embeddings"]
    assert config.tie_word_embeddings == hf["tie_word_embeddings"]
    assert config.qkv_bias == (hf["model_type"] == "qwen2")
    assert config.qk_norm == (hf["model_type"] == "qwen3")
    assert not config.o_bias and not config.mlp_bias
    assert config.mask_token_id == hf.get("pard_token")
    assert config.bos_token_id == hf["bos_token_id"]
    assert config.dtype == "bfloat16"


@pytest.mark.parametrize("name", REAL)
def test_number_of_parameters_equals_transformers(name):
    hf = REAL[name]
    kwargs = {k: v for k, v in json.loads(json.dumps(hf)).items() if k != "model_type"}
    torch = pytest.importorskip("torch")
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(hf["model_type"], **kwargs))
    assert ModelConfig.from_hf(hf).num_parameters == sum(p.numel() for p in model.parameters())


def test_values_of_two_known_models():
    """Counts and figures as published, apart from any other code."""
    config = ModelConfig.from_hf(REAL["PARD-Qwen3-0.6B"])
    assert (config.mask_token_id, config.eos_token_ids, config.rope) == (151670, (151645,), RopeConfig(1e6))
    assert config.num_parameters == 596_049_920
    assert config.num_heads * config.head_dim == 2048 != config.hidden_size
    llama = ModelConfig.from_hf(REAL["Llama-3.2-1B"])
    assert llama.eos_token_ids == (128001, 128008, 128009)
    assert llama.rope == RopeConfig(5e5, 32.0, 1.0, 4.0, 8192)
    assert llama.num_parameters == 1_235_814_400


@pytest.mark.parametrize("family", ["qwen3", "qwen2", "llama"])
def test_the_config_that_transformers_writes(family, tmp_path):
    """transformers 5 writes its own layout (rope_parameters, layer_types, dtype): the same config comes back."""
    hf = hf_config(family, rope_theta=12345.0, rope_scaling=LLAMA3_SCALING)
    directory = save_hf(hf_model(hf), tmp_path, pard_token=7)
    written = json.loads((directory / "config.json").read_text())
    assert "rope_parameters" in written and "rope_theta" not in written
    assert ModelConfig.from_pretrained(directory) == ModelConfig.from_hf(hf | {"pard_token": 7})


def test_both_rope_layouts():
    old = ModelConfig.from_hf(hf_config("llama", rope_theta=3e4, rope_scaling=LLAMA3_SCALING))
    new = ModelConfig.from_hf(hf_config("llama", rope_theta=None, rope_parameters=LLAMA3_SCALING | {"rope_theta": 3e4}))
    legacy = {("type" if k == "rope_type" else k): v for k, v in LLAMA3_SCALING.items()}
    assert old == new == ModelConfig.from_hf(hf_config("llama", rope_theta=3e4, rope_scaling=legacy))
    assert old.rope == RopeConfig(3e4, 8.0, 1.0, 4.0, 64)
    nested = {"full_attention": {"rope_type": "default", "rope_theta": 7e5}}
    assert ModelConfig.from_hf(hf_config("qwen3", rope_theta=None, rope_parameters=nested)).rope == RopeConfig(7e5)
    # rope_parameters wins over a rope_theta that stands beside it.
    both = hf_config("qwen3", rope_theta=1e4, rope_parameters={"rope_type": "default", "rope_theta": 7e5})
    assert ModelConfig.from_hf(both).rope.theta == 7e5


def test_defaults_where_hf_has_them():
    bare = {
        key: value
        for key, value in hf_config("qwen3").items()
        if key
        not in ("head_dim", "num_key_value_heads", "tie_word_embeddings", "bos_token_id", "eos_token_id", "dtype")
    }
    config = ModelConfig.from_hf(bare)
    assert config.head_dim == 128  # Qwen3's own, whatever D / N
    assert config.num_kv_heads == config.num_heads
    assert not config.tie_word_embeddings
    assert (config.bos_token_id, config.eos_token_ids, config.dtype) == (None, (), "float32")
    llama = ModelConfig.from_hf(bare | {"architectures": ["LlamaForCausalLM"]})
    assert llama.head_dim == 8
    # Without `architectures` the model type decides.
    assert ModelConfig.from_hf({k: v for k, v in bare.items() if k != "architectures"}) == config


def test_biases_by_family():
    def biases(family: str) -> tuple[bool, bool, bool]:
        config = ModelConfig.from_hf(hf_config(family, attention_bias=True, mlp_bias=True))
        return config.qkv_bias, config.o_bias, config.mlp_bias

    assert biases("qwen3") == (True, True, False)
    assert biases("qwen2") == (True, False, False)
    assert biases("llama") == (True, True, True)


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({}, None),
        ({"ptd_token_id": 5}, 5),
        ({"ptd_token_id": 5, "pard_token": 0}, 0),
        ({"pard_token": 4, "dspark_noise_token_id": 3}, 3),
        ({"dspark_noise_token_id": 3, "mask_token_id": 2}, 2),
        ({"mask_token_id": 2, "dflash_config": {"mask_token_id": 1}}, 1),
        ({"mask_token_id": 2, "dflash_config": {"target_layer_ids": [1]}}, 2),
        ({"mask_token_id": None, "pard_token": 4}, 4),
    ],
)
def test_mask_token_lookup_order(keys, expected):
    assert ModelConfig.from_hf(hf_config("qwen3", **keys) | keys).mask_token_id == expected


def test_sliding_window_that_no_layer_uses_is_accepted():
    for keys in (
        {"sliding_window": 4096},
        {"sliding_window": 4096, "use_sliding_window": False, "max_window_layers": 0},
        {"sliding_window": 4096, "use_sliding_window": True, "max_window_layers": 2},
        {"use_sliding_window": True, "max_window_layers": 0},
        {"sliding_window": 4096, "use_sliding_window": True, "layer_types": ["full_attention"] * 2},
    ):
        for family in ("qwen3", "qwen2"):
            assert ModelConfig.from_hf(hf_config(family, **keys)) == ModelConfig.from_hf(hf_config(family))


REFUSED = {
    "negative rope theta": ({"rope_theta": -5}, "rope_theta=-5; expected a positive number"),
    "rope theta in words": ({"rope_theta": "10000"}, "rope_theta='10000'; expected a positive number"),
    "a number as text": ({"hidden_size": "576"}, "hidden_size='576'; expected a whole number"),
    "epsilon as text": ({"rms_norm_eps": "1e-5"}, "rms_norm_eps='1e-5'; expected a positive number"),
    "eos in words": ({"eos_token_id": "x"}, "eos_token_id='x'; expected a token id or a list of them"),
    "architecture": (
        {"architectures": ["GPT2LMHeadModel"]},
        "architecture GPT2LMHeadModel is not supported; supported are "
        "Qwen3ForCausalLM, Qwen2ForCausalLM, LlamaForCausalLM",
    ),
    "model type": ({"architectures": [], "model_type": "gpt2"}, "architecture model_type 'gpt2' is not supported"),
    "moe architecture": ({"architectures": ["Qwen3MoeForCausalLM"]}, "Qwen3MoeForCausalLM is not supported"),
    "experts": ({"num_experts": 128}, r"mixture-of-experts models are not supported \(num_experts=128\)"),
    "local experts": ({"num_local_experts": 8}, r"\(num_local_experts=8\)"),
    "sliding layers": (
        {"layer_types": ["full_attention", "sliding_attention"]},
        "layers of type sliding_attention are not supported; only full attention is",
    ),
    "sliding window": (
        {"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 1},
        "layers of type sliding_attention",
    ),
    "quantized": (
        {"quantization_config": {"quant_method": "gptq", "bits": 4}},
        r"quantized checkpoints are not supported \(gptq\)",
    ),
    "activation": ({"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported; expected 'silu'"),
    "no theta": ({"rope_theta": None}, "neither rope_theta nor rope_parameters.rope_theta"),
    "yarn": (
        {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}},
        "rope scaling 'yarn' is not supported; supported are 'default' and 'llama3'",
    ),
    "legacy linear": ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope scaling 'linear'"),
    "half llama3": ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "lacks 'low_freq_factor'"),
    "partial rotary": ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
    "heads": ({"num_key_value_heads": 3}, "num_attention_heads=4 is not a multiple of num_key_value_heads=3"),
    "odd head": ({"head_dim": 7}, "head_dim=7 is odd"),
    "no layers": ({"num_hidden_layers": 0}, "num_layers is 0; it must be at least 1"),
    **{
        f"no {key}": ({key: None}, f"config.json lacks '{key}', which a qwen3 model needs")
        for key in ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size",
                    "max_position_embeddings")
    },
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_refused(case):
    keys, message = REFUSED[case]
    with pytest.raises(ValueError, match=message):
        ModelConfig.from_hf(hf_config("qwen3", **keys))


@pytest.mark.parametrize("key", ["vocab_size", "num_hidden_layers", "max_position_embeddings", "rope_theta"])
def test_null_is_as_good_as_missing(key):
    hf = hf_config("qwen2", use_sliding_window=True, sliding_window=64, max_window_layers=9) | {key: None}
    with pytest.raises(ValueError, match=key):
        ModelConfig.from_hf(hf)


@pytest.mark.parametrize(
    "keys",
    [
        {"rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]}},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [16, 24, 24]}},
    ],
)
def test_mrope_is_refused_in_vllms_words(keys):
    message = "Speculative Decoding with draft models or parallel drafting does not support M-RoPE yet"
    with pytest.raises(NotImplementedError, match=message):
        ModelConfig.from_hf(hf_config("qwen2", **keys))


def test_from_pretrained_names_the_file(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"holds no config.json; expected a Hugging Face checkpoint"):
        ModelConfig.from_pretrained(tmp_path)
    path = tmp_path / "config.json"
    path.write_text("{not json")
    with pytest.raises(ValueError, match=rf"{path} is not valid JSON"):
        ModelConfig.from_pretrained(tmp_path)
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ValueError, match=rf"{path} is not valid JSON"):
        ModelConfig.from_pretrained(tmp_path)
    path.write_text("[1, 2]")
    with pytest.raises(ValueError, match="holds a list; expected a JSON object"):
        ModelConfig.from_pretrained(str(tmp_path))
    path.write_text(json.dumps(hf_config("qwen3", hidden_size=None)))
    with pytest.raises(ValueError, match=rf"{path}: config.json lacks 'hidden_size'"):
        ModelConfig.from_pretrained(tmp_path)
    path.write_text(json.dumps(hf_config("qwen2", rope_scaling={"type": "mrope"})))
    with pytest.raises(NotImplementedError, match=rf"{path}: .*M-RoPE"):
        ModelConfig.from_pretrained(tmp_path)
    path.write_text(json.dumps(hf_config("llama")))
    assert ModelConfig.from_pretrained(tmp_path) == ModelConfig.from_hf(hf_config("llama"))
