"""``python -m pard_jax.train``: train a PARD draft, or any model of a supported family from the next token on."""

from __future__ import annotations

import sys

from pard_jax import cli
from pard_jax.train import options, run


def main(argv: list[str] | None = None) -> int:
    """Run the command. Returns the exit status, see :func:`pard_jax.cli.run_command`."""

    def command() -> None:
        run.run(options.parser().parse_args(argv))

    return cli.run_command(command, if_out_of_memory=options.MEMORY)


if __name__ == "__main__":
    sys.exit(main())
