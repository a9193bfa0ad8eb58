"""``python -m pard_jax.bench generate``: methods side by side, on the same prompts and weights, at batch 1 by default.

Compiling and loading are left out. Prefill and decoding are timed apart: the time to the first token, and the rate of
the tokens after it. Each figure is the median over repeats.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import json
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tqdm import tqdm

OURS = ("plain", "pard", "draft_model", "ngram")
PEERS = ("transformers",)


@dataclasses.dataclass
class Result:
    """One method's figures. Rates are tokens a second, times seconds."""

    method: str
    dtype: str
    decode_tokens_per_second: float
    time_to_first_token: float
    num_tokens: int
    mean_acceptance_length: float | None = None
    draft_acceptance_rate: float | None = None
    acceptance_histogram: list[int] | None = None
    equal: bool | None = None  # its greedy tokens are those of the first method


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print; returns the exit status."""
    args = _parser().parse_args(argv)
    try:
        report = run(args)
        if args.json:
            _write(Path(args.json), report)
    except (ValueError, OSError, NotImplementedError) as e:
        print(f"error: {e}", file=sys.stderr)
        return 2
    _print(report)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m pard_jax.bench generate", description=__doc__)
    parser.add_argument("--model", required=True, help="checkpoint directory or hub id")
    parser.add_argument("--draft-model", help="for the methods pard and draft_model")
    parser.add_argument("--mask-token-id", type=int, help="for pard, where the draft's config.json names none")
    parser.add_argument("-k", "--num-speculative-tokens", type=int, default=8)
    parser.add_argument(
        "--methods",
        default="plain",
        help=f"comma-separated, of {', '.join(OURS + PEERS)}; transformers needs torch and runs float32 and bfloat16",
    )
    parser.add_argument("--prompts", help="JSONL file with `prompt` or `data` in each line, or text, a prompt a line")
    parser.add_argument("--limit", type=int, default=4, help="use the first so many prompts")
    parser.add_argument("--max-tokens", type=int, default=128, help="new tokens a prompt; EOS is ignored")
    parser.add_argument("--max-num-seqs", type=int, default=1)
    parser.add_argument("--max-model-len", type=int, default=None)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", help="also write the report to this file")
    return parser


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Measure every method asked for.

    Raises:
        ValueError, OSError: bad arguments, before anything is loaded.
    """
    methods = [m.strip() for m in args.methods.split(",") if m.strip()]
    if unknown := [m for m in methods if m not in OURS + PEERS]:
        raise ValueError(f"unknown method {unknown[0]!r}; choose of {', '.join(OURS + PEERS)}")
    for name in ("repeats", "limit", "max_tokens", "max_num_seqs"):
        if getattr(args, name) < 1:
            raise ValueError(f"--{name.replace('_', '-')} must be at least 1, got {getattr(args, name)}")
    if "transformers" in methods and importlib.util.find_spec("torch") is None:
        raise ValueError("the method transformers needs torch, which is not installed")
    if "transformers" in methods and args.max_num_seqs != 1:
        raise ValueError("the method transformers is measured at batch 1; leave --max-num-seqs at 1")
    if {"pard", "draft_model"} & set(methods) and not args.draft_model:
        raise ValueError("the methods pard and draft_model need --draft-model")

    from pard_jax.loading import resolve_checkpoint
    from pard_jax.tokenizer import load_tokenizer

    directory = resolve_checkpoint(args.model)
    tokenizer = load_tokenizer(directory)
    if tokenizer is None:
        raise ValueError(f"{directory} holds no tokenizer")
    texts = read_prompts(Path(args.prompts))[: args.limit] if args.prompts else ["Why is the sky blue?"]
    encode = tokenizer.encode
    if tokenizer.has_chat_template:
        prompts = [tokenizer.apply_chat_template([{"role": "user", "content": text}]) for text in texts]
    else:
        prompts = [encode(text) for text in texts]

    results: list[Result] = []
    tokens: list[list[int]] | None = None
    for method in methods:
        if method in PEERS:
            measured = [_measure_transformers(directory, prompts, args, dtype) for dtype in ("float32", "bfloat16")]
        else:
            measured = [_measure_ours(method, prompts, args)]
        for result, ids in measured:
            tokens = tokens or ids
            result.equal = ids == tokens
            results.append(result)
    return {
        "model": str(args.model),
        "num_prompts": len(prompts),
        "prompt_tokens": sum(map(len, prompts)),
        "max_tokens": args.max_tokens,
        "num_speculative_tokens": args.num_speculative_tokens,
        "max_num_seqs": args.max_num_seqs,
        "repeats": args.repeats,
        **_environment(),
        "results": [dataclasses.asdict(r) for r in results],
    }


def read_prompts(path: Path) -> list[str]:
    """Prompts of a JSONL file (``prompt`` or ``data``), or of a text file, one a line."""
    prompts = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        if not line.strip():
            continue
        if path.suffix != ".jsonl":
            prompts.append(line)
            continue
        try:
            row = json.loads(line)
            prompts.append(row["prompt"] if "prompt" in row else row["data"])
        except (json.JSONDecodeError, KeyError, TypeError):
            raise ValueError(f"{path}, line {number}: expected a JSON object with `prompt` or `data`") from None
    if not prompts:
        raise ValueError(f"{path} holds no prompt")
    return prompts


def _speculative(method: str, args: argparse.Namespace) -> dict[str, Any] | None:
    if method == "plain":
        return None
    if method == "ngram":
        return {"method": "ngram", "num_speculative_tokens": args.num_speculative_tokens}
    config = {"model": args.draft_model, "num_speculative_tokens": args.num_speculative_tokens}
    if method == "pard":
        config |= {"parallel_drafting": True}
        if args.mask_token_id is not None:
            config |= {"mask_token_id": args.mask_token_id}
    return config


def _measure_ours(method: str, prompts: list[list[int]], args: argparse.Namespace) -> tuple[Result, list[list[int]]]:
    from pard_jax.llm import LLM
    from pard_jax.sampling_params import SamplingParams

    llm = LLM(
        args.model,
        speculative_config=_speculative(method, args),
        max_model_len=args.max_model_len,
        max_num_seqs=args.max_num_seqs,
        dtype=args.dtype,
    )
    params = SamplingParams(temperature=0.0, max_tokens=args.max_tokens, ignore_eos=True)
    llm.engine.warm_up(max(map(len, prompts)) + args.max_tokens)
    requests = [{"prompt_token_ids": ids} for ids in prompts]
    rates, firsts, ids = [], [], []
    for _ in tqdm(range(args.repeats), desc=method, unit="run", leave=False):
        # One batch of slots after the other, so that a request's first token waits for nobody else's.
        outputs = []
        decoded, seconds = 0, 0.0
        for i in range(0, len(requests), args.max_num_seqs):
            batch = llm.generate(requests[i : i + args.max_num_seqs], params, use_tqdm=False)
            outputs += batch
            begin = min(o.metrics.first_token_time or 0.0 for o in batch)
            seconds += max(o.metrics.last_token_time or 0.0 for o in batch) - begin
            # What came with the first look at the device is not counted: its time is not either.
            decoded += sum(o.metrics.num_generation_tokens - o.metrics.num_first_tokens for o in batch)
        rates.append(decoded / seconds if seconds else float("nan"))
        firsts.append(statistics.fmean(o.metrics.time_to_first_token or 0.0 for o in outputs))
        ids = [o.outputs[0].token_ids for o in outputs]
    stats = llm.engine.acceptance
    speculates = method != "plain"
    return (
        Result(
            method=method,
            dtype=str(llm.settings.dtype),
            decode_tokens_per_second=statistics.median(rates),
            time_to_first_token=statistics.median(firsts),
            num_tokens=sum(map(len, ids)),
            mean_acceptance_length=stats.mean_acceptance_length if speculates else None,
            draft_acceptance_rate=stats.draft_acceptance_rate if speculates else None,
            acceptance_histogram=list(stats.acceptance_histogram) if speculates else None,
        ),
        ids,
    )


def _measure_transformers(
    directory: Path, prompts: list[list[int]], args: argparse.Namespace, dtype: str
) -> tuple[Result, list[list[int]]]:
    """``AutoModelForCausalLM.generate``, greedy, batch 1: the time to one token, and the rate of those after it."""
    import torch  # pyright: ignore[reportMissingImports]
    from transformers import AutoModelForCausalLM

    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=getattr(torch, dtype)).to(device).eval()

    def generate(ids: list[int], new_tokens: int) -> tuple[list[int], float]:
        inputs = torch.tensor([ids], device=device)
        start = time.perf_counter()
        with torch.inference_mode():
            out = model.generate(
                inputs,
                attention_mask=torch.ones_like(inputs),
                do_sample=False,
                max_new_tokens=new_tokens,
                min_new_tokens=new_tokens,
                pad_token_id=0,
            )
        out = out[0, len(ids) :].tolist()
        return out, time.perf_counter() - start

    generate(prompts[0], min(8, args.max_tokens))
    rates, firsts, ids = [], [], []
    for _ in tqdm(range(args.repeats), desc=f"transformers {dtype}", unit="run", leave=False):
        first = [generate(prompt, 1)[1] for prompt in prompts]
        whole = [generate(prompt, args.max_tokens) for prompt in prompts]
        seconds = sum(t for _, t in whole) - sum(first)
        rates.append(len(prompts) * (args.max_tokens - 1) / seconds)
        firsts.append(statistics.fmean(first))
        ids = [out for out, _ in whole]
    return (
        Result(
            method="transformers",
            dtype=dtype,
            decode_tokens_per_second=statistics.median(rates),
            time_to_first_token=statistics.median(firsts),
            num_tokens=sum(map(len, ids)),
        ),
        ids,
    )


def _environment() -> dict[str, Any]:
    import os
    import platform

    import jax

    device = jax.devices()[0]
    versions = {name: _version(name) for name in ("jax", "flax", "transformers", "torch")}
    return {
        "platform": device.platform,
        "device": device.device_kind,
        "cpu_cores": os.cpu_count(),
        "python": platform.python_version(),
        "versions": {name: version for name, version in versions.items() if version},
    }


def _version(package: str) -> str | None:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _write(path: Path, report: dict[str, Any]) -> None:
    beside = path.with_name(f".{path.name}.partial")
    beside.write_text(json.dumps(report, indent=2) + "\n")
    beside.replace(path)


def _print(report: dict[str, Any]) -> None:
    versions = ", ".join(f"{name} {version}" for name, version in report["versions"].items())
    print(
        f"{report['model']}: {report['num_prompts']} prompts ({report['prompt_tokens']} tokens), "
        f"{report['max_tokens']} new tokens each, greedy, batch {report['max_num_seqs']}, "
        f"K={report['num_speculative_tokens']}, median of {report['repeats']}"
    )
    print(f"{report['device']} ({report['platform']}), {report['cpu_cores']} CPU cores; {versions}")
    results = [Result(**r) for r in report["results"]]
    base = results[0].decode_tokens_per_second
    print(f"{'method':14} {'dtype':9} {'decode tok/s':>12} {'ratio':>6} {'first token s':>13} {'accepted':>8}  equal")
    for r in results:
        length = "-" if r.mean_acceptance_length is None else f"{r.mean_acceptance_length:.2f}"
        print(
            f"{r.method:14} {r.dtype:9} {r.decode_tokens_per_second:12.1f} {r.decode_tokens_per_second / base:6.2f} "
            f"{r.time_to_first_token:13.3f} {length:>8}  {'yes' if r.equal else 'no'}"
        )
