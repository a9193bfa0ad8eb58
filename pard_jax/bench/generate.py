"""``python -m pard_jax.bench generate``: methods side by side, on the same prompts and weights.

Loading, compiling and a first pass are left out. Prefill and decoding are timed apart: the time to the first token, and
the rate of the tokens after it. Each figure is the median over repeats. Greedy; plain decoding comes first, once for
each batch and context: it is what the others are compared with.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path

from pard_jax import cli, report
from pard_jax.bench import ours, peers, plot
from pard_jax.bench.flags import numbers
from pard_jax.bench.outcome import Outcome
from pard_jax.bench.result import Measurement
from pard_jax.bench.workload import Workload, add_prompt_arguments, encode_groups, read_groups
from pard_jax.config import EngineConfig, ModelConfig
from pard_jax.presets import DEFAULT, fill_preset, resolve_draft, resolve_target
from pard_jax.tokenizer import load_tokenizer

METHODS = (*ours.METHODS, *peers.METHODS)
UNDRAFTED = ("plain", "transformers")  # K is nothing to them
DRAFTED = ("pard", "draft_model", "transformers-assisted")  # by a model
# Lengths are rounded up to a multiple of it, so that similar runs have equal programs, which JAX can keep on disk.
_LENGTH_STEP = 256
_DEFAULT_K = 8
MEMORY = "lower --max-num-seqs, --context or --max-tokens"  # what to do when it runs out


def measure(argv: Sequence[str]) -> None:
    """Measure every method asked for, print a table, and write the report and the figure where they are wanted."""
    args = _parser().parse_args(argv)
    _check(args)
    prompts = read_groups(args.texts, args.prompts, args.limit)
    report.start_jax()
    directory = resolve_target(args.model)
    config = ModelConfig.from_pretrained(directory)
    draft = resolve_draft(args.draft_model, directory).absolute() if {*args.methods} & {*DRAFTED} else None
    _check_peers(args, directory, config, draft)
    tokenizer = load_tokenizer(directory)
    workloads = encode_groups(prompts, tokenizer, args.context or [None], args)
    args.max_model_len = _max_model_len(args, max(w.longest for w in workloads), config.max_position_embeddings)
    speculations = [
        (method, ours.speculative_config(method, k, draft, args.mask_token_id))
        for method in args.methods
        if method in ours.METHODS
        for k in args.num_speculative_tokens[: 1 if method in UNDRAFTED else None]
    ]
    engine = EngineConfig(max_model_len=args.max_model_len, dtype=args.dtype, quantization=args.quantization)
    parts = ours.load(directory, engine, args.max_num_seqs, [s for _, s in speculations], tokenizer)

    outcome = Outcome(args, workloads)
    for batch in args.max_num_seqs:
        for method, speculative in speculations:
            configured = parts.configured(speculative, batch)
            passes = {"repeats": args.repeats, "ignore_eos": args.ignore_eos}
            for measured in ours.measure(configured, method, workloads, args.max_tokens, **passes):
                outcome.add(measured)
    for measured in _peers(args, directory, draft, () if args.ignore_eos else parts.eos_token_ids, workloads):
        outcome.add(measured)
    outcome.finish()


def _parser() -> argparse.ArgumentParser:
    parser = cli.Parser(prog="python -m pard_jax.bench generate", description=__doc__)
    add = add_prompt_arguments(parser, files="several are reported one by one and in total")
    add("--context", type=numbers, metavar="N,...",
        help="make every prompt N tokens long: its tokens are repeated, and cut at the beginning; n-grams profit from "
        "the repetition (default: as they are)")  # fmt: skip
    add = parser.add_argument_group("models").add_argument
    add("--model", default=DEFAULT, help=f"checkpoint directory, hub id or preset (default: {DEFAULT})")
    add("--draft-model", metavar="MODEL",
        help=f"of the methods {', '.join(DRAFTED)} (default: the preset's, where --model is one)")  # fmt: skip
    add("--mask-token-id", type=int, metavar="ID", help="of pard, where the draft's config.json names none")
    add("--dtype", default="auto", help="of our methods (default: auto)")
    cli.add_quantization_argument(add)
    add("--transformers-dtypes", type=_names, default=["float32", "bfloat16"], metavar="DTYPE,...",
        help="of transformers' methods, each in all of them (default: float32,bfloat16)")  # fmt: skip
    add = parser.add_argument_group("measurement").add_argument
    add("--methods", type=_names, default=["plain"], metavar="METHOD,...",
        help=f"of {', '.join(METHODS)} (default: plain, which is always measured)")  # fmt: skip
    add("-k", "--num-speculative-tokens", type=numbers, metavar="K,...",
        help=f"tokens drafted a step, each in turn (default: the preset's, or {_DEFAULT_K})")  # fmt: skip
    add("--max-num-seqs", type=numbers, default=[1], metavar="N,...",
        help="requests at once, each in turn; transformers' methods run at 1 alone (default: 1)")  # fmt: skip
    add("--max-tokens", type=int, default=128, metavar="N", help="new tokens a prompt (default: 128)")
    add("--ignore-eos", action=argparse.BooleanOptionalAction, default=True,
        help="go on past the end-of-sequence token, so that all outputs are equally long (default: go on)")  # fmt: skip
    add("--max-model-len", type=int, metavar="N", help="(default: what the prompts and --max-tokens need)")
    add("--repeats", type=int, default=3, metavar="N", help="timed passes of each method (default: 3)")
    add = parser.add_argument_group("output").add_argument
    add("--output", metavar="FILE", help="also write the report as JSON, anew after every method")
    add("--plot", metavar="FILE", help=f"also draw a figure ({', '.join(plot.FORMATS)}); needs matplotlib")
    return parser


def _names(text: str) -> list[str]:
    return list(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))


def _check(args: argparse.Namespace) -> None:
    """Refuse what no model is needed to refuse. Puts plain decoding first, and fills in what a preset brings."""
    for method in args.methods:
        if method not in METHODS:
            raise ValueError(f"unknown method {method!r}; choose of {', '.join(METHODS)}")
    args.methods = list(dict.fromkeys(["plain", *args.methods]))
    for name in ("max_tokens", "repeats"):
        if getattr(args, name) < 1:
            raise ValueError(f"--{name.replace('_', '-')} must be at least 1, got {getattr(args, name)}")
    fill_preset(args)
    if not isinstance(k := args.num_speculative_tokens, list):  # none was given
        args.num_speculative_tokens = [k or _DEFAULT_K]
    if (drafted := [m for m in args.methods if m in DRAFTED]) and args.draft_model is None:
        raise ValueError(f"{', '.join(drafted)} need{'s' * (len(drafted) == 1)} --draft-model")
    if asked := [m for m in args.methods if m in peers.METHODS]:
        peers.check_torch()
        if 1 not in args.max_num_seqs:
            raise ValueError(f"{asked[0]} is measured one prompt at a time; let --max-num-seqs hold 1")
        for dtype in args.transformers_dtypes:
            if dtype not in peers.DTYPES:
                raise ValueError(
                    f"unknown dtype {dtype!r} of --transformers-dtypes; choose of {', '.join(peers.DTYPES)}"
                )
        if not args.transformers_dtypes:
            raise ValueError("--transformers-dtypes names none")
    if args.output is not None:
        cli.check_writable(Path(args.output))
    if args.plot is not None:
        plot.check(Path(args.plot))


def _check_peers(args: argparse.Namespace, directory: Path, config: ModelConfig, draft: Path | None) -> None:
    if any(method in peers.METHODS for method in args.methods):
        peers.check_checkpoint(directory)
    if "transformers-assisted" in args.methods and draft is not None:
        peers.check_checkpoint(draft)
        peers.check_same_size(config.vocab_size, ModelConfig.from_pretrained(draft).vocab_size)


def _max_model_len(args: argparse.Namespace, longest: int, limit: int) -> int:
    needed = longest + args.max_tokens
    if needed > (most := args.max_model_len or limit):
        whose = "--max-model-len" if args.max_model_len else "the model's limit"
        raise ValueError(
            f"the longest prompt has {longest} tokens, and with --max-tokens {args.max_tokens} it needs {needed}, but "
            f"{whose} is {most}; shorten the one or the other"
        )
    return args.max_model_len or min(-(-needed // _LENGTH_STEP) * _LENGTH_STEP, limit)


def _peers(
    args: argparse.Namespace, directory: Path, draft: Path | None, eos: Sequence[int], workloads: list[Workload]
) -> Iterator[list[Measurement]]:
    methods = [method for method in args.methods if method in peers.METHODS]
    draft = draft if "transformers-assisted" in methods else None
    for dtype in args.transformers_dtypes if methods else ():
        peer = peers.Peer(directory, draft, dtype, eos)
        for method in methods:
            for k in [None] if method in UNDRAFTED else args.num_speculative_tokens:
                yield from peer.measure(method, k, workloads, args.max_tokens, args.repeats)
