"""How much of the drafts was accepted: vLLM's counters, rates and log line (vllm/v1/spec_decode/metrics.py).

One class serves a request and the whole engine; the engine's numbers are the merged requests'.
"""

from __future__ import annotations

from pard_jax.outputs import RequestSpecMetrics


class AcceptanceStats:
    """Counts over verification steps that had drafts; steps without are not counted.

    Only kept tokens count as accepted. vLLM counts before the end of a request is cut, and so over-counts in its last
    step.

    Args:
        num_spec_tokens: K.

    Attributes:
        num_draft_tokens: drafts that were verified.
        acceptance_histogram: entry j counts the steps that accepted exactly j drafts; K+1 entries.
    """

    def __init__(self, num_spec_tokens: int) -> None:
        self.num_spec_tokens = num_spec_tokens
        self.reset()

    def reset(self) -> None:
        """Start from nothing again."""
        self.num_draft_tokens = 0
        self.acceptance_histogram = [0] * (self.num_spec_tokens + 1)

    def observe(self, num_draft_tokens: int, num_accepted: int, num_kept: int | None = None) -> None:
        """Count one verification step of one request.

        Args:
            num_draft_tokens: drafts that were verified, 0..K.
            num_accepted: how many of them the target accepted.
            num_kept: tokens of the step that the request kept, the target's own included; None for all of them. A
                step that came after the end keeps none and is not counted.

        Raises:
            ValueError: more accepted than drafted, or more drafted than K.
        """
        if not 0 <= num_accepted <= num_draft_tokens <= self.num_spec_tokens:
            raise ValueError(
                f"accepted {num_accepted} of {num_draft_tokens} drafts with K={self.num_spec_tokens}; "
                "expected 0 <= accepted <= drafted <= K"
            )
        if num_draft_tokens == 0 or num_kept == 0:
            return
        self.num_draft_tokens += num_draft_tokens
        self.acceptance_histogram[num_accepted if num_kept is None else min(num_accepted, num_kept)] += 1

    def merge(self, other: AcceptanceStats) -> None:
        """Add another's counts to these.

        Raises:
            ValueError: the two have different K.
        """
        if other.num_spec_tokens != self.num_spec_tokens:
            raise ValueError(f"cannot merge statistics of K={other.num_spec_tokens} into K={self.num_spec_tokens}")
        self.num_draft_tokens += other.num_draft_tokens
        mine, theirs = self.acceptance_histogram, other.acceptance_histogram
        self.acceptance_histogram = [a + b for a, b in zip(mine, theirs, strict=True)]

    @property
    def num_drafts(self) -> int:
        """Verification steps that had drafts."""
        return sum(self.acceptance_histogram)

    @property
    def num_accepted_tokens(self) -> int:
        """Drafts that were accepted and kept."""
        return sum(count * steps for count, steps in enumerate(self.acceptance_histogram))

    @property
    def num_accepted_tokens_per_pos(self) -> list[int]:
        """For each of the K positions, the steps that accepted the draft there; never increasing."""
        return [sum(self.acceptance_histogram[position + 1 :]) for position in range(self.num_spec_tokens)]

    @property
    def mean_acceptance_length(self) -> float:
        """Tokens a step, the target's own one included: 1..K+1, and 1.0 without drafts."""
        return 1.0 + self.num_accepted_tokens / self.num_drafts if self.num_drafts else 1.0

    @property
    def per_position_acceptance_rates(self) -> list[float]:
        """For each of the K positions, the share of steps that accepted the draft there; 0.0 without drafts."""
        steps = self.num_drafts or 1
        return [count / steps for count in self.num_accepted_tokens_per_pos]

    @property
    def draft_acceptance_rate(self) -> float:
        """Accepted drafts / verified drafts, 0..1; 0.0 without drafts."""
        return self.num_accepted_tokens / self.num_draft_tokens if self.num_draft_tokens else 0.0

    def request_metrics(self) -> RequestSpecMetrics:
        """These counts as a request's output carries them."""
        return RequestSpecMetrics(
            mean_acceptance_length=self.mean_acceptance_length,
            draft_acceptance_rate=self.draft_acceptance_rate,
            acceptance_histogram=list(self.acceptance_histogram),
            num_spec_steps=self.num_drafts,
            num_accepted_draft_tokens=self.num_accepted_tokens,
            num_draft_tokens=self.num_draft_tokens,
            num_spec_tokens=self.num_spec_tokens,
        )

    def log_line(self, interval: float) -> str | None:
        """vLLM's log line over the last ``interval`` seconds; None without drafts. The caller resets after it."""
        if not self.num_drafts:
            return None
        accepted, drafted = self.num_accepted_tokens, self.num_draft_tokens
        accepted_rate, drafted_rate = (accepted / interval, drafted / interval) if interval > 0 else (0.0, 0.0)
        rates = ", ".join(f"{rate:.3f}" for rate in self.per_position_acceptance_rates)
        return (
            f"SpecDecoding metrics: Mean acceptance length: {self.mean_acceptance_length:.2f}, "
            f"Accepted throughput: {accepted_rate:.2f} tokens/s, "
            f"Drafted throughput: {drafted_rate:.2f} tokens/s, "
            f"Accepted: {accepted} tokens, "
            f"Drafted: {drafted} tokens, "
            f"Per-position acceptance rate: {rates}, "
            f"Avg Draft acceptance rate: {self.draft_acceptance_rate * 100:.1f}%"
        )
