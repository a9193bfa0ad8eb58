from __future__ import annotations

import dataclasses

import pytest

from pard_jax.config.speculative import (
    SpeculativeConfig,
    acceptance_length_to_rates,
    extra_slots,
    unconditional_to_conditional,
)

PARD = {"model": "amd/PARD-Qwen3-0.6B", "num_speculative_tokens": 12, "parallel_drafting": True}
DRAFT = {"model": "org/draft", "num_speculative_tokens": 3}
SYNTHETIC = {**DRAFT, "rejection_sample_method": "synthetic"}


@pytest.mark.parametrize(
    ("keys", "method", "drafter", "model"),
    [
        (PARD, "draft_model", "pard", "amd/PARD-Qwen3-0.6B"),
        ({**PARD, "method": "draft_model"}, "draft_model", "pard", "amd/PARD-Qwen3-0.6B"),
        (DRAFT, "draft_model", "draft_model", "org/draft"),
        # the directories above a draft do not name its method, and an explicit method is believed
        ({**DRAFT, "model": "/data/eagle3-runs/plain"}, "draft_model", "draft_model", "/data/eagle3-runs/plain"),
        ({**DRAFT, "model": "my-dflash", "method": "draft_model"}, "draft_model", "draft_model", "my-dflash"),
        ({"model": "ngram", "num_speculative_tokens": 3}, "ngram", "ngram", None),
        ({"model": "[ngram]", "num_speculative_tokens": 3}, "ngram", "ngram", None),
        ({"method": "ngram", "num_speculative_tokens": 3}, "ngram", "ngram", None),
    ],
)
def test_method_is_inferred(keys, method, drafter, model):
    config = SpeculativeConfig.from_dict(keys)
    assert (config.method, config.drafter, config.model) == (method, drafter, model)
    assert config.num_speculative_tokens == keys["num_speculative_tokens"]
    assert SpeculativeConfig(**keys) == config  # the constructor takes the same keys
    assert dataclasses.replace(config) == config


def test_nulls_and_defaults_of_unsupported_keys_ask_for_nothing():
    keys = {**PARD, "quantization": None, "use_heterogeneous_vocab": False, "tensor_parallel_size": None}
    keys |= {"parallel_drafting": True, "draft_sample_method": None, "suffix_decoding_max_tree_depth": 24}
    assert SpeculativeConfig.from_dict(keys) == SpeculativeConfig.from_dict(PARD)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"model": "a"}, "A speculative model was provided, but `num_speculative_tokens` was not provided"),
        ({"num_speculative_tokens": 3}, "num_speculative_tokens was provided but without speculative model"),
        (
            {"num_speculative_tokens": 3, "method": "draft_model"},
            "num_speculative_tokens was provided but without speculative model",
        ),
        ({"method": "draft_model"}, "needs a speculative model"),
        ({"method": "ngram"}, "num_speculative_tokens must be provided"),
        ({}, "neither a model nor a method"),
        ({**DRAFT, "num_speculative_tokens": 0}, r"greater than zero \(0\)"),
        ({**DRAFT, "num_speculative_tokens": -1}, r"greater than zero \(-1\)"),
        ({**DRAFT, "num_speculative_tokens": 129}, "num_speculative_tokens=129 is greater than the maximum, 128"),
        ({**DRAFT, "num_speculative_tokens": "3"}, "num_speculative_tokens must be an integer, got '3'"),
        ({**DRAFT, "num_speculative_tokens": True}, "num_speculative_tokens must be an integer, got True"),
        ({**DRAFT, "parallel_drafting": "yes"}, "parallel_drafting must be true or false, got 'yes'"),
        ({**DRAFT, "model": 7}, "model must be a string, got 7"),
        (
            {**DRAFT, "tensor_parallel_size": 2},
            "'tensor_parallel_size' is not a valid argument in the speculative_config. "
            "Please pass 'draft_tensor_parallel_size' instead.",
        ),
        ({**DRAFT, "num_speculative_token": 3}, "unknown key 'num_speculative_token'.*'num_speculative_tokens'"),
        ({**DRAFT, "temperature": 0.5}, "unknown key 'temperature'"),
        ({**DRAFT, "method": "draft-model"}, "unknown speculative method 'draft-model'; did you mean 'draft_model'"),
        ({**DRAFT, "method": "ngram"}, "drafts without a model, but model='org/draft'"),
        ({**DRAFT, "model": "ngram", "method": "draft_model"}, "'draft_model' contradicts model='ngram'"),
        ({**DRAFT, "max_model_len": 0}, "max_model_len must be at least 1, got 0"),
        ({**DRAFT, "draft_tensor_parallel_size": 0}, "draft_tensor_parallel_size must be at least 1, got 0"),
        ({**DRAFT, "quantization": "fp8"}, "quantization='fp8' is not supported; choose 'int8', or 'none' to keep"),
        ({**DRAFT, "quantization": 8}, "quantization must be a string, got 8"),
        ({**PARD, "mask_token_id": -1}, "mask_token_id must not be negative, got -1"),
        ({**DRAFT, "mask_token_id": 5}, "a sequential draft has no use for it"),
        ({**DRAFT, "prompt_lookup_max": 3}, "belong to method 'ngram'"),
        ({**DRAFT, "draft_sample_method": "top"}, "draft_sample_method must be one of 'greedy', 'probabilistic'"),
        ({**DRAFT, "rejection_sample_method": "typical"}, "must be one of 'standard', 'synthetic', got 'typical'"),
        ({**DRAFT, "synthetic_acceptance_length": 2}, "only valid with rejection_sample_method='synthetic'"),
        ({**DRAFT, "synthetic_acceptance_rates": [1, 1, 1]}, "only valid with rejection_sample_method='synthetic'"),
        (SYNTHETIC, "requires exactly one of"),
        (
            {**SYNTHETIC, "synthetic_acceptance_length": 2, "synthetic_acceptance_rates": [1, 1, 1]},
            "requires exactly one of",
        ),
        ({**SYNTHETIC, "synthetic_acceptance_rates": [0.9, 0.5]}, "must have length 3"),
        ({**SYNTHETIC, "synthetic_acceptance_rates": [1.1, 0.5, 0]}, r"entries must be in \[0, 1\]"),
        ({**SYNTHETIC, "synthetic_acceptance_rates": [0.9, "x", 0]}, "must be a list of numbers"),
        ({**SYNTHETIC, "synthetic_acceptance_rates": [0.5, 0.6, 0]}, "must be non-increasing"),
        ({**SYNTHETIC, "synthetic_acceptance_length": 0.9}, r"must be in \[1, 4\], got 0.9"),
        ({**SYNTHETIC, "synthetic_acceptance_length": 4.1}, r"must be in \[1, 4\], got 4.1"),
        ({**SYNTHETIC, "synthetic_acceptance_length": float("nan")}, r"must be in \[1, 4\], got nan"),
    ],
)
def test_what_cannot_be_is_refused(keys, message):
    with pytest.raises(ValueError, match=message):
        SpeculativeConfig.from_dict(keys)


@pytest.mark.parametrize("keys", [None, [], "ngram", 3])
def test_only_an_object_is_taken(keys):
    with pytest.raises(ValueError, match="must be a JSON object"):
        SpeculativeConfig.from_dict(keys)


@pytest.mark.parametrize("method", ["eagle", "eagle3", "mtp", "dflash", "dspark", "suffix", "medusa", "mimo_mtp"])
def test_vllms_other_methods_are_known_but_not_supported(method):
    with pytest.raises(NotImplementedError, match=f"'{method}' is not supported yet; supported are draft_model, ngram"):
        SpeculativeConfig.from_dict({"model": "a", "num_speculative_tokens": 3, "method": method})


@pytest.mark.parametrize(
    ("model", "method"),
    [
        ("yuhuili/EAGLE-LLaMA3-Instruct-8B", "eagle"),
        ("AngelSlim/Qwen3-8B_eagle3", "eagle3"),
        ("z-lab/Qwen3-8B-DFlash", "dflash"),
        ("deepseek-ai/dspark_qwen3_8b_block7", "dspark"),
    ],
)
def test_a_draft_of_another_method_is_known_by_its_name(model, method):
    with pytest.raises(NotImplementedError, match=f"'{method}' is not supported"):
        SpeculativeConfig.from_dict({"model": model, "num_speculative_tokens": 3})


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("disable_padded_drafter_batch", True),
        ("use_heterogeneous_vocab", True),
        ("num_speculative_tokens_per_batch_size", [[1, 4, 3]]),
        ("kv_cache_dtype", "fp8"),
        ("enforce_eager", True),
        ("suffix_decoding_max_tree_depth", 8),
        ("rejection_sample_method", "block"),
        ("rejection_sample_method", "fly"),
    ],
)
def test_vllms_other_keys_are_refused_by_name(key, value):
    with pytest.raises(NotImplementedError, match=f"{key}=.*is not supported"):
        SpeculativeConfig.from_dict({**DRAFT, key: value})


@pytest.mark.parametrize(
    ("given", "expected"),
    [({}, (5, 5)), ({"prompt_lookup_max": 3}, (3, 3)), ({"prompt_lookup_min": 2}, (2, 2)),
     ({"prompt_lookup_min": 2, "prompt_lookup_max": 4}, (2, 4))],
)  # fmt: skip
def test_ngram_lengths(given, expected):
    config = SpeculativeConfig.from_dict({"method": "ngram", "num_speculative_tokens": 3, **given})
    assert (config.prompt_lookup_min, config.prompt_lookup_max) == expected


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"prompt_lookup_min": 4, "prompt_lookup_max": 3}, "prompt_lookup_min=4 must be <= prompt_lookup_max=3"),
        ({"prompt_lookup_max": 0}, "prompt_lookup_max must be at least 1, got 0"),
        ({"parallel_drafting": True}, "only compatible with EAGLE and draft model methods"),
        ({"draft_sample_method": "probabilistic"}, "needs a draft model"),
        ({"max_model_len": 10}, "max_model_len=10 describes a draft model"),
        ({"mask_token_id": 5}, "mask_token_id=5 describes a draft model"),
        ({"revision": "main"}, "revision='main' describes a draft model"),
        ({"quantization": "int8"}, "quantization='int8' describes a draft model"),
    ],
)
def test_ngram_contradictions(keys, message):
    with pytest.raises(ValueError, match=message):
        SpeculativeConfig.from_dict({"method": "ngram", "num_speculative_tokens": 3, **keys})


def test_every_field_is_a_key_with_a_type():
    keys = {**PARD, "method": "draft_model", "draft_tensor_parallel_size": 1, "max_model_len": 9, "revision": "main"}
    keys |= {"draft_sample_method": "probabilistic", "rejection_sample_method": "standard", "mask_token_id": 7}
    assert dataclasses.asdict(SpeculativeConfig.from_dict(keys)).items() >= keys.items()
    for field in dataclasses.fields(SpeculativeConfig):
        with pytest.raises(ValueError, match=f"{field.name} must be"):
            SpeculativeConfig.from_dict({**PARD, field.name: {}})


def test_k_of_128_is_the_last_allowed():
    assert SpeculativeConfig.from_dict({**PARD, "num_speculative_tokens": 128}).num_speculative_tokens == 128
    assert SpeculativeConfig.from_dict({**PARD, "num_speculative_tokens": 1}).num_speculative_tokens == 1


def test_draft_must_be_split_like_the_target():
    SpeculativeConfig.from_dict(DRAFT).check_tensor_parallel_size(4)
    config = SpeculativeConfig.from_dict({**DRAFT, "draft_tensor_parallel_size": 1})
    config.check_tensor_parallel_size(1)
    with pytest.raises(ValueError, match=r"must be the same\. Got 1 and 2\. Please pass 'draft_tensor_parallel_size'"):
        config.check_tensor_parallel_size(2)


def test_draft_length():
    assert SpeculativeConfig.from_dict(DRAFT).resolve_max_model_len(64, 256) == 64
    assert SpeculativeConfig.from_dict(DRAFT).resolve_max_model_len(256, 64) == 64
    config = SpeculativeConfig.from_dict({**DRAFT, "max_model_len": 80})
    assert config.resolve_max_model_len(100, 200) == 80
    with pytest.raises(ValueError, match="speculative_max_model_len=80 cannot be larger than draft_max_model_len=64"):
        config.resolve_max_model_len(64, 200)
    with pytest.raises(ValueError, match="speculative_max_model_len=80 cannot be larger than target_max_model_len=64"):
        config.resolve_max_model_len(100, 64)


@pytest.mark.parametrize(
    ("rates", "conditional"),
    [((0.9, 0.5, 0.2), (0.9, 0.5 / 0.9, 0.4)), ((1.0, 0.6, 0.0, 0.0), (1, 0.6, 0, 0)), ((1.0, 1.0, 1.0), (1, 1, 1))],
)
def test_conditional_rates(rates, conditional):
    assert unconditional_to_conditional(rates) == pytest.approx(conditional)


@pytest.mark.parametrize(
    ("length", "k", "rates"),
    [
        (2.6, 3, (1, 0.6, 0)),
        (1.0, 3, (0, 0, 0)),
        (4.0, 3, (1, 1, 1)),
        (2.0, 3, (1, 0, 0)),
        (3.5, 4, (1, 1, 0.5, 0)),
    ],
)
def test_rates_of_a_length(length, k, rates):
    found = acceptance_length_to_rates(length, k)
    assert found == pytest.approx(rates)
    assert 1 + sum(found) == pytest.approx(length)


def test_synthetic_rates_of_a_config():
    by_rates = SpeculativeConfig.from_dict({**SYNTHETIC, "synthetic_acceptance_rates": [0.9, 0.5, 0.2]})
    assert by_rates.conditional_acceptance_rates == pytest.approx((0.9, 0.5 / 0.9, 0.4))
    assert by_rates.synthetic_acceptance_rates == (0.9, 0.5, 0.2)
    by_length = SpeculativeConfig.from_dict({**SYNTHETIC, "synthetic_acceptance_length": 2.6})
    assert by_length.conditional_acceptance_rates == pytest.approx((1.0, 0.6, 0.0))
    assert SpeculativeConfig.from_dict(DRAFT).conditional_acceptance_rates is None


@pytest.mark.parametrize(
    ("algorithm", "method", "parallel", "slots"),
    [
        ("EAGLE3", "eagle3", False, 0),
        ("P-EAGLE", "eagle3", True, 7),
        ("DFlash", "dflash", True, 8),
        ("DSpark", "dspark", True, 7),
        ("MTP", "mtp", False, 0),
        ("N-gram", "ngram", False, 0),
        ("Draft model", "draft_model", False, 1),
        ("PARD", "draft_model", True, 8),
    ],
)
def test_slots_of_the_eight_algorithms(algorithm, method, parallel, slots):
    assert extra_slots(method, parallel, 8) == slots, algorithm


def test_slots_of_no_method():
    with pytest.raises(ValueError, match="unknown speculative method 'medusa'"):
        extra_slots("medusa", False, 8)
    with pytest.raises(ValueError, match="parallel_drafting is only compatible"):
        extra_slots("ngram", True, 8)
