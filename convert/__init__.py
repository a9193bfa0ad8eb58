"""Checkpoints from one format to another: ``python -m convert COMMAND SRC DST``."""

from convert.gguf import gguf_to_hf
from convert.orbax import hf_to_orbax, orbax_to_hf

__all__ = ["gguf_to_hf", "hf_to_orbax", "orbax_to_hf"]
