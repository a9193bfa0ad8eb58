"""What the speculation is: vLLM's ``speculative_config`` keys, read once and refused early.

Knows the names and the rules of vLLM's keys (vllm/config/speculative.py), which of its methods run here, and how many
query rows a method adds to a pass. Knows no model: rules about a pair of models take the two numbers.
"""

from __future__ import annotations

import dataclasses
import difflib
import itertools
import math
from collections.abc import Mapping, Sequence
from pathlib import PurePath
from typing import Any

from pard_jax.config.engine import resolve_quantization

MAX_SPEC_LEN = 128  # vllm/v1/sample/rejection_sampler.py
SUPPORTED_METHODS = ("draft_model", "ngram")
# vLLM's other methods: known by name, so that asking for one is told apart from a misspelt name.
OTHER_METHODS = (
    "eagle",
    "eagle3",
    "mtp",
    "dflash",
    "dspark",
    "medusa",
    "mlp_speculator",
    "suffix",
    "ngram_gpu",
    "custom_class",
    "extract_hidden_states",
)
# vLLM's keys for what is not done here. Each is refused unless it has its default, at which it asks for nothing.
UNSUPPORTED_KEYS: dict[str, Any] = {
    "attention_backend": None,
    "code_revision": None,
    "disable_eagle_block_drop": False,
    "disable_padded_drafter_batch": False,
    "draft_lm_head_quantization": None,
    "draft_load_config": None,
    "dspark_draft_topk": None,
    "enable_adaptive_verification": False,
    "enforce_eager": None,
    "fly_entropy_threshold": 0.3,
    "fly_entropy_top_k": 3,
    "fly_window_size": None,
    "index_share_for_mtp_iteration": None,
    "kv_cache_dtype": None,
    "moe_backend": None,
    "num_speculative_tokens_per_batch_size": None,
    "suffix_decoding_max_cached_requests": 10000,
    "suffix_decoding_max_spec_factor": 1.0,
    "suffix_decoding_max_tree_depth": 24,
    "suffix_decoding_min_token_prob": 0.1,
    "use_heterogeneous_vocab": False,
    "use_local_argmax_reduction": False,
    "xpress_topc": None,
}
_TYPES: dict[str, type] = {
    "model": str,
    "method": str,
    "num_speculative_tokens": int,
    "parallel_drafting": bool,
    "draft_tensor_parallel_size": int,
    "max_model_len": int,
    "revision": str,
    "quantization": str,
    "draft_sample_method": str,
    "rejection_sample_method": str,
    "synthetic_acceptance_rates": list,
    "synthetic_acceptance_length": float,
    "prompt_lookup_max": int,
    "prompt_lookup_min": int,
    "mask_token_id": int,
}
_REFUSAL_HINTS = {
    "disable_padded_drafter_batch": "every pass has a static shape, so the drafter's batch is always padded",
    "num_speculative_tokens_per_batch_size": "K is fixed for the life of the engine",
    "use_heterogeneous_vocab": "target and draft must share one vocabulary",
}


@dataclasses.dataclass(frozen=True)
class SpeculativeConfig:
    """How tokens are drafted and verified; the fields are vLLM's keys, with vLLM's defaults.

    Attributes:
        model: the draft checkpoint (directory or hub id); "ngram" chooses the n-gram drafter and is stored as None.
        method: "draft_model" or "ngram"; inferred from ``model`` when it is not given, never None afterwards.
        num_speculative_tokens: K, 1..128; required.
        parallel_drafting: all K tokens from one draft pass (PARD) in place of K passes.
        draft_tensor_parallel_size: None for the target's; another number is refused, see
            :meth:`check_tensor_parallel_size`.
        max_model_len: the longest sequence the draft is asked about, in tokens; None for what both models allow.
        revision: branch, tag or commit of ``model`` on the hub.
        quantization: of the draft's weights: "int8" or "none"; None for the target's. (In vLLM, a draft is quantized
            only where its own checkpoint or this key says so.)
        draft_sample_method: "greedy" (argmax drafts, verified as one-hot) or "probabilistic".
        rejection_sample_method: "standard", or "synthetic": accept at given rates whatever the models say.
        synthetic_acceptance_rates: chance that the first i+1 drafts are all accepted, i < K; synthetic only.
        synthetic_acceptance_length: mean tokens a step, 1..K+1; synthetic only, instead of the rates.
        prompt_lookup_max, prompt_lookup_min: n-gram lengths tried; n-gram only, 5 and 5 when both are None.
        mask_token_id: parallel drafting only: the id to draft with where the draft's ``config.json`` names none or
            another (no key of vLLM's).

    Raises:
        ValueError: keys that contradict each other or lie outside their range, in vLLM's words where it has them.
        NotImplementedError: a vLLM method or rejection sampler that does not run here.
    """

    model: str | None = None
    method: str = None  # type: ignore[assignment]  # None until __post_init__ has inferred it
    num_speculative_tokens: int = None  # type: ignore[assignment]  # None is refused
    parallel_drafting: bool = False
    draft_tensor_parallel_size: int | None = None
    max_model_len: int | None = None
    revision: str | None = None
    quantization: str | None = None
    draft_sample_method: str = "greedy"
    rejection_sample_method: str = "standard"
    synthetic_acceptance_rates: Sequence[float] | None = None
    synthetic_acceptance_length: float | None = None
    prompt_lookup_max: int | None = None
    prompt_lookup_min: int | None = None
    mask_token_id: int | None = None

    def __post_init__(self) -> None:
        self._check_ranges()
        self._settle_method()
        self._check_num_speculative_tokens()
        if self.method == "ngram":
            self._settle_ngram()
        elif self.mask_token_id is not None and not self.parallel_drafting:
            raise ValueError(
                "mask_token_id is what parallel_drafting drafts with; a sequential draft has no use for it"
            )
        elif self.prompt_lookup_max is not None or self.prompt_lookup_min is not None:
            raise ValueError("prompt_lookup_max and prompt_lookup_min belong to method 'ngram', not to a draft model")
        _check_choice("draft_sample_method", self.draft_sample_method, ("greedy", "probabilistic"))
        if self.rejection_sample_method in ("block", "fly"):
            raise NotImplementedError(
                f"rejection_sample_method={self.rejection_sample_method!r} is not supported; "
                "supported are 'standard' and 'synthetic'"
            )
        _check_choice("rejection_sample_method", self.rejection_sample_method, ("standard", "synthetic"))
        self._settle_synthetic()

    @classmethod
    def from_dict(cls, keys: Any) -> SpeculativeConfig:
        """Build from vLLM's JSON object (``--speculative-config``, ``LLM(speculative_config=...)``).

        Raises:
            ValueError: not an object, an unknown key (the nearest known one is named), or see the class.
            NotImplementedError: a key of vLLM's that is not supported, set to anything but its default.
        """
        if not isinstance(keys, Mapping):
            raise ValueError(f"speculative_config must be a JSON object, got {keys!r}")
        known = [field.name for field in dataclasses.fields(cls)]
        if keys.get("tensor_parallel_size") is not None:
            raise ValueError(
                "'tensor_parallel_size' is not a valid argument in the speculative_config. "
                "Please pass 'draft_tensor_parallel_size' instead."
            )
        for key, value in keys.items():
            if key in UNSUPPORTED_KEYS:
                if value is not None and value != UNSUPPORTED_KEYS[key]:
                    hint = f": {_REFUSAL_HINTS[key]}" if key in _REFUSAL_HINTS else ""
                    raise NotImplementedError(f"speculative_config key {key}={value!r} is not supported{hint}")
            elif key not in known and key != "tensor_parallel_size":
                raise ValueError(f"unknown key {key!r} in speculative_config; {_suggest(key, known)}")
        # A JSON null asks for the default, as leaving the key out does.
        return cls(**{key: _typed(key, value) for key, value in keys.items() if key in known and value is not None})

    @property
    def drafter(self) -> str:
        """Which drafter runs: "pard", "draft_model" (one pass a token) or "ngram"."""
        return "pard" if self.method == "draft_model" and self.parallel_drafting else self.method

    @property
    def conditional_acceptance_rates(self) -> tuple[float, ...] | None:
        """Synthetic only: chance that draft i+1 is accepted once the i before it were, K of them; else None."""
        if self.synthetic_acceptance_rates is not None:
            return unconditional_to_conditional(self.synthetic_acceptance_rates)
        if self.synthetic_acceptance_length is not None:
            rates = acceptance_length_to_rates(self.synthetic_acceptance_length, self.num_speculative_tokens)
            return unconditional_to_conditional(rates)
        return None

    def check_tensor_parallel_size(self, tensor_parallel_size: int) -> None:
        """Refuse a draft split over another number of devices than the target (vLLM's DraftModelProposer does)."""
        if self.draft_tensor_parallel_size not in (None, tensor_parallel_size):
            raise ValueError(
                "Currently, 'draft_tensor_parallel_size' and 'tensor_parallel_size' must be the same. "
                f"Got {self.draft_tensor_parallel_size} and {tensor_parallel_size}. "
                "Please pass 'draft_tensor_parallel_size' in the speculative_config."
            )

    def resolve_max_model_len(self, draft_max_model_len: int, target_max_model_len: int) -> int:
        """The longest sequence that is drafted for, in tokens: ``max_model_len``, else what both models allow."""
        if (wanted := self.max_model_len) is None:
            return min(draft_max_model_len, target_max_model_len)
        for name, limit in (("draft", draft_max_model_len), ("target", target_max_model_len)):
            if wanted > limit:
                raise ValueError(
                    f"speculative_max_model_len={wanted} cannot be larger than {name}_max_model_len={limit}"
                )
        return wanted

    def _set(self, **values: Any) -> None:
        for name, value in values.items():
            object.__setattr__(self, name, value)

    def _check_ranges(self) -> None:
        for name in ("draft_tensor_parallel_size", "max_model_len", "prompt_lookup_max", "prompt_lookup_min"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        resolve_quantization(self.quantization)
        if self.mask_token_id is not None and self.mask_token_id < 0:
            raise ValueError(f"mask_token_id must not be negative, got {self.mask_token_id}")

    def _settle_method(self) -> None:
        method = self.method
        if method == "[ngram]" or (method is None and self.model in ("ngram", "[ngram]")):
            method = "ngram"
        if method is None:
            method = _method_of(self.model) if self.model else None
        if method is None:
            if self.num_speculative_tokens is not None:
                raise ValueError("num_speculative_tokens was provided but without speculative model.")
            raise ValueError("speculative_config names neither a model nor a method")
        if method in OTHER_METHODS or method.endswith("_mtp"):
            raise NotImplementedError(
                f"speculative method {method!r} is not supported yet; supported are {', '.join(SUPPORTED_METHODS)}"
            )
        if method not in SUPPORTED_METHODS:
            hint = "; PARD is 'draft_model' with \"parallel_drafting\": true" if method.lower() == "pard" else ""
            raise ValueError(f"unknown speculative method {method!r}; {_suggest(method, SUPPORTED_METHODS)}{hint}")
        if method == "draft_model" and self.model in ("ngram", "[ngram]"):
            raise ValueError(f"method 'draft_model' contradicts model={self.model!r}; leave one of the two out")
        if method == "draft_model" and not self.model:
            raise ValueError(
                "num_speculative_tokens was provided but without speculative model."
                if self.num_speculative_tokens is not None
                else "method 'draft_model' needs a speculative model; name its checkpoint in 'model'"
            )
        self._set(method=method)

    def _check_num_speculative_tokens(self) -> None:
        k = self.num_speculative_tokens
        if k is None:
            raise ValueError(
                "A speculative model was provided, but `num_speculative_tokens` was not provided"
                if self.model
                else f"num_speculative_tokens must be provided with method {self.method!r}"
            )
        if k < 1:
            raise ValueError(f"Expected num_speculative_tokens to be greater than zero ({k}).")
        if k > MAX_SPEC_LEN:
            raise ValueError(f"num_speculative_tokens={k} is greater than the maximum, {MAX_SPEC_LEN}")

    def _settle_ngram(self) -> None:
        if self.model not in (None, "ngram", "[ngram]"):
            raise ValueError(f"method 'ngram' drafts without a model, but model={self.model!r} was given")
        if self.parallel_drafting:
            raise ValueError(
                "parallel_drafting is only compatible with EAGLE and draft model methods, not with 'ngram'"
            )
        for name in ("draft_tensor_parallel_size", "max_model_len", "revision", "quantization", "mask_token_id"):
            if (value := getattr(self, name)) is not None:
                raise ValueError(f"{name}={value!r} describes a draft model, which method 'ngram' does not have")
        if self.draft_sample_method != "greedy":
            raise ValueError(f"draft_sample_method={self.draft_sample_method!r} needs a draft model, not 'ngram'")
        # One omitted bound mirrors the other; 5 when both are.
        low = self.prompt_lookup_min or self.prompt_lookup_max or 5
        high = self.prompt_lookup_max or low
        if low > high:
            raise ValueError(f"prompt_lookup_min={low} must be <= prompt_lookup_max={high}")
        self._set(model=None, prompt_lookup_min=low, prompt_lookup_max=high)

    def _settle_synthetic(self) -> None:
        k = self.num_speculative_tokens
        rates, length = self.synthetic_acceptance_rates, self.synthetic_acceptance_length
        if self.rejection_sample_method != "synthetic":
            if rates is not None or length is not None:
                raise ValueError(
                    "synthetic_acceptance_rates / synthetic_acceptance_length "
                    "are only valid with rejection_sample_method='synthetic'."
                )
            return
        if (rates is None) == (length is None):
            raise ValueError(
                "rejection_sample_method='synthetic' requires exactly one of "
                "synthetic_acceptance_rates or synthetic_acceptance_length."
            )
        if rates is not None:
            if len(rates) != k:
                raise ValueError(f"synthetic_acceptance_rates must have length {k}, got {list(rates)}.")
            if not all(0.0 <= rate <= 1.0 for rate in rates):
                raise ValueError(f"synthetic_acceptance_rates entries must be in [0, 1], got {list(rates)}.")
            if any(later > earlier for earlier, later in itertools.pairwise(rates)):
                raise ValueError(f"synthetic_acceptance_rates must be non-increasing, got {list(rates)}.")
            self._set(synthetic_acceptance_rates=tuple(rates))
        elif length is not None and not 1.0 <= length <= k + 1:
            raise ValueError(f"synthetic_acceptance_length must be in [1, {k + 1}], got {length}.")


def extra_slots(method: str, parallel: bool, k: int) -> int:
    """Query rows a request adds to the draft's pass beyond the target's own (vLLM's max_num_new_slots_for_drafting).

    Args:
        method: vLLM's method name.
        parallel: ``parallel_drafting``; DFlash and DSpark are parallel whatever it says.
        k: K, the number of speculative tokens.

    Returns:
        PARD K, P-EAGLE K-1, a sequential draft model 1, EAGLE, MTP and n-gram 0. DFlash counts its bonus query and
        K masks less the row the target has anyway, K; DSpark, which samples from that row, K-1. (vLLM 0.33 budgets
        the two at 0 as they run a query pass of their own; the rows are computed all the same.)

    Raises:
        ValueError: an unknown method, or one that cannot draft in parallel.
    """
    if method == "dflash":
        return k
    if method == "dspark":
        return k - 1
    if method == "draft_model":
        return k if parallel else 1
    if method in ("eagle", "eagle3"):
        return k - 1 if parallel else 0
    if method not in ("mtp", "ngram"):
        raise ValueError(
            f"unknown speculative method {method!r}; expected eagle3, dflash, dspark, mtp, ngram, draft_model"
        )
    if parallel:
        raise ValueError(
            f"parallel_drafting is only compatible with EAGLE and draft model methods, not with {method!r}"
        )
    return 0


def unconditional_to_conditional(rates: Sequence[float]) -> tuple[float, ...]:
    """From P(drafts 1..i all accepted) to P(draft i accepted | those before it were); 0 after a rate of 0."""
    previous = (1.0, *rates[:-1])
    return tuple(rate / before if before > 0.0 else 0.0 for rate, before in zip(rates, previous, strict=True))


def acceptance_length_to_rates(length: float, k: int) -> tuple[float, ...]:
    """Unconditional rates, K of them, whose mean acceptance length (bonus included) is ``length``, in [1, K+1].

    The schedule of least variance, vLLM's: the whole part is always accepted, the fraction at the next position.
    """
    whole = math.floor(length - 1.0)
    rates = [1.0] * whole + [length - 1.0 - whole] + [0.0] * k
    return tuple(rates[:k])


def _typed(key: str, value: Any) -> Any:
    """A JSON value as the field's type. JSON writes 1.0 as 1, and Python takes true for 1: only the first is meant."""
    kind = _TYPES[key]
    if kind is float and _is(int | float, value):
        return float(value)
    if kind is list and isinstance(value, list | tuple) and all(_is(int | float, x) for x in value):
        return tuple(float(x) for x in value)
    if kind in (str, int, bool) and _is(kind, value):
        return value
    names = {str: "a string", int: "an integer", bool: "true or false", float: "a number", list: "a list of numbers"}
    raise ValueError(f"{key} must be {names[kind]}, got {value!r}")


def _is(kind: Any, value: Any) -> bool:
    return isinstance(value, kind) and (kind is bool or not isinstance(value, bool))


def _method_of(model: str) -> str:
    """vLLM's guess from the draft's name; the directories above it do not count."""
    name = PurePath(model).name.lower()
    for marker, method in (("eagle-", "eagle"), ("eagle3", "eagle3"), ("dflash", "dflash"), ("dspark", "dspark")):
        if marker in name:
            return method
    return "draft_model"


def _check_choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, choices))}, got {value!r}")


def _suggest(name: Any, known: Sequence[str]) -> str:
    near = difflib.get_close_matches(str(name), known, n=1)
    return f"did you mean {near[0]!r}?" if near else f"known are {', '.join(known)}"
