"""The decoder that every target and draft runs through. It knows nothing of speculation."""

from pard_jax.models.cache import KVCache
from pard_jax.models.decoder import Decoder, abstract_params, bind, init_params, param_bytes
from pard_jax.models.sharding import TENSOR_AXIS, make_mesh

__all__ = ["TENSOR_AXIS", "Decoder", "KVCache", "abstract_params", "bind", "init_params", "make_mesh", "param_bytes"]
