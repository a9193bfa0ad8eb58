"""How one request is sampled and when it ends: vLLM's ``SamplingParams`` with its names, defaults and messages.

What is not supported is a field all the same, so that asking for it is refused by name and never ignored.
"""

from __future__ import annotations

import copy
import logging
import math
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any

from pard_jax.decoding.logprobs import MAX_LOGPROBS
from pard_jax.decoding.sampling import GREEDY_BELOW
from pard_jax.tokenizer import check_unicode

logger = logging.getLogger(__name__)

MIN_TEMPERATURE = 0.01  # a smaller one overflows the logits it divides
MAX_TEMPERATURE = 2.0
MAX_N = 16384
_INT64 = 2**63

# Fields of vLLM that are not supported, each with the values that ask for nothing.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "logit_bias": (None, {}),
    "bad_words": (None, []),
    "allowed_token_ids": (None,),  # an empty list would allow nothing
    "prompt_logprobs": (None,),
}


@dataclass
class SamplingParams:
    """Sampling settings of one request (vllm/sampling_params.py).

    Attributes:
        n: completions a prompt; more than one needs a temperature. See :meth:`child`.
        temperature: 0 is greedy (and turns top_p, top_k, min_p off); 0..0.01 is raised to 0.01; at most 2.
        top_p: in (0, 1]; 1 is off.
        top_k: 0 or -1 is off.
        min_p: in [0, 1], relative to the likeliest token; 0 is off.
        seed: of this request alone; None or -1 draws one.
        stop: a string, several or None; a list once constructed. The text ends before the one that completes first.
        stop_token_ids: ids that end the request beside EOS; a list without repeats once constructed.
        ignore_eos: go on past EOS.
        max_tokens: None for as many as the model's length allows.
        min_tokens: no EOS, stop token or stop string counts before so many tokens.
        logprobs: None for none, else how many of the likeliest tokens are given beside the chosen one, 0..20.
        detokenize: False leaves the text empty.
        skip_special_tokens: leave special tokens out of the text.
        spaces_between_special_tokens: of no effect, as in vLLM with the fast tokenizers that are used here: these put
            no spaces between special tokens.
        include_stop_str_in_output: end the text after the stop string (or stop token), not before it.

    Raises:
        ValueError: a value out of range, or a field that is not supported at any but its neutral value.
    """

    n: int = 1
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool = False
    max_tokens: int | None = 16
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    detokenize: bool = True
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    logit_bias: dict[int, float] | None = None
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] | None = None

    def __post_init__(self) -> None:
        self._check_types()
        for name, neutral in _NEUTRAL.items():
            if (value := getattr(self, name)) not in neutral:
                raise ValueError(f"{name}={value!r} is not supported; leave it at {neutral[0]!r}")
        self._check_sampling()
        self._check_lengths()
        self._check_stops()
        if 0 < self.temperature < MIN_TEMPERATURE:
            logger.warning(
                "temperature %s is less than %s, which may cause numerical errors nan or inf in tensors. "
                "We have maxed it out to %s.",
                self.temperature,
                MIN_TEMPERATURE,
                MIN_TEMPERATURE,
            )
            self.temperature = MIN_TEMPERATURE
        if self.seed == -1:
            self.seed = None
        if self.greedy:
            self.top_p, self.top_k, self.min_p = 1.0, 0, 0.0
            if self.n > 1:
                raise ValueError(f"n must be 1 when using greedy sampling, got {self.n}.")

    @property
    def greedy(self) -> bool:
        """Whether every token is the likeliest one."""
        return self.temperature < GREEDY_BELOW

    @property
    def stop_strings(self) -> list[str]:
        """``stop`` as a list, whatever it was given as."""
        return [self.stop] if isinstance(self.stop, str) else self.stop or []

    def child(self, index: int) -> SamplingParams:
        """The settings of completion ``index`` of ``n``: one completion, seed + index (vLLM's parallel_sampling.py)."""
        # Copied and not constructed again: a seed of -2 must not turn into "no seed" at index 1.
        child = copy.copy(self)
        child.n = 1
        child.seed = None if self.seed is None else self.seed + index
        return child

    def _check_types(self) -> None:
        for name in ("temperature", "top_p", "min_p"):
            if isinstance(value := getattr(self, name), bool) or not isinstance(value, Real):
                raise ValueError(f"{name} must be a number, got {value!r}")
        for name in ("n", "top_k", "min_tokens"):
            if not _is_int(value := getattr(self, name)):
                raise ValueError(f"{name} must be an integer, got {value!r}")
        for name in ("seed", "max_tokens", "logprobs"):
            if (value := getattr(self, name)) is not None and not _is_int(value):
                raise ValueError(f"{name} must be an integer or None, got {value!r}")
        for name in ("ignore_eos", "detokenize", "skip_special_tokens", "spaces_between_special_tokens",
                     "include_stop_str_in_output"):  # fmt: skip
            if not isinstance(value := getattr(self, name), bool):
                raise ValueError(f"{name} must be True or False, got {value!r}")

    def _check_sampling(self) -> None:
        if not 1 <= self.n <= MAX_N:
            raise ValueError(f"n must be at least 1 and at most {MAX_N}, got {self.n}.")
        if not math.isfinite(self.temperature):
            raise ValueError(f"temperature must be a finite number, got {self.temperature}.")
        if self.temperature < 0.0:
            raise ValueError(f"temperature must be non-negative, got {self.temperature}.")
        if self.temperature > MAX_TEMPERATURE:
            raise ValueError(f"temperature must be in [0, 2], got {self.temperature}.")
        if not 0.0 < self.top_p <= 1.0:
            raise ValueError(f"top_p must be in (0, 1], got {self.top_p}.")
        if self.top_k < -1:
            raise ValueError(f"top_k must be 0 (disable), or at least 1, got {self.top_k}.")
        if not 0.0 <= self.min_p <= 1.0:
            raise ValueError(f"min_p must be in [0, 1], got {self.min_p}.")
        if self.seed is not None and not -_INT64 <= self.seed < _INT64:
            raise ValueError(f"seed must fit in 64 bits with a sign, got {self.seed}.")
        if self.logprobs is not None and self.logprobs < -1:
            raise ValueError(f"logprobs must be non-negative, got {self.logprobs}.")
        if self.logprobs == -1 or (self.logprobs is not None and self.logprobs > MAX_LOGPROBS):
            wanted = "the whole vocabulary (-1)" if self.logprobs == -1 else self.logprobs
            raise ValueError(
                f"Requested sample logprobs of {wanted}, which is greater than max allowed: {MAX_LOGPROBS}"
            )

    def _check_lengths(self) -> None:
        if self.max_tokens is not None and self.max_tokens < 1:
            raise ValueError(f"max_tokens must be at least 1, got {self.max_tokens}.")
        if self.min_tokens < 0:
            raise ValueError(f"min_tokens must be greater than or equal to 0, got {self.min_tokens}.")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise ValueError(
                f"min_tokens must be less than or equal to max_tokens={self.max_tokens}, got {self.min_tokens}."
            )

    def _check_stops(self) -> None:
        stop: Any = [] if self.stop is None else self.stop if isinstance(self.stop, list | tuple) else [self.stop]
        if not all(isinstance(s, str) for s in stop):
            raise ValueError(f"stop must be a string or a list of strings, got {self.stop!r}.")
        for text in stop:
            check_unicode(text)
        if not all(stop):
            raise ValueError("stop cannot contain an empty string.")
        if stop and not self.detokenize:
            raise ValueError(
                "stop strings are only supported when detokenize is True. Set detokenize=True to use stop."
            )
        ids: Any = [] if self.stop_token_ids is None else self.stop_token_ids
        if not isinstance(ids, list | tuple) or not all(_is_int(i) for i in ids):
            raise ValueError(f"stop_token_ids must contain only integers, got {self.stop_token_ids!r}.")
        if any(i < 0 for i in ids):
            raise ValueError(f"stop_token_ids must not be negative, got {self.stop_token_ids!r}.")
        self.stop, self.stop_token_ids = list(stop), list(dict.fromkeys(ids))


def _is_int(value: Any) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)
