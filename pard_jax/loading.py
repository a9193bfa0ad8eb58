"""From names on a command line to a running engine: resolve, refuse, plan, load, build; in this order."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from pard_jax import compilation_cache
from pard_jax.config import EngineConfig, ModelConfig, SpeculativeConfig, extra_slots
from pard_jax.config.engine import resolve_quantization
from pard_jax.config.model import MASK_TOKEN_KEYS
from pard_jax.decoding.drafters import Drafter, NgramDrafter, NoDrafter, PardDrafter, SequentialDrafter
from pard_jax.decoding.drafters.model import ModelDrafter
from pard_jax.engine.adaptive import make_policy
from pard_jax.engine.engine import Engine
from pard_jax.engine.memory import MemoryPlan, Speculation, device_memory, plan_memory
from pard_jax.models import abstract_params, make_mesh
from pard_jax.models.attention import is_nvidia
from pard_jax.presets import resolve_draft, resolve_target
from pard_jax.program_store import ProgramStore
from pard_jax.tokenizer import Tokenizer, check_same_vocabulary, load_generation_config, load_tokenizer
from pard_jax.weights import load_params
from pard_jax.weights.borrow import same_tokenizer

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Settings:
    """What is in effect once every default is filled in."""

    model: Path
    draft_model: Path | None
    method: str  # "pard", "draft_model", "ngram" or "none"
    num_speculative_tokens: int | Literal["auto"]  # 0 where nothing is drafted; or "auto"
    widths: tuple[int, ...]  # every K that a step may have, ascending
    dtype: Any
    chunk_size: int
    steps_per_dispatch: int
    implementation: str  # of decoding passes: "xla" or "pallas"
    plan: MemoryPlan
    config: ModelConfig
    drafter: Drafter
    quantization: str | None = None  # of the target's weights
    draft_quantization: str | None = None


@dataclasses.dataclass(frozen=True)
class Parts:
    """All that an engine is made of. Engines made of the same parts share the weights; each has caches of its own."""

    settings: Settings
    engine_config: EngineConfig
    params: dict[str, Any]  # {"target": ..., "draft": ...}
    speculative: SpeculativeConfig | None
    speculative_slots: int
    tokenizer: Tokenizer | None
    eos_token_ids: tuple[int, ...]
    mesh: Mesh

    def build(self) -> Engine:
        """An engine, its caches allocated and nothing compiled yet."""
        settings, directory = self.settings, compilation_cache.directory()
        return Engine(
            settings.config,
            settings.drafter,
            self.params,
            settings.plan,
            num_rows=self.engine_config.max_num_seqs,
            chunk_size=settings.chunk_size,
            steps_per_dispatch=settings.steps_per_dispatch,
            dtype=settings.dtype,
            speculative_slots=self.speculative_slots,
            implementation=settings.implementation,
            specialize=specializes(self.mesh.devices.flat[0]),
            tokenizer=self.tokenizer,
            eos_token_ids=self.eos_token_ids,
            seed=self.engine_config.seed,
            synthetic_rates=None if self.speculative is None else self.speculative.conditional_acceptance_rates,
            policy=make_policy(self.speculative),
            mesh=self.mesh,
            store=None if directory is None else ProgramStore(directory, [*self.mesh.devices.flat]),
        )

    def without_speculation(self) -> Parts:
        """The same target, weights and lengths, for decoding one token a step."""
        return self.configured(None, self.engine_config.max_num_seqs)

    def configured(self, speculative: SpeculativeConfig | None, max_num_seqs: int) -> Parts:
        """The same weights, lengths and settings for another method, K or batch, which needs no more memory."""
        settings = self.settings
        draft = None
        if speculative is not None and speculative.model is not None:
            assert isinstance(settings.drafter, ModelDrafter)
            draft = settings.drafter.config
        shared = self.params.get("draft") is self.params["target"]
        speculation = _speculation(speculative, draft, shared, settings.draft_quantization)
        engine = dataclasses.replace(self.engine_config, max_num_seqs=max_num_seqs)
        # Less is needed than was planned for, so this plan fits, whatever the device has left by now.
        plan = plan_memory(
            settings.config,
            dataclasses.replace(engine, max_model_len=settings.plan.max_model_len, gpu_memory_utilization=1.0),
            speculation,
            dtype=settings.dtype,
            chunk_size=settings.chunk_size,
            memory_bytes=settings.plan.budget_bytes,
        )
        return dataclasses.replace(
            self,
            settings=dataclasses.replace(
                settings,
                draft_model=None if draft is None else settings.draft_model,
                method="none" if speculative is None else speculative.drafter,
                **_k_settings(speculative),
                plan=plan,
                drafter=make_drafter(speculative, settings.config, draft, plan.max_model_len, settings.implementation),
            ),
            engine_config=engine,
            params=self.params if draft is not None else {"target": self.params["target"]},
            speculative=speculative,
            speculative_slots=speculation.num_speculative_tokens + speculation.extra_slots,
        )


@dataclasses.dataclass(frozen=True)
class Loaded:
    """An engine, and what its callers need beside it."""

    engine: Engine
    settings: Settings
    tokenizer: Tokenizer | None
    sampling_defaults: dict[str, Any]  # of generation_config.json, by SamplingParams' names
    parts: Parts  # what the engine is made of


def load_engine(
    model: str | Path,
    engine_config: EngineConfig,
    speculative: SpeculativeConfig | None = None,
    *,
    revision: str | None = None,
    progress: bool = True,
    tokenizer: Tokenizer | None = None,
    before_weights: Callable[[Engine], None] = lambda engine: None,
) -> Loaded:
    """Build an engine.

    Everything that can be refused is refused before weights are read, and nothing is compiled here.

    Args:
        model: a checkpoint directory, a hub id or a preset's name.
        speculative: its ``model`` may also be a preset's name, or a draft that borrows the target's embedding.
        revision: of a hub id.
        progress: show progress bars on a terminal.
        tokenizer: the model's, where the caller has loaded it already.
        before_weights: is given the engine, complete but for its weights: to refuse requests, and to start compiling
            while weights are read.

    Raises:
        FileNotFoundError, ValueError, NotImplementedError: see the rooms that raise them.
    """
    tp = engine_config.tensor_parallel_size
    directory = resolve_target(model, revision=revision, progress=progress)
    config = ModelConfig.from_pretrained(directory)
    draft_directory = draft_config = None
    if speculative is not None:
        speculative.check_tensor_parallel_size(tp)
        if speculative.model is not None:
            draft_directory = resolve_draft(
                speculative.model, directory, revision=speculative.revision, progress=progress
            )
            draft_config = ModelConfig.from_pretrained(draft_directory)
    # On one device, too: the caches are then bound to it as the weights are, and programs that have run once need not
    # be compiled again for what they returned themselves.
    mesh = make_mesh(tp)
    check_divisible(tp, [m for m in (config, draft_config) if m is not None])

    device = mesh.devices.flat[0]
    dtype, chunk_size, steps = by_platform(engine_config, device)
    implementation = resolve_implementation(engine_config.implementation, dtype, mesh)

    tokenizer = load_tokenizer(directory) if tokenizer is None else tokenizer
    generation = load_generation_config(directory)
    quantization = engine_config.quantization
    draft_quantization = None if speculative is None else resolve_quantization(speculative.quantization, quantization)
    itself = draft_directory is not None and draft_directory.resolve() == directory.resolve()
    shared_weights = itself and draft_quantization == quantization
    if draft_directory is not None and draft_config is not None and speculative is not None and not itself:
        same = same_tokenizer(directory, draft_directory)
        draft_tokenizer = tokenizer if same else load_tokenizer(draft_directory)
        mask = _mask_token_id(speculative, draft_config) if speculative.drafter == "pard" else None
        check_same_vocabulary(tokenizer, draft_tokenizer, config.vocab_size, draft_config.vocab_size, mask)

    speculation = _speculation(speculative, draft_config, shared_weights, draft_quantization)
    memory = device_memory(device)
    plan = plan_memory(config, engine_config, speculation, dtype=dtype, chunk_size=chunk_size, memory_bytes=memory)
    if memory is None:
        logger.warning(
            "%s does not tell how much memory it has; max_model_len=%d with max_num_seqs=%d is taken to fit",
            device.device_kind,
            plan.max_model_len,
            engine_config.max_num_seqs,
        )
    drafter = make_drafter(speculative, config, draft_config, plan.max_model_len, implementation)

    models = {"target": (directory, config, quantization)}
    if draft_directory is not None and draft_config is not None and not shared_weights:
        models["draft"] = (draft_directory, draft_config, draft_quantization)

    def of_each(make: Callable[[Path, ModelConfig, str | None], Any]) -> dict[str, Any]:
        params = {name: make(*model) for name, model in models.items()}
        return params | {"draft": params["target"]} if shared_weights else params

    def abstract(_: Path, config: ModelConfig, quantization: str | None) -> Any:
        return abstract_params(config, dtype, mesh, quantization=quantization)

    def load(path: Path, config: ModelConfig, quantization: str | None) -> Any:
        return load_params(path, config, dtype=dtype, mesh=mesh, progress=progress, quantization=quantization)

    settings = Settings(
        model=directory,
        draft_model=draft_directory,
        method="none" if speculative is None else speculative.drafter,
        **_k_settings(speculative),
        dtype=jnp.dtype(dtype),
        chunk_size=chunk_size,
        steps_per_dispatch=steps,
        implementation=implementation,
        plan=plan,
        config=config,
        drafter=drafter,
        quantization=quantization,
        draft_quantization=draft_quantization,
    )
    parts = Parts(
        settings,
        engine_config,
        of_each(abstract),
        speculative=speculative,
        speculative_slots=speculation.num_speculative_tokens + speculation.extra_slots,
        tokenizer=tokenizer,
        eos_token_ids=_eos_token_ids(tokenizer, config, generation["eos_token_id"]),
        mesh=mesh,
    )
    defaults = {k: v for k, v in generation.items() if k != "eos_token_id"}
    engine = parts.build()
    before_weights(engine)
    try:
        params = of_each(load)
    except BaseException:
        engine.stop_compiling()
        raise
    engine.take_params(params)
    return Loaded(engine, settings, tokenizer, defaults, dataclasses.replace(parts, params=params))


def make_drafter(
    speculative: SpeculativeConfig | None,
    target: ModelConfig,
    draft: ModelConfig | None,
    max_model_len: int,
    implementation: str = "xla",
) -> Drafter:
    """The drafter that a configuration names.

    Raises:
        ValueError: parallel drafting without a mask token, or with one that the draft's vocabulary lacks.
    """
    if speculative is None:
        return NoDrafter()
    k = speculative.max_num_speculative_tokens
    if speculative.drafter == "ngram":
        assert speculative.prompt_lookup_max is not None and speculative.prompt_lookup_min is not None
        return NgramDrafter(
            num_speculative_tokens=k, max_n=speculative.prompt_lookup_max, min_n=speculative.prompt_lookup_min
        )
    assert draft is not None
    # A draft with a shorter limit than the target's leaves the rows beyond it to the target alone. One without goes on
    # to the last token: the few positions drafted past it are never kept.
    limit = speculative.resolve_max_model_len(draft.max_position_embeddings, max_model_len)
    common: dict[str, Any] = {
        "num_speculative_tokens": k,
        "config": draft,
        "target_vocab_size": target.vocab_size,
        "max_model_len": limit if limit < max_model_len else max_model_len + k,
        "implementation": implementation,
        "sampled": speculative.draft_sample_method == "probabilistic",
    }
    if speculative.drafter == "pard":
        return PardDrafter(**common, mask_token_id=_mask_token_id(speculative, draft))
    return SequentialDrafter(**common)


def by_platform(engine_config: EngineConfig, device: jax.Device) -> tuple[str, int, int]:  # pyright: ignore[reportInvalidTypeForm]
    """The dtype, the tokens of a prefill pass and the steps of a dispatch in effect, where defaults depend on the
    device."""
    on_cpu = device.platform == "cpu"
    dtype = ("float32" if on_cpu else "bfloat16") if engine_config.dtype == "auto" else engine_config.dtype
    chunk_size = engine_config.prefill_chunk_size or (64 if on_cpu else 256)
    return dtype, chunk_size, engine_config.steps_per_dispatch or (1 if on_cpu else 8)


def specializes(device: jax.Device) -> bool:  # pyright: ignore[reportInvalidTypeForm]
    """Whether engines there compile a program of its own for plain greedy batches."""
    # On a CPU what the special program saves is nothing, and compiling it takes seconds.
    return device.platform != "cpu"


def resolve_implementation(implementation: str, dtype: Any, mesh: Mesh) -> str:
    """``"auto"`` is our kernels where they run: one NVIDIA GPU, in bfloat16.

    Raises:
        ValueError: they are asked for where they do not run.
    """
    device = mesh.devices.flat[0]
    runs = is_nvidia(device) and mesh.size == 1 and jnp.dtype(dtype) == jnp.bfloat16
    if implementation == "pallas" and not runs:
        raise ValueError(
            f"implementation='pallas' needs one NVIDIA GPU and bfloat16; this is {mesh.size} "
            f"{device.platform} device(s) in {jnp.dtype(dtype).name}: choose 'xla' or 'auto'"
        )
    if implementation != "auto":
        return implementation
    return "pallas" if runs else "xla"


def _mask_token_id(speculative: SpeculativeConfig, draft: ModelConfig) -> int:
    mask = draft.mask_token_id if speculative.mask_token_id is None else speculative.mask_token_id
    if mask is None:
        keys = ", ".join(f"`{key}`" for key in MASK_TOKEN_KEYS[:-1])
        raise ValueError(
            f"For parallel drafting, the draft model config must have {keys}, or `{MASK_TOKEN_KEYS[-1]}` specified in "
            "its config.json. (Or name an unused id as `mask_token_id` in the speculative config, --mask-token-id on a "
            "command line. A draft that was not trained for parallel drafting runs one token after the other: "
            "`parallel_drafting` false, --method draft_model.)"
        )
    if not 0 <= mask < draft.vocab_size:
        raise ValueError(
            f"the mask token id {mask} is not in the draft's vocabulary of {draft.vocab_size} ids (0 to "
            f"{draft.vocab_size - 1})"
        )
    return mask


def _k_settings(speculative: SpeculativeConfig | None) -> dict[str, Any]:
    if speculative is None:
        return {"num_speculative_tokens": 0, "widths": (0,)}
    return {"num_speculative_tokens": speculative.num_speculative_tokens, "widths": speculative.widths}


def _speculation(
    speculative: SpeculativeConfig | None,
    draft: ModelConfig | None,
    shares_weights: bool,
    draft_quantization: str | None,
) -> Speculation:
    if speculative is None:
        return Speculation()
    k = speculative.max_num_speculative_tokens
    return Speculation(
        num_speculative_tokens=k,
        extra_slots=extra_slots(speculative.method, speculative.parallel_drafting, k),
        draft=draft,
        draft_quantization=draft_quantization,
        shares_weights=shares_weights,
        sampled=speculative.draft_sample_method == "probabilistic",
    )


def _eos_token_ids(tokenizer: Tokenizer | None, config: ModelConfig, generation: list[int]) -> tuple[int, ...]:
    """The primary id first: the tokenizer's, else the first that the configs name."""
    primary = tokenizer.eos_token_id if tokenizer is not None else None
    ids = [*([] if primary is None else [primary]), *generation, *(() if generation else config.eos_token_ids)]
    return tuple(dict.fromkeys(ids))


def check_divisible(tp: int, configs: list[ModelConfig]) -> None:
    """Refuse models that ``tp`` devices cannot share.

    Raises:
        ValueError: it does not divide what is split among them.
    """
    for config in configs:
        for name in ("num_kv_heads", "intermediate_size", "vocab_size"):
            if (size := getattr(config, name)) % tp:
                raise ValueError(f"tensor_parallel_size={tp} does not divide the {config.family} model's {name}={size}")
