"""What requests stream while they run: whole characters, nothing that has to be taken back, nobody else's text."""

from __future__ import annotations

from typing import Any

import pytest

from tests.engine.alphabets import DIGITS, LOWER, UPPER, follows, joined, text_of
from tests.helpers.engine import (
    ScriptedEngine,
    drain,
    params_of_request,
    scripted,
    submit,
)

CHARACTERS = "é😀中"  # of 2, 4 and 3 bytes, none of them twice


@pytest.fixture
def engine(engine: ScriptedEngine) -> ScriptedEngine:
    engine.say(LOWER, UPPER, DIGITS, drafts=2)
    return engine


@pytest.mark.parametrize("right", range(4))
@pytest.mark.parametrize("max_tokens", range(1, 20, 3))
def test_characters_are_streamed_whole(right, max_tokens):
    """Whichever blocks their bytes come in."""
    engine = scripted(3, 4)
    engine.say(b"p" + CHARACTERS.encode(), drafts=right)
    updates: list[Any] = []
    submit(engine, {"x": ("p", params_of_request(max_tokens=max_tokens))})
    output = drain(engine, updates)["x"]
    said = (CHARACTERS + "p").encode() * 3
    assert "".join(u.text for u in updates) == text_of(output) == said[:max_tokens].decode(errors="replace")
    assert not any("\ufffd" in u.text for u in updates[:-1])
    assert joined(u.token_ids for u in updates) == list(said[:max_tokens])
    assert [u.finished for u in updates] == [False] * (len(updates) - 1) + [True]


@pytest.mark.parametrize("stop", ["hij", "z", "yza", "bcx"])
def test_what_may_become_a_stop_string_is_held_back(engine, stop):
    updates: list[Any] = []
    submit(engine, {"x": ("a", params_of_request(max_tokens=40, stop=stop))})
    output = drain(engine, updates)["x"]
    whole = follows("a", 40)
    text = whole[: whole.index(stop)] if stop in whole else whole
    sent = ""
    for update in updates:
        sent += update.text
        assert text.startswith(sent)  # nothing that was sent had to be taken back
    assert sent == text_of(output) == text
    if len(text) > 20:
        assert len(updates) > 1 and sum(bool(u.text) for u in updates) > 1
    assert output.outputs[0].finish_reason == ("stop" if stop in whole else "length")


def test_streams_of_several_requests_do_not_mix(engine):
    updates: list[Any] = []
    submit(engine, {c: (c, params_of_request(max_tokens=33, logprobs=1)) for c in "aAbB01c"})
    outputs = drain(engine, updates)
    for request_id, output in outputs.items():
        mine = [u for u in updates if u.request_id == request_id]
        assert "".join(u.text for u in mine) == text_of(output) == follows(request_id, 33)
        assert joined(u.token_ids for u in mine) == output.outputs[0].token_ids
        assert joined(u.logprobs for u in mine) == output.outputs[0].logprobs
        assert len(mine) > 2
