"""``python -m pard_jax.synthesize``: a target model writes the conversations that its draft is trained on."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
from tqdm import tqdm

from pard_jax import SamplingParams, __version__, cli, report
from pard_jax.config import ModelConfig
from pard_jax.loading import Loaded, load_engine
from pard_jax.presets import resolve_target
from pard_jax.prompts import Prompt, encode_prompt, read_prompts
from pard_jax.synthesize.conversations import Magpie, Prompts, Sampling, Source, Synthesis
from pard_jax.synthesize.store import Store
from pard_jax.synthesize.turns import Turns, derive_turns
from pard_jax.tokenizer import Tokenizer, load_tokenizer
from pard_jax.utf8 import read_text

EPILOG = """\
examples:
  python -m pard_jax.synthesize --model models/smollm2 --num-samples 200000 --output train.jsonl --max-num-seqs 1024
  python -m pard_jax.synthesize --model models/smollm2 --prompts questions.jsonl --greedy-share 1 --output train.jsonl

Without --prompts the model writes the user's turns, too (Magpie): it is given its chat template up to where the user
speaks. The same command goes on with a file that is not complete; more --num-samples make a complete one longer.
Exit status: 0; 2 after an error; 130 after Ctrl-C, which loses nothing that was complete.
"""
_CHUNK = 64  # turns are short: a longer chunk would be padding for the most part


def main(argv: list[str] | None = None) -> int:
    """Run the command. Returns the exit status, see :func:`pard_jax.cli.run_command`."""
    return cli.run_command(lambda: _synthesize(_parser().parse_args(argv)), if_out_of_memory=cli.ENGINE_MEMORY)


def _parser() -> argparse.ArgumentParser:
    parser = cli.Parser(
        prog="python -m pard_jax.synthesize",
        description="Have a target model write conversations, to train its draft on what it says itself.",
        epilog=EPILOG,
    )
    parser.add_argument("--version", action="version", version=f"pard-jax {__version__}")
    add = parser.add_argument_group("samples").add_argument
    add("--output", required=True, metavar="FILE", help="JSON lines: token_ids, loss_ranges, messages")
    add("--num-samples", type=int, metavar="N",
        help="samples in the file at the end (default: with --prompts, as many as they give)")  # fmt: skip
    add("--seed", type=int, default=0, help="of all that is random (default: 0)")
    add("--system", metavar="TEXT", help="the system's turn (default: the chat template's own, if any)")
    add("--no-thinking", action="store_true", help="tell the chat template enable_thinking=False")
    add("--keep-cut-off", action="store_true", help="keep answers that reach --max-tokens before their end")
    add = parser.add_argument_group("user turns").add_argument
    add("--prompts", metavar="FILE",
        help='.jsonl, one object a line with "prompt", "data", "messages" or "prompt_token_ids"; or text, one prompt a '
        "line")  # fmt: skip
    add("--repeats-per-prompt", type=int, default=1, metavar="N", help="answers a prompt (default: 1)")
    add("--openers", metavar="FILE",
        help="text, one a line, that user turns begin with and the model goes on from; \\n in a line is a line break, "
        "lines that begin with # do not count")  # fmt: skip
    add("--opener-share", type=float, default=0.45, metavar="X", help="of the user turns that do (default: 0.45)")
    add("--user-temperature", type=float, default=1.0, metavar="T", help="of user turns (default: 1)")
    add("--user-min-p", type=float, default=0.05, metavar="P", help="of user turns (default: 0.05)")
    add("--user-max-tokens", type=int, default=80, metavar="N", help="behind the opener, if any (default: 80)")
    add = parser.add_argument_group("answers").add_argument
    add("--greedy-share", type=float, default=0.7, metavar="X", help="answered greedily; others sampled (default: 0.7)")
    add("--temperature", type=float, default=0.8, metavar="T", help="of sampled answers (default: 0.8)")
    add("--top-p", type=float, default=1.0, metavar="P", help="of sampled answers (default: 1, off)")
    add("--min-p", type=float, default=0.05, metavar="P", help="of sampled answers (default: 0.05)")
    add("--max-tokens", type=int, default=256, metavar="N", help="of an answer (default: 256)")
    cli.add_model_arguments(parser)
    cli.add_engine_arguments(parser, max_model_len="what the turns need", max_num_seqs="16 on a CPU, 512 elsewhere")
    return parser


def _synthesize(args: argparse.Namespace) -> None:
    # In the order of what a refusal costs: first all that needs no model, then no weights, then no compilation.
    _check(args)
    cli.engine_config(args)
    _sampling(args)
    openers = [] if args.openers is None else _read_openers(Path(args.openers))
    prompts = None if args.prompts is None else read_prompts([], args.prompts)

    _, about_device = cli.open_device()
    start = time.monotonic()
    directory = resolve_target(args.model, revision=args.revision)
    limit = ModelConfig.from_pretrained(directory).max_position_embeddings
    tokenizer = load_tokenizer(directory)
    source, turns = _source(args, tokenizer, prompts, openers)
    _size_engine(args, source, limit)
    with Store(Path(args.output), _settings(args, source)) as store:
        if store.kept:
            cli.say(f"going on     with {store.kept} samples of {args.output}")
        loaded = load_engine(directory, cli.engine_config(args), tokenizer=tokenizer)
        cli.say(about_device)
        cli.say(report.describe_settings(loaded.settings, args.max_num_seqs, args.tensor_parallel_size))
        cli.say(f"loaded       in {time.monotonic() - start:.1f} s")
        _run(args, loaded, source, turns, store)


def _check(args: argparse.Namespace) -> None:
    for name in ("num_samples", "repeats_per_prompt", "user_max_tokens"):
        if (value := getattr(args, name)) is not None and value < 1:
            raise ValueError(f"--{name.replace('_', '-')} must be at least 1, got {value}")
    for name in ("opener_share", "greedy_share"):
        if not 0 <= (value := getattr(args, name)) <= 1:
            raise ValueError(f"--{name.replace('_', '-')} must be a share from 0 to 1, got {value}")
    if args.seed < 0:
        raise ValueError(f"--seed must not be negative, got {args.seed}")
    if args.prompts is None and args.num_samples is None:
        raise ValueError("say with --num-samples how many samples to make, or give --prompts")
    if args.prompts is None and args.repeats_per_prompt != 1:
        raise ValueError("--repeats-per-prompt needs --prompts")
    if args.prompts is not None and args.openers is not None:
        raise ValueError("--openers begin user turns that the model writes, and --prompts brings whole ones")
    if args.greedy_share == 1 and args.repeats_per_prompt > 1:
        raise ValueError("--repeats-per-prompt would repeat the same greedy answers: choose a smaller --greedy-share")
    cli.check_writable(Path(args.output))


def _read_openers(path: Path) -> list[str]:
    lines = read_text(path).split("\n")
    # A space at the end would be a token of its own, which no model expects before a word.
    lines = [line.strip() for line in lines if not line.startswith("#")]
    openers = [line.replace("\\n", "\n") for line in lines if line]
    if not openers:
        raise ValueError(f"{path} holds no openers")
    return openers


def _source(
    args: argparse.Namespace, tokenizer: Tokenizer | None, prompts: Sequence[Prompt] | None, openers: Sequence[str]
) -> tuple[Source, Turns | None]:
    thinking = False if args.no_thinking else None
    if prompts is not None:
        encoded = [encode_prompt(p, tokenizer, system=args.system, enable_thinking=thinking) for p in prompts]
        chat = tokenizer is not None and tokenizer.has_chat_template
        messages = [_messages(p, args.system) if chat else None for p in prompts]
        return Prompts(list(zip(encoded, messages, strict=True)), args.repeats_per_prompt), None
    if tokenizer is None:
        raise ValueError(f"{args.model} holds no tokenizer, so no user turn can be opened; give --prompts")
    turns = derive_turns(tokenizer, system=args.system, enable_thinking=thinking)
    opener_ids = [tokenizer.encode(opener, add_special_tokens=False) for opener in openers]
    return Magpie(turns, args.system, opener_ids, args.opener_share if openers else 0.0), turns


def _messages(prompt: Prompt, system: str | None) -> list[dict[str, str]] | None:
    if prompt.kind == "ids":
        return None
    messages = prompt.given if prompt.kind == "messages" else [{"role": "user", "content": prompt.given}]
    return messages if system is None else [{"role": "system", "content": system}, *messages]


def _size_engine(args: argparse.Namespace, source: Source, limit: int) -> None:
    """Fill in the engine's flags that were not given; refuse turns that can never be so long."""
    whose, most = (
        ("the model's limit", limit) if args.max_model_len is None else ("--max-model-len", args.max_model_len)
    )
    for name in ("max_tokens", "user_max_tokens") if source.writes_user else ("max_tokens",):
        if (value := getattr(args, name)) >= most:
            raise ValueError(
                f"--{name.replace('_', '-')} {value} leaves no room for a prompt: {whose} is {most} tokens, prompt and "
                "answer together; lower it"
            )
    longest = source.longest_prompt(args.user_max_tokens) + args.max_tokens
    if longest > most:
        cli.say(f"note         answers end where prompt and answer are {most} tokens, {whose}")
    if args.max_model_len is None:
        args.max_model_len = min(longest, limit)
    if args.prefill_chunk_size is None:
        args.prefill_chunk_size = min(_CHUNK, args.max_model_len)
    if args.max_num_seqs is None:
        args.max_num_seqs = 16 if jax.default_backend() == "cpu" else 512


def _settings(args: argparse.Namespace, source: Source) -> dict[str, Any]:
    """All that the samples hang on; a file is gone on with only under the same. Files go in by their contents."""
    names = ["seed", "system", "no_thinking", "keep_cut_off", "greedy_share", "temperature", "top_p", "min_p",
             "max_tokens", "max_model_len", "revision", "dtype"]  # fmt: skip
    if source.writes_user:
        names += ["opener_share", "user_temperature", "user_min_p", "user_max_tokens"]
    settings = {"model": str(args.model)} | {name: getattr(args, name) for name in names}
    return settings | {"source": type(source).__name__, "source_sha256": source.digest()}


def _sampling(args: argparse.Namespace, end_ids: Sequence[int] = ()) -> Sampling:
    # Turns become text once they are whole: token by token, it would bound the speed.
    common: dict[str, Any] = {"stop_token_ids": list(end_ids), "detokenize": False}
    answer = {"max_tokens": args.max_tokens} | common
    return Sampling(
        seed=args.seed,
        user=SamplingParams(
            temperature=args.user_temperature, min_p=args.user_min_p, max_tokens=args.user_max_tokens, **common
        ),
        greedy=SamplingParams(temperature=0.0, **answer),
        sampled=SamplingParams(temperature=args.temperature, top_p=args.top_p, min_p=args.min_p, **answer),
        greedy_share=args.greedy_share,
        keep_cut_off=args.keep_cut_off,
    )


def _run(args: argparse.Namespace, loaded: Loaded, source: Source, turns: Turns | None, store: Store) -> None:
    engine = loaded.engine
    cli.say("compiling    ...")
    start = time.monotonic()
    engine.warm_up()
    cli.say(f"compiled     in {time.monotonic() - start:.1f} s")

    sampling = _sampling(args, () if turns is None else turns.end_ids)
    synthesis = Synthesis(
        engine, loaded.tokenizer, source, sampling, store,
        num_rows=args.max_num_seqs, closing=() if turns is None else turns.closing,
    )  # fmt: skip
    wanted = args.num_samples or source.total or 0
    begun, start = store.kept, time.monotonic()
    interval = 0.5 if sys.stderr.isatty() else 30.0
    with tqdm(total=wanted, initial=begun, unit="sample", mininterval=interval, file=sys.stderr) as bar:

        def progress() -> None:
            rate = synthesis.num_tokens / max(time.monotonic() - start, 1e-9)
            bar.set_postfix_str(f"{rate:,.0f} tok/s, {sum(store.dropped.values())} dropped", refresh=False)
            bar.update(store.kept - bar.n)

        synthesis.run(wanted, progress)
    seconds = time.monotonic() - start
    dropped = ", ".join(f"{count} {reason}" for reason, count in store.dropped.most_common())
    cli.say(f"samples      {store.kept} in {args.output}, {store.kept - begun} of them new")
    cli.say(f"dropped      {sum(store.dropped.values())}{f' ({dropped})' if dropped else ''}")
    cli.say(f"tokens       {store.num_tokens} in the samples' answers")
    cli.say(
        f"speed        {synthesis.num_tokens} tokens written in {seconds:.1f} s: "
        f"{synthesis.num_tokens / max(seconds, 1e-9):,.0f} tokens/s"
    )


if __name__ == "__main__":
    sys.exit(main())
