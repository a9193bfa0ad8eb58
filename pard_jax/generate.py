"""``python -m pard_jax.generate``: complete prompts from a command line, a file or stdin, and say how fast it went."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pard_jax import LLM, SamplingParams, __version__, cli, compilation_cache, report
from pard_jax.blocks import BlockRecorder, ansi_block, histogram, legend, marked_block
from pard_jax.config import ModelConfig, SpeculativeConfig
from pard_jax.engine.engine import Engine
from pard_jax.engine.request import RequestUpdate
from pard_jax.llm import OnUpdate
from pard_jax.loading import load_engine
from pard_jax.presets import fill_preset, resolve_target
from pard_jax.prompts import Prompt, encode_prompt, read_prompts
from pard_jax.tokenizer import load_tokenizer

EXAMPLES = """\
examples:
  python -m pard_jax.generate "What is the capital of France?"
  python -m pard_jax.generate --model smollm2 --show-blocks "Name three primary colours."
  python -m pard_jax.generate --model Qwen/Qwen3-4B --draft-model amd/PARD-Qwen3-0.6B -k 12 "Why is the sky blue?"
  python -m pard_jax.generate --model models/smollm2 -k 4 --raw --compare "def add(a, b):"
  python -m pard_jax.generate --model Qwen/Qwen3-0.6B --prompts questions.jsonl --limit 20 --json > answers.jsonl
  git diff | python -m pard_jax.generate --model Qwen/Qwen3-4B --system "Write a commit message." -

Text goes to stdout, everything else to stderr. Exit status: 0; 2 after an error; 130 after Ctrl-C.
"""
_MOST_SLOTS = 8
# Lengths are rounded up to a multiple of it, so that similar runs have equal programs, which are kept on disk.
_LENGTH_STEP = 256


def main(argv: list[str] | None = None) -> int:
    """Run the command. Returns the exit status, see :func:`pard_jax.cli.run_command`."""
    return cli.run_command(
        lambda: _generate(_parse(sys.argv[1:] if argv is None else argv)), if_out_of_memory=cli.ENGINE_MEMORY
    )


def _parse(argv: list[str]) -> argparse.Namespace:
    # Apart, because argparse takes no "--" where prompts and flags may be mixed.
    end = argv.index("--") if "--" in argv else len(argv)
    args = _parser().parse_intermixed_args(argv[:end])
    args.texts = [*args.texts, *argv[end + 1 :]]
    return args


def _parser() -> argparse.ArgumentParser:
    parser = cli.Parser(
        prog="python -m pard_jax.generate",
        usage="%(prog)s [--model MODEL] [options] [PROMPT ...]",
        description="Complete prompts with speculative decoding; the output is the target model's own.",
        epilog=EXAMPLES,
    )
    parser.add_argument("--version", action="version", version=f"pard-jax {__version__}")
    add = parser.add_argument_group("prompts").add_argument
    add(
        "texts",
        nargs="*",
        metavar="PROMPT",
        help='a prompt, or "-" for all of stdin (the default where it is no terminal); what follows "--" is a prompt',
    )
    add("--prompts", metavar="FILE",
        help='text, one prompt a line; or .jsonl, one object a line with "prompt", "data", "messages" or '
        '"prompt_token_ids"; "-" for lines of text on stdin')  # fmt: skip
    add("--limit", type=int, metavar="N", help="the first N prompts of the file")
    add("--raw", action="store_true", help="complete the text as it stands, without the chat template")
    add("--system", metavar="TEXT", help="the system's turn, in front of every prompt")
    add("--no-thinking", action="store_true", help="tell the chat template enable_thinking=False")
    add = parser.add_argument_group("output").add_argument
    add("--stream", action="store_true", help="write text as it comes (the default on a terminal)")
    add("--json", action="store_true", help="one JSON object a completion on stdout, and nothing else there")
    add("--output", metavar="FILE", help="write these JSON objects to a file, which appears whole or not at all")
    add("--show-blocks", action="store_true",
        help="of one completion: mark the tokens that each step kept, accepted drafts apart from the target's own "
        "token; in colours on a terminal (NO_COLOR and FORCE_COLOR decide otherwise), else in brackets")  # fmt: skip
    add("--compare", action="store_true", help="run without speculation, too: the speed-up, and whether tokens agree")
    cli.add_model_arguments(parser)
    cli.add_speculation_arguments(parser)
    cli.add_sampling_arguments(parser)
    cli.add_engine_arguments(
        parser,
        max_model_len="what the prompts and --max-tokens need",
        max_num_seqs=f"as many as there are completions, at most {_MOST_SLOTS}",
    )
    return parser


def _generate(args: argparse.Namespace) -> None:
    # In the order of what a refusal costs: first all that needs no model, then no weights, then no compilation.
    params = cli.sampling_params(args)
    fill_preset(args)
    speculation = cli.speculative_config(args)
    if args.compare and speculation is None:
        raise ValueError("--compare has nothing to compare: give a draft with --draft-model, or -k for n-grams")
    if params.logprobs is not None and not args.json and args.output is None:
        raise ValueError("--logprobs are part of the JSON only: add --json or --output FILE")
    if args.json and args.stream:
        raise ValueError("--json writes whole objects, which --stream contradicts; choose one")
    if args.show_blocks:
        _check_blocks(args)
    cli.engine_config(args)
    prompts = read_prompts(args.texts, args.prompts, args.limit)
    if args.show_blocks and len(prompts) * params.n > 1:
        raise ValueError(
            f"--show-blocks shows one completion, not {len(prompts) * params.n}; give one prompt (--limit 1)"
        )
    if args.output is not None:
        cli.check_writable(Path(args.output))

    llm, encoded, longest = _load(args, prompts, params, speculation)
    # Every completion is a request of its own, so that each has times and acceptance of its own.
    requests = [{"prompt_token_ids": ids} for ids in encoded for _ in range(params.n)]
    children = [params.child(i) for _ in prompts for i in range(params.n)]
    printer = None
    if args.show_blocks:
        coloured = cli.in_colour(sys.stdout)
        printer = BlockPrinter(llm, params, coloured=coloured)
        cli.say(f"blocks       {legend(coloured=coloured, painted=cli.in_colour(sys.stderr))}")
    elif not args.json:
        stream = args.stream or sys.stdout.isatty()
        printer = TextPrinter(_titles(prompts, params.n), stream=stream, as_ids=not llm.has_tokenizer)
    settings = llm.settings
    run, baseline = _timed(llm, requests, children, longest, printer), None
    if isinstance(printer, BlockPrinter):
        printer.finish()
    cli.say(report.summarize(run, settings))
    if args.compare:
        llm.disable_speculation()
        _start_compiling(llm.engine, "plain", longest)
        baseline = _timed(llm, requests, children, longest, None)
        cli.say(report.compare_runs(run, baseline, greedy=params.greedy, dtype=settings.dtype.name))

    lines = []
    for i, output in enumerate(run.outputs):
        record = report.completion_record(
            prompts[i // params.n].given,
            output,
            settings,
            index=i % params.n if params.n > 1 else None,
            plain=None if baseline is None else baseline.outputs[i],
            greedy=params.greedy,
        )
        lines.append(json.dumps(record) + "\n")
    if args.output is not None:
        cli.write_whole(Path(args.output), "".join(lines))
        cli.say(f"wrote        {args.output}")
    if args.json:
        sys.stdout.writelines(lines)


def _check_blocks(args: argparse.Namespace) -> None:
    if args.json:
        raise ValueError("--json writes objects only, which --show-blocks contradicts; choose one")
    if args.steps_per_dispatch not in (None, 1):
        raise ValueError(
            f"--show-blocks looks at every step, which --steps-per-dispatch {args.steps_per_dispatch} contradicts"
        )
    args.steps_per_dispatch = 1


def _load(
    args: argparse.Namespace, prompts: Sequence[Prompt], params: SamplingParams, speculation: SpeculativeConfig | None
) -> tuple[LLM, list[list[int]], int]:
    """The model, sized for these prompts and being compiled for them, their token ids, and the most tokens of one with
    its output; says what is in effect."""
    _, about_device = cli.open_device()
    start = time.monotonic()
    directory = resolve_target(args.model, revision=args.revision)
    # Before the tokenizer, on which transformers would blame a config.json that is wrong.
    limit = ModelConfig.from_pretrained(directory).max_position_embeddings
    tokenizer = load_tokenizer(directory)
    thinking = False if args.no_thinking else None
    encoded = [
        encode_prompt(prompt, tokenizer, chat=not args.raw, system=args.system, enable_thinking=thinking)
        for prompt in prompts
    ]
    longest = max(map(len, encoded)) + args.max_tokens
    if args.max_model_len is None:
        asked = 0 if speculation is None else speculation.max_model_len or 0
        needed = max(longest, asked)
        if needed > limit:
            cli.say(f"note         outputs end where prompt and output are {limit} tokens, the model's limit")
        args.max_model_len = min(-(-needed // _LENGTH_STEP) * _LENGTH_STEP, limit)
    if args.max_num_seqs is None:
        args.max_num_seqs = min(len(prompts) * params.n, _MOST_SLOTS)

    def before_weights(engine: Engine) -> None:
        _check_requests(engine, prompts, encoded, params)
        _start_compiling(engine, "plain" if speculation is None else speculation.drafter, longest)

    loaded = load_engine(
        directory, cli.engine_config(args), speculation, tokenizer=tokenizer, before_weights=before_weights
    )
    llm = LLM.from_loaded(loaded)
    cli.say(about_device)
    cli.say(report.describe_settings(llm.settings, args.max_num_seqs, args.tensor_parallel_size))
    cli.say(f"loaded       in {time.monotonic() - start:.1f} s")
    return llm, encoded, longest


def _start_compiling(engine: Engine, method: str, longest: int) -> None:
    """Begin with what :func:`_timed` waits for, and say what is being waited for."""
    count, home = engine.start_compiling(longest).num_to_compile, compilation_cache.directory()
    if count == 0:
        cli.say(f"reading      {method} decoding, compiled by an earlier start, from {home}")
    else:
        kept = "" if home is None else f", kept in {home}: the next start is quicker"
        cli.say(f"compiling    {method} decoding: {count} programs{kept} ...")


def _check_requests(
    engine: Engine, prompts: Sequence[Prompt], encoded: Sequence[list[int]], params: SamplingParams
) -> None:
    """Have the engine refuse what it would refuse later, after everything is compiled."""
    checked = params.child(0)
    checked.seed = 0  # draws none of the engine's own seeds
    for prompt, ids in zip(prompts, encoded, strict=True):
        try:
            engine.add_request("check", ids, checked)
        except ValueError as e:
            raise ValueError(f"{prompt.where}: {e}") from None
        engine.abort(["check"])
        engine.step()  # takes the abort; there is nothing to run


def _timed(
    llm: LLM,
    requests: Sequence[dict[str, Any]],
    params: Sequence[SamplingParams],
    longest: int,
    on_update: OnUpdate | None,
) -> report.Run:
    """Wait for the compilation, then run all requests, ``longest`` tokens long at most, by the clock. The engine is a
    new one."""
    engine = llm.engine
    start = time.monotonic()
    windows = engine.warm_up(longest, progress=True)
    cli.say(f"compiled     {windows} attention window{'s' * (windows > 1)} in {time.monotonic() - start:.1f} s")
    first: list[tuple[float, int]] = []  # when the first token was there, and the steps read by then

    def observe(prompt: int, completion: int, update: RequestUpdate) -> None:
        if not first:
            first.append((time.monotonic(), engine.num_steps))
        if on_update is not None:
            on_update(prompt, completion, update)

    start = time.monotonic()
    outputs = llm.generate(requests, params, use_tqdm=on_update is None, on_update=observe)
    end = max(output.metrics.last_token_time or start for output in outputs)
    first_time, first_steps = first[0]
    return report.Run(
        outputs=outputs,
        seconds=end - start,
        steps_by_k=engine.steps_by_k,
        decode_seconds=end - first_time,
        decode_steps=engine.num_steps - first_steps,
        acceptance=engine.acceptance,
    )


def _titles(prompts: Sequence[Prompt], n: int) -> list[str | None]:
    """A line to tell each completion by; None where there is only one."""
    if len(prompts) * n == 1:
        return [None]
    titles = []
    for i, prompt in enumerate(prompts, 1):
        given = prompt.given[-1]["content"] if prompt.kind == "messages" else prompt.given
        short = " ".join(str(given).split())
        short = short if len(short) <= 60 else f"{short[:59]}…"
        titles += [f"=== {i}{f'.{j}' if n > 1 else ''}: {short}" for j in range(n)]
    return titles


class TextPrinter:
    """Writes completions to stdout in order: the first unfinished one as it grows, those behind it when it is done."""

    def __init__(self, titles: Sequence[str | None], *, stream: bool, as_ids: bool = False) -> None:
        """
        Args:
            titles: one a completion: what to write above its text, or None.
            stream: show text at once, whatever stands behind stdout.
            as_ids: write token ids, where no tokenizer makes text of them.
        """
        self._titles, self._stream, self._as_ids = titles, stream, as_ids
        self._waiting = ["" for _ in titles]  # text of each that is not written yet
        self._finished = [False for _ in titles]
        self._current = 0
        self._opened = False  # whether the current one's title is written

    def __call__(self, prompt: int, completion: int, update: RequestUpdate) -> None:
        """Take what is new of completion ``prompt``; there is one a prompt."""
        self._waiting[prompt] += "".join(f"{i} " for i in update.token_ids) if self._as_ids else update.text
        self._finished[prompt] = update.finished
        while self._current < len(self._titles):
            at = self._current
            if not self._opened and self._titles[at] is not None:
                print(self._titles[at])
            self._opened = True
            text, self._waiting[at] = self._waiting[at], ""
            print(text, end="\n" if self._finished[at] else "")
            if not self._finished[at]:
                break
            self._current, self._opened = at + 1, False
        if self._stream:
            sys.stdout.flush()


class BlockPrinter:
    """Writes one completion to stdout as :mod:`pard_jax.blocks` shows it, block by block as they come."""

    def __init__(self, llm: LLM, params: SamplingParams, *, coloured: bool) -> None:
        self._coloured = coloured
        self._recorder = BlockRecorder(llm.get_tokenizer() if llm.has_tokenizer else None, params.child(0))
        # What has been written cannot be taken back, as a stop string that is found later would.
        self._at_once = not params.stop_strings
        self._written = 0

    def __call__(self, prompt: int, completion: int, update: RequestUpdate) -> None:
        """Take what one step added."""
        self._recorder(prompt, completion, update)
        if self._at_once or update.finished:
            blocks = self._recorder.blocks
            for i in range(self._written, len(blocks)):
                print(ansi_block(blocks[i], i) if self._coloured else marked_block(blocks[i]), end="")
            self._written = len(blocks)
            sys.stdout.flush()

    def finish(self) -> None:
        """End the line, and write the histogram to stderr."""
        print(flush=True)
        cli.say(histogram(self._recorder.blocks))


if __name__ == "__main__":
    sys.exit(main())
