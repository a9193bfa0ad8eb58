"""The package's own files of prompts and openers, which are written by hand."""

from __future__ import annotations

import json
from importlib.resources import files
from pathlib import Path

from pard_jax.demo.prompts import generate_prompts
from pard_jax.prompts import read_prompts

CHAT = Path(str(files("pard_jax").joinpath("bench/prompts/chat.jsonl")))
OPENERS = Path(str(files("pard_jax").joinpath("synthesize/openers.txt")))


def test_chat_holds_50_prompts_that_the_commands_read() -> None:
    prompts = read_prompts([], str(CHAT))
    assert len({prompt.given for prompt in prompts}) == len(prompts) == 50
    assert all(set(json.loads(line)) == {"prompt"} for line in CHAT.read_text(encoding="utf-8").splitlines())


def test_chat_is_not_what_the_demo_is_trained_on() -> None:
    chat = {prompt.given for prompt in read_prompts([], str(CHAT))}
    demo = list(generate_prompts(20_000))
    assert not chat & {prompt.text for prompt in demo}
    assert not chat & {prompt.core for prompt in demo}


def test_openers_are_distinct_lines_of_all_kinds() -> None:
    sections: dict[str, list[str]] = {}
    title = ""
    for line in OPENERS.read_text(encoding="utf-8").splitlines():
        if line.startswith("#"):
            title = line
        elif line:
            assert line == line.strip() and line.count("\\") == line.count("\\n"), line
            sections.setdefault(title, []).append(line)
    assert list(sections) == ["# Chat.", "# Everyday talk.", "# Word problems.", "# Code."]
    openers = [opener for section in sections.values() for opener in section]
    assert len(set(openers)) == len(openers) >= 300
    shares = [len(section) / len(openers) for section in sections.values()]
    assert shares[0] + shares[1] > 0.6 and min(shares) > 0.1
