"""Text to token ids and back, and whether two models mean the same by an id.

A thin wrapper over transformers' tokenizers, which are imported when one is first loaded: it takes a third of a second,
two where PyTorch is installed, and token-id prompts need none. Also reads ``generation_config.json``, the defaults that
come with a tokenizer.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

logger = logging.getLogger(__name__)

# Any of them holds a vocabulary; tokenizer_config.json alone does not make a tokenizer.
VOCABULARY_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json")
# What a checkpoint names whose tokenizer is its tokenizer.json and nothing else, and the models of which AutoTokenizer
# believes it (of qwen2, for one, it does not).
_GENERIC_CLASSES = ("PreTrainedTokenizerFast", "TokenizersBackend")
_GENERIC_MODELS = ("llama", "qwen3")
# The keys of generation_config.json that vLLM takes as sampling defaults (ModelConfig.get_diff_sampling_param).
SAMPLING_DEFAULTS = {
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "max_new_tokens": "max_tokens",
}


class Tokenizer:
    """A transformers tokenizer, narrowed to what is used here and the same under transformers 4.57 and 5."""

    def __init__(self, hf: Any) -> None:
        self.hf = hf

    def __len__(self) -> int:
        """Number of tokens, added ones included."""
        return len(self.hf)

    @property
    def eos_token_id(self) -> int | None:
        """The primary EOS id."""
        return self.hf.eos_token_id

    @property
    def bos_token_id(self) -> int | None:
        """The id that begins a text, where the model has one."""
        return self.hf.bos_token_id

    @property
    def vocab(self) -> dict[str, int]:
        """Token -> id, added tokens included."""
        return self.hf.get_vocab()

    @property
    def has_chat_template(self) -> bool:
        """Whether the checkpoint brings a chat template."""
        return bool(self.hf.chat_template)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Ids of a text; ``add_special_tokens`` puts BOS (or whatever the tokenizer wants) around it.

        Raises:
            ValueError: the text holds half a surrogate pair, as bytes that are no UTF-8 do once Python has read them.
        """
        check_unicode(text)
        # verbose=False: a prompt that is too long is refused by the engine, not warned of here.
        return list(self.hf.encode(text, add_special_tokens=add_special_tokens, verbose=False))

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of ids, exactly as the tokenizer's decoder gives it; ids that name no token are left out."""
        # transformers can "clean up" spaces before punctuation, which changes text that was generated.
        return self.hf.decode(token_ids, skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False)

    def convert_id_to_piece(self, token_id: int) -> str:
        """One id decoded alone, as log-probabilities show it; half a character gives U+FFFD."""
        return self.decode([token_id], skip_special_tokens=False)

    def tokens(self, token_ids: Sequence[int]) -> list[str | None]:
        """The vocabulary's own spelling of ids; None where an id names no token."""
        return self.hf.convert_ids_to_tokens(list(token_ids))

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        enable_thinking: bool | None = None,
        add_generation_prompt: bool = True,
        **template_kwargs: Any,
    ) -> list[int]:
        """Ids of a conversation as the model was trained to see it.

        Args:
            messages: ``{"role": ..., "content": ...}`` each.
            enable_thinking: passed to the template when given (Qwen3's templates read it).
            add_generation_prompt: open the assistant's turn.
            template_kwargs: passed on, to the template or to transformers (``tools``, ``continue_final_message``,
                ``chat_template``).

        Raises:
            ValueError: the checkpoint has no chat template, a message is not one of text, or the template refuses.
        """
        import jinja2

        if not self.has_chat_template and template_kwargs.get("chat_template") is None:
            raise ValueError(
                "the tokenizer has no chat template; give the prompt as text, or add a chat_template to the checkpoint"
            )
        if enable_thinking is not None:
            template_kwargs["enable_thinking"] = enable_thinking
        if not messages:
            raise ValueError("the conversation has no messages; expected at least one")
        conversation = [_text_message(message) for message in messages]
        try:
            return self._render(conversation, add_generation_prompt, **template_kwargs)
        except jinja2.TemplateError as e:
            raise ValueError(f"the chat template refused the messages: {e}") from e

    def _render(self, conversation: list[dict[str, Any]], add_generation_prompt: bool, **more: Any) -> list[int]:
        return list(
            self.hf.apply_chat_template(
                conversation,
                tokenize=True,
                add_generation_prompt=add_generation_prompt,
                return_dict=False,  # the default differs between transformers 4.57 and 5
                **more,
            )
        )


def check_unicode(text: str) -> None:
    """Refuse what no tokenizer takes.

    Raises:
        ValueError: a lone surrogate.
    """
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as e:
        raise ValueError(
            f"the text is not valid Unicode ({text[e.start : e.end]!r} at character {e.start}); give UTF-8 text"
        ) from None


def _text_message(message: Any) -> dict[str, Any]:
    """A message with its content as one text: parts of type "text" are joined by newlines, as vLLM does.

    Raises:
        ValueError: no role or content, or content that is not text.
    """
    if not isinstance(message, Mapping) or "role" not in message:
        raise ValueError(f"a message must have a 'role' and a 'content' of text, got {message!r:.80}")
    content = message.get("content")
    if content is None and not message.get("tool_calls"):
        raise ValueError(f"a message must have a 'role' and a 'content' of text, got {message!r:.80}")
    if isinstance(content, list | tuple):
        for part in content:
            if not isinstance(part, Mapping) or part.get("type") != "text" or not isinstance(part.get("text"), str):
                raise ValueError(
                    f"a part of a message's content must be text, {{'type': 'text', ...}}, got {part!r:.80}"
                )
        content = "\n".join(part["text"] for part in content)
    if content is not None and not isinstance(content, str):
        raise ValueError(f"a message's content must be text, got {content!r:.80}")
    if content is not None:
        check_unicode(content)
    return {**message, "content": content}


def load_tokenizer(directory: str | Path) -> Tokenizer | None:
    """The tokenizer of a checkpoint directory; None when it holds no tokenizer files.

    Raises:
        ValueError: tokenizer files that transformers cannot load.
    """
    directory = Path(directory)
    if not any((directory / name).is_file() for name in VOCABULARY_FILES):
        if (directory / "tokenizer_config.json").is_file():
            raise ValueError(
                f"{directory} holds a tokenizer_config.json but no vocabulary; expected one of "
                f"{', '.join(VOCABULARY_FILES)} beside it"
            )
        return None
    try:
        if _is_generic(directory):
            from pard_jax.plain_tokenizer import load_plain

            if (plain := load_plain(directory)) is not None:
                return plain
            from transformers import PreTrainedTokenizerFast as Loader
        else:
            from transformers import AutoTokenizer as Loader
        return Tokenizer(Loader.from_pretrained(str(directory), local_files_only=True))
    except Exception as e:
        # transformers and tokenizers raise anything from OSError to a bare Exception here.
        raise ValueError(f"the tokenizer in {directory} cannot be loaded: {e}") from e


def _is_generic(directory: Path) -> bool:
    """Whether AutoTokenizer would choose the generic class. To ask it takes over a second, and imports PyTorch."""
    if not (directory / "tokenizer.json").is_file():
        return False
    try:
        tokenizer, model = (
            json.loads((directory / name).read_bytes()) for name in ("tokenizer_config.json", "config.json")
        )
        return (
            tokenizer.get("tokenizer_class") in _GENERIC_CLASSES
            and "auto_map" not in tokenizer
            and model.get("model_type") in _GENERIC_MODELS
        )
    except (OSError, ValueError, AttributeError):
        return False  # AutoTokenizer says what is wrong


def check_same_vocabulary(
    target: Tokenizer | None,
    draft: Tokenizer | None,
    target_vocab_size: int,
    draft_vocab_size: int,
    mask_token_id: int | None = None,
) -> int:
    """The vocabulary that target and draft share, after making sure that they mean the same by every id of it.

    vLLM compares the two sizes alone: that refuses models which differ in padding only, and lets two tokenizers of one
    size pass. Here the tokens are compared and the padding may differ.

    Args:
        target, draft: the tokenizers; None where a checkpoint brings none.
        target_vocab_size, draft_vocab_size: V of each ``config.json``, padding included.
        mask_token_id: the draft's mask token, which its tokenizer may name where the target's has nothing.

    Returns:
        min of the two sizes: no draft at or above it may be proposed.

    Raises:
        ValueError: the first id that differs, a token that lies outside the shared vocabulary, or, with a tokenizer
            missing, sizes that differ.
    """
    shared = min(target_vocab_size, draft_vocab_size)
    if target is None or draft is None:
        if target_vocab_size != draft_vocab_size:
            missing = " and ".join(n for n, tok in (("target", target), ("draft", draft)) if tok is None)
            raise ValueError(
                "Target and draft model should have the same vocabulary size. "
                f"Target model vocab_size={target_vocab_size}. Draft model vocab_size={draft_vocab_size}. "
                "Using models with different tokenizers can cause out-of-bounds errors during speculative decoding. "
                f"(Sizes may differ where both checkpoints bring a tokenizer to compare; the {missing} brings none.)"
            )
        return shared
    if target is draft:  # there is nothing to compare, but what may lie outside
        ids = sorted(i for i in target.vocab.values() if i >= shared)
    else:
        ids = sorted({*target.vocab.values(), *draft.vocab.values()})
    for token_id, ours, theirs in zip(ids, target.tokens(ids), draft.tokens(ids), strict=True):
        if token_id == mask_token_id and ours is None:
            continue
        if ours != theirs:
            raise ValueError(
                "target and draft must share one vocabulary, but token id "
                f"{token_id} is {_quote(ours)} in the target and {_quote(theirs)} in the draft; "
                "use a draft that was trained for the target's tokenizer"
            )
        if token_id >= shared:
            raise ValueError(
                f"token id {token_id} ({ours!r}) lies outside the shared vocabulary of {shared} ids "
                f"(target vocab_size={target_vocab_size}, draft vocab_size={draft_vocab_size}); "
                "both models must have a row for every token"
            )
    return shared


def load_generation_config(directory: str | Path) -> dict[str, Any]:
    """What ``generation_config.json`` says: ``eos_token_id``, a list of all of them, and the sampling defaults it sets.

    The sampling defaults have the names of :class:`pard_jax.SamplingParams`. Empty, but for ``eos_token_id: []``, when
    the file is missing.

    Raises:
        ValueError: the file is no JSON object.
    """
    path = Path(directory) / "generation_config.json"
    if not path.is_file():
        return {"eos_token_id": []}
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as e:
        raise ValueError(f"{path} is not valid JSON: {e}") from None
    if not isinstance(config, dict):
        raise ValueError(f"{path} holds a {type(config).__name__}; expected a JSON object")
    eos = config.get("eos_token_id")
    found: dict[str, Any] = {"eos_token_id": [] if eos is None else [eos] if isinstance(eos, int) else list(eos)}
    for key, name in SAMPLING_DEFAULTS.items():
        if config.get(key) is not None:
            found[name] = config[key]
    if (penalty := config.get("repetition_penalty")) not in (None, 1, 1.0):
        # vLLM would apply it by default. Nobody asked for it in a request, so it is left out, and said.
        logger.warning("%s sets repetition_penalty=%s, which is not supported; it is left out", path, penalty)
    return found


def _quote(token: str | None) -> str:
    return "no token" if token is None else repr(token)
