"""One request on the host: what came of it so far, token by token, until it ends."""

from __future__ import annotations

import dataclasses
import time

import numpy as np

from pard_jax.engine.detokenizer import Detokenizer
from pard_jax.engine.metrics import AcceptanceStats
from pard_jax.engine.stop import StopChecker
from pard_jax.outputs import CompletionOutput, Logprob, RequestMetrics, RequestOutput
from pard_jax.sampling_params import SamplingParams
from pard_jax.tokenizer import Tokenizer


@dataclasses.dataclass(frozen=True)
class RequestUpdate:
    """What one look at the device added to a request: what a server streams.

    ``text`` never ends inside a character or inside what may become a stop string. ``output`` is the whole result, on
    the last update only.
    """

    request_id: str
    text: str
    token_ids: list[int]
    logprobs: list[dict[int, Logprob]] | None
    output: RequestOutput | None = None

    @property
    def finished(self) -> bool:
        return self.output is not None


@dataclasses.dataclass(frozen=True)
class StepLogprobs:
    """Log-probabilities of the tokens one step kept of one row, as the device gives them."""

    chosen: np.ndarray  # [K+1]
    rank: np.ndarray  # [K+1]
    top_ids: np.ndarray  # [K+1, max]
    top_values: np.ndarray  # [K+1, max]


class Request:
    """A request's output as it grows. Knows nothing of slots or devices."""

    def __init__(
        self,
        request_id: str,
        prompt: str | None,
        prompt_token_ids: list[int],
        params: SamplingParams,
        *,
        seed: int,
        stop: StopChecker,
        tokenizer: Tokenizer | None,
        max_length: int,
        num_speculative_tokens: int,
    ) -> None:
        """``seed``: 32 bits; ``max_length``: tokens, the prompt's included, at which the request ends anyway."""
        self.request_id, self.prompt, self.prompt_token_ids, self.params = request_id, prompt, prompt_token_ids, params
        self.seed, self.stop, self.max_length = seed, stop, max_length
        self.token_ids: list[int] = []
        self.logprobs: list[dict[int, Logprob]] | None = None if params.logprobs is None else []
        self.acceptance = AcceptanceStats(num_speculative_tokens)
        self.metrics = RequestMetrics(arrival_time=time.monotonic())
        self.finish_reason: str | None = None
        self.stop_reason: int | str | None = None
        self._tokenizer = tokenizer
        self._detokenizer = Detokenizer(tokenizer, params)
        self._ids_alone = self.logprobs is None and not self._detokenizer.active  # nothing to do token by token
        self._streamed = 0  # tokens already handed out in updates

    @property
    def num_tokens(self) -> int:
        """Prompt and output."""
        return len(self.prompt_token_ids) + len(self.token_ids)

    @property
    def plain_greedy(self) -> bool:
        """Whether each of its tokens is the target's likeliest, and nothing more is asked."""
        return self.params.greedy and self.params.min_tokens == 0 and self.params.logprobs is None

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None

    def extend(
        self, tokens: list[int], num_drafts: int, num_accepted: int, logprobs: StepLogprobs | None, now: float
    ) -> None:
        """Take in what one step kept, in order, dropping what follows the token that ends the request.

        Steps without drafts and log-probabilities may be taken in together.
        ``now``: when the host read it; equal for all steps of one dispatch.
        """
        if self.metrics.first_token_time is None:
            self.metrics.first_token_time = now
        self.metrics.last_token_time = now
        kept, end = len(tokens), None
        if self._ids_alone and self.stop.none_ends(tokens, len(self.token_ids), self.num_tokens):
            self.token_ids += tokens
        else:
            for i, token in enumerate(tokens):
                self.token_ids.append(token)
                if self.logprobs is not None and logprobs is not None:
                    self.logprobs.append(self._logprob_entry(token, logprobs, i))
                if (end := self._end_at(token)) is not None:
                    kept = i + 1
                    break
        self.metrics.num_generation_tokens = len(self.token_ids)
        if now == self.metrics.first_token_time:
            self.metrics.num_first_tokens = len(self.token_ids)
        self.acceptance.observe(num_drafts, num_accepted, kept)
        if end is not None:
            self.finish(*end)

    def finish(self, reason: str, stop_reason: int | str | None = None) -> None:
        """End the request; an abort comes here, too."""
        self.finish_reason, self.stop_reason = reason, stop_reason
        self.metrics.finished_time = time.monotonic()
        if self.acceptance.num_spec_tokens:
            self.metrics.speculative_decoding = self.acceptance.request_metrics()

    def update(self) -> RequestUpdate:
        """What is new since the last update."""
        start, self._streamed = self._streamed, len(self.token_ids)
        return RequestUpdate(
            request_id=self.request_id,
            text=self._detokenizer.delta(self.finished),
            token_ids=self.token_ids[start:],
            logprobs=None if self.logprobs is None else self.logprobs[start:],
            output=self.output() if self.finished else None,
        )

    def output(self) -> RequestOutput:
        """The result so far, as vLLM's users read it."""
        cumulative = None
        if self.logprobs is not None:
            pairs = zip(self.token_ids, self.logprobs, strict=True)
            cumulative = float(sum(entry[token].logprob for token, entry in pairs))
        completion = CompletionOutput(
            index=0,
            text=self._detokenizer.text,
            token_ids=list(self.token_ids),
            cumulative_logprob=cumulative,
            logprobs=self.logprobs,
            finish_reason=self.finish_reason,
            stop_reason=self.stop_reason,
        )
        return RequestOutput(
            request_id=self.request_id,
            prompt=self.prompt,
            prompt_token_ids=self.prompt_token_ids,
            outputs=[completion],
            finished=self.finished,
            metrics=self.metrics,
        )

    def _end_at(self, token: int) -> tuple[str, int | str | None] | None:
        """(finish_reason, stop_reason) if the newest token is the last."""
        end = self.stop.check(token, len(self.token_ids), self.num_tokens)
        matched = self._detokenizer.append(token, None if end is None else end[0])
        return end if matched is None else ("stop", matched)

    def _logprob_entry(self, token: int, step: StepLogprobs, i: int) -> dict[int, Logprob]:
        """id -> Logprob: the chosen token first, then the n likeliest by rank."""
        entry = {token: Logprob(float(step.chosen[i]), int(step.rank[i]), self._decode(token))}
        for rank in range(self.params.logprobs or 0):
            top = int(step.top_ids[i, rank])
            if top < 0:  # the vocabulary has no more
                break
            entry.setdefault(top, Logprob(float(step.top_values[i, rank]), rank + 1, self._decode(top)))
        return entry

    def _decode(self, token: int) -> str | None:
        return None if self._tokenizer is None else self._tokenizer.convert_id_to_piece(token)
