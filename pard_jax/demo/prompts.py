"""``python -m pard_jax.demo.prompts``: the prompts whose answers the demo pair is trained on.

About 60 % ask for short stories, the others are simple questions and requests. All are put together from the patterns
of :mod:`pard_jax.demo.patterns`, and ask for answers so short that a small model ends them. What a prompt asks is its
core; greetings and wishes for length are put around it. Cores are divided for good, by a hash, into those to train on
and those held out, so that no seed and no number of prompts mixes the two.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import itertools
import json
import math
import random
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from pard_jax import cli
from pard_jax.demo import patterns, words

STORY_SHARE = 0.6
HELD_OUT_SHARE = 0.02  # of cores

EXAMPLES = """\
example:
  python -m pard_jax.demo.prompts --num 150000 --output prompts.jsonl --held-out held_out.jsonl
"""
_SLOT = re.compile(r"\{(\w+)\}")
_ARTICLE = re.compile(r"\b([Aa])\(n\) (?=(\w+))")
# Words whose first letter misleads: a unicorn, an honest fox.
_VOWEL_SOUND = re.compile(r"(?!uni|use|one\b|eu)[aeiou]|hon[eo]|hour", re.IGNORECASE)
# So many draws in a row without a prompt that is new: the patterns are exhausted, or nearly.
_MOST_REPEATS = 10_000


@dataclasses.dataclass(frozen=True)
class DemoPrompt:
    """A prompt and what of it is the matter."""

    core: str  # the question or the story's subject; it says whether the prompt is held out
    text: str
    is_story: bool

    @property
    def held_out(self) -> bool:
        """Whether the core belongs to those that are never trained on."""
        digest = hashlib.blake2b(self.core.encode(), digest_size=8).digest()
        return int.from_bytes(digest, "big") < HELD_OUT_SHARE * 2**64


def generate_prompts(num: int, seed: int = 0, *, held_out: bool = False) -> Iterator[DemoPrompt]:
    """Distinct prompts in random order; the first of a longer run are the same.

    Args:
        num: how many.
        seed: other seeds give other prompts, of which some are the same.
        held_out: prompts of the cores that are held out, instead of those that are trained on.

    Raises:
        ValueError: ``num`` is not positive, or there are not so many prompts.
    """
    if num < 1:
        raise ValueError(f"the number of prompts must be at least 1, got {num}")
    # A text as seed is hashed: neighbouring seeds, and the two halves of one, have nothing in common.
    rng = random.Random(f"{seed} {'held out' if held_out else 'train'}")
    seen: set[str] = set()
    while len(seen) < num:
        # The kind is drawn once for every new prompt: its share stays the same as questions begin to repeat.
        draw = _story if rng.random() < STORY_SHARE else _question
        for _ in range(_MOST_REPEATS):
            prompt = draw(rng)
            if prompt.held_out == held_out and prompt.text not in seen:
                break
        else:
            raise ValueError(f"there are not so many prompts: asked for {num}, could make {len(seen)}; ask for fewer")
        seen.add(prompt.text)
        yield prompt


def expand(pattern: str) -> Iterator[str]:
    """All sentences of a pattern, in the order of :data:`pard_jax.demo.words.WORDS`."""
    for values in itertools.product(*(words.WORDS[slot] for slot in _SLOT.findall(pattern))):
        chosen = iter(values)
        yield _finish(_SLOT.sub(lambda _, chosen=chosen: next(chosen), pattern))


def _finish(text: str) -> str:
    """The articles put in.

    >>> _finish("A(n) old owl met a(n) unicorn.")
    'An old owl met a unicorn.'
    """
    return _ARTICLE.sub(lambda m: m[1] + ("n " if _VOWEL_SOUND.match(m[2]) else " "), text)


def _fill(rng: random.Random, pattern: str) -> str:
    return _finish(_SLOT.sub(lambda m: rng.choice(words.WORDS[m[1]]), pattern))


def _num_sentences(pattern: str) -> int:
    return math.prod(len(words.WORDS[slot]) for slot in _SLOT.findall(pattern))


def _story(rng: random.Random) -> DemoPrompt:
    if rng.random() < 0.1:
        text = _fill(rng, rng.choice(patterns.STORY_STARTS))
        return DemoPrompt(text, text, is_story=True)
    core = _fill(rng, f"{rng.choice(patterns.STORY_HEROES)} {rng.choice(patterns.STORY_EVENTS)}")
    request, closer = rng.choice(patterns.STORY_REQUESTS), rng.choice(patterns.STORY_CLOSERS)
    return DemoPrompt(core, f"{request.format(core)} {_fill(rng, closer)}".rstrip(), is_story=True)


# The square root: patterns of many sentences come more often, but do not drown those of a few.
_CUMULATIVE_WEIGHTS = tuple(itertools.accumulate(math.sqrt(_num_sentences(p)) for p in patterns.QUESTIONS))


def _question(rng: random.Random) -> DemoPrompt:
    core = _fill(rng, rng.choices(patterns.QUESTIONS, cum_weights=_CUMULATIVE_WEIGHTS)[0])
    opener, closer = rng.choice(patterns.QUESTION_OPENERS), rng.choice(patterns.QUESTION_CLOSERS)
    return DemoPrompt(core, f"{opener}{core} {closer}".rstrip(), is_story=False)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command. Returns the exit status, see :func:`pard_jax.cli.run_command`."""
    return cli.run_command(lambda: _run(_parser().parse_args(sys.argv[1:] if argv is None else argv)))


def _parser() -> argparse.ArgumentParser:
    parser = cli.Parser(
        prog="python -m pard_jax.demo.prompts",
        description="Write distinct prompts for the demo pair's data, one JSON object a line.",
        epilog=EXAMPLES,
    )
    add = parser.add_argument
    add("--num", type=int, required=True, metavar="N", help="prompts to train on")
    add("--seed", type=int, default=0, metavar="S", help="the same seed gives the same prompts (default: 0)")
    add("--output", required=True, metavar="FILE", help="where to; it appears whole or not at all")
    add("--held-out", metavar="FILE", help="also write prompts whose questions and subjects are never trained on")
    add("--num-held-out", type=int, metavar="N", help="how many of those (default: 200)")
    return parser


def _run(args: argparse.Namespace) -> None:
    if args.held_out is None and args.num_held_out is not None:
        raise ValueError("--num-held-out says how many prompts to hold out; say where to with --held-out FILE")
    if args.held_out is not None and Path(args.held_out).absolute() == Path(args.output).absolute():
        raise ValueError(f"--output and --held-out are both {args.output}; name two files")
    files = [Path(path) for path in (args.output, args.held_out) if path is not None]
    for path in files:
        cli.check_writable(path)
    texts = [_lines(generate_prompts(args.num, args.seed))]
    if args.held_out is not None:
        num = 200 if args.num_held_out is None else args.num_held_out
        texts.append(_lines(generate_prompts(num, args.seed, held_out=True)))
    for path, text in zip(files, texts, strict=True):
        cli.write_whole(path, text)
        print(f"{path}: {text.count(chr(10))} prompts", file=sys.stderr)


def _lines(prompts: Iterable[DemoPrompt]) -> str:
    return "".join(json.dumps({"prompt": prompt.text}) + "\n" for prompt in prompts)


if __name__ == "__main__":
    sys.exit(main())
