"""``python -m pard_jax.demo.corpus``: what a model wrote, made fit to train a smaller one on.

A small model's short answers are good for a few sentences; then they wander, repeat themselves, or are cut off. So each
answer is cut back to whole sentences from its start, which makes those that ``--max-tokens`` cut off as good as others.
System turns are left out: the model that learns from the corpus is to answer so without being told.
"""

from __future__ import annotations

import argparse
import collections
import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pard_jax import cli
from pard_jax.demo.samples import read_samples

EXAMPLES = """\
example:
  python -m pard_jax.demo.corpus --data stories.jsonl --output corpus.jsonl
"""
# A stop, and what closes behind it; not that of a title, an initial or an item's number.
_SENTENCE_END = re.compile(r"(?<=\w\w)(?<!\bMr)(?<!\bMrs)(?<!\bDr)(?<!\bSt)[.!?]+[\"')\u201d\u2019]*(?=\s|$)")
# Words and signs apart, as tokenizers take them: words that return before another sign are the same words.
_PIECES = re.compile(r"\w+|[^\w\s]")
_FEWEST_GRAMS = 9  # of fewer, one that returns would be a large share


def repetition(pieces: Sequence[str]) -> float:
    """The share of a text's runs of four that were there before in it; 0 for less than twelve pieces of text."""
    grams = list(zip(pieces, pieces[1:], pieces[2:], pieces[3:], strict=False))
    return 1 - len(set(grams)) / len(grams) if len(grams) >= _FEWEST_GRAMS else 0.0


def cut_back(text: str, *, ended: bool, max_words: int, max_repetition: float) -> str | None:
    """The longest start of a text that is whole sentences, short enough and does not repeat itself.

    Args:
        text: an answer.
        ended: whether its end is one of its own; otherwise the end counts only where a sentence ends there.
        max_words: how long it may be.
        max_repetition: how large :func:`repetition` of its words may be, unless it is one sentence.

    Returns:
        None where there is none, the first sentence being too long. Quotations are not left open.
    """
    text = text.strip()
    ends = [match.end() for match in _SENTENCE_END.finditer(text)]
    if ended and ends[-1:] != [len(text)]:
        ends.append(len(text))
    best = None
    for end in ends:
        words = text[:end].split()
        if len(words) > max_words or (best is not None and repetition(words) > max_repetition):
            break
        if text.count('"', 0, end) % 2 == 0:
            best = text[:end]
    return best


def select(sample: dict[str, Any], *, max_words: int, max_repetition: float) -> dict[str, Any] | str:
    """The corpus's sample of one that :mod:`pard_jax.synthesize` wrote, or why there is none.

    Answers are cut at half of ``max_repetition``, as what begins to repeat itself goes on so.

    Raises:
        ValueError: without its system turn, the sample is not a request and an answer.
    """
    messages = [message for message in sample["messages"] if message.get("role") != "system"]
    if (roles := [message.get("role") for message in messages]) != ["user", "assistant"]:
        raise ValueError(f"expected one turn of the user and one of the assistant, got turns of {roles!r:.80}")
    request, answer = messages
    if answer["content"].strip() in request["content"]:
        return "echo the request"
    ended = sample.get("finish_reason", "stop") == "stop"
    text = cut_back(answer["content"], ended=ended, max_words=max_words, max_repetition=max_repetition / 2)
    if text is None:
        return "have no whole sentence that is short enough"
    if repetition(_PIECES.findall(text)) > max_repetition:
        return "repeat themselves"
    return {"messages": [request, answer | {"content": text}]}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command. Returns the exit status, see :func:`pard_jax.cli.run_command`."""
    return cli.run_command(lambda: _run(_parser().parse_args(sys.argv[1:] if argv is None else argv)))


def _parser() -> argparse.ArgumentParser:
    parser = cli.Parser(
        prog="python -m pard_jax.demo.corpus",
        description="Cut a model's answers back to whole sentences, and leave out those that are of no use.",
        epilog=EXAMPLES,
    )
    add = parser.add_argument
    add(
        "--data", required=True, metavar="FILE", help=".jsonl of requests and answers, as pard_jax.synthesize writes it"
    )
    add("--output", required=True, metavar="FILE", help="where to; it appears whole or not at all")
    add("--max-words", type=int, default=70, metavar="N", help="of an answer (default: 70)")
    add("--max-repetition", type=float, default=0.15, metavar="X",
        help="share of an answer's runs of four words and signs that may be repeated ones (default: 0.15)")  # fmt: skip
    return parser


def _run(args: argparse.Namespace) -> None:
    if args.max_words < 1:
        raise ValueError(f"--max-words must be at least 1, got {args.max_words}")
    if not 0 <= args.max_repetition <= 1:
        raise ValueError(f"--max-repetition is a share and must lie in [0, 1], got {args.max_repetition}")
    data, output = Path(args.data), Path(args.output)
    if data.resolve() == output.resolve():
        raise ValueError(f"--data and --output are both {data}; name two files")
    cli.check_writable(output)
    kept, dropped = 0, collections.Counter[str]()
    with cli.open_whole(output) as file:
        for where, sample in read_samples(data):
            try:
                selected = select(sample, max_words=args.max_words, max_repetition=args.max_repetition)
            except ValueError as e:
                raise ValueError(f"{where}: {e}") from None
            if isinstance(selected, str):
                dropped[selected] += 1
            else:
                file.write(json.dumps(selected, ensure_ascii=False) + "\n")
                kept += 1
        reasons = ", ".join(f"{count} {reason}" for reason, count in dropped.most_common())
        if not kept:
            raise ValueError(f"{data}: none of the answers is of use ({reasons})")
    cli.say(f"{output}: {kept} samples; {dropped.total()} left out{f' ({reasons})' if reasons else ''}")


if __name__ == "__main__":
    sys.exit(main())
