"""Blocks: what each step kept, told from updates alone, and how it is shown."""

from __future__ import annotations

import re
from html.parser import HTMLParser

import pytest

from pard_jax import SamplingParams
from pard_jax.blocks import Block, BlockRecorder, ansi_block, blocks_html, histogram, legend, marked_block
from pard_jax.engine.request import RequestUpdate
from pard_jax.outputs import CompletionOutput, RequestMetrics, RequestOutput, RequestSpecMetrics
from pard_jax.tokenizer import Tokenizer

ANSI = re.compile(r"\x1b\[[\d;]*m")
PARAMS = SamplingParams(max_tokens=100)
BLOCKS = [Block("One two", " three", 2, 3), Block("", "\n", 0, 1), Block("a <b> & ", "", 3, 3)]


def feed(
    recorder: BlockRecorder,
    steps: list[list[int]],
    accepted: int | None,
    reason: str = "length",
    stop_string: str | None = None,
) -> list[Block]:
    """The blocks of a request that ends with the last of ``steps``, ``accepted`` drafts in all."""
    for i, tokens in enumerate(steps, 1):
        output = None
        if i == len(steps):
            metrics = RequestMetrics(0.0)
            if accepted is not None:
                metrics.speculative_decoding = RequestSpecMetrics(1.0, 1.0, [], i, accepted, 9, 9)
            completion = CompletionOutput(0, "", [], finish_reason=reason, stop_reason=stop_string)
            output = RequestOutput("", None, [1], [completion], finished=True, metrics=metrics)
        recorder(0, 0, RequestUpdate("0", "held back", tokens, None, output))
    return recorder.blocks


def cut(ids: list[int], *sizes: int) -> list[list[int]]:
    steps = []
    for size in sizes:
        steps.append(ids[:size])
        ids = ids[size:]
    return [*steps, ids]


def test_tokens_of_every_step(tokenizer: Tokenizer) -> None:
    text = "The quick brown fox jumps, naïve 😀 and 你好."
    ids = tokenizer.encode(text)
    assert len(ids) > 12
    steps = cut(ids, 3, 1, 4)
    blocks = feed(BlockRecorder(tokenizer, PARAMS), [*steps[:2], [], *steps[2:]], 2 + 0 + 3 + len(ids) - 9)
    assert [(b.num_accepted, b.num_tokens) for b in blocks] == [(2, 3), (0, 1), (3, 4), (len(ids) - 9, len(ids) - 8)]
    assert "".join(b.accepted + b.own for b in blocks) == text
    assert blocks[0].accepted == tokenizer.decode(ids[:2]) and blocks[0].own == tokenizer.decode(ids[2:3])
    assert blocks[1] == Block("", tokenizer.decode(ids[3:4]), 0, 1)


def test_a_character_goes_where_it_is_complete(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("😁")
    assert len(ids) > 1
    blocks = feed(BlockRecorder(tokenizer, PARAMS), [ids[:-1], ids[-1:]], len(ids) - 2)
    assert [b.accepted + b.own for b in blocks] == ["", "😁"]


def test_the_last_step_may_lack_the_targets_token(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("one two three four")
    first, last = cut(ids, 2)
    blocks = feed(BlockRecorder(tokenizer, PARAMS), [first, last], 1 + len(last))
    assert (blocks[1].own, blocks[1].num_accepted) == ("", len(last))
    blocks = feed(BlockRecorder(tokenizer, PARAMS), [first, last], 1 + len(last) - 1)
    assert blocks[1].own == tokenizer.decode(ids[-1:])


def test_an_end_token_is_no_text(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("one two three")
    eos = tokenizer.eos_token_id
    assert eos is not None
    blocks = feed(BlockRecorder(tokenizer, PARAMS), [ids, [eos]], len(ids) - 1, "stop")
    assert blocks[-1] == Block("", "", 0, 1)
    assert "".join(b.accepted + b.own for b in blocks) == "one two three"


def test_a_stop_string_takes_text_back(tokenizer: Tokenizer) -> None:
    text = "One two three four five six"
    ids = tokenizer.encode(text)
    end = next(n for n in range(len(ids)) if "three four" in tokenizer.decode(ids[:n]))
    recorder = BlockRecorder(tokenizer, SamplingParams(max_tokens=100, stop="three four"))
    steps = [[token] for token in ids[:end]]  # so that the string spans blocks
    blocks = feed(recorder, steps, 0, "stop", "three four")
    assert "".join(b.accepted + b.own for b in blocks) == "One two "
    assert [b.num_tokens for b in blocks] == [1] * end


def test_without_speculation_or_tokenizer() -> None:
    recorder = BlockRecorder(None, PARAMS)
    assert feed(recorder, [[5], [77]], None) == [Block("", "5 ", 0, 1), Block("", "77 ", 0, 1)]


def test_what_is_no_single_step(tokenizer: Tokenizer) -> None:
    with pytest.raises(ValueError, match="steps_per_dispatch=1"):
        feed(BlockRecorder(tokenizer, PARAMS), [[5, 6, 7], [8]], 1)
    with pytest.raises(ValueError, match="one completion"):
        BlockRecorder(tokenizer, PARAMS)(0, 1, RequestUpdate("1", "", [5], None))
    with pytest.raises(ValueError, match="one completion"):
        BlockRecorder(tokenizer, PARAMS)(1, 0, RequestUpdate("1", "", [5], None))


# -- how it is shown ----------------------------------------------------------------------------------------------


def test_on_a_terminal() -> None:
    shown = [ansi_block(block, i) for i, block in enumerate(BLOCKS)]
    assert ANSI.sub("", "".join(shown)) == "One two three\na <b> & "
    assert shown[1] == "\n"  # no colour to run on to the end of the line
    styles = [ANSI.findall(block) for block in (ansi_block(BLOCKS[0], i) for i in range(3))]
    assert styles[0] == styles[2] != styles[1]
    accepted, reset, own, end = styles[0]
    assert accepted != own and reset == end == "\x1b[0m"
    for style in (*styles[0], *styles[1]):
        assert style in legend(coloured=True, painted=True)
    text = ANSI.sub("", legend(coloured=True, painted=True))
    assert text.endswith("  one colour a step") and text.count("draft accepted") == text.count("the target's own") == 2


def test_in_a_file() -> None:
    assert "".join(map(marked_block, BLOCKS)) == "[One two| three][|\n][a <b> & |]"
    assert legend(coloured=False, painted=True).startswith("[draft accepted|the target's own token]")
    assert "\x1b" not in legend(coloured=True, painted=False) and "light" in legend(coloured=True, painted=False)


def test_histogram() -> None:
    lines = histogram([*BLOCKS, BLOCKS[1]]).splitlines()
    assert lines[0] == "8 tokens in 4 steps, 2.00 a step; steps by the tokens they kept:"
    bar = "█" * 40
    assert lines[1:] == [f"   1  {bar} 2", "   2   0", f"   3  {bar} 2"]
    assert histogram([]).startswith("0 tokens in 0 steps")


class _Page(HTMLParser):
    """Text, and what every span says."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.spans: list[tuple[str | None, str, str]] = []  # title, style, text
        self._open: list[str] = []
        self.feed(page)
        self.close()
        assert not self._open, "a tag is left open"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert tag in ("div", "span")
        self._open.append(tag)
        if tag == "span":
            found = dict(attrs)
            self.spans.append((found.get("title"), found["style"] or "", ""))

    def handle_data(self, data: str) -> None:
        if self._open[-1] == "span":
            title, style, text = self.spans[-1]
            self.spans[-1] = (title, style, text + data)

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag


def test_html() -> None:
    page = blocks_html(BLOCKS)
    told = [(title, text) for title, _, text in _Page(page).spans if title is not None]
    assert told == [
        ("step 1: 2 accepted, 3 kept", "One two"),
        ("step 1: 2 accepted, 3 kept", " three"),
        ("step 2: 0 accepted, 1 kept", "\n"),
        ("step 3: 3 accepted, 3 kept", "a <b> & "),
    ]
    styles = [style for title, style, _ in _Page(page).spans if title is not None]
    assert len({styles[0], styles[1], styles[2]}) == 3 and styles[3] == styles[0]
    legend = {text: style for title, style, text in _Page(page).spans if title is None and text}
    assert set(legend) == {" draft accepted ", " the target's own token "}
    assert "7 tokens in 3 steps, 2.33 a step" in page and "<b>" not in page
    assert _Page(blocks_html([])).spans
