"""What the command lines share: the flags of a model, its speculation, its engine and its sampling; and how they fail.

Every error is one line on stderr and exit status 2. A traceback means a fault in the project.
"""

from __future__ import annotations

import argparse
import atexit
import contextlib
import gc
import json
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn, TextIO

import jax

from pard_jax import presets, report
from pard_jax.config import EngineConfig, SpeculativeConfig
from pard_jax.config.engine import DTYPES, IMPLEMENTATIONS, QUANTIZATIONS
from pard_jax.sampling_params import SamplingParams

# What to do, of the commands that run an engine, when memory runs out.
ENGINE_MEMORY = (
    "lower --max-num-seqs, --max-model-len or --gpu-memory-utilization, or share the model among more devices with "
    "--tensor-parallel-size"
)
# Flags that say in part what --speculative-config says in whole; None where they were not given.
_SPECULATION_FLAGS = {
    "draft_model": "--draft-model",
    "draft_revision": "--draft-revision",
    "num_speculative_tokens": "-k/--num-speculative-tokens",
    "method": "--method",
    "mask_token_id": "--mask-token-id",
    "draft_sample_method": "--draft-sample-method",
    "prompt_lookup_max": "--prompt-lookup-max",
    "prompt_lookup_min": "--prompt-lookup-min",
}


class Parser(argparse.ArgumentParser):
    """An argument parser whose errors are exceptions, for :func:`run_command` to report."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False, **kwargs)

    def error(self, message: str) -> NoReturn:
        """Raise the error.

        Raises:
            ValueError: always.
        """
        raise ValueError(f"{message} (see {self.prog} --help)")


class _ListPresets(argparse.Action):
    """Prints the presets and ends the command, as ``--version`` does."""

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> NoReturn:
        print(presets.describe_presets())
        parser.exit()


def add_model_arguments(parser: argparse.ArgumentParser) -> None:
    """``--model``, ``--list-presets``, ``--revision``, ``--dtype``, ``--quantization``, ``--tensor-parallel-size``."""
    group = parser.add_argument_group("model")
    add = group.add_argument
    add("--model", default=presets.DEFAULT, metavar="MODEL",
        help="checkpoint directory (Hugging Face or Orbax), hub id, or a preset's name, which brings a draft and K "
        f"(default: {presets.DEFAULT})")  # fmt: skip
    add("--list-presets", action=_ListPresets, nargs=0, help="list the presets and exit")
    add("--revision", help="branch, tag or commit of a hub id")
    add("--dtype", default="auto", metavar="DTYPE",
        help=f"{', '.join(DTYPES)}; auto is float32 on a CPU, bfloat16 elsewhere")  # fmt: skip
    add_quantization_argument(add)
    add("-tp", "--tensor-parallel-size", type=int, default=1, metavar="N", help="devices that share the model")


def add_quantization_argument(add: Callable[..., Any]) -> None:
    """``--quantization``, by a parser's or a group's ``add_argument``."""
    add("--quantization", choices=QUANTIZATIONS,
        help="of the weights of target and draft, as they are loaded: int8 reads half of bfloat16's bytes (default: "
        "none)")  # fmt: skip


def add_speculation_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags that :func:`speculative_config` reads."""
    group = parser.add_argument_group(
        "speculation", "by flags, or as vLLM's JSON; without either, a preset's draft, or else plain decoding"
    )
    add = group.add_argument
    add("--draft-model", metavar="MODEL", help="checkpoint directory, hub id or preset of the draft")
    add("--draft-revision", metavar="REVISION", help="branch, tag or commit of the draft's hub id")
    add("-k", "--num-speculative-tokens", type=num_speculative_tokens, metavar="K",
        help="tokens drafted a step, 1 to 128; or auto: the engine chooses, and none where that is faster")  # fmt: skip
    add("--method", choices=("pard", "draft_model", "ngram", "none"),
        help="pard: one draft pass for all K; draft_model: one pass a token; ngram: look the prompt up, no draft model "
        "(default: pard with a draft model, ngram with -k alone, else none)")  # fmt: skip
    add("--mask-token-id", type=int, metavar="ID", help="pard: the mask id, where the draft's config.json names none")
    add("--draft-sample-method", choices=("greedy", "probabilistic"),
        help="drafts are the likeliest tokens, or sampled (default: greedy)")  # fmt: skip
    add("--prompt-lookup-max", type=int, metavar="N", help="ngram: longest n-gram to look up (default: 5)")
    add("--prompt-lookup-min", type=int, metavar="N", help="ngram: shortest n-gram to look up (default: the longest)")
    add("--speculative-config", metavar="JSON", help="all of this as one JSON object with vLLM's keys")


def num_speculative_tokens(text: str) -> int | str:
    """A whole number, or "auto", as ``type=`` of a flag."""
    try:
        return text if text == "auto" else int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected a whole number or auto, got {text!r}") from None


def add_engine_arguments(parser: argparse.ArgumentParser, *, max_model_len: str, max_num_seqs: str) -> None:
    """The flags that :func:`engine_config` reads; the two texts say what the command's defaults are."""
    add = parser.add_argument_group("engine").add_argument
    add("--max-model-len", type=int, metavar="N", help=f"tokens of a prompt and its output (default: {max_model_len})")
    add("--max-num-seqs", type=int, metavar="N", help=f"requests that run at once (default: {max_num_seqs})")
    add("--gpu-memory-utilization", type=float, default=0.9, metavar="X",
        help="share of the device's memory to plan for (default: 0.9)")  # fmt: skip
    add("--prefill-chunk-size", type=int, metavar="N",
        help="prompt tokens a pass (default: 64 on a CPU, 256 elsewhere)")  # fmt: skip
    add("--steps-per-dispatch", type=int, metavar="N",
        help="speculative steps between two looks of the host (default: 1 on a CPU, 8 elsewhere)")  # fmt: skip
    add("--implementation", choices=IMPLEMENTATIONS, default="auto",
        help="of decoding passes: XLA's operations or our own kernels (default: auto: our kernels on one NVIDIA GPU "
        "in bfloat16)")  # fmt: skip


def add_sampling_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags that :func:`sampling_params` reads, by vLLM's names."""
    group = parser.add_argument_group(
        "sampling", "greedy unless a temperature is given; the model's generation_config.json sets no defaults here"
    )
    add = group.add_argument
    add("--temperature", type=float, default=0.0, metavar="T", help="0 is greedy; at most 2 (default: 0)")
    add("--top-p", type=float, default=1.0, metavar="P", help="in (0, 1] (default: 1, off)")
    add("--top-k", type=int, default=0, metavar="N", help="0 or -1 is off (default: 0)")
    add("--min-p", type=float, default=0.0, metavar="P", help="in [0, 1], relative to the likeliest (default: 0, off)")
    add("--seed", type=int, help="of every prompt's samples (default: one a prompt, the same in every run)")
    add("--n", type=int, default=1, help="completions a prompt; more than 1 needs a temperature (default: 1)")
    add("--max-tokens", type=int, default=128, metavar="N", help="tokens to generate at most (default: 128)")
    add("--min-tokens", type=int, default=0, metavar="N", help="tokens before anything may end it (default: 0)")
    add("--ignore-eos", action="store_true", help="go on past the end-of-sequence token")
    add("--stop", action="append", default=[], metavar="TEXT", help="end before this text; may be repeated")
    add("--stop-token-ids", type=int, nargs="+", default=[], metavar="ID", help="end at these tokens")
    add("--include-stop-str-in-output", action="store_true", help="end after the stop text, not before it")
    add("--skip-special-tokens", action=argparse.BooleanOptionalAction, default=True,
        help="leave special tokens out of the text (default: leave them out)")  # fmt: skip
    add("--logprobs", type=int, metavar="N", help="log-probabilities of each token and of the N likeliest, 0 to 20")


def speculative_config(args: argparse.Namespace) -> SpeculativeConfig | None:
    """What the speculation flags ask for; None for plain decoding.

    Where ``--model`` names a preset, :func:`pard_jax.presets.fill_preset` completes the flags beforehand.

    Raises:
        ValueError, NotImplementedError: flags that contradict one another, or see :class:`SpeculativeConfig`.
    """
    given = {name: flag for name, flag in _SPECULATION_FLAGS.items() if getattr(args, name) is not None}
    if args.speculative_config is not None:
        if given:
            raise ValueError(
                f"--speculative-config contradicts {', '.join(given.values())}; use the JSON or the flags, not both"
            )
        try:
            return SpeculativeConfig.from_dict(presets.complete(json.loads(args.speculative_config)))
        except json.JSONDecodeError as e:
            raise ValueError(f"--speculative-config is not valid JSON: {e}") from None
    drafts = "pard" if args.draft_model is not None else "ngram" if args.num_speculative_tokens is not None else "none"
    method = args.method or drafts
    if method == "none":
        if others := [flag for name, flag in given.items() if name != "method"]:
            why = "--method none drafts nothing" if args.method else "neither --draft-model nor --method was given"
            raise ValueError(f"{why}, so {', '.join(others)} cannot be used")
        return None
    if method != "ngram" and args.draft_model is None:
        raise ValueError(f"--method {method} needs a draft: name its checkpoint with --draft-model")
    if args.num_speculative_tokens is None:
        raise ValueError(f"method {method} needs -k/--num-speculative-tokens, the number of tokens to draft a step")
    keys = {
        "model": args.draft_model,
        "method": "draft_model" if method == "pard" else method,
        "parallel_drafting": method == "pard",
        "num_speculative_tokens": args.num_speculative_tokens,
        "revision": args.draft_revision,
        "mask_token_id": args.mask_token_id,
        "draft_sample_method": args.draft_sample_method,
        "prompt_lookup_max": args.prompt_lookup_max,
        "prompt_lookup_min": args.prompt_lookup_min,
    }
    return SpeculativeConfig.from_dict(keys)


def engine_config(args: argparse.Namespace) -> EngineConfig:
    """What the model and engine flags ask for; ``max_num_seqs`` falls back to the engine's own default.

    Raises:
        ValueError: see :class:`EngineConfig`.
    """
    rows = {} if args.max_num_seqs is None else {"max_num_seqs": args.max_num_seqs}
    return EngineConfig(
        max_model_len=args.max_model_len,
        dtype=args.dtype,
        quantization=args.quantization,
        tensor_parallel_size=args.tensor_parallel_size,
        gpu_memory_utilization=args.gpu_memory_utilization,
        prefill_chunk_size=args.prefill_chunk_size,
        steps_per_dispatch=args.steps_per_dispatch,
        implementation=args.implementation,
        **rows,
    )


def sampling_params(args: argparse.Namespace) -> SamplingParams:
    """What the sampling flags ask for.

    Raises:
        ValueError: see :class:`SamplingParams`.
    """
    return SamplingParams(
        n=args.n,
        temperature=args.temperature,
        top_p=args.top_p,
        top_k=args.top_k,
        min_p=args.min_p,
        seed=args.seed,
        max_tokens=args.max_tokens,
        min_tokens=args.min_tokens,
        ignore_eos=args.ignore_eos,
        stop=args.stop,
        stop_token_ids=args.stop_token_ids,
        include_stop_str_in_output=args.include_stop_str_in_output,
        skip_special_tokens=args.skip_special_tokens,
        logprobs=args.logprobs,
    )


def say(line: str) -> None:
    """Tell the user, on stderr: stdout is for results."""
    print(line, file=sys.stderr, flush=True)


def in_colour(stream: TextIO) -> bool:
    """Whether to colour what goes to a stream: on a terminal, unless NO_COLOR or FORCE_COLOR decides (no-color.org)."""
    if os.environ.get("NO_COLOR"):
        return False
    return bool(os.environ.get("FORCE_COLOR")) or stream.isatty()


def open_device() -> tuple[jax.Device, str]:  # pyright: ignore[reportInvalidTypeForm]
    """Start JAX, and warn where an accelerator is missed.

    Returns:
        The first device, and the line about it for when all is loaded: its memory is described as it is now, free.

    Raises:
        ValueError: see :func:`pard_jax.report.start_jax`.
    """
    device = report.start_jax()
    if (signs := report.missed_accelerator()) is not None:
        say(report.cpu_warning(signs))
    return device, report.describe_device(device)


def check_writable(path: Path) -> None:
    """Refuse an output file that cannot be written, by beginning to.

    Raises:
        OSError: it cannot.
    """
    if path.is_dir():
        raise IsADirectoryError(f"--output {path} is a directory; name a file")
    if not path.absolute().parent.is_dir():
        raise FileNotFoundError(f"--output {path}: there is no directory {path.absolute().parent}")
    beside = _beside(path)
    try:
        beside.touch()
    except OSError as e:
        raise type(e)(f"--output {path} cannot be written: {e.strerror}") from None
    beside.unlink()


@contextlib.contextmanager
def open_whole(path: Path) -> Iterator[TextIO]:
    """A file to write that appears, whole, at the end of the block; after an error, what stood there before stays."""
    beside = _beside(path)
    try:
        with beside.open("w", encoding="utf-8") as file:
            yield file
        beside.replace(path)
    finally:
        beside.unlink(missing_ok=True)


def write_whole(path: Path, text: str) -> None:
    """Write a file that appears whole or not at all."""
    with open_whole(path) as file:
        file.write(text)


def _beside(path: Path) -> Path:
    return path.absolute().with_name(f".{path.name}.{os.getpid()}.tmp")


def run_command(command: Callable[[], None], *, if_out_of_memory: str | None = None) -> int:
    """Run a command line to its exit status.

    Args:
        command: reads the flags and does all there is to do.
        if_out_of_memory: what to do then, by the command's own flags; for the message.

    Returns:
        0; 2 after an error, said in one line on stderr; 130 after Ctrl-C; 141 where nobody reads stdout any more, as
        of a program that SIGPIPE ends.

    Raises:
        Exception: any other, which is a fault of the project: with its traceback.
    """
    # Python would go through all objects once more as it exits, for a quarter of a second.
    atexit.register(gc.freeze)
    # Without PyTorch, transformers advises to install it; tokenizers need none.
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    try:
        command()
        sys.stdout.flush()
    except SystemExit as e:  # --help and --version, and a signal's status
        return int(e.code or 0)
    except KeyboardInterrupt as e:
        say(f"\ninterrupted{f': {e}' if e.args else ''}")
        return 130
    except BrokenPipeError:
        _discard_stdout()
        return 141
    except (ValueError, NotImplementedError, OSError, FloatingPointError) as e:
        return _fail(_message(e))
    except (RuntimeError, MemoryError) as e:
        if not isinstance(e, MemoryError) and "RESOURCE_EXHAUSTED" not in str(e):
            raise
        return _fail(f"out of memory ({_message(e)}){'' if if_out_of_memory is None else f'; {if_out_of_memory}'}")
    return 0


def _fail(message: str) -> int:
    say(f"error: {message}")
    return 2


def _message(error: BaseException) -> str:
    """The error in one line."""
    if isinstance(error, OSError) and error.strerror and error.filename is not None:
        return f"{error.filename}: {error.strerror}"
    return " ".join(str(error).split()) or type(error).__name__


def _discard_stdout() -> None:
    """Keep Python from complaining, as it exits, that it cannot write what is still in stdout's buffer."""
    try:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except OSError:  # a stdout that is no file
        return
