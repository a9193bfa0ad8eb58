"""``python -m pard_jax.bench cod``: training with dropped rows (COD) against training on all of them.

Two runs of ``pard_jax.train`` that differ in the retention alone, at equal updates: rows a sequence, time an update,
and what the drafts are worth on the same held-out samples. The first update, which compiles, is left out of the time.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path

from pard_jax import cli
from pard_jax.train import options, run

DESCRIPTION = """\
Train twice, with rows dropped as asked (COD) and with all of them, at equal updates; compare rows, time and acceptance.
The runs and their models are left in OUTPUT/cod and OUTPUT/all.
"""
_NOT_HELD_OUT = "nothing is held out to measure acceptance on; give --held-out or --held-out-data"


@dataclasses.dataclass(frozen=True)
class Row:
    """One run's figures."""

    name: str
    rows: int
    seconds_per_update: float
    tokens_per_second: float
    loss: float
    acceptance_length: float
    per_position: list[float]


def measure(argv: Sequence[str]) -> None:
    """Train both ways and print a table."""
    parser = options.parser(prog="python -m pard_jax.bench cod", description=DESCRIPTION)
    parser.add_argument("--json", metavar="FILE", help="also write the figures as JSON")
    args = parser.parse_args(argv)
    if args.json is not None:
        cli.check_writable(Path(args.json))
    if args.held_out == 0 and args.held_out_data is None:
        raise ValueError(_NOT_HELD_OUT)
    kept = (args.retention, args.min_retention)
    rows: list[Row] = []
    for name, (retention, minimum) in {"cod": kept, "all": (1.0, 1.0)}.items():
        rows.append(_run(name, args, retention, minimum))
    print(f"{'':10} {'rows':>6} {'ms/update':>10} {'tokens/s':>10} {'loss':>7} {'accepted':>9}  by position")
    for row in rows:
        positions = " ".join(f"{p:.2f}" for p in row.per_position)
        print(
            f"{row.name:10} {row.rows:6} {row.seconds_per_update * 1e3:10.1f} {row.tokens_per_second:10,.0f} "
            f"{row.loss:7.3f} {row.acceptance_length:9.3f}  {positions}"
        )
    if args.json is not None:
        report = {"settings": vars(args), "results": [dataclasses.asdict(row) for row in rows]}
        cli.write_whole(Path(args.json), json.dumps(report, indent=2) + "\n")


def _run(name: str, args: argparse.Namespace, retention: float, minimum: float) -> Row:
    varied = {"retention": retention, "min_retention": minimum, "output": str(Path(args.output) / name)}
    args = argparse.Namespace(**{**vars(args), **varied})
    outcome = run.run(args)
    if outcome.evaluation is None:
        raise ValueError(_NOT_HELD_OUT)
    evaluation, seconds = outcome.evaluation, outcome.seconds_per_update
    return Row(
        name,
        sum(options.cod_config(args).counts(args.length)),
        seconds,
        args.batch_size * args.length / seconds,
        evaluation.loss,
        evaluation.acceptance_length,
        evaluation.per_position,
    )
