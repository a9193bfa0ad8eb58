"""What a finished (or streamed) request gives back: text, tokens, log-probabilities, times and acceptance."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Logprob:
    """One token's log-probability (vllm/logprobs.py).

    Attributes:
        logprob: natural logarithm of the token's probability.
        rank: 1 for the likeliest token; None where it was not counted.
        decoded_token: the id decoded alone; None without a tokenizer.
    """

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


@dataclass
class CompletionOutput:
    """One completion (vllm/outputs.py).

    Attributes:
        index: which of the ``n`` completions.
        text: what was generated, cut at the stop string.
        token_ids: what was generated, up to and with the token that ended it.
        cumulative_logprob: sum over the tokens; None when logprobs were not asked for.
        logprobs: one dict a token, id -> Logprob: the chosen token and the likeliest ones.
        finish_reason: "stop", "length" or "abort"; None while it runs.
        stop_reason: the stop string or stop token id that ended it; None for EOS and for other ends.
    """

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None = None
    logprobs: list[dict[int, Logprob]] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None

    def finished(self) -> bool:
        """Whether nothing more will be generated."""
        return self.finish_reason is not None


@dataclass(frozen=True)
class RequestSpecMetrics:
    """What speculation did for one request (vLLM's ``metrics.speculative_decoding``).

    Attributes:
        mean_acceptance_length: tokens a step, the target's own one included; 1.0 without drafts.
        draft_acceptance_rate: accepted / drafted; 0.0 without drafts.
        acceptance_histogram: entry j counts the steps that accepted exactly j drafts; K+1 entries.
        num_spec_steps: verification steps that had drafts, the histogram's sum.
        num_accepted_draft_tokens: drafts that were accepted and kept.
        num_draft_tokens: drafts that were verified.
        num_spec_tokens: K.
    """

    mean_acceptance_length: float
    draft_acceptance_rate: float
    acceptance_histogram: list[int]
    num_spec_steps: int
    num_accepted_draft_tokens: int
    num_draft_tokens: int
    num_spec_tokens: int


@dataclass
class RequestMetrics:
    """When things happened to a request; times in seconds of ``time.monotonic()``, None until they are known.

    Attributes:
        arrival_time: the request was handed over.
        first_token_time: its first token was known to the host.
        last_token_time: its newest token was.
        finished_time: its output was complete.
        num_generation_tokens: tokens kept, over all of its completions.
        num_first_tokens: of these, the ones known at first_token_time; a step yields several.
        speculative_decoding: acceptance; None without speculation and for n > 1.
    """

    arrival_time: float
    first_token_time: float | None = None
    last_token_time: float | None = None
    finished_time: float | None = None
    num_generation_tokens: int = 0
    num_first_tokens: int = 0
    speculative_decoding: RequestSpecMetrics | None = None

    @property
    def time_to_first_token(self) -> float | None:
        """Seconds from arrival to the first token."""
        return None if self.first_token_time is None else self.first_token_time - self.arrival_time

    @property
    def e2e_latency(self) -> float | None:
        """Seconds from arrival to the end."""
        return None if self.finished_time is None else self.finished_time - self.arrival_time

    @property
    def time_per_output_token(self) -> float | None:
        """Seconds a token after the first ones; None before there are any."""
        later = self.num_generation_tokens - self.num_first_tokens
        if self.first_token_time is None or self.last_token_time is None or later < 1:
            return None
        return (self.last_token_time - self.first_token_time) / later

    @property
    def tokens_per_second(self) -> float | None:
        """Tokens a second from arrival to the newest token; None before there is one."""
        if self.last_token_time is None or self.last_token_time <= self.arrival_time:
            return None
        return self.num_generation_tokens / (self.last_token_time - self.arrival_time)


@dataclass
class RequestOutput:
    """A request and its completions (vllm/outputs.py).

    Attributes:
        request_id: as given, or made up by the engine.
        prompt: the prompt's text; None when it was given as ids.
        prompt_token_ids: what the model saw.
        outputs: the ``n`` completions by index.
        finished: whether all of them are.
        metrics: times and acceptance.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    metrics: RequestMetrics
