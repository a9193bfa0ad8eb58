"""The offline API, vLLM's: ``LLM(model, speculative_config={...}).generate(prompts, SamplingParams(...))``."""

from __future__ import annotations

import dataclasses
import itertools
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tqdm import tqdm

from pard_jax import presets
from pard_jax.config import EngineConfig, SpeculativeConfig
from pard_jax.engine.request import RequestUpdate
from pard_jax.loading import Loaded, load_engine
from pard_jax.outputs import RequestOutput
from pard_jax.sampling_params import SamplingParams
from pard_jax.tokenizer import Tokenizer
from pard_jax.xla_flags import add_xla_flags

Prompt = str | Mapping[str, Any] | Sequence[int]  # text, {"prompt": text}, {"prompt_token_ids": ids}, or ids
Messages = Sequence[Mapping[str, Any]]  # one conversation
OnUpdate = Callable[[int, int, RequestUpdate], None]  # prompt's index, completion's index, what is new


class LLM:
    """A model, with or without a draft, ready to generate.

    Args:
        model: a checkpoint directory (HF or Orbax), a hub id, or a preset's name (:mod:`pard_jax.presets`), which
            stands for its target; nothing is speculated unless ``speculative_config`` asks for it.
        tensor_parallel_size: devices that share the model.
        speculative_config: vLLM's keys, for instance ``{"model": "amd/PARD-Qwen3-0.6B", "num_speculative_tokens": 12,
            "method": "draft_model", "parallel_drafting": True}``; None decodes plainly. A preset's name as ``"model"``
            stands for its draft, and the other keys need not be given: ``LLM("smollm2", speculative_config={"model":
            "smollm2"})``.
        max_model_len: prompt and output tokens of one request; None for the model's own limit, or what fits.
        max_num_seqs: requests that run at once. Every step computes all of these rows.
        dtype: "auto" (float32 on CPU, bfloat16 elsewhere), "float32", "bfloat16" or "float16".
        quantization: "int8" quantizes the weights of target and draft as they are loaded, with a scale for each output
            channel; the draft's alone by the key of that name in ``speculative_config`` ("int8" or "none").
        seed: of requests that bring none; None for different samples in every run.
        gpu_memory_utilization: the share of the device's memory to plan for.
        revision: of a hub id.
        use_tqdm: show progress of loading.
        engine_args: further fields of :class:`pard_jax.config.EngineConfig`.

    Raises:
        FileNotFoundError, ValueError, NotImplementedError: what cannot work, said before anything is compiled.
    """

    def __init__(
        self,
        model: str,
        *,
        tensor_parallel_size: int = 1,
        speculative_config: Mapping[str, Any] | SpeculativeConfig | None = None,
        max_model_len: int | None = None,
        max_num_seqs: int = 8,
        dtype: str = "auto",
        quantization: str | None = None,
        seed: int | None = 0,
        gpu_memory_utilization: float = 0.9,
        revision: str | None = None,
        use_tqdm: bool = True,
        **engine_args: Any,
    ) -> None:
        try:
            engine_config = EngineConfig(
                max_model_len=max_model_len,
                max_num_seqs=max_num_seqs,
                dtype=dtype,
                quantization=quantization,
                tensor_parallel_size=tensor_parallel_size,
                gpu_memory_utilization=gpu_memory_utilization,
                seed=seed,
                **engine_args,
            )
        except TypeError as e:
            known = ", ".join(field.name for field in dataclasses.fields(EngineConfig))
            raise ValueError(f"LLM: {str(e).removeprefix('EngineConfig.__init__() ')}; known are {known}") from None
        if speculative_config is not None and not isinstance(speculative_config, SpeculativeConfig):
            speculative_config = SpeculativeConfig.from_dict(presets.complete(speculative_config))
        add_xla_flags()
        self._take(load_engine(model, engine_config, speculative_config, revision=revision, progress=use_tqdm))

    @classmethod
    def from_loaded(cls, loaded: Loaded) -> LLM:
        """An LLM around what :func:`pard_jax.loading.load_engine` has loaded."""
        llm = cls.__new__(cls)
        llm._take(loaded)
        return llm

    def _take(self, loaded: Loaded) -> None:
        self.engine, self.settings, self._parts = loaded.engine, loaded.settings, loaded.parts
        self._tokenizer, self._defaults = loaded.tokenizer, loaded.sampling_defaults
        self._ids = itertools.count()

    def disable_speculation(self) -> None:
        """Decode one token a step from here on: what a speed-up is measured against.

        The weights stay. The caches are made anew, and everything compiles again.
        """
        self._parts = self._parts.without_speculation()
        del self.engine  # first: the old caches and the new ones need not fit together
        self.engine, self.settings = self._parts.build(), self._parts.settings

    def get_tokenizer(self) -> Tokenizer:
        """The model's tokenizer.

        Raises:
            ValueError: the checkpoint has none.
        """
        if self._tokenizer is None:
            raise ValueError(
                f"{self.settings.model} holds no tokenizer, so text cannot be encoded; give prompt_token_ids instead"
            )
        return self._tokenizer

    @property
    def has_tokenizer(self) -> bool:
        """Whether the checkpoint brings a tokenizer; without, prompts and outputs are token ids."""
        return self._tokenizer is not None

    def get_default_sampling_params(self) -> SamplingParams:
        """The defaults that the model's ``generation_config.json`` sets."""
        return SamplingParams(**self._defaults)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        on_update: OnUpdate | None = None,
    ) -> list[RequestOutput]:
        """Complete prompts, as many at once as there are slots; results come in the prompts' order.

        Args:
            prompts: one or several: text, ``{"prompt": text}`` or ``{"prompt_token_ids": [...]}``.
            sampling_params: one for all, or one for each; None for the model's defaults.
            use_tqdm: show progress.
            on_update: called with the index of the prompt, the index of the completion and what is new of it, as it
                comes.

        Raises:
            ValueError: a prompt that cannot run, or as many params as prompts are not given. Nothing has run then.
        """
        many = _as_list(prompts)
        requests = [self._encode(prompt) for prompt in many]
        return self._run(requests, self._params_for(len(requests), sampling_params), use_tqdm, on_update)

    def chat(
        self,
        messages: Messages | Sequence[Messages],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        add_generation_prompt: bool = True,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        on_update: OnUpdate | None = None,
    ) -> list[RequestOutput]:
        """Answer one conversation, or several, through the tokenizer's chat template.

        ``chat_template_kwargs`` go to the template, ``{"enable_thinking": False}`` for Qwen3 for instance.
        ``on_update``: see :meth:`generate`.
        """
        tokenizer = self.get_tokenizer()
        conversations = [messages] if messages and isinstance(messages[0], Mapping) else list(messages)
        requests = []
        for conversation in conversations:
            kwargs = dict(chat_template_kwargs or {})
            ids = tokenizer.apply_chat_template(
                conversation,  # type: ignore[arg-type]
                add_generation_prompt=add_generation_prompt,
                **kwargs,
            )
            requests.append((tokenizer.decode(ids, skip_special_tokens=False), ids))
        return self._run(requests, self._params_for(len(requests), sampling_params), use_tqdm, on_update)

    def _encode(self, prompt: Prompt) -> tuple[str | None, list[int]]:
        if isinstance(prompt, str):
            return prompt, self.get_tokenizer().encode(prompt)
        if isinstance(prompt, Mapping):
            if "prompt_token_ids" in prompt:
                return prompt.get("prompt"), _token_ids(prompt["prompt_token_ids"])
            if isinstance(text := prompt.get("prompt"), str):
                return text, self.get_tokenizer().encode(text)
            raise ValueError(
                f"a prompt with the keys {sorted(prompt)} was given; expected 'prompt' or 'prompt_token_ids'"
            )
        return None, _token_ids(prompt)

    def _params_for(self, count: int, params: SamplingParams | Sequence[SamplingParams] | None) -> list[SamplingParams]:
        if params is None:
            return [self.get_default_sampling_params()] * count
        if isinstance(params, SamplingParams):
            return [params] * count
        if isinstance(params, Mapping | str) or not all(isinstance(p, SamplingParams) for p in params):
            raise ValueError(f"sampling_params must be SamplingParams, or a list of them, got {params!r:.80}")
        if len(params) != count:
            raise ValueError(f"The lengths of prompts ({count}) and sampling_params ({len(params)}) must be the same")
        return list(params)

    def _run(
        self,
        requests: list[tuple[str | None, list[int]]],
        params: list[SamplingParams],
        use_tqdm: bool,
        on_update: OnUpdate | None = None,
    ) -> list[RequestOutput]:
        for _, ids in requests:
            self.engine.check_prompt(ids)
        children: dict[str, tuple[int, int]] = {}  # request id -> (prompt, completion)
        try:
            for i, ((text, ids), p) in enumerate(zip(requests, params, strict=True)):
                for n in range(p.n):
                    request_id = str(next(self._ids))
                    self.engine.add_request(request_id, ids, p.child(n), prompt=text)
                    children[request_id] = (i, n)
            outputs = self._drain(children, use_tqdm, on_update)
        except BaseException:
            self.engine.abort(children)
            while self.engine.has_work():
                self.engine.step()
            raise
        return [_merge([outputs[i, n] for n in range(p.n)]) for i, p in enumerate(params)]

    def _drain(
        self, children: Mapping[str, tuple[int, int]], use_tqdm: bool, on_update: OnUpdate | None
    ) -> dict[tuple[int, int], RequestOutput]:
        outputs: dict[tuple[int, int], RequestOutput] = {}
        show = use_tqdm and sys.stderr.isatty()
        with tqdm(total=len(children), desc="Processed prompts", unit="req", disable=not show) as bar:
            tokens = 0
            while len(outputs) < len(children):
                for update in self.engine.step():
                    if update.request_id not in children:
                        continue
                    tokens += len(update.token_ids)
                    if on_update is not None:
                        on_update(*children[update.request_id], update)
                    if update.output is not None:
                        outputs[children[update.request_id]] = update.output
                        bar.update()
                        rate = tokens / max(bar.format_dict["elapsed"], 1e-9)
                        bar.set_postfix_str(f"output: {rate:.1f} tok/s")
        return outputs


def _as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One prompt (text, a mapping, or a list of ids) or a list of them."""
    if isinstance(prompts, bytes | bytearray):
        raise ValueError(f"a prompt of bytes was given ({prompts!r:.40}); decode it to text first")
    if isinstance(prompts, str | Mapping):
        return [prompts]
    many: list[Any] = list(prompts)
    return [many] if many and all(isinstance(p, int) for p in many) else many


def _token_ids(ids: Any) -> list[int]:
    if isinstance(ids, str | bytes | bytearray) or not isinstance(ids, Sequence):
        raise ValueError(f"prompt_token_ids must be a list of integers, got {ids!r:.80}")
    if bad := [i for i in ids if isinstance(i, bool) or not isinstance(i, int)]:
        raise ValueError(f"prompt_token_ids must be a list of integers, got {bad[0]!r} in it")
    return list(ids)


def _merge(outputs: list[RequestOutput]) -> RequestOutput:
    """The n completions of one prompt as one output."""
    first = outputs[0]
    if len(outputs) == 1:
        return first
    completions = []
    for index, output in enumerate(outputs):
        completion = output.outputs[0]
        completion.index = index
        completions.append(completion)
    metrics = first.metrics
    metrics.num_generation_tokens = sum(len(c.token_ids) for c in completions)
    metrics.num_first_tokens = sum(o.metrics.num_first_tokens for o in outputs)
    metrics.last_token_time = max(o.metrics.last_token_time or 0.0 for o in outputs)
    metrics.finished_time = max(o.metrics.finished_time or 0.0 for o in outputs)
    metrics.speculative_decoding = None  # of one completion only; vLLM leaves it out, too
    return RequestOutput(
        request_id=first.request_id,
        prompt=first.prompt,
        prompt_token_ids=first.prompt_token_ids,
        outputs=completions,
        finished=True,
        metrics=metrics,
    )
