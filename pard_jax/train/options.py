"""The flags of ``python -m pard_jax.train``, and what they may say."""

from __future__ import annotations

import argparse
from pathlib import Path

from pard_jax import cli
from pard_jax.models.attention import IMPLEMENTATIONS
from pard_jax.train.cod import CodConfig
from pard_jax.train.optimizer import OPTIMIZERS, SCHEDULES, OptimizerConfig

MAX_BLOCKS = 128  # as many as are ever drafted
# What to do when memory runs out.
MEMORY = (
    "split the updates with --accumulation, add --remat, lower --length or --batch-size (and --evaluation-batch, if it "
    "was an evaluation), or use more --devices"
)
DESCRIPTION = "Train a PARD draft by conditional drop (COD), or a model from the next token on (-k 1)."
EXAMPLES = """\
examples:
  adapt a small model of the target's family, on what the target wrote (PARD's own settings):
    python -m pard_jax.train --model Qwen/Qwen3-0.6B --data samples.jsonl --output runs/draft --length 1024
  a draft of four of the target's layers: next-token training first, then PARD
    python -m pard_jax.train --model smollm2 --layers 0,1,28,29 -k 1 --data samples.jsonl --output runs/ar
    python -m pard_jax.train --model runs/ar/model -k 8 --data samples.jsonl --output runs/draft

The run directory holds checkpoints, train.csv, eval.csv, curves.png and, at the end, model/, a Hugging Face directory.
The same command goes on where it was stopped.
Exit status: 0; 2 after an error; 130 after an interrupt, which leaves a checkpoint.
"""


def parser(*, prog: str = "python -m pard_jax.train", description: str = DESCRIPTION) -> cli.Parser:
    """All flags; defaults are PARD's published ones."""
    result = cli.Parser(prog=prog, description=description, epilog=EXAMPLES)
    add = result.add_argument_group("model").add_argument
    add("--model", metavar="MODEL", help="initial weights: checkpoint directory, hub id or preset")
    add("--revision", help="branch, tag or commit of a hub id")
    add("--layers", metavar="I,J,...", help="start with these layers of the model only")
    add("--config", metavar="FILE", help="a config.json: random weights instead of --model")
    add("--tokenizer", metavar="DIR", help="whose tokenizer goes with it (default: the model's)")
    add("--mask-token-id", type=int, metavar="ID",
        help="an id that the tokenizer never gives (default: the config's, or else one is chosen)")  # fmt: skip
    add("--freeze-embeddings", action="store_true", help="train the mask token's row of the embeddings only")

    add = result.add_argument_group("data").add_argument
    add("--data", nargs="+", required=True, metavar="FILE", help="JSONL, as pard_jax.synthesize writes it")
    add("--held-out-data", nargs="+", metavar="FILE", help="samples to evaluate on (default: some of --data)")
    add("--held-out", type=int, metavar="N", help="samples of --data kept for evaluation (default: 64, or a tenth)")
    add("--max-samples", type=int, metavar="N", help="the first N samples only")
    add(
        "--length",
        type=int,
        default=512,
        metavar="L",
        help="tokens of a row, in which samples are packed (default: 512)",
    )
    add("--retokenize", action="store_true",
        help="make tokens of the samples' text, where another model's ids stand beside it")  # fmt: skip
    add("--prompt-loss", action=argparse.BooleanOptionalAction, default=True,
        help="prompts count in the loss, as PARD trains (default), or the target's own tokens only")  # fmt: skip

    add = result.add_argument_group("objective").add_argument
    add(
        "-k",
        "--num-blocks",
        type=int,
        default=8,
        metavar="K",
        help="tokens drafted in training; 1: next token (default: 8)",
    )
    add(
        "--retention", type=float, default=0.7, metavar="R", help="COD keeps max(R**b, r_min) of block b (default: 0.7)"
    )
    add("--min-retention", type=float, default=0.2, metavar="R", help="r_min (default: 0.2)")
    add("--loss", choices=("pooled", "subtask"), default="pooled",
        help="all rows alike, as PARD's code has it, or every block alike, as the paper (default: pooled)")  # fmt: skip
    add("--distill-from", metavar="MODEL", help="also learn this target's distribution, computed as it trains")
    add("--distill-weight", type=float, default=0.5, metavar="W", help="its share in the loss (default: 0.5)")

    add = result.add_argument_group("optimization").add_argument
    add("--epochs", type=float, default=4, metavar="N", help="passes over the data (default: 4)")
    add("--steps", type=int, metavar="N", help="updates, instead of --epochs")
    add("--batch-size", type=int, default=64, metavar="B", help="rows an update (default: 64)")
    add("--accumulation", type=int, default=1, metavar="N", help="passes an update is split into (default: 1)")
    add("--learning-rate", type=float, default=3e-5, metavar="X", help="(default: 3e-5)")
    add("--schedule", choices=SCHEDULES, default="constant", help="after the warm-up (default: constant)")
    add(
        "--final-ratio",
        type=float,
        default=0.1,
        metavar="X",
        help="of cosine and linear: last rate / peak (default: 0.1)",
    )
    add("--warmup", type=float, default=0.0, metavar="SHARE", help="of the updates (default: 0)")
    add("--optimizer", choices=OPTIMIZERS, default="adamw")
    add("--beta2", type=float, default=0.999, metavar="X", help="(default: 0.999)")
    add("--weight-decay", type=float, default=0.0, metavar="X", help="of matrices (default: 0)")
    add("--clip", type=float, default=1.0, metavar="X", help="gradient norm (default: 1)")
    add("--embedding-ratio", type=float, default=1.0, metavar="X", help="embeddings' rate / the others' (default: 1)")
    add("--seed", type=int, default=0)

    add = result.add_argument_group("computation").add_argument
    add("--dtype", choices=("auto", "float32", "bfloat16"), default="auto",
        help="of the computation; master weights are float32 (auto: float32 on a CPU, else bfloat16)")  # fmt: skip
    add("--attention", choices=IMPLEMENTATIONS, default="auto", help="(default: auto)")
    add("--devices", type=int, metavar="N", help="over which batches are split (default: all)")
    add("--remat", action="store_true", help="recompute layers in the backward pass: less memory, more time")

    add = result.add_argument_group("output").add_argument
    add("--output", required=True, metavar="DIR", help="run directory")
    add("--log-every", type=int, default=20, metavar="N", help="updates (default: 20)")
    add("--evaluate-every", type=int, default=500, metavar="N", help="updates; 0: at the end (default: 500)")
    add("--save-every", type=int, default=500, metavar="N", help="updates; 0: at the end (default: 500)")
    add("--keep", type=int, default=2, metavar="N", help="checkpoints kept (default: 2)")
    add(
        "--evaluation-drafts",
        type=int,
        metavar="K",
        help="tokens a step in evaluation (default: the K trained, 8 for 1)",
    )
    add("--evaluation-batch", type=int, default=16, metavar="B", help="rows at once in evaluation (default: 16)")
    add("--export-dtype", choices=("bfloat16", "float32"), default="bfloat16", help="of model/ (default: bfloat16)")
    add("--tensorboard", action="store_true", help="TensorBoard event files as well")
    return result


_LEAST = (
    (("length", "batch_size", "accumulation", "num_blocks", "steps", "evaluation_batch", "evaluation_drafts"), 1),
    (("log_every", "keep", "max_samples"), 1),
    (("evaluate_every", "save_every", "held_out", "seed", "weight_decay", "embedding_ratio", "final_ratio"), 0),
)


def check(args: argparse.Namespace) -> None:
    """Refuse what contradicts itself, before anything is read.

    Raises:
        ValueError: it does.
    """
    if (args.model is None) == (args.config is None):
        raise ValueError("give either --model, to start from a checkpoint, or --config, to start from random weights")
    if args.config is not None and args.tokenizer is None:
        raise ValueError("--config needs --tokenizer: the directory of the tokenizer that the samples were made with")
    if layer_indices(args) is not None and args.config is not None:
        raise ValueError("--layers picks layers of --model; --config says itself how many there are")
    for names, least in _LEAST:
        for name in names:
            value = getattr(args, name)
            if value is not None and value < least:
                raise ValueError(f"--{name.replace('_', '-')} must be at least {least}, got {value}")
    if args.num_blocks > MAX_BLOCKS:
        raise ValueError(f"-k/--num-blocks is at most {MAX_BLOCKS}, got {args.num_blocks}")
    if args.length <= args.num_blocks:
        raise ValueError(f"--length {args.length} leaves no row for block {args.num_blocks}; choose more than -k")
    if not args.epochs > 0:
        raise ValueError(f"--epochs must be above 0, got {args.epochs}")
    if Path(args.output).exists() and not Path(args.output).is_dir():
        raise ValueError(f"--output {args.output} is a file; name a directory")
    if not 0 <= args.distill_weight <= 1:
        raise ValueError(f"--distill-weight must be in [0, 1], got {args.distill_weight}")
    check_split(args, 1)


def check_split(args: argparse.Namespace, num_devices: int) -> None:
    """Refuse a batch that so many devices cannot share.

    Raises:
        ValueError: it is no multiple of what they take at once.
    """
    if args.batch_size % (args.accumulation * num_devices):
        raise ValueError(
            f"a batch of {args.batch_size} rows cannot be split into {args.accumulation} pass(es) over "
            f"{num_devices} device(s); choose a multiple of {args.accumulation * num_devices}"
        )


def optimizer_config(args: argparse.Namespace) -> OptimizerConfig:
    """What the flags of the optimization say.

    Raises:
        ValueError: see :class:`OptimizerConfig`.
    """
    return OptimizerConfig(
        learning_rate=args.learning_rate,
        schedule=args.schedule,
        final_ratio=args.final_ratio,
        warmup=args.warmup,
        name=args.optimizer,
        beta2=args.beta2,
        weight_decay=args.weight_decay,
        clip=args.clip,
        embedding_ratio=args.embedding_ratio,
    )


def layer_indices(args: argparse.Namespace) -> list[int] | None:
    """The layers to start with; None for all.

    Raises:
        ValueError: something else than indices.
    """
    if args.layers is None:
        return None
    try:
        return [int(index) for index in args.layers.split(",")]
    except ValueError:
        raise ValueError(
            f"--layers takes indices with commas between them, as 0,1,28,29; got {args.layers!r}"
        ) from None


def cod_config(args: argparse.Namespace) -> CodConfig:
    """What the flags of COD say.

    Raises:
        ValueError: see :class:`CodConfig`.
    """
    return CodConfig(args.num_blocks, args.retention, args.min_retention)
