"""Everything that is decided before an array exists: the models, the speculation, the engine; and every refusal."""

from pard_jax.config.engine import EngineConfig
from pard_jax.config.model import ModelConfig, RopeConfig
from pard_jax.config.speculative import SpeculativeConfig, extra_slots

__all__ = ["EngineConfig", "ModelConfig", "RopeConfig", "SpeculativeConfig", "extra_slots"]
