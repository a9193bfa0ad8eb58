"""Text of a request, token by token, with its stop strings.

A token is not a piece of text: a character may take several tokens, and a decoder may treat a token by its neighbours.
So each new token is decoded together with a few before it, and the text that they share is taken off.
"""

from __future__ import annotations

from pard_jax.engine.stop import check_stop_strings
from pard_jax.sampling_params import SamplingParams
from pard_jax.tokenizer import Tokenizer

_INCOMPLETE = "\ufffd"  # what a decoder writes for bytes that are no character, or not yet


class Detokenizer:
    """The text of one completion.

    The text is the one that ``tokenizer.decode`` gives for all tokens at once (vLLM decodes the prompt's end along, and
    drops bytes at the end that are no character; these give U+FFFD here, once nothing can complete them any more).

    Args:
        tokenizer: None leaves the text empty.
        params: the request's settings: stop strings, min_tokens, skip_special_tokens, detokenize.

    Raises:
        ValueError: stop strings without a tokenizer.
    """

    def __init__(self, tokenizer: Tokenizer | None, params: SamplingParams) -> None:
        self._stop = params.stop_strings
        if tokenizer is None and self._stop:
            raise ValueError("stop strings need a tokenizer, and the model's directory holds none; use stop_token_ids")
        self._tokenizer = tokenizer if params.detokenize else None
        self._skip_special = params.skip_special_tokens
        self._include_stop = params.include_stop_str_in_output
        self._min_tokens = params.min_tokens
        # So many characters may turn out to begin a stop string; they are streamed once they cannot.
        self._held = max(map(len, self._stop), default=1) - 1 if not self._include_stop else 0
        self._text = ""
        self._num_tokens = 0
        self._sent = 0  # characters that delta() has given away
        self._window: list[int] = []  # the tokens decoded together: a stretch that is settled, then what is not
        self._settled = 0  # tokens of the window's settled stretch
        self._shown = 0  # characters of the window's text that are in self._text

    @property
    def active(self) -> bool:
        """Whether there is a tokenizer to make text; else :meth:`append` has nothing to do."""
        return self._tokenizer is not None

    @property
    def text(self) -> str:
        """All text so far, cut at the stop string; a character still incomplete is not in it."""
        return self._text

    def append(self, token_id: int, finish_reason: str | None = None) -> str | None:
        """Take the next token.

        Args:
            token_id: any id; one that names no token adds no text.
            finish_reason: how this token ends the request (StopChecker's answer), None if it goes on. With "stop" the
                token's own text is left out, unless ``include_stop_str_in_output``. With any, nothing can follow:
                bytes that are no character yet are written as U+FFFD.

        Returns:
            The stop string that this token completed, the text being cut there, or None. The request then ends with
            this token, whatever else it would end with, and no token may follow.
        """
        self._num_tokens += 1
        if self._tokenizer is None:
            return None
        before = len(self._text)
        if finish_reason != "stop" or self._include_stop:
            self._window.append(token_id)
        self._decode(final=finish_reason is not None)
        if self._num_tokens <= self._min_tokens:
            return None
        found = check_stop_strings(self._text, len(self._text) - before, self._stop, self._include_stop)
        if found is None:
            return None
        matched, length = found
        if length >= 0:
            self._text = self._text[:length]
        return matched

    def delta(self, finished: bool) -> str:
        """The text that is new since the last call and that no stop string can take back; all of it once finished."""
        end = len(self._text) if finished else len(self._text) - self._held
        begin, self._sent = self._sent, max(self._sent, end)
        return self._text[begin : self._sent]

    def _decode(self, final: bool) -> None:
        assert self._tokenizer is not None
        window = self._tokenizer.decode(self._window, skip_special_tokens=self._skip_special)
        sure = window if final else window.rstrip(_INCOMPLETE)
        if len(sure) > self._shown:
            self._text += sure[self._shown :]
            self._shown = len(sure)
            if len(sure) == len(window):
                # All of it is settled. The newest stretch stays as the context of what follows, so that a decoder which
                # treats the first token of a text differently never takes the next one for it.
                self._window = self._window[self._settled :]
                self._settled = len(self._window)
                kept = self._tokenizer.decode(self._window, skip_special_tokens=self._skip_special)
                self._shown = len(kept)
