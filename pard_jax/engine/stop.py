"""When a request ends, looked at one token at a time.

A step keeps several tokens at once, and any of them may be the last: the caller hands them over one by one, in order,
and drops what follows the first that ends the request. Token ends are decided here from ids and counts alone; stop
strings need text, which the detokenizer brings.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from pard_jax.sampling_params import SamplingParams


class StopChecker:
    """The token-wise ends of one request (vllm/v1/core/sched/utils.py, check_stop).

    Args:
        params: the request's settings.
        eos_token_id: the primary EOS id; None where the model has none.
        extra_eos_token_ids: further EOS ids, of ``generation_config.json``: they end a request as stop token ids do.
        max_model_len: tokens the prompt and the output may have together.

    Attributes:
        token_ids: the ids that end the request, which must not be sampled before min_tokens; EOS first, and without the
            EOS ids under ignore_eos.
    """

    def __init__(
        self,
        params: SamplingParams,
        *,
        eos_token_id: int | None = None,
        extra_eos_token_ids: Iterable[int] = (),
        max_model_len: int,
    ) -> None:
        extra = list(extra_eos_token_ids)
        own = params.stop_token_ids or []
        self._eos = None if params.ignore_eos else eos_token_id
        self._stop_ids = frozenset(own if params.ignore_eos else (*own, *extra))
        self._min_tokens = params.min_tokens
        self._max_tokens = params.max_tokens
        self._max_model_len = max_model_len
        ids = [*([] if self._eos is None else [self._eos]), *(own if params.ignore_eos else (*extra, *own))]
        self.token_ids: tuple[int, ...] = tuple(dict.fromkeys(ids))
        self._ends = frozenset(ids)

    def check(self, token_id: int, num_output_tokens: int, num_total_tokens: int) -> tuple[str, int | None] | None:
        """Whether a token ends the request: EOS before stop token ids before length.

        Args:
            token_id: the newest token.
            num_output_tokens: generated tokens, this one included.
            num_total_tokens: the same and the prompt's.

        Returns:
            None to go on, or (finish_reason, stop_reason): ("stop", None) for the primary EOS, ("stop", id) for
            another stop token, ("length", None) at max_tokens or max_model_len.
        """
        # min_tokens is enforced where tokens are sampled, by masking. Here too, so that no fault there ends a request.
        if num_output_tokens >= self._min_tokens:
            if token_id == self._eos:
                return "stop", None
            if token_id in self._stop_ids:
                return "stop", token_id
        if num_total_tokens >= self._max_model_len:
            return "length", None
        if self._max_tokens is not None and num_output_tokens >= self._max_tokens:
            return "length", None
        return None

    def none_ends(self, token_ids: list[int], num_output_tokens: int, num_total_tokens: int) -> bool:
        """Whether none of the next tokens can end the request, by one look at all of them.

        False says only that :meth:`check` must look at each. The numbers are those before these tokens.
        """
        count = len(token_ids)
        return (
            num_total_tokens + count < self._max_model_len
            and (self._max_tokens is None or num_output_tokens + count < self._max_tokens)
            and self._ends.isdisjoint(token_ids)
        )


def check_stop_strings(
    output_text: str, new_char_count: int, stop: Sequence[str], include_in_output: bool
) -> tuple[str, int] | None:
    """The stop string that is completed first within the newest characters (vllm/v1/engine/detokenizer.py).

    Args:
        output_text: all text so far.
        new_char_count: how many of its last characters are new; a match must end among them.
        stop: the stop strings, none empty.
        include_in_output: keep the stop string itself.

    Returns:
        None, or the stop string and the length to cut the text to (-1: nothing to cut). Where several are completed by
        the same character, the one that is listed first.
    """
    if new_char_count <= 0:
        return None
    ends: list[tuple[int, str]] = []
    for candidate in stop:
        begin = output_text.find(candidate, max(0, len(output_text) - new_char_count - len(candidate) + 1))
        if begin >= 0:
            ends.append((begin + len(candidate), candidate))
    if not ends:
        return None
    end, matched = min(ends, key=lambda match: match[0])
    if not include_in_output:
        return matched, end - len(matched)
    return matched, -1 if end == len(output_text) else end
