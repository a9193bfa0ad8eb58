from __future__ import annotations

import pytest

from pard_jax.engine.metrics import AcceptanceStats


@pytest.mark.parametrize(
    ("drafts", "emitted", "stats", "histograms"),
    [  # vLLM's vectors (tests/v1/core/test_scheduler.py, test_schedule_spec_decoding_stats)
        ([[1, 2, 3]], [[1, 2, 3, 4]], (1, 3, 3, [1, 1, 1]), [[0, 0, 0, 1]]),
        ([[1, 2, 3]], [[1, 5]], (1, 3, 1, [1, 0, 0]), [[0, 1, 0, 0]]),
        ([[1, 2], [3]], [[1, 2, 5], [3, 4]], (2, 3, 3, [2, 1]), [[0, 0, 1], [0, 1, 0]]),
        ([[1]], [[1, 2]], (1, 1, 1, [1]), [[0, 1]]),
        ([[]], [[5]], (0, 0, 0, [0]), [[0, 0]]),
        ([[1, 2, 3], [4, 5, 6]], [[1, 2, 7], [4, 8]], (2, 6, 3, [2, 1, 0]), [[0, 0, 1, 0], [0, 1, 0, 0]]),
    ],
)
def test_vllms_vectors(drafts, emitted, stats, histograms):
    k = max(1, max(map(len, drafts)))
    total = AcceptanceStats(k)
    for draft, tokens, histogram in zip(drafts, emitted, histograms, strict=True):
        request = AcceptanceStats(k)
        request.observe(len(draft), len(tokens) - 1)
        assert request.acceptance_histogram == histogram
        total.merge(request)
    counted = (total.num_drafts, total.num_draft_tokens, total.num_accepted_tokens, total.num_accepted_tokens_per_pos)
    assert counted == stats


def test_vllms_request_vector():
    stats = AcceptanceStats(3)
    for drafted, accepted in [(3, 0), (3, 3), (3, 2), (3, 3), (3, 1)]:
        stats.observe(drafted, accepted)
    metrics = stats.request_metrics()
    assert metrics.acceptance_histogram == [1, 1, 1, 2]
    assert metrics.mean_acceptance_length == pytest.approx(1 + 9 / 5)
    assert metrics.draft_acceptance_rate == pytest.approx(9 / 15)
    assert (metrics.num_spec_steps, metrics.num_accepted_draft_tokens) == (5, 9)
    assert (metrics.num_draft_tokens, metrics.num_spec_tokens) == (15, 3)


def test_vllms_documented_example():
    stats = AcceptanceStats(3)
    for accepted, steps in enumerate([39, 1, 0, 3]):
        for _ in range(steps):
            stats.observe(3, accepted)
    metrics = stats.request_metrics()
    assert (metrics.num_spec_steps, metrics.num_accepted_draft_tokens, metrics.num_draft_tokens) == (43, 10, 129)
    assert round(metrics.mean_acceptance_length, 4) == 1.2326
    assert round(metrics.draft_acceptance_rate, 4) == 0.0775
    assert stats.per_position_acceptance_rates == pytest.approx([4 / 43, 3 / 43, 3 / 43])


def test_no_drafts():
    stats = AcceptanceStats(4)
    stats.observe(0, 0)
    metrics = stats.request_metrics()
    assert metrics.acceptance_histogram == [0] * 5
    assert (metrics.mean_acceptance_length, metrics.draft_acceptance_rate, metrics.num_spec_steps) == (1.0, 0.0, 0)
    assert stats.per_position_acceptance_rates == [0.0] * 4
    assert stats.log_line(10.0) is None


@pytest.mark.parametrize(
    ("accepted", "kept", "counted"),
    [
        (12, 13, 12),  # nothing cut
        (12, 2, 2),  # EOS was the second draft
        (12, 12, 12),  # the end was the last draft: only the bonus token went
        (1, 2, 1),  # EOS was the correction
        (0, 1, 0),
    ],
)
def test_only_kept_tokens_count(accepted, kept, counted):
    stats = AcceptanceStats(12)
    stats.observe(12, accepted, kept)
    assert stats.num_accepted_tokens == counted
    assert (stats.num_drafts, stats.num_draft_tokens) == (1, 12)


def test_a_step_after_the_end_is_not_counted():
    stats = AcceptanceStats(3)
    stats.observe(3, 3, 0)
    assert (stats.num_drafts, stats.num_draft_tokens) == (0, 0)


@pytest.mark.parametrize(("drafted", "accepted"), [(2, 3), (4, 1), (3, -1)])
def test_impossible_counts_are_refused(drafted, accepted):
    with pytest.raises(ValueError, match="expected 0 <= accepted <= drafted <= K"):
        AcceptanceStats(3).observe(drafted, accepted)


def test_merge_needs_one_k_and_leaves_the_other_alone():
    a, b = AcceptanceStats(2), AcceptanceStats(2)
    a.observe(2, 1)
    b.observe(2, 2)
    a.merge(b)
    a.observe(2, 0)
    assert a.acceptance_histogram == [1, 1, 1]
    assert b.acceptance_histogram == [0, 0, 1]
    with pytest.raises(ValueError, match="K=3 into K=2"):
        a.merge(AcceptanceStats(3))
    snapshot = a.request_metrics()
    a.reset()
    assert (a.num_drafts, a.num_draft_tokens) == (0, 0)
    assert snapshot.acceptance_histogram == [1, 1, 1]


def test_log_line_is_vllms():
    stats = AcceptanceStats(3)
    for accepted in (3, 1, 0, 2):
        stats.observe(3, accepted)
    assert stats.log_line(8.0) == (
        "SpecDecoding metrics: Mean acceptance length: 2.50, Accepted throughput: 0.75 tokens/s, "
        "Drafted throughput: 1.50 tokens/s, Accepted: 6 tokens, Drafted: 12 tokens, "
        "Per-position acceptance rate: 0.750, 0.500, 0.250, Avg Draft acceptance rate: 50.0%"
    )
    assert "throughput: 0.00 tokens/s" in (stats.log_line(0.0) or "")
