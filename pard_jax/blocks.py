"""What speculation looks like: the text of one completion, step by step; in colours, in brackets, or as HTML.

Every step keeps a block of tokens: the drafts that the target accepted, then one token of the target's own. Blocks are
told by what is streamed, so an engine has to stream every step: ``steps_per_dispatch=1``.
"""

from __future__ import annotations

import collections
import dataclasses
import html
from collections.abc import Sequence

from pard_jax.engine.detokenizer import Detokenizer
from pard_jax.engine.request import RequestUpdate
from pard_jax.sampling_params import SamplingParams
from pard_jax.tokenizer import Tokenizer

# Accepted drafts, and the target's own token, of odd and of even blocks: xterm's colours, and the same for HTML.
_ANSI = (("\x1b[38;5;16;48;5;157m", "\x1b[38;5;231;48;5;29m"), ("\x1b[38;5;16;48;5;153m", "\x1b[38;5;231;48;5;26m"))
_HTML = (("#afffaf", "#00875f"), ("#afd7ff", "#005fd7"))
_RESET = "\x1b[0m"
_BAR = 40  # characters of the longest bar of a histogram


@dataclasses.dataclass(frozen=True)
class Block:
    """What one step gave a completion.

    Attributes:
        accepted: text of the drafts that the target accepted.
        own: text of the target's own token; empty where the completion ended before it.
        num_accepted, num_tokens: tokens of the first, and of both.
    """

    accepted: str
    own: str
    num_accepted: int
    num_tokens: int


class BlockRecorder:
    """Takes one completion's blocks from its updates: pass it as ``on_update`` to ``LLM.generate`` or ``LLM.chat``.

    ::

        recorder = BlockRecorder(llm.get_tokenizer(), params)
        llm.chat(messages, params, on_update=recorder)
        display(HTML(blocks_html(recorder.blocks)))

    Args:
        tokenizer: None shows token ids.
        params: those that the completion is generated with.
    """

    def __init__(self, tokenizer: Tokenizer | None, params: SamplingParams) -> None:
        self._tokenizer = tokenizer
        self._detokenizer = Detokenizer(tokenizer, params)
        self._ends = [0]  # where the text of each token ends, before a stop string cut it
        self._text = ""
        self._steps: list[tuple[int, int]] = []  # tokens, and of these the accepted drafts

    def __call__(self, prompt: int, completion: int, update: RequestUpdate) -> None:
        """Take what one step added.

        Raises:
            ValueError: an update of a second completion, or of several steps at once.
        """
        if (prompt, completion) != (0, 0):
            raise ValueError("blocks are recorded of one completion; give one prompt, and n=1")
        if (count := len(update.token_ids)) == 0:
            return
        output, reason = update.output, None
        if output is not None and not isinstance(output.outputs[0].stop_reason, str):
            reason = output.outputs[0].finish_reason  # the detokenizer finds stop strings by itself
        for i, token in enumerate(update.token_ids, 1):
            self._append(token, reason if i == count else None)
        accepted = count - 1
        if output is not None and (found := output.metrics.speculative_decoding) is not None:
            # The last step may end within the drafts, without a token of the target's own; the request's count tells.
            accepted = found.num_accepted_draft_tokens - sum(n for _, n in self._steps)
            if not count - 1 <= accepted <= count:
                raise ValueError(
                    "an update held the tokens of several steps; blocks need an engine with steps_per_dispatch=1"
                )
        self._steps.append((count, accepted))

    @property
    def blocks(self) -> list[Block]:
        """All blocks so far; their texts joined are the completion's text."""
        blocks, at = [], 0
        for count, accepted in self._steps:
            start, middle, end = (self._ends[i] for i in (at, at + accepted, at + count))
            blocks.append(Block(self._text[start:middle], self._text[middle:end], accepted, count))
            at += count
        return blocks

    def _append(self, token: int, finish_reason: str | None) -> None:
        self._detokenizer.append(token, finish_reason)
        self._text = self._text + f"{token} " if self._tokenizer is None else self._detokenizer.text
        self._ends.append(len(self._text))


def ansi_block(block: Block, index: int) -> str:
    """A block for a terminal of 256 colours; ``index``: which of the completion's it is, from 0."""
    accepted, own = _ANSI[index % 2]
    return _ansi(block.accepted, accepted) + _ansi(block.own, own)


def marked_block(block: Block) -> str:
    """A block in plain text: in brackets, with a bar between the accepted drafts and the target's own token."""
    return f"[{block.accepted}|{block.own}]"


def legend(*, coloured: bool, painted: bool) -> str:
    """How blocks are to be read, in one line.

    Args:
        coloured: they are :func:`ansi_block`'s, or else :func:`marked_block`'s.
        painted: this line itself is for a terminal, and may show the colours.
    """
    accepted, own = "draft accepted", "the target's own token"
    if not coloured:
        return f"[{accepted}|{own}]  one bracket a step"
    if not painted:
        return f"light: {accepted}, dark: {own}; one colour a step"
    shown = ("".join(_ansi(f" {text} ", pair[i]) for pair in _ANSI) for i, text in enumerate((accepted, own)))
    return f"{' '.join(shown)}  one colour a step"


def histogram(blocks: Sequence[Block]) -> str:
    """How many steps kept 1, 2, ... tokens, as lines with bars."""
    counts = _counts(blocks)
    most = max(counts.values(), default=1)
    lines = [_headline(blocks)]
    lines += [f"{kept:4}  {'█' * -(-_BAR * steps // most)} {steps}" for kept, steps in counts.items()]
    return "\n".join(lines)


def blocks_html(blocks: Sequence[Block]) -> str:
    """The text in colours, a legend and the histogram, as HTML that brings its own styles; for notebooks.

    Pointing at a block tells its step and how many drafts were accepted.
    """
    spans = []
    for i, block in enumerate(blocks):
        accepted, own = _HTML[i % 2]
        title = f"step {i + 1}: {block.num_accepted} accepted, {block.num_tokens} kept"
        spans.append(_span(block.accepted, accepted, "#000", title) + _span(block.own, own, "#fff", title))
    legend = "".join(_span(" draft accepted ", accepted, "#000") for accepted, _ in _HTML)
    legend += " " + "".join(_span(" the target's own token ", own, "#fff") for _, own in _HTML)
    counts = _counts(blocks)
    most = max(counts.values(), default=1)
    bars = "".join(
        f'<div>{kept:2} <span style="display:inline-block;height:.8em;width:{20 * steps / most:.2f}em;'
        f'background:{_HTML[0][1]}"></span> {steps}</div>'
        for kept, steps in counts.items()
    )
    return (
        '<div style="font-family:monospace;line-height:1.6">'
        f'<div style="white-space:pre-wrap">{"".join(spans)}</div>'
        f'<div style="white-space:pre-wrap;margin:1em 0">{legend}  one colour a step</div>'
        f'<div style="white-space:pre">{html.escape(_headline(blocks))}{bars}</div></div>'
    )


def _counts(blocks: Sequence[Block]) -> dict[int, int]:
    """Steps by the tokens that they kept, from 1 to the most."""
    found = collections.Counter(block.num_tokens for block in blocks)
    return {kept: found[kept] for kept in range(1, max(found, default=0) + 1)}


def _headline(blocks: Sequence[Block]) -> str:
    tokens = sum(block.num_tokens for block in blocks)
    mean = tokens / max(len(blocks), 1)
    return f"{tokens} tokens in {len(blocks)} steps, {mean:.2f} a step; steps by the tokens they kept:"


def _ansi(text: str, style: str) -> str:
    # Line by line: a terminal would paint the rest of the line that a newline leaves in colour.
    return "\n".join(f"{style}{line}{_RESET}" if line else "" for line in text.split("\n"))


def _span(text: str, background: str, colour: str, title: str | None = None) -> str:
    if not text:
        return ""
    tip = "" if title is None else f' title="{html.escape(title)}"'
    return f'<span{tip} style="background:{background};color:{colour}">{html.escape(text)}</span>'
