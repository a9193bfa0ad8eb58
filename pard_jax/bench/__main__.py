"""``python -m pard_jax.bench SUBCOMMAND``."""

from __future__ import annotations

import sys

from pard_jax import cli
from pard_jax.bench import aot, cod, generate, quantization, step
from pard_jax.train import options

# What measures, and what to do when memory runs out.
COMMANDS = {
    "generate": (generate.measure, generate.MEMORY),
    "step": (step.measure, step.MEMORY),
    "aot": (aot.measure, aot.MEMORY),
    "quantization": (quantization.measure, quantization.MEMORY),
    "cod": (cod.measure, options.MEMORY),
}


def main(argv: list[str] | None = None) -> int:
    """Run a subcommand. Returns the exit status, see :func:`pard_jax.cli.run_command`."""
    given = sys.argv[1:] if argv is None else argv
    memory = COMMANDS[given[0]][1] if given and given[0] in COMMANDS else None
    return cli.run_command(lambda: _dispatch(given), if_out_of_memory=memory)


def _dispatch(argv: list[str]) -> None:
    parser = cli.Parser(prog="python -m pard_jax.bench", description="Measure; SUBCOMMAND --help tells more.")
    parser.add_argument("subcommand", choices=COMMANDS)
    measure, _ = COMMANDS[parser.parse_args(argv[:1]).subcommand]
    measure(argv[1:])


if __name__ == "__main__":
    sys.exit(main())
