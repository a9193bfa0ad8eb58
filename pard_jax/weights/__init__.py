"""Parameters from disk (a Hugging Face directory, a hub id, an Orbax directory) to devices, and back. No torch."""

from pard_jax.weights.errors import CheckpointError, CheckpointMismatchError, CheckpointNotFoundError
from pard_jax.weights.hub import resolve_checkpoint
from pard_jax.weights.load import load_params
from pard_jax.weights.save import save_hf

__all__ = [
    "CheckpointError",
    "CheckpointMismatchError",
    "CheckpointNotFoundError",
    "load_params",
    "resolve_checkpoint",
    "save_hf",
]
