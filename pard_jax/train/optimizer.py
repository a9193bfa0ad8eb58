"""The optimizer: AdamW or Muon, with a schedule, clipping and frozen rows. All of it optax."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import optax

OPTIMIZERS = ("adamw", "muon")
SCHEDULES = ("constant", "cosine", "linear")
_EMBEDDINGS = ("embed", "lm_head")


@dataclasses.dataclass(frozen=True)
class OptimizerConfig:
    """Defaults are PARD's: AdamW (0.9, 0.999), no decay, clipping at 1, a constant rate.

    Attributes:
        learning_rate: the peak.
        schedule: after the warm-up: constant, or falling to ``final_ratio`` of the peak by cosine or linearly.
        warmup: share of the steps in which the rate rises linearly from 0.
        name: ``"muon"`` orthogonalizes the matrices' momentum (Jordan et al. 2024), scaled to AdamW's step size, so
            that rates compare; embeddings, norms and biases go by AdamW.
        embedding_ratio: of the embeddings' rate to the others'.
    """

    learning_rate: float = 3e-5
    schedule: str = "constant"
    final_ratio: float = 0.1
    warmup: float = 0.0
    name: str = "adamw"
    beta1: float = 0.9
    beta2: float = 0.999
    weight_decay: float = 0.0
    clip: float = 1.0
    embedding_ratio: float = 1.0

    def __post_init__(self) -> None:
        for field, value, known in (("optimizer", self.name, OPTIMIZERS), ("schedule", self.schedule, SCHEDULES)):
            if value not in known:
                raise ValueError(f"unknown {field} {value!r}; choose of {', '.join(known)}")
        if not self.learning_rate > 0:
            raise ValueError(f"the learning rate must be above 0, got {self.learning_rate}")
        if not 0 <= self.warmup < 1:
            raise ValueError(f"the warm-up is a share of the steps, in [0, 1), got {self.warmup}")
        for field, value in (("beta1", self.beta1), ("beta2", self.beta2)):
            if not 0 <= value < 1:
                raise ValueError(f"{field} must be in [0, 1), got {value}")
        if not 0 <= self.final_ratio <= 1:
            raise ValueError(f"the final rate is a share of the peak, in [0, 1], got {self.final_ratio}")
        if not self.clip > 0:
            raise ValueError(f"the gradient norm to clip at must be above 0, got {self.clip}")


def learning_rate(config: OptimizerConfig, num_steps: int) -> optax.Schedule:
    """The rate of each of ``num_steps`` updates."""
    warmup = round(config.warmup * num_steps)
    rest = max(num_steps - warmup, 1)
    peak, end = config.learning_rate, config.learning_rate * config.final_ratio
    if config.schedule == "constant":
        after = optax.constant_schedule(peak)
    elif config.schedule == "linear":
        after = optax.linear_schedule(peak, end, rest)
    else:
        after = optax.cosine_decay_schedule(peak, rest, alpha=config.final_ratio)
    if not warmup:
        return after
    return optax.join_schedules([optax.linear_schedule(peak / (warmup + 1), peak, warmup), after], [warmup])


def make_optimizer(config: OptimizerConfig, num_steps: int, params: Any) -> optax.GradientTransformation:
    """The whole transformation for parameters shaped as ``params``; decay leaves embeddings, norms and biases alone."""
    rate = learning_rate(config, num_steps)
    kinds = jax.tree_util.tree_map_with_path(lambda path, leaf: _kind(path, leaf), params)

    def adamw(decay: float) -> optax.GradientTransformation:
        return optax.chain(optax.scale_by_adam(config.beta1, config.beta2), optax.add_decayed_weights(decay))

    matrices = adamw(config.weight_decay) if config.name == "adamw" else _muon(config)
    rule = optax.partition(
        {
            "matrix": matrices,
            "embedding": optax.chain(adamw(0.0), optax.scale(config.embedding_ratio)),
            "vector": adamw(0.0),
        },
        kinds,
    )
    return optax.chain(optax.clip_by_global_norm(config.clip), rule, optax.scale_by_learning_rate(rate))


def _muon(config: OptimizerConfig) -> optax.GradientTransformation:
    # Layers are stacked, [L, out, in]: every layer is a matrix of its own.
    stacked = optax.contrib.MuonDimensionNumbers(reduction_axis=2, output_axis=1)
    dims = lambda tree: jax.tree.map(lambda _: stacked, tree)  # noqa: E731
    return optax.chain(
        optax.contrib.scale_by_muon(weight_dimension_numbers=dims),
        _scale_as_adam(),
        optax.add_decayed_weights(config.weight_decay),
    )


def _scale_as_adam(rms: float = 0.2) -> optax.GradientTransformation:
    """An orthogonal matrix's entries have the size 1 / sqrt(max(out, in)); Adam's updates about 0.2 (2502.16982)."""

    def update(updates, params=None):
        del params
        return jax.tree.map(lambda u: u * (rms * max(u.shape[-2:]) ** 0.5), updates)

    return optax.stateless(update)


def _kind(path: Any, leaf: Any) -> str:
    if path[-1].key in _EMBEDDINGS:
        return "embedding"
    return "matrix" if leaf.ndim == 3 else "vector"


def freeze_embeddings(gradients: Any, trained_rows: tuple[int, ...]) -> Any:
    """Gradients with the embeddings' set to zero, but for some rows."""

    def freeze(path: Any, g: jax.Array) -> jax.Array:
        if path[-1].key not in _EMBEDDINGS:
            return g
        rows = jnp.asarray(trained_rows, jnp.int32)
        return jnp.zeros_like(g).at[rows].set(g[rows])

    return jax.tree_util.tree_map_with_path(freeze, gradients)
