"""Where a draft's training starts: a checkpoint, some layers of one, or random weights."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pard_jax.config import ModelConfig
from pard_jax.models import bind
from pard_jax.train.cod import all_rows, lay_out
from pard_jax.train.loss import coefficients, cross_entropy
from pard_jax.train.objective import Objective
from pard_jax.weights import load_params

NORM_SCALES = (1.0, 0.7, 0.5, 0.35, 0.25, 0.18, 0.12, 0.08)


def config_of_checkpoint(directory: Path, layers: Sequence[int] | None = None) -> tuple[ModelConfig, dict[str, Any]]:
    """Config and ``config.json`` of a checkpoint, with all of its layers or some. Reads no weights.

    Args:
        layers: indices of the layers to keep, in the order in which they shall stand; None for all.

    Raises:
        ValueError: an index that the checkpoint lacks.
    """
    config = ModelConfig.from_pretrained(directory)
    config_json = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    if layers is None:
        return config, config_json
    for layer in layers:
        if not 0 <= layer < config.num_layers:
            raise ValueError(f"layer {layer} was asked for; {directory} has layers 0 to {config.num_layers - 1}")
    config_json["num_hidden_layers"] = len(layers)
    if isinstance(config_json.get("layer_types"), list):
        config_json["layer_types"] = [config_json["layer_types"][i] for i in layers]
    return ModelConfig.from_hf(config_json), config_json


def params_of_checkpoint(
    directory: Path, layers: Sequence[int] | None = None, *, progress: bool = True
) -> dict[str, Any]:
    """Float32 parameters of a checkpoint, with all of its layers or some: see :func:`config_of_checkpoint`."""
    params = load_params(directory, ModelConfig.from_pretrained(directory), dtype="float32", progress=progress)
    if layers is not None:
        kept = np.asarray(layers)
        params = {**params, "layers": jax.tree.map(lambda x: x[kept], params["layers"])}
    return params


def config_of_file(path: Path) -> tuple[ModelConfig, dict[str, Any]]:
    """Config and contents of a ``config.json``, wherever it lies.

    Raises:
        ValueError: it is no JSON, or see :meth:`pard_jax.config.ModelConfig.from_hf`.
    """
    try:
        config_json = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as e:
        raise ValueError(f"{path} is not valid JSON: {e}") from None
    return ModelConfig.from_hf(config_json), config_json


def calibrate_norm(objective: Objective, params: dict[str, Any], batch: dict[str, np.ndarray]) -> float:
    """The factor for the final norm with which next-token loss on a batch ``[B, L]`` is lowest.

    A few layers of a deep model leave a residual stream whose direction the norm then scales for the full depth: the
    first logits are far too sharp (losses of 13 to 73), and learning the scale takes longer than finding it.
    """
    length = batch["token_ids"].shape[1]

    @jax.jit
    def loss(params: Any, batch: Any, scale: jax.Array) -> jax.Array:
        rows = all_rows(1, length)
        inputs = lay_out(rows, batch["token_ids"], batch["segment_ids"], batch["loss_mask"], objective.mask_token_id)
        cast = jax.tree.map(lambda p: p.astype(objective.dtype), params)
        cast = {**cast, "norm": cast["norm"] * scale.astype(objective.dtype)}
        model = bind(objective.config, cast)
        hidden = model.encode(
            cast["embed"][inputs.tokens], inputs.positions, inputs.mask, implementation=objective.attention
        )
        weights = coefficients(inputs.supervised[None], rows.block, num_blocks=1, per_subtask=False)[0]
        return cross_entropy(hidden, model.head, inputs.targets, weights)

    losses = [float(loss(params, batch, jnp.float32(scale))) for scale in NORM_SCALES]
    return NORM_SCALES[int(np.argmin(losses))]
