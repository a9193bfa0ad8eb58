"""This project's methods, measured one after the other on weights that are loaded once."""

from __future__ import annotations

import dataclasses
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal

from tqdm import tqdm

from pard_jax import LLM, SamplingParams
from pard_jax.bench.acceptance import Trace
from pard_jax.bench.result import Case, Measurement, Timing
from pard_jax.bench.workload import Workload
from pard_jax.config import EngineConfig, SpeculativeConfig
from pard_jax.engine.request import RequestUpdate
from pard_jax.loading import Loaded, Parts, load_engine
from pard_jax.outputs import RequestOutput
from pard_jax.tokenizer import Tokenizer

METHODS = ("plain", "pard", "draft_model", "ngram")


def speculative_config(
    method: str, k: int | Literal["auto"], draft: Path | None, mask_token_id: int | None
) -> SpeculativeConfig | None:
    """What a method's name stands for.

    Raises:
        ValueError: see :class:`pard_jax.config.SpeculativeConfig`.
    """
    if method == "plain":
        return None
    if method == "ngram":
        return SpeculativeConfig(method="ngram", num_speculative_tokens=k)
    pard = method == "pard"
    return SpeculativeConfig(
        model=None if draft is None else str(draft),
        method="draft_model",
        num_speculative_tokens=k,
        parallel_drafting=pard,
        mask_token_id=mask_token_id if pard else None,
    )


def load(
    directory: Path,
    engine: EngineConfig,
    batches: Sequence[int],
    speculations: Sequence[SpeculativeConfig | None],
    tokenizer: Tokenizer | None,
) -> Parts:
    """The weights that all of the configurations need, loaded for the one that needs the most memory.

    Raises:
        FileNotFoundError, ValueError, NotImplementedError: what cannot work, before any weight is read.
    """
    # The order of what they need: a draft's cache, the slots a parallel draft writes, K.
    most = max(
        (s for s in speculations if s is not None),
        key=lambda s: (s.model is not None, s.parallel_drafting, s.max_num_speculative_tokens),
        default=None,
    )
    widest = dataclasses.replace(engine, max_num_seqs=max(batches))
    return load_engine(directory, widest, most, tokenizer=tokenizer).parts


def measure(
    parts: Parts, method: str, workloads: Sequence[Workload], max_tokens: int, *, repeats: int, ignore_eos: bool
) -> Iterator[list[Measurement]]:
    """Compile one configuration and run each workload on it; one measurement a group of prompts.

    A first pass, which is not timed, looks at every step alone, to see what it accepted. Each timed pass over a batch
    is one for the first token alone, and one for all of them.
    """
    engine, settings = parts.build(), parts.settings
    llm = LLM.from_loaded(Loaded(engine, settings, parts.tokenizer, {}, parts))
    batch_size, k = parts.engine_config.max_num_seqs, settings.num_speculative_tokens or None
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=ignore_eos)
    first = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=ignore_eos)
    engine.warm_up(max(workload.longest for workload in workloads) + max_tokens)
    for workload in workloads:
        case = Case("", method, settings.dtype.name, k, batch_size, workload.context)
        timings: dict[str, list[Timing]] = defaultdict(list)
        outputs: dict[str, list[list[list[int]]]] = defaultdict(list)
        traces: dict[str, list[Trace]] = defaultdict(list)
        steps_by_k: dict[str, Counter[int]] = defaultdict(Counter)
        total = (1 + repeats) * sum(map(len, workload.groups.values()))
        with tqdm(total=total, desc=case.label, unit="prompt", leave=False, disable=None) as bar:
            for name in workload.groups:
                outputs[name] = [[] for _ in range(1 + repeats)]
                timings[name] = [Timing()] * repeats
            for name, batch in workload.batches(batch_size):
                done, steps = _step_by_step(llm, batch, params)
                outputs[name][0] += _tokens(done)
                traces[name] += [_trace(output, emitted) for output, emitted in zip(done, steps, strict=True)]
                bar.update(len(batch))
            for i in range(repeats):
                for name, batch in workload.batches(batch_size):
                    before = engine.steps_by_k.copy()
                    started = llm.generate(_requests(batch), first, use_tqdm=False)
                    done = llm.generate(_requests(batch), params, use_tqdm=False)
                    timings[name][i] += _timing(batch, started, done)
                    outputs[name][1 + i] += _tokens(done)
                    steps_by_k[name] += engine.steps_by_k - before
                    bar.update(len(batch))
        yield [
            Measurement(
                dataclasses.replace(case, prompts=name),
                timings[name],
                outputs[name],
                None if k is None else traces[name],
                steps_by_k[name],
            )
            for name in workload.groups
        ]


def _requests(batch: Sequence[list[int]]) -> list[dict[str, list[int]]]:
    return [{"prompt_token_ids": ids} for ids in batch]


def _tokens(outputs: Sequence[RequestOutput]) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in outputs]


def _step_by_step(
    llm: LLM, batch: Sequence[list[int]], params: SamplingParams
) -> tuple[list[RequestOutput], list[list[int]]]:
    """The outputs, and of each the number of tokens that every step gave."""
    steps: list[list[int]] = [[] for _ in batch]

    def observe(prompt: int, _: int, update: RequestUpdate) -> None:
        if update.token_ids:
            steps[prompt].append(len(update.token_ids))

    engine = llm.engine
    usual, engine.steps_per_dispatch = engine.steps_per_dispatch, 1  # an update is then one step's; nothing compiles
    try:
        return llm.generate(_requests(batch), params, use_tqdm=False, on_update=observe), steps
    finally:
        engine.steps_per_dispatch = usual


def _trace(output: RequestOutput, emitted: Sequence[int]) -> Trace:
    found = output.metrics.speculative_decoding
    return Trace.of(emitted, 0 if found is None else found.num_accepted_draft_tokens)


def _timing(batch: Sequence[list[int]], started: Sequence[RequestOutput], done: Sequence[RequestOutput]) -> Timing:
    metrics = [output.metrics for output in done]
    begun = [output.metrics for output in started]
    return Timing(
        # What came with the first look at the device is not counted, as the time it took is not.
        decode_tokens=sum(m.num_generation_tokens - m.num_first_tokens for m in metrics),
        decode_seconds=max(m.last_token_time or 0.0 for m in metrics) - min(m.first_token_time or 0.0 for m in metrics),
        prompt_tokens=sum(map(len, batch)),
        prefill_seconds=max(m.first_token_time or 0.0 for m in begun) - min(m.arrival_time for m in begun),
        first_token_seconds=sum(m.time_to_first_token or 0.0 for m in metrics),
        num_prompts=len(batch),
    )
