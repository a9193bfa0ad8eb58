"""Other people's decoding on the same weights, to compare with: transformers, plain, assisted by the same draft, and
with its own prompt look-up. Needs torch, which nothing else here does.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from tqdm import tqdm

from pard_jax.bench.acceptance import Trace
from pard_jax.bench.result import Case, Measurement, Timing
from pard_jax.bench.workload import Workload

METHODS = ("transformers", "transformers-assisted", "transformers-ngram")
DTYPES = ("float32", "bfloat16", "float16")


def check_torch() -> None:
    """Refuse early where torch is missing.

    Raises:
        ValueError: it is.
    """
    if importlib.util.find_spec("torch") is None:
        raise ValueError("the methods of transformers need torch, which is not installed; leave them out or install it")


def check_checkpoint(directory: Path) -> None:
    """Refuse a checkpoint that transformers cannot read.

    Raises:
        ValueError: it has no safetensors.
    """
    if not any(directory.glob("*.safetensors")):
        raise ValueError(f"transformers reads safetensors, and {directory} holds none; leave its methods out")


def check_same_size(target: int, draft: int) -> None:
    """Refuse a pair whose vocabularies are padded differently, which transformers takes for different tokenizers.

    Raises:
        ValueError: the two sizes differ.
    """
    if target != draft:
        raise ValueError(
            f"transformers-assisted needs a target and a draft of equal vocab_size, got {target} and {draft}; "
            "leave it out"
        )


@dataclasses.dataclass(frozen=True)
class _Run:
    """One prompt's output, with the tokens of each step and when they came."""

    tokens: list[int]
    emitted: list[int]
    first_seconds: float  # until the first step's tokens were there
    seconds: float


class Peer:
    """A target in torch, and where a draft is given, that one, too; on the GPU where torch has one.

    Args:
        dtype: of both: "float32", "bfloat16" or "float16".
        eos_token_ids: what ends an output; empty to go on past it.
    """

    def __init__(self, directory: Path, draft: Path | None, dtype: str, eos_token_ids: Sequence[int]) -> None:
        import torch  # pyright: ignore[reportMissingImports]

        self.dtype = dtype
        self._torch = torch
        self._device = "cuda" if torch.cuda.is_available() else "cpu"
        # None of the checkpoint's own defaults: greedy, and ending where the other methods end.
        self._settings: dict[str, Any] = {
            "do_sample": False,
            "pad_token_id": 0,
            "eos_token_id": list(eos_token_ids) or None,
        }
        self._target = self._load(directory)
        self._draft = None if draft is None else self._load(draft)

    def _load(self, directory: Path) -> Any:
        from transformers import AutoModelForCausalLM, GenerationConfig

        model: Any = AutoModelForCausalLM.from_pretrained(directory, dtype=getattr(self._torch, self.dtype))
        model.generation_config = GenerationConfig(**self._settings)
        return model.to(self._device).eval()

    def measure(
        self, method: str, k: int | None, workloads: Sequence[Workload], max_tokens: int, repeats: int
    ) -> Iterator[list[Measurement]]:
        """Run each workload, a prompt at a time; one measurement a group of prompts."""
        keywords = self._keywords(method, k)
        for workload in workloads:
            case = Case("", method, self.dtype, k, 1, workload.context)
            self._run(next(iter(workload.groups.values()))[0], min(8, max_tokens), keywords)
            measured = []
            total = repeats * sum(map(len, workload.groups.values()))
            desc = f"{case.label}, {self.dtype}"
            with tqdm(total=total, desc=desc, unit="prompt", leave=False, disable=None) as bar:
                for name, prompts in workload.groups.items():
                    timings, outputs, runs = [], [], []
                    for _ in range(repeats):
                        runs = []
                        for prompt in prompts:
                            runs.append(self._run(prompt, max_tokens, keywords))
                            bar.update()
                        pairs = zip(prompts, runs, strict=True)
                        timings.append(sum((_timing(prompt, run) for prompt, run in pairs), Timing()))
                        outputs.append([run.tokens for run in runs])
                    traces = None if k is None else [Trace.of(run.emitted) for run in runs]
                    measured.append(Measurement(dataclasses.replace(case, prompts=name), timings, outputs, traces))
            yield measured

    def _keywords(self, method: str, k: int | None) -> dict[str, Any]:
        from transformers import GenerationConfig

        if method == "transformers-ngram":
            return {"prompt_lookup_num_tokens": k}
        if method != "transformers-assisted":
            return {}
        assert self._draft is not None
        # K tokens at every step, as elsewhere: by default, the number follows the draft's luck and its confidence.
        self._draft.generation_config = GenerationConfig(
            **self._settings,
            num_assistant_tokens=k,
            num_assistant_tokens_schedule="constant",
            assistant_confidence_threshold=0.0,
        )
        return {"assistant_model": self._draft}

    def _run(self, prompt: list[int], max_tokens: int, keywords: dict[str, Any]) -> _Run:
        inputs = self._torch.tensor([prompt], device=self._device)
        clock = _Clock()
        start = time.perf_counter()
        with self._torch.inference_mode():
            output = self._target.generate(
                inputs,
                attention_mask=self._torch.ones_like(inputs),
                max_new_tokens=max_tokens,
                streamer=clock,
                **keywords,
            )
        tokens = output[0, len(prompt) :].tolist()
        return _Run(tokens, clock.counts[1:], clock.times[1] - start, time.perf_counter() - start)


class _Clock:
    """A streamer that notes how many tokens came when; the prompt comes first."""

    def __init__(self) -> None:
        self.counts: list[int] = []
        self.times: list[float] = []

    def put(self, value: Any) -> None:
        self.counts.append(value.numel())
        self.times.append(time.perf_counter())

    def end(self) -> None:
        """Nothing is held back."""


def _timing(prompt: list[int], run: _Run) -> Timing:
    return Timing(
        decode_tokens=len(run.tokens) - run.emitted[0],
        decode_seconds=run.seconds - run.first_seconds,
        prompt_tokens=len(prompt),
        prefill_seconds=run.first_seconds,
        first_token_seconds=run.first_seconds,
        num_prompts=1,
    )
