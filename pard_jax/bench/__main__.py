"""``python -m pard_jax.bench SUBCOMMAND``."""

from __future__ import annotations

import sys

from pard_jax.bench import generate


def main(argv: list[str] | None = None) -> int:
    """Run a subcommand; errors are one line on stderr and exit status 2."""
    argv = sys.argv[1:] if argv is None else argv
    commands = {"generate": generate.main}
    if not argv or argv[0] not in commands:
        asked = f"unknown subcommand {argv[0]!r}" if argv and not argv[0].startswith("-") else "a subcommand is needed"
        help_asked = bool(argv) and argv[0] in ("-h", "--help")
        usage = f"usage: python -m pard_jax.bench {{{','.join(commands)}}} [options]"
        print(usage if help_asked else f"error: {asked}; {usage}", file=sys.stdout if help_asked else sys.stderr)
        return 0 if help_asked else 2
    return commands[argv[0]](argv[1:])


if __name__ == "__main__":
    sys.exit(main())
