"""``python -m pard_jax.bench SUBCOMMAND``."""

from __future__ import annotations

import sys

from pard_jax import cli
from pard_jax.bench import cod, generate

COMMANDS = {"generate": generate.measure, "cod": cod.measure}


def main(argv: list[str] | None = None) -> int:
    """Run a subcommand. Returns the exit status, see :func:`pard_jax.cli.run_command`."""
    return cli.run_command(lambda: _dispatch(sys.argv[1:] if argv is None else argv))


def _dispatch(argv: list[str]) -> None:
    parser = cli.Parser(prog="python -m pard_jax.bench", description="Measure; SUBCOMMAND --help tells more.")
    parser.add_argument("subcommand", choices=COMMANDS)
    args = parser.parse_args(argv[:1])
    COMMANDS[args.subcommand](argv[1:])


if __name__ == "__main__":
    sys.exit(main())
