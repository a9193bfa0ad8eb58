"""Where the turns of a conversation begin and end, found out from any chat template by rendering it."""

from __future__ import annotations

import dataclasses

from pard_jax.tokenizer import Tokenizer

# No spaces, which templates strip; nothing that a template or its default system turn would say itself.
_USER, _ASSISTANT = "QkUserTurnQk", "QkAssistantTurnQk"


@dataclasses.dataclass(frozen=True)
class Turns:
    """The ids around what a user and an assistant say.

    Attributes:
        opening: all up to the user's text: system turn and the head of the user's turn. A model that is given this, and
            no more, goes on with what a user would say (Magpie, arXiv 2406.08464).
        closing: from the end of the user's text to where the assistant's begins.
        end_ids: the special tokens that end the one or the other.
    """

    opening: list[int]
    closing: list[int]
    end_ids: tuple[int, ...]


def derive_turns(tokenizer: Tokenizer, *, system: str | None = None, enable_thinking: bool | None = None) -> Turns:
    """The turns of a tokenizer's chat template.

    Args:
        system: the system's turn; None for the template's own, if it has one.
        enable_thinking: given to the template.

    Raises:
        ValueError: there is no template, it changes what the user says, or it ends the user's turn with a token that
            is not special: nothing would tell where a model that writes a user's turn is done.
    """
    if not tokenizer.has_chat_template:
        raise ValueError("the tokenizer has no chat template to open a user's turn with; give prompts with --prompts")
    messages = [] if system is None else [{"role": "system", "content": system}]
    messages.append({"role": "user", "content": _USER})
    opening, closing = _around(_render(tokenizer, messages, enable_thinking, answered=False), _USER)
    messages.append({"role": "assistant", "content": _ASSISTANT})
    _, rest = _around(_render(tokenizer, messages, enable_thinking, answered=True), _ASSISTANT)

    special = special_ids(tokenizer)
    closing_ids = tokenizer.encode(closing, add_special_tokens=False)
    if not closing_ids or closing_ids[0] not in special:
        raise ValueError(
            f"the chat template ends the user's turn with {closing!r:.60}, which begins with no special token, so the "
            "model cannot end a turn that it writes itself; give prompts with --prompts"
        )
    ends = [closing_ids[0], *tokenizer.encode(rest, add_special_tokens=False)[:1]]
    return Turns(
        opening=tokenizer.encode(opening, add_special_tokens=False),
        closing=closing_ids,
        end_ids=tuple(dict.fromkeys(i for i in ends if i in special)),
    )


def special_ids(tokenizer: Tokenizer) -> frozenset[int]:
    """Ids of the tokens that structure a text and are none of it: turn marks, padding, BOS, EOS."""
    added = tokenizer.hf.added_tokens_decoder.items()
    return frozenset([*tokenizer.hf.all_special_ids, *(i for i, token in added if token.special)])


def _render(
    tokenizer: Tokenizer, messages: list[dict[str, str]], enable_thinking: bool | None, *, answered: bool
) -> str:
    import jinja2

    thinking = {} if enable_thinking is None else {"enable_thinking": enable_thinking}
    try:
        return tokenizer.hf.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=not answered, **thinking
        )
    except jinja2.TemplateError as e:
        raise ValueError(f"the chat template refused a conversation of one turn: {e}") from e


def _around(text: str, content: str) -> tuple[str, str]:
    if text.count(content) != 1:
        raise ValueError(
            f"the chat template does not write a message once and as it is ({text!r:.200}), so where the turns lie "
            "is not known; give prompts with --prompts"
        )
    before, after = text.split(content)
    return before, after
