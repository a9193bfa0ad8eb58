"""PARD in JAX: parallel-draft speculative decoding, with the target's exact distribution."""

from pard_jax.config import SpeculativeConfig
from pard_jax.llm import LLM
from pard_jax.outputs import CompletionOutput, Logprob, RequestOutput
from pard_jax.sampling_params import SamplingParams

__all__ = ["LLM", "CompletionOutput", "Logprob", "RequestOutput", "SamplingParams", "SpeculativeConfig"]
__version__ = "0.1.0"
