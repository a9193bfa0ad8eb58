"""One method's figures."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Result:
    """What was measured of one method: medians over repeats. Acceptance is None where nothing is drafted.

    Attributes:
        decode_tokens_per_second: after the first token, over all prompts.
        time_to_first_token: seconds, the mean over prompts.
        equal: whether its greedy tokens are the first method's.
    """

    method: str
    dtype: str
    decode_tokens_per_second: float
    time_to_first_token: float
    mean_acceptance_length: float | None = None
    per_position_acceptance_rates: list[float] | None = None
    acceptance_histogram: list[int] | None = None
    equal: bool | None = None
