"""One update of a draft: rows drawn, laid out, scored, differentiated and applied, over every device of a mesh."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Float, Int

from pard_jax.config.model import ModelConfig
from pard_jax.models import bind
from pard_jax.pytree import pytree
from pard_jax.train.cod import CodConfig, Inputs, Rows, all_rows, draw, lay_out
from pard_jax.train.loss import Teacher, coefficients, cross_entropy
from pard_jax.train.optimizer import freeze_embeddings

DATA_AXIS = "data"
_ROW_MULTIPLE = 64  # R is padded to it: the shapes that fused attention kernels are fast at


@pytree
class TrainState:
    """All that training changes. Parameters are float32, whatever the compute dtype."""

    step: Int[Array, ""]
    params: Any
    optimizer: Any


@dataclasses.dataclass(frozen=True)
class Objective:
    """What is minimized.

    Attributes:
        config: of the draft.
        cod: rows kept.
        mask_token_id: of the draft; of no effect if there is one block only.
        per_subtask: the loss is the mean over blocks of their means (the paper); else pooled (the reference code).
        dtype: of the computation.
        attention: "xla" or "cudnn".
        remat: recompute layers in the backward pass.
        frozen_embeddings: leave the embeddings as they are, but for the mask token's row.
        distill_weight: of the target's distribution in the loss; 0 trains on the data's tokens alone.
        target: the target's config, for distillation.
        seed: of the rows drawn.
    """

    config: ModelConfig
    cod: CodConfig
    mask_token_id: int
    per_subtask: bool = False
    dtype: Any = jnp.float32
    attention: str = "xla"
    remat: bool = False
    frozen_embeddings: bool = False
    distill_weight: float = 0.0
    target: ModelConfig | None = None
    seed: int = 0

    def gradients(
        self, params: Any, target_params: Any, step: Array, batch: dict[str, Array], axis: str | None = None
    ) -> tuple[Float[Array, ""], Any]:
        """The loss of a batch and its gradients.

        Args:
            params: float32.
            target_params: the target's, in any dtype, or None.
            step: of the update; with the seed, it fixes the rows drawn.
            batch: ``token_ids``, ``segment_ids``, ``loss_mask``, each ``[A, B, L]``: A passes, accumulated.
            axis: a mapped mesh axis to sum over; the batch is then this device's part of it.
        """
        length = batch["token_ids"].shape[2]
        key = jax.random.fold_in(jax.random.key(self.seed), step)
        rows = draw(key, self.cod, length, multiple=_ROW_MULTIPLE)

        def inputs(one: dict[str, Array]) -> Inputs:
            return lay_out(rows, one["token_ids"], one["segment_ids"], one["loss_mask"], self.mask_token_id)

        # The normalization counts all that the update sees, on every device and in every pass.
        supervised = jax.vmap(lambda one: inputs(one).supervised)(batch)
        weights = self._coefficients(supervised, rows, axis)

        def loss(params: Any, one: dict[str, Array], weight: Array) -> Array:
            return self._loss(params, target_params, rows, inputs(one), one, weight)

        def accumulate(carry, xs):
            one, weight = xs
            value, grads = jax.value_and_grad(loss)(params, one, weight)
            return jax.tree.map(jnp.add, carry, (value, grads)), None

        zero = (jnp.zeros((), jnp.float32), jax.tree.map(jnp.zeros_like, params))
        total, _ = lax.scan(accumulate, zero, (batch, weights), unroll=batch["token_ids"].shape[0] == 1)
        value, grads = total if axis is None else lax.psum(total, axis)
        if self.frozen_embeddings:
            grads = freeze_embeddings(grads, self.trained_rows)
        return value, grads

    @property
    def trained_rows(self) -> tuple[int, ...]:
        """Rows of frozen embeddings that are trained all the same: the mask token's, where there are mask rows."""
        return (self.mask_token_id,) if self.cod.num_blocks > 1 else ()

    def _coefficients(self, supervised: Array, rows: Rows, axis: str | None) -> Array:
        everywhere = supervised
        if axis is not None:
            everywhere = lax.all_gather(supervised, axis, axis=1, tiled=True)
        weights = coefficients(everywhere, rows.block, num_blocks=self.cod.num_blocks, per_subtask=self.per_subtask)
        if axis is None:
            return weights
        size = supervised.shape[1]
        return lax.dynamic_slice_in_dim(weights, lax.axis_index(axis) * size, size, axis=1)

    def _loss(
        self, params: Any, target_params: Any, rows: Rows, inputs: Inputs, batch: dict[str, Array], weights: Array
    ) -> Array:
        cast = jax.tree.map(lambda p: p.astype(self.dtype), params)
        model = bind(self.config, cast)
        hidden = model.encode(
            embed_rows(cast["embed"], batch["token_ids"], rows, self.mask_token_id),
            inputs.positions,
            inputs.mask,
            implementation=self.attention,
            remat=self.remat,
        )
        teacher = self._teacher(target_params, rows, batch)
        head_rows = self.trained_rows if self.frozen_embeddings else None
        return cross_entropy(hidden, model.head, inputs.targets, weights, teacher, head_rows=head_rows)

    def _teacher(self, target_params: Any, rows: Rows, batch: dict[str, Array]) -> Teacher | None:
        """The target's states at every row's position, given the true tokens before it."""
        if not self.distill_weight or self.target is None:
            return None
        plain = all_rows(1, batch["token_ids"].shape[1])
        inputs = lay_out(plain, batch["token_ids"], batch["segment_ids"], batch["loss_mask"], self.mask_token_id)
        embedded = target_params["embed"][batch["token_ids"]]
        model = bind(self.target, target_params)
        hidden = model.encode(embedded, inputs.positions, inputs.mask, implementation=self.attention)
        return Teacher(lax.stop_gradient(hidden[:, rows.position]), model.head, self.distill_weight)


def embed_rows(
    embed: Float[Array, "V D"], token_ids: Int[Array, "B L"], rows: Rows, mask_token_id: int
) -> Float[Array, "B R D"]:
    """The input embeddings of the rows: block 0 first, whole and in order, then masks only.

    The mask's row is repeated, not looked up: the backward pass of a look-up adds two thirds of all rows into one row
    of the embedding, one after the other (on an H200, 0.6 s of a 0.1 s update).
    """
    batch, length = token_ids.shape
    masks = jnp.broadcast_to(embed[mask_token_id], (batch, len(rows.block) - length, embed.shape[1]))
    return jnp.concatenate([embed[token_ids], masks], axis=1)


def make_update(
    objective: Objective, optimizer: optax.GradientTransformation, mesh: Mesh
) -> Callable[[TrainState, Any, dict[str, Array]], tuple[TrainState, dict[str, Array]]]:
    """The jitted update: ``(state, target_params, batch) -> (state, {"loss", "grad_norm"})``, the state donated.

    The state is the same on every device; a batch ``[A, B, L]`` is split along B, gradients are summed once.
    """
    everywhere, split = PartitionSpec(), PartitionSpec(None, DATA_AXIS)

    def local(params: Any, target_params: Any, step: Array, batch: dict[str, Array]) -> tuple[Array, Any]:
        return objective.gradients(params, target_params, step, batch, DATA_AXIS)

    gradients = jax.shard_map(
        local, mesh=mesh, in_specs=(everywhere, everywhere, everywhere, split), out_specs=everywhere, check_vma=False
    )

    def update(state: TrainState, target_params: Any, batch: dict[str, Array]) -> tuple[TrainState, dict[str, Array]]:
        loss, grads = gradients(state.params, target_params, state.step, batch)
        updates, optimizer_state = optimizer.update(grads, state.optimizer, state.params)
        params = optax.apply_updates(state.params, updates)
        logged = {"loss": loss, "grad_norm": optax.tree.norm(grads)}
        return TrainState(step=state.step + 1, params=params, optimizer=optimizer_state), logged

    return jax.jit(update, donate_argnums=0, out_shardings=NamedSharding(mesh, everywhere))
