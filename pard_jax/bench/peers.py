"""Other people's decoding on the same weights, to compare with. Needs torch, which nothing else here does."""

from __future__ import annotations

import importlib.util
import statistics
import time
from pathlib import Path
from typing import Any

from tqdm import tqdm

from pard_jax.bench.result import Result

DTYPES = ("float32", "bfloat16")


def check_torch() -> None:
    """Refuse early where torch is missing.

    Raises:
        ValueError: it is.
    """
    if importlib.util.find_spec("torch") is None:
        raise ValueError("the method transformers needs torch, which is not installed; leave it out or install torch")


def transformers(
    directory: Path, prompts: list[list[int]], max_tokens: int, repeats: int, dtype: str
) -> tuple[Result, list[list[int]]]:
    """``AutoModelForCausalLM.generate``, greedy, one prompt at a time, on the GPU where torch has one.

    The first token's time is that of generating one token; the rate is that of the others.
    """
    import torch  # pyright: ignore[reportMissingImports]
    from transformers import AutoModelForCausalLM

    device = "cuda" if torch.cuda.is_available() else "cpu"
    model: Any = AutoModelForCausalLM.from_pretrained(directory, dtype=getattr(torch, dtype))
    model = model.to(device).eval()

    def generate(prompt: list[int], new_tokens: int) -> tuple[list[int], float]:
        inputs = torch.tensor([prompt], device=device)
        start = time.perf_counter()
        with torch.inference_mode():
            output = model.generate(
                inputs,
                attention_mask=torch.ones_like(inputs),
                do_sample=False,
                max_new_tokens=new_tokens,
                min_new_tokens=new_tokens,
                pad_token_id=0,
            )
        tokens = output[0, len(prompt) :].tolist()
        return tokens, time.perf_counter() - start

    generate(prompts[0], min(8, max_tokens))
    rates, waits, tokens = [], [], []
    for _ in tqdm(range(repeats), desc=f"transformers {dtype}", unit="run", leave=False, disable=None):
        first = [generate(prompt, 1)[1] for prompt in prompts]
        whole = [generate(prompt, max_tokens) for prompt in prompts]
        seconds = sum(t for _, t in whole) - sum(first)
        rates.append(len(prompts) * (max_tokens - 1) / seconds)
        waits.append(statistics.fmean(first))
        tokens = [out for out, _ in whole]
    return Result("transformers", dtype, statistics.median(rates), statistics.median(waits)), tokens
