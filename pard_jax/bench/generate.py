"""``python -m pard_jax.bench generate``: methods side by side, on the same prompts and weights.

Loading and compiling are left out. Prefill and decoding are timed apart: the time to the first token, and the rate of
the tokens after it. Each figure is the median over repeats.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.metadata
import json
import os
import platform
import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
from tqdm import tqdm

from pard_jax import LLM, SamplingParams, cli, report
from pard_jax.bench import peers
from pard_jax.bench.result import Result
from pard_jax.prompts import encode_prompt, read_prompts
from pard_jax.tokenizer import load_tokenizer
from pard_jax.weights import resolve_checkpoint

OURS = ("plain", "pard", "draft_model", "ngram")
METHODS = (*OURS, "transformers")
PACKAGES = ("jax", "flax", "transformers", "torch")


def measure(argv: Sequence[str]) -> None:
    """Measure every method asked for, print a table, and write the report where one is wanted."""
    args = _parser().parse_args(argv)
    methods = _check(args)
    report.start_jax()
    directory = resolve_checkpoint(args.model)
    tokenizer = load_tokenizer(directory)
    prompts = [encode_prompt(p, tokenizer) for p in read_prompts(args.texts, args.prompts, args.limit)]

    outcome: dict[str, Any] = {
        "settings": {key: value for key, value in vars(args).items() if key != "texts"},
        "num_prompts": len(prompts),
        "prompt_tokens": sum(map(len, prompts)),
        "environment": _environment(),
    }
    _print_head(outcome)
    results: list[Result] = []
    tokens: list[list[int]] = []
    for result, ids in _runs(methods, directory, prompts, args):
        tokens = tokens or ids
        results.append(dataclasses.replace(result, equal=ids == tokens))
        _print_row(results[-1], results[0])
    if args.output is not None:
        outcome["results"] = [dataclasses.asdict(result) for result in results]
        cli.write_whole(Path(args.output), json.dumps(outcome, indent=2) + "\n")


def _parser() -> argparse.ArgumentParser:
    parser = cli.Parser(prog="python -m pard_jax.bench generate", description=__doc__)
    add = parser.add_argument
    add("texts", nargs="*", metavar="PROMPT", help='prompts; "-" for stdin')
    add("--prompts", metavar="FILE", help="text, a prompt a line, or .jsonl as pard_jax.generate takes it")
    add("--limit", type=int, metavar="N", help="the first N prompts of the file")
    add("--model", required=True, help="checkpoint directory or hub id")
    add("--draft-model", metavar="MODEL", help="of the methods pard and draft_model")
    add("--mask-token-id", type=int, metavar="ID", help="of pard, where the draft's config.json names none")
    add("-k", "--num-speculative-tokens", type=int, default=8, metavar="K")
    add("--methods", default="plain", help=f"comma-separated, of {', '.join(METHODS)} (default: plain)")
    add("--max-tokens", type=int, default=128, metavar="N", help="new tokens a prompt, EOS ignored (default: 128)")
    add("--max-num-seqs", type=int, default=1, metavar="N", help="requests at once (default: 1)")
    add("--max-model-len", type=int, metavar="N")
    add("--dtype", default="auto", help="of our methods; transformers runs in float32 and in bfloat16")
    add("--repeats", type=int, default=3, metavar="N", help="runs of each method (default: 3)")
    add("--output", metavar="FILE", help="also write the report as JSON")
    return parser


def _check(args: argparse.Namespace) -> list[str]:
    """The methods; refuses what cannot be measured, before anything is loaded."""
    methods = [method.strip() for method in args.methods.split(",") if method.strip()]
    for method in methods:
        if method not in METHODS:
            raise ValueError(f"unknown method {method!r}; choose of {', '.join(METHODS)}")
    for name in ("max_tokens", "max_num_seqs", "repeats"):
        if getattr(args, name) < 1:
            raise ValueError(f"--{name.replace('_', '-')} must be at least 1, got {getattr(args, name)}")
    if {"pard", "draft_model"} & {*methods} and args.draft_model is None:
        raise ValueError("the methods pard and draft_model need --draft-model")
    if "transformers" in methods:
        peers.check_torch()
        if args.max_num_seqs != 1:
            raise ValueError("transformers is measured one prompt at a time; leave --max-num-seqs at 1")
    if args.output is not None:
        cli.check_writable(Path(args.output))
    return methods


def _speculative_config(method: str, args: argparse.Namespace) -> dict[str, Any] | None:
    if method == "plain":
        return None
    config: dict[str, Any] = {"num_speculative_tokens": args.num_speculative_tokens}
    if method == "ngram":
        return config | {"method": "ngram"}
    config |= {"model": args.draft_model, "method": "draft_model"}
    return config if method == "draft_model" else config | {
        "parallel_drafting": True,
        "mask_token_id": args.mask_token_id,
    }  # fmt: skip


def _runs(
    methods: list[str], directory: Path, prompts: list[list[int]], args: argparse.Namespace
) -> Iterator[tuple[Result, list[list[int]]]]:
    """Each method's figures and tokens, as they come."""
    for method in methods:
        if method == "transformers":
            for dtype in peers.DTYPES:
                yield peers.transformers(directory, prompts, args.max_tokens, args.repeats, dtype)
        else:
            yield _ours(method, prompts, args)


def _ours(method: str, prompts: list[list[int]], args: argparse.Namespace) -> tuple[Result, list[list[int]]]:
    llm = LLM(
        args.model,
        speculative_config=_speculative_config(method, args),
        max_model_len=args.max_model_len,
        max_num_seqs=args.max_num_seqs,
        dtype=args.dtype,
    )
    llm.engine.warm_up(max(map(len, prompts)) + args.max_tokens)
    params = SamplingParams(temperature=0.0, max_tokens=args.max_tokens, ignore_eos=True)
    requests = [{"prompt_token_ids": ids} for ids in prompts]
    rates, waits, ids = [], [], []
    for _ in tqdm(range(args.repeats), desc=method, unit="run", leave=False, disable=None):
        outputs, decoded, seconds = [], 0, 0.0
        # One batch of slots after the other, so that no request's first token waits for another request's end.
        for i in range(0, len(requests), args.max_num_seqs):
            batch = llm.generate(requests[i : i + args.max_num_seqs], params, use_tqdm=False)
            metrics = [output.metrics for output in batch]
            seconds += max(m.last_token_time or 0.0 for m in metrics) - min(m.first_token_time or 0.0 for m in metrics)
            # What came with the first look at the device is not counted, as the time it took is not.
            decoded += sum(m.num_generation_tokens - m.num_first_tokens for m in metrics)
            outputs += batch
        rates.append(decoded / seconds if seconds > 0 else float("nan"))
        waits.append(statistics.fmean(output.metrics.time_to_first_token or 0.0 for output in outputs))
        ids = [output.outputs[0].token_ids for output in outputs]
    stats = llm.engine.acceptance
    result = Result(method, llm.settings.dtype.name, statistics.median(rates), statistics.median(waits))
    if method != "plain":
        result = dataclasses.replace(
            result,
            mean_acceptance_length=stats.mean_acceptance_length,
            per_position_acceptance_rates=stats.per_position_acceptance_rates,
            acceptance_histogram=list(stats.acceptance_histogram),
        )
    return result, ids


def _environment() -> dict[str, Any]:
    device = jax.devices()[0]
    versions = {}
    for package in PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return {
        "platform": device.platform,
        "device": device.device_kind,
        "cpu_cores": os.cpu_count(),
        "python": platform.python_version(),
        "versions": versions,
    }


def _print_head(outcome: dict[str, Any]) -> None:
    settings, environment = outcome["settings"], outcome["environment"]
    print(
        f"{settings['model']}: {outcome['num_prompts']} prompt(s), {outcome['prompt_tokens']} tokens, "
        f"{settings['max_tokens']} new tokens each, greedy, batch {settings['max_num_seqs']}, "
        f"K={settings['num_speculative_tokens']}, median of {settings['repeats']}"
    )
    versions = ", ".join(f"{name} {version}" for name, version in environment["versions"].items())
    print(f"{environment['platform']} ({environment['device']}), {environment['cpu_cores']} CPU cores; {versions}\n")
    print(
        f"{'method':14} {'dtype':9} {'decode tok/s':>12} {'ratio':>6} {'first token':>12} {'accepted':>9}  tokens",
        flush=True,
    )


def _print_row(r: Result, base: Result) -> None:
    length = "-" if r.mean_acceptance_length is None else f"{r.mean_acceptance_length:.2f}"
    ratio = r.decode_tokens_per_second / base.decode_tokens_per_second
    print(
        f"{r.method:14} {r.dtype:9} {r.decode_tokens_per_second:12.1f} {ratio:6.2f} {r.time_to_first_token:10.3f} s "
        f"{length:>9}  {'equal' if r.equal else 'differ'}",
        flush=True,
    )
