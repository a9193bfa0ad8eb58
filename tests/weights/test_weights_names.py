"""The table of names against transformers' own, for every switch of the three families."""

from __future__ import annotations

import itertools

import jax
import pytest

from pard_jax.config import ModelConfig
from pard_jax.models import abstract_params
from pard_jax.weights import CheckpointMismatchError, names
from tests.helpers.models import hf_config, hf_model
from tests.weights.files import hf_state

SWITCHES = {
    "qwen3": [{"attention_bias": b} for b in (False, True)],
    "qwen2": [{}],
    "llama": [{"attention_bias": a, "mlp_bias": m} for a, m in itertools.product((False, True), repeat=2)],
}
CASES = [(family, switch, tied) for family, all_ in SWITCHES.items() for switch in all_ for tied in (False, True)]


@pytest.mark.parametrize(("family", "switches", "tied"), CASES)
def test_names_and_shapes_are_those_of_transformers(family, switches, tied):
    pytest.importorskip("torch")
    config = hf_config(family, tie_word_embeddings=tied, num_hidden_layers=12, **switches)
    theirs = {name: tuple(x.shape) for name, x in hf_model(config).state_dict().items()}
    if tied:
        del theirs["lm_head.weight"]
    tensors = names.stored_tensors(abstract_params(ModelConfig.from_hf(config), "float32"))
    assert {name: tensor.shape for name, tensor in tensors.items()} == theirs
    assert {name: x.shape for name, x in hf_state(config).items()} == theirs  # the tests' own list


def test_layers_are_counted_from_their_arrays():
    leaf = jax.ShapeDtypeStruct((11, 4), "float32")
    tensors = names.stored_tensors({"layers": {"attn_norm": leaf}})
    assert list(tensors) == [f"model.layers.{i}.input_layernorm.weight" for i in range(11)]
    assert tensors["model.layers.10.input_layernorm.weight"] == names.Tensor(("layers", "attn_norm"), 10, (4,))


def test_no_two_paths_share_a_name():
    assert len(set(names.NAMES.values())) == len(names.NAMES)


@pytest.mark.parametrize(
    ("name", "tied", "ignored"),
    [
        ("lm_head.weight", True, True),
        ("lm_head.weight", False, False),
        ("model.layers.3.self_attn.rotary_emb.inv_freq", False, True),
        ("rotary_emb.inv_freq", False, True),
        ("model.layers.3.self_attn.q_proj.weight", True, False),
        ("model.norm.weight", True, False),
    ],
)
def test_what_is_no_parameter(name, tied, ignored):
    assert names.is_ignored(name, tied=tied) is ignored


def test_every_difference_is_listed_in_one_error():
    expected = {"a": (1, 2), "b": (3,), "c": (4,)}
    names.check_tensors("here", expected, dict(reversed(expected.items())))
    with pytest.raises(CheckpointMismatchError) as error:
        names.check_tensors("here", expected, {"b": (4,), "c": (4,), "d": ()}, [("c", "I8")])
    message = str(error.value)
    assert message.startswith("here does not hold")
    for part in ("4 problem(s)", "missing a [1, 2]", "unexpected d []", "shape of b is [4], expected [3]", "c is I8"):
        assert part in message


def test_hundreds_of_problems_are_counted_and_not_listed():
    expected = {f"layer.{i}": (2,) for i in range(300)}
    with pytest.raises(CheckpointMismatchError, match=r"300 problem\(s\)") as error:
        names.check_tensors("here", expected, {}, [])
    assert "missing layer.19 [2];" in str(error.value) and "and 280 more" in str(error.value)
    assert "layer.20" not in str(error.value)
