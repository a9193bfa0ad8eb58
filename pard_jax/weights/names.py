"""Hugging Face's names for the parameters: one table, read in both directions.

The tree stacks all layers into one array; HF holds a tensor a layer, otherwise laid out alike. Everything else about a
tensor (its shape, whether the model has it at all) follows from the abstract tree of
:func:`pard_jax.models.abstract_params`.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Mapping
from typing import Any, cast

from flax.traverse_util import flatten_dict

from pard_jax.weights.errors import CheckpointMismatchError

Path = tuple[str, ...]  # of an array in the parameter tree

_MOST_LISTED = 20  # things that are wrong: a config of another size is wrong about hundreds of tensors

# Path in the tree -> HF name; `{}` is the layer.
NAMES: dict[Path, str] = {
    ("embed",): "model.embed_tokens.weight",
    ("layers", "attn_norm"): "model.layers.{}.input_layernorm.weight",
    ("layers", "q_proj"): "model.layers.{}.self_attn.q_proj.weight",
    ("layers", "k_proj"): "model.layers.{}.self_attn.k_proj.weight",
    ("layers", "v_proj"): "model.layers.{}.self_attn.v_proj.weight",
    ("layers", "o_proj"): "model.layers.{}.self_attn.o_proj.weight",
    ("layers", "q_bias"): "model.layers.{}.self_attn.q_proj.bias",
    ("layers", "k_bias"): "model.layers.{}.self_attn.k_proj.bias",
    ("layers", "v_bias"): "model.layers.{}.self_attn.v_proj.bias",
    ("layers", "o_bias"): "model.layers.{}.self_attn.o_proj.bias",
    ("layers", "q_norm"): "model.layers.{}.self_attn.q_norm.weight",
    ("layers", "k_norm"): "model.layers.{}.self_attn.k_norm.weight",
    ("layers", "mlp_norm"): "model.layers.{}.post_attention_layernorm.weight",
    ("layers", "gate_proj"): "model.layers.{}.mlp.gate_proj.weight",
    ("layers", "up_proj"): "model.layers.{}.mlp.up_proj.weight",
    ("layers", "down_proj"): "model.layers.{}.mlp.down_proj.weight",
    ("layers", "gate_bias"): "model.layers.{}.mlp.gate_proj.bias",
    ("layers", "up_bias"): "model.layers.{}.mlp.up_proj.bias",
    ("layers", "down_bias"): "model.layers.{}.mlp.down_proj.bias",
    ("norm",): "model.norm.weight",
    ("lm_head",): "lm_head.weight",
}
# Buffers that old checkpoints hold beside the parameters.
_BUFFER = re.compile(r"(^|\.)rotary_emb\.inv_freq$")


@dataclasses.dataclass(frozen=True)
class Tensor:
    """One stored tensor of the model, and where it lies in the tree."""

    path: Path
    layer: int | None  # index along the array's leading axis; None for an array of its own
    shape: tuple[int, ...]


def flatten(tree: Mapping[str, Any]) -> dict[Path, Any]:
    """The leaves of a nested dict by their paths."""
    return cast(dict[Path, Any], flatten_dict(tree))


def stored_tensors(params: Mapping[str, Any], names: Mapping[Path, str] = NAMES) -> dict[str, Tensor]:
    """Every stored tensor of a parameter tree (of arrays or of ``ShapeDtypeStruct``) by its name, layer by layer."""
    leaves = flatten(params)
    stacked = {path: leaf for path, leaf in leaves.items() if path[0] == "layers"}
    single = {names[path]: Tensor(path, None, leaf.shape) for path, leaf in leaves.items() if path not in stacked}
    layers = {
        names[path].format(layer): Tensor(path, layer, leaf.shape[1:])
        for layer in range(max((leaf.shape[0] for leaf in stacked.values()), default=0))
        for path, leaf in stacked.items()
    }
    return single | layers


def is_ignored(name: str, *, tied: bool) -> bool:
    """Whether a stored tensor is no parameter: a rotary buffer, or the head of a model whose head is the embedding."""
    return bool(_BUFFER.search(name)) or (tied and name == NAMES[("lm_head",)])


def check_tensors(
    where: str,
    expected: Mapping[str, tuple[int, ...]],
    found: Mapping[str, tuple[int, ...]],
    unsupported: Iterable[tuple[str, str]] = (),
) -> None:
    """Compare shapes by name.

    Args:
        where: the checkpoint, for the message.
        expected: shape of every tensor of the model.
        found: shape of every stored tensor that is a parameter.
        unsupported: (name, dtype) of the tensors whose dtype cannot be loaded.

    Raises:
        CheckpointMismatchError: one error that counts everything that is wrong and lists the first of it.
    """
    problems = [f"missing {name} {list(shape)}" for name, shape in expected.items() if name not in found]
    problems += [f"unexpected {name} {list(shape)}" for name, shape in found.items() if name not in expected]
    problems += [
        f"shape of {name} is {list(found[name])}, expected {list(shape)}"
        for name, shape in expected.items()
        if name in found and found[name] != shape
    ]
    problems += [
        f"dtype of {name} is {dtype}, which is not supported (use bfloat16, float16 or float32)"
        for name, dtype in unsupported
    ]
    if problems:
        rest = len(problems) - _MOST_LISTED
        listed = ";\n  ".join(problems[:_MOST_LISTED] + ([f"and {rest} more"] if rest > 0 else []))
        raise CheckpointMismatchError(
            f"{where} does not hold the model that its config.json describes; {len(problems)} problem(s):\n  {listed}"
        )
