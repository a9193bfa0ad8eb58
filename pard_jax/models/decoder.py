"""The one decoder: Qwen3, Qwen2 and Llama, by their config's switches.

Parameters of all layers are stacked along a leading layer axis and scanned over, with the cache in the carry: a
dispatch then passes about a dozen arrays instead of hundreds, and XLA updates the cache in place. Matrices keep HF's
orientation, [out, in]: with [in, out], XLA for TPU copies the query, key and value weights into this order in every
step (305 MiB of temporaries instead of 12 at a quarter of Qwen3-4B's depth, by the compiler).
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax
from jax.sharding import Mesh
from jaxtyping import Array, Bool, Float, Int

from pard_jax.config.model import ModelConfig
from pard_jax.int8 import Int8Matrix, quantize, quantized_like
from pard_jax.kernels.linear import fits_linear, linear_argmax
from pard_jax.kernels.linear import linear as fused_linear
from pard_jax.models.argmax import first_argmax
from pard_jax.models.attention import attend, attend_in_blocks, attend_sequence, block_slots
from pard_jax.models.cache import KVCache
from pard_jax.models.fused import fused_layers, runs_fused
from pard_jax.models.layer import Params, linear, mlp, product, qkv, rms_norm
from pard_jax.models.rope import apply_rope, rope_tables
from pard_jax.models.sharding import param_sharding

_FIRST = np.int32(0)  # the only layer of a matrix that is not stacked
_MAX_UNROLLED = 8  # layers of a training pass that are unrolled


class Pass(NamedTuple):
    """What one forward pass gives."""

    hidden: Float[Array, "R T D"]  # after the final norm: what `logits` reads
    cache: KVCache
    features: Float[Array, "C R T D"] | None  # the residual stream after the captured layers; None if none is


class Layers(nnx.Module):
    """Parameters of all layers, stacked: every array leads with L."""

    def __init__(self, config: ModelConfig, param) -> None:
        c, n = config, config.num_layers
        d, f = c.hidden_size, c.intermediate_size
        q, kv = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
        self.attn_norm = param((n, d), ones=True)
        self.q_proj = param((n, q, d))
        self.k_proj = param((n, kv, d))
        self.v_proj = param((n, kv, d))
        self.o_proj = param((n, d, q))
        if c.qkv_bias:
            self.q_bias = param((n, q))
            self.k_bias = param((n, kv))
            self.v_bias = param((n, kv))
        if c.o_bias:
            self.o_bias = param((n, d))
        if c.qk_norm:
            self.q_norm = param((n, c.head_dim), ones=True)
            self.k_norm = param((n, c.head_dim), ones=True)
        self.mlp_norm = param((n, d), ones=True)
        self.gate_proj = param((n, f, d))
        self.up_proj = param((n, f, d))
        self.down_proj = param((n, d, f))
        if c.mlp_bias:
            self.gate_bias = param((n, f))
            self.up_bias = param((n, f))
            self.down_bias = param((n, d))


class Decoder(nnx.Module):
    """A causal language model.

    ``Decoder(config, dtype=..., rngs=nnx.Rngs(0))`` makes random weights, None makes zeros where only shapes matter;
    :func:`bind` puts given ones in place.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        dtype=jnp.float32,
        rngs: nnx.Rngs | None,
        implementation: str = "xla",
    ) -> None:
        def param(shape: tuple[int, ...], *, ones: bool = False) -> nnx.Param:
            if ones:
                return nnx.Param(jnp.ones(shape, dtype))
            return nnx.Param(jnp.zeros(shape, dtype) if rngs is None else _normal(rngs.params(), shape, dtype))

        self.config, self.implementation = config, implementation
        self.embed = param((config.vocab_size, config.hidden_size))
        self.layers = Layers(config, param)
        self.norm = param((config.hidden_size,), ones=True)
        if not config.tie_word_embeddings:
            self.lm_head = param((config.vocab_size, config.hidden_size))

    def __call__(
        self,
        tokens: Int[Array, "R T"],
        cache: KVCache,
        starts: Int[Array, "R"],
        *,
        window: int,
        first_row: Int[Array, ""] | Int[Array, "R"] | int = 0,
        capture: tuple[int, ...] = (),
    ) -> Pass:
        """Run ``T`` new tokens of ``R`` rows, writing their keys and values into the cache.

        Args:
            tokens: ids; row r's token t stands at position ``starts[r] + t``.
            cache: keys and values of the positions before ``starts``; anything may lie behind.
            starts: where each row's new tokens go.
            window: slots read (static); at least ``max(starts) + T``, so that cost follows the live length.
            first_row: the rows are ``first_row..first_row+R`` of the cache; or R distinct row ids, of which those that
                are no row's leave no trace.
            capture: layers (0-based, static) whose residual stream is returned as ``features``, in this order.
        """
        config = self.config
        r, t = tokens.shape
        positions = starts[:, None] + jnp.arange(t, dtype=jnp.int32)[None, :]
        x = self.embed[...][tokens]
        if isinstance(x, Int8Matrix):
            x = x.dequantize(self.norm[...].dtype)
        layers = nnx.to_pure_dict(nnx.state(self.layers))
        from_first = isinstance(first_row, int) and first_row == 0
        if self.implementation != "xla" and from_first and runs_fused(config, t, cache):
            x, cache, features = fused_layers(
                config,
                layers,
                x,
                positions,
                cache,
                starts,
                window=window,
                capture=capture,
                interpret=self._interpret,
            )
            return Pass(rms_norm(x, self.norm[...], config.rms_norm_eps), cache, features)
        first_row = jnp.asarray(first_row, jnp.int32)
        tables = rope_tables(config.rope, config.head_dim, positions)
        # Causality by position alone hides whatever lies behind a row's length.
        mask = jnp.arange(window, dtype=jnp.int32)[None, None, :] <= positions[:, :, None]
        block = block_slots(t, window)

        def layer(carry: tuple[Array, KVCache], xs: tuple[Params, Array]):
            x, cache = carry
            p, index = xs
            with jax.named_scope("attention"):
                q, k, v = qkv(config, p, rms_norm(x, p["attn_norm"], config.rms_norm_eps))
                q, k = apply_rope(q, tables), apply_rope(k, tables)
                cache = cache.write(index, first_row, starts, k.swapaxes(1, 2), v.swapaxes(1, 2))
                if block < window:
                    read = functools.partial(cache.window, index, first_row, r, block)
                    out = attend_in_blocks(q, read, positions, window=window, block=block)
                else:
                    out = attend(q, *cache.window(index, first_row, r, window), mask)
                x = x + linear(out, p["o_proj"], p.get("o_bias"))
            with jax.named_scope("mlp"):
                x = x + mlp(config, p, x)
            return (x, cache), (x if capture else None)

        indices = jnp.arange(config.num_layers, dtype=jnp.int32)
        (x, cache), residuals = lax.scan(layer, (x, cache), (layers, indices))
        features = None if residuals is None else residuals[jnp.asarray(capture)]
        return Pass(rms_norm(x, self.norm[...], config.rms_norm_eps), cache, features)

    def encode(
        self,
        inputs: Float[Array, "R T D"],
        positions: Int[Array, "R T"],
        mask: Bool[Array, "R T T"],
        *,
        implementation: str = "xla",
        remat: bool = False,
    ) -> Float[Array, "R T D"]:
        """Hidden states of whole sequences at once, without a cache: what training differentiates.

        Args:
            inputs: rows of the embedding.
            positions: of each token, for the rotary embedding; any order.
            mask: whether a query (second axis) sees a key (third axis); every query sees one at least.
            implementation: see :func:`pard_jax.models.attention.attend_sequence`.
            remat: keep only the layers' inputs for the backward pass and compute the rest again.

        Returns:
            The states after the final norm: what :meth:`logits` reads.
        """
        config = self.config
        tables = rope_tables(config.rope, config.head_dim, positions)

        def layer(x: Array, p: Params) -> tuple[Array, None]:
            with jax.named_scope("attention"):
                q, k, v = qkv(config, p, rms_norm(x, p["attn_norm"], config.rms_norm_eps))
                q, k = apply_rope(q, tables), apply_rope(k, tables)
                out = attend_sequence(q, k, v, mask, implementation=implementation)
                x = x + linear(out, p["o_proj"], p.get("o_bias"))
            with jax.named_scope("mlp"):
                x = x + mlp(config, p, x)
            return x, None

        layers = nnx.to_pure_dict(nnx.state(self.layers))
        # Shallow models are unrolled: a scan would copy every residual into a stacked array and back.
        unroll = config.num_layers if config.num_layers <= _MAX_UNROLLED else 1
        x, _ = lax.scan(jax.checkpoint(layer) if remat else layer, inputs, layers, unroll=unroll)
        return rms_norm(x, self.norm[...], config.rms_norm_eps)

    @property
    def head(self) -> Any:
        """The output matrix ``[V, D]``, which may be the embedding; an ``Int8Matrix`` where it is quantized."""
        return self.embed[...] if self.config.tie_word_embeddings else self.lm_head[...]

    def logits(self, hidden: Float[Array, "R T D"]) -> Float[Array, "R T V"]:
        """Scores over the vocabulary, float32. A tied head contracts on the embedding's D axis: no transposed copy."""
        r, t, d = hidden.shape
        with jax.named_scope("lm_head"):
            if self._fused_head(hidden):
                (scores,) = fused_linear(hidden.reshape(r * t, d), [self.head[None]], _FIRST, out_dtype=jnp.float32,
                                         interpret=self._interpret)  # fmt: skip
                return scores.reshape(r, t, -1)
            return product(hidden, self.head, jnp.float32)

    def best(self, hidden: Float[Array, "R T D"], limit: int | None = None) -> Int[Array, "R T"]:
        """The likeliest tokens (the first among equals), of those below ``limit`` where one is given."""
        r, t, d = hidden.shape
        vocab = self.config.vocab_size
        if self._fused_head(hidden):
            with jax.named_scope("lm_head"):
                flat = hidden.reshape(r * t, d)
                ids = linear_argmax(flat, self.head, limit=min(limit or vocab, vocab), interpret=self._interpret)
                return ids.reshape(r, t)
        scores = self.logits(hidden)
        if limit is not None and limit < vocab:
            scores = jnp.where(jnp.arange(vocab)[None, None, :] < limit, scores, -jnp.inf)
        return first_argmax(scores)

    def _fused_head(self, hidden: Array) -> bool:
        r, t, d = hidden.shape
        fits = hidden.dtype == jnp.bfloat16 and fits_linear(r * t, d, self.config.vocab_size)
        return self.implementation != "xla" and fits

    @property
    def _interpret(self) -> bool:
        return self.implementation == "interpret"


@functools.partial(jax.jit, static_argnums=(1, 2))
def _normal(key: Array, shape: tuple[int, ...], dtype) -> Array:
    # Variance-preserving: the last axis is the one contracted.
    return (jax.random.normal(key, shape, jnp.float32) * shape[-1] ** -0.5).astype(dtype)


@functools.partial(jax.jit, static_argnums=(1, 2))
def _quantized_normal(key: Array, shape: tuple[int, ...], dtype) -> Int8Matrix:
    return quantize(_normal(key, shape, dtype))


@functools.lru_cache(maxsize=32)
def _abstract(config: ModelConfig, dtype_name: str, implementation: str = "xla") -> tuple[nnx.GraphDef, Params]:
    def make() -> Decoder:
        return Decoder(config, dtype=jnp.dtype(dtype_name), rngs=None, implementation=implementation)

    model = nnx.eval_shape(make)
    graphdef, state = nnx.split(model)
    return graphdef, nnx.to_pure_dict(state)


def abstract_params(config: ModelConfig, dtype, mesh: Mesh | None = None, *, quantization: str | None = None) -> Params:
    """Shapes, dtypes and (with a mesh) shardings of the parameters: a nested dict of ``ShapeDtypeStruct``.

    Args:
        quantization: "int8": every matrix that multiplies something is an :class:`pard_jax.int8.Int8Matrix` of them. An
            embedding that is no head stays as it is: a pass looks a few of its rows up.
    """
    matrices = {"embed" if config.tie_word_embeddings else "lm_head"} if quantization else set()

    def place(path, leaf):
        name = path[-1].key
        sharding = None if mesh is None else param_sharding(mesh, name)
        leaf = jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)
        return quantized_like(leaf) if name in matrices or (quantization and name.endswith("_proj")) else leaf

    return jax.tree_util.tree_map_with_path(place, _abstract(config, jnp.dtype(dtype).name)[1])


def param_bytes(config: ModelConfig, dtype, quantization: str | None = None) -> int:
    """What the parameters take, over all devices."""
    leaves = jax.tree.leaves(abstract_params(config, dtype, quantization=quantization))
    return sum(leaf.size * leaf.dtype.itemsize for leaf in leaves)


def init_params(
    config: ModelConfig,
    *,
    dtype=jnp.float32,
    seed: int = 0,
    mesh: Mesh | None = None,
    quantization: str | None = None,
) -> Params:
    """Random parameters, made on the device tensor by tensor (one jit over all of them compiles for minutes)."""
    abstract = abstract_params(config, dtype, mesh, quantization=quantization)
    leaves, treedef = jax.tree_util.tree_flatten_with_path(abstract, is_leaf=lambda x: isinstance(x, Int8Matrix))
    keys = jax.random.split(jax.random.key(seed), len(leaves))

    def make(path, leaf, key):
        if isinstance(leaf, Int8Matrix):
            value = _quantized_normal(key, leaf.shape, jnp.dtype(dtype))
        elif path[-1].key.endswith("norm"):
            value = jnp.ones(leaf.shape, leaf.dtype)
        else:
            value = _normal(key, leaf.shape, leaf.dtype)
        return value if mesh is None else jax.tree.map(lambda x, a: jax.device_put(x, a.sharding), value, leaf)

    return treedef.unflatten([make(path, leaf, key) for (path, leaf), key in zip(leaves, keys, strict=True)])


def bind(config: ModelConfig, params: Params, implementation: str = "xla") -> Decoder:
    """The module with ``params`` in place. Cheap, and meant to be called inside ``jit``: parameters stay arguments.

    Args:
        implementation: of passes from the first row on: "xla", or "pallas" where our kernels take them (bfloat16,
            one NVIDIA GPU), or "interpret", the same kernels by Pallas' interpreter.
    """
    return nnx.merge(_abstract(config, "float32", implementation)[0], nnx.State(params))
