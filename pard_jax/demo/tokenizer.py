"""``python -m pard_jax.demo.tokenizer``: train the demo pair's tokenizer on the texts of a corpus.

Byte-level BPE as in GPT-2 and Qwen, so that any text survives, with every digit a token of its own. Ids 0 to 3 are
special: ChatML's three, and a mask for PARD drafts. As with every Hugging Face tokenizer, text that spells a special
token out is encoded as that token (chat templates depend on it), and so is "<|pard_mask|>"; no other text gives its id,
no merge leads to it, and a target that never saw it in training has no reason to write it.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from pard_jax import cli
from pard_jax.demo.samples import read_samples
from pard_jax.weights.save import new_directory, write_json

if TYPE_CHECKING:
    from tokenizers import Tokenizer

PAD_TOKEN, START_TOKEN, EOS_TOKEN, MASK_TOKEN = "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|pard_mask|>"
SPECIAL_TOKENS = (PAD_TOKEN, START_TOKEN, EOS_TOKEN, MASK_TOKEN)  # ids 0, 1, 2, 3
MASK_TOKEN_ID = SPECIAL_TOKENS.index(MASK_TOKEN)
# ChatML without a system turn of its own: the demo pair was trained without.
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
MODEL_MAX_LENGTH = 1024
_SMALLEST_VOCABULARY = len(SPECIAL_TOKENS) + 256
# GPT-2's pattern with single digits: words with the space before them, runs of signs, line breaks apart.
_PIECES = r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"

EXAMPLES = """\
example:
  python -m pard_jax.demo.tokenizer --data corpus.jsonl --vocab-size 8192 --output tokenizer
"""


def train_tokenizer(texts: Iterator[str], vocab_size: int) -> Tokenizer:
    """Train on texts, which are read once and not kept.

    The same texts give the same tokenizer.

    Args:
        texts: what is to be compressed.
        vocab_size: V, special tokens and the 256 bytes included.

    Raises:
        ValueError: the vocabulary is too small for the bytes, or the texts have not enough pairs to fill it.
    """
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

    if vocab_size < _SMALLEST_VOCABULARY:
        raise ValueError(
            f"the vocabulary must have at least {_SMALLEST_VOCABULARY} tokens, {len(SPECIAL_TOKENS)} special ones and "
            f"256 bytes; got {vocab_size}"
        )
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_PIECES), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=2,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,  # unknown lengths have none: the reader of the file shows how far it is
    )
    tokenizer.train_from_iterator(texts, trainer)
    if (made := tokenizer.get_vocab_size()) != vocab_size:
        raise ValueError(
            f"the texts give a vocabulary of {made} tokens, not of {vocab_size}: give more text, or a smaller size"
        )
    return tokenizer


def write_tokenizer(tokenizer: Tokenizer, directory: Path) -> None:
    """Write ``tokenizer.json`` and ``tokenizer_config.json`` as transformers' AutoTokenizer loads them."""
    tokenizer.save(str(directory / "tokenizer.json"))
    write_json(
        directory / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "eos_token": EOS_TOKEN,
            "pad_token": PAD_TOKEN,
            "mask_token": MASK_TOKEN,
            "model_max_length": MODEL_MAX_LENGTH,
            "clean_up_tokenization_spaces": False,
            "chat_template": CHAT_TEMPLATE,
        },
    )


def read_texts(path: Path) -> Iterator[str]:
    """The contents of all messages of a corpus, with a progress bar on stderr.

    Raises:
        ValueError, OSError: see :func:`pard_jax.demo.samples.read_samples`.
    """
    for _, sample in read_samples(path):
        yield from (message["content"] for message in sample["messages"])


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command. Returns the exit status, see :func:`pard_jax.cli.run_command`."""
    return cli.run_command(lambda: _run(_parser().parse_args(sys.argv[1:] if argv is None else argv)))


def _parser() -> argparse.ArgumentParser:
    parser = cli.Parser(
        prog="python -m pard_jax.demo.tokenizer",
        description="Train a byte-level BPE tokenizer with ChatML's special tokens and a mask token for PARD drafts.",
        epilog=EXAMPLES,
    )
    add = parser.add_argument
    add("--data", required=True, metavar="FILE", help='.jsonl, one object with "messages" a line')
    add("--vocab-size", type=int, default=8192, metavar="V", help="tokens, all included (default: 8192)")
    add("--output", required=True, metavar="DIR", help="where to; it appears whole or not at all")
    add("--overwrite", action="store_true", help="replace a directory that is not empty")
    return parser


def _run(args: argparse.Namespace) -> None:
    with new_directory(args.output, overwrite=args.overwrite) as directory:
        write_tokenizer(train_tokenizer(read_texts(Path(args.data)), args.vocab_size), directory)
    print(f"{args.output}: a tokenizer of {args.vocab_size} tokens", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
