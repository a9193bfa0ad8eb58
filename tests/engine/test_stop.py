from __future__ import annotations

import random

import pytest

from pard_jax.engine.stop import StopChecker, check_stop_strings
from pard_jax.sampling_params import SamplingParams

EOS, OTHER_EOS, STOP = 2, 3, 12


def run(block, prompt=4, max_model_len=1000, **keys):
    """Tokens kept of a block, and why the request ended (None: it goes on)."""
    checker = StopChecker(
        SamplingParams(**keys), eos_token_id=EOS, extra_eos_token_ids=[EOS, OTHER_EOS], max_model_len=max_model_len
    )
    for i, token in enumerate(block):
        if (end := checker.check(token, i + 1, prompt + i + 1)) is not None:
            return block[: i + 1], end
    return block, None


@pytest.mark.parametrize(
    ("max_tokens", "kept", "end"),
    [(5, [10, 11, STOP], ("stop", STOP)), (2, [10, 11], ("length", None)), (3, [10, 11, STOP], ("stop", STOP))],
)
def test_a_stop_inside_the_budget_is_seen_in_a_block_that_exceeds_it(max_tokens, kept, end):
    assert run([10, 11, STOP, 20, 21, 22], max_tokens=max_tokens, stop_token_ids=[STOP]) == (kept, end)


@pytest.mark.parametrize("position", range(13))
def test_eos_anywhere_in_a_block_is_the_last_token(position):
    block = [10] * position + [EOS] + [11] * (12 - position)
    assert run(block, max_tokens=100) == (block[: position + 1], ("stop", None))
    assert run(block, max_tokens=100, ignore_eos=True) == (block, None)


def test_eos_wins_over_stop_ids_and_length():
    assert run([EOS], max_tokens=1, stop_token_ids=[EOS]) == ([EOS], ("stop", None))
    assert run([EOS], max_tokens=1, ignore_eos=True) == ([EOS], ("length", None))
    # Asked for by id, it still ends the request, as a stop token does.
    assert run([EOS], max_tokens=1, ignore_eos=True, stop_token_ids=[EOS]) == ([EOS], ("stop", EOS))


def test_a_second_eos_ends_as_a_stop_token():
    assert run([10, OTHER_EOS, 11]) == ([10, OTHER_EOS], ("stop", OTHER_EOS))
    assert run([10, OTHER_EOS, 11], ignore_eos=True) == ([10, OTHER_EOS, 11], None)


@pytest.mark.parametrize("prompt", [1, 5, 9])
def test_the_models_length_ends_a_request(prompt):
    kept, end = run([10] * 20, prompt=prompt, max_model_len=10, max_tokens=None)
    assert (prompt + len(kept), end) == (10, ("length", None))


def test_min_tokens_lets_length_through_but_no_stop():
    block = [EOS, STOP, OTHER_EOS, EOS, 10]
    assert run(block, max_tokens=10, min_tokens=4, stop_token_ids=[STOP]) == (block[:4], ("stop", None))
    assert run([10] * 9, max_tokens=None, min_tokens=9, max_model_len=8) == ([10] * 4, ("length", None))


def test_ids_that_min_tokens_masks():
    def masked(**keys):
        params = SamplingParams(**keys)
        return StopChecker(params, eos_token_id=EOS, extra_eos_token_ids=[EOS, OTHER_EOS], max_model_len=9)

    assert masked(stop_token_ids=[STOP, EOS]).token_ids == (EOS, OTHER_EOS, STOP)
    assert masked(stop_token_ids=[STOP, EOS], ignore_eos=True).token_ids == (STOP, EOS)
    assert StopChecker(SamplingParams(), max_model_len=9).token_ids == ()


@pytest.mark.parametrize(
    ("text", "new", "stop", "include", "expected"),
    [
        # vLLM's vectors (tests/detokenizer/test_check_stop_strings.py)
        (" The user is a", 5, ["is", " a"], False, ("is", 10)),
        (" The user is a", 5, [" a", "is"], False, ("is", 10)),
        (" The user is a", 5, ["a", "is"], True, ("is", 12)),
        ("abc", 3, ["abc", "b"], False, ("b", 1)),
        ("ab", 2, ["ab", "b"], False, ("ab", 0)),
        ("ab", 2, ["b", "ab"], False, ("b", 1)),
        ("hello world.", 1, ["."], False, (".", 11)),
        ("hello world.", 1, ["."], True, (".", -1)),
        ("hello", 5, ["zzz"], False, None),
        ("hello", 0, ["h"], False, None),
        ("hello", 5, [], False, None),
        # a match must end among the new characters, and may begin before them
        ("stop here", 5, ["stop"], False, None),
        ("stop here", 6, ["stop"], False, ("stop", 0)),
        ("the end", 1, ["the end"], False, ("the end", 0)),
        ("xx stop xx stop", 1, ["stop"], False, ("stop", 11)),
    ],
)
def test_stop_strings(text, new, stop, include, expected):
    assert check_stop_strings(text, new, stop, include) == expected


def test_stop_strings_against_a_search_by_end():
    rng = random.Random(0)
    for _ in range(2000):
        text = "".join(rng.choices("ab", k=rng.randrange(1, 12)))
        new = rng.randrange(0, len(text) + 1)
        stop = ["".join(rng.choices("ab", k=rng.randrange(1, 4))) for _ in range(rng.randrange(1, 4))]
        expected = None
        for end in range(len(text) - new + 1, len(text) + 1):
            found = [s for s in stop if text[:end].endswith(s)]
            if found:
                expected = (found[0], end - len(found[0]))
                break
        assert check_stop_strings(text, new, stop, False) == expected
