"""Does a sample follow a distribution? The chi-square test that vLLM's rejection-sampler tests use."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt


def chi_square(ids: npt.ArrayLike, probs: np.ndarray) -> tuple[float, float]:
    """Pearson's statistic of ``ids`` [n] against ``probs`` [V], and the threshold it must stay below.

    Bins that expect fewer than 5 are merged into one. The threshold, df + 10 * sqrt(2 df), lies 10 standard deviations
    above the mean: a right sampler never reaches it, a biased one passes it as n grows.
    """
    ids = np.asarray(ids)
    assert ids.size, "no samples"
    assert ids.min() >= 0 and ids.max() < probs.size, f"ids out of range: {ids.min()}..{ids.max()}"
    probs = probs.astype(np.float64) / probs.astype(np.float64).sum()
    observed, expected = np.bincount(ids, minlength=probs.size).astype(np.float64), probs * ids.size
    assert not observed[probs == 0].any(), "an id of probability zero was drawn"
    small = expected < 5
    if small.any():
        observed = np.append(observed[~small], observed[small].sum())
        expected = np.append(expected[~small], expected[small].sum())
    observed, expected = observed[expected > 0], expected[expected > 0]
    df = max(1, expected.size - 1)
    return float(((observed - expected) ** 2 / expected).sum()), df + 10 * math.sqrt(2 * df)


def assert_follows(ids: npt.ArrayLike, probs: np.ndarray, what: str = "sample") -> None:
    """Asserts that ``ids`` are plausible draws from ``probs``."""
    statistic, threshold = chi_square(ids, probs)
    assert statistic < threshold, f"{what}: chi-square {statistic:.1f}, threshold {threshold:.1f}, n = {np.size(ids)}"
