from __future__ import annotations

import random

import pytest
import tokenizers
from tokenizers import decoders, models
from transformers import PreTrainedTokenizerFast

from pard_jax.engine.detokenizer import Detokenizer
from pard_jax.sampling_params import SamplingParams
from pard_jax.tokenizer import Tokenizer

TEXT = "naïve café — 你好，世界 👨‍👩‍👧 🇩🇪 “x”\n\n\tdef f(a,  b):   return a"
EOS = 2


@pytest.fixture(scope="module")
def raw(tokenizer_dir) -> tokenizers.Tokenizer:
    return tokenizers.Tokenizer.from_file(str(tokenizer_dir / "tokenizer.json"))


def generate(tokenizer, ids, finish="length", stream_every=1, **keys):
    """Feed ids as an engine does: the text, the deltas, the tokens kept and the stop string."""
    detokenizer = Detokenizer(tokenizer, SamplingParams(max_tokens=None, **keys))
    deltas, matched, kept = [], None, []
    for i, token in enumerate(ids):
        kept.append(token)
        last = i == len(ids) - 1
        matched = detokenizer.append(token, finish if last else None)
        finished = last or matched is not None
        if finished or i % stream_every == 0:
            deltas.append(detokenizer.delta(finished))
        if finished:
            break
    return detokenizer.text, deltas, kept, matched


def test_no_replacement_characters_in_deltas(tokenizer):
    ids = tokenizer.encode(TEXT)
    # some token must end inside a character, or this tests nothing
    assert any("\ufffd" in tokenizer.decode([token]) for token in ids)
    text, deltas, kept, matched = generate(tokenizer, ids)
    assert text == TEXT and "".join(deltas) == TEXT
    assert not any("\ufffd" in delta for delta in deltas)
    assert kept == ids and matched is None


@pytest.mark.parametrize("skip_special_tokens", [True, False])
@pytest.mark.parametrize("stream_every", [1, 4])
def test_any_tokens_give_the_text_of_all_at_once(tokenizer, raw, skip_special_tokens, stream_every):
    # Any ids: bytes that are no character, special tokens between the bytes of one, ids that name no token.
    for seed in range(300):
        rng = random.Random(seed)
        ids = [rng.randrange(310) for _ in range(rng.randrange(1, 40))]
        if seed % 3 == 0:
            spread = tokenizer.encode("😀你")
            ids = [token for piece in spread for token in (piece, *rng.choices([[], [1], [2, 305]])[0])]
        expected = raw.decode(ids, skip_special_tokens=skip_special_tokens)
        text, deltas, _, _ = generate(
            tokenizer, ids, stream_every=stream_every, skip_special_tokens=skip_special_tokens
        )
        assert text == expected, ids
        assert "".join(deltas) == expected, ids


def test_text_is_never_taken_back(tokenizer, raw):
    for seed in range(100):
        rng = random.Random(seed)
        ids = [rng.randrange(3, 300) for _ in range(30)]
        detokenizer = Detokenizer(tokenizer, SamplingParams())
        seen = ""
        for i, token in enumerate(ids):
            detokenizer.append(token)
            assert detokenizer.text.startswith(seen)
            seen = detokenizer.text
            # what is held back is at most the unfinished end
            assert seen == raw.decode(ids[: i + 1]).rstrip("\ufffd")


def test_spaces_that_a_decoder_strips_at_the_start_of_a_text():
    # A SentencePiece-like decoder: "▁" is a space, the first space goes, bytes stand for characters out of vocabulary.
    tokens = ["<unk>", "<s>", "▁", "▁Hello", "▁world", "wor", "ld", ",", "▁▁", *(f"<0x{i:02X}>" for i in range(256))]
    backend = tokenizers.Tokenizer(models.BPE({t: i for i, t in enumerate(tokens)}, [], unk_token="<unk>"))
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.add_special_tokens(["<s>"])
    tokenizer = Tokenizer(PreTrainedTokenizerFast(tokenizer_object=backend))
    emoji = [9 + byte for byte in "€😀".encode()]
    cases = [[3, 4, 7, 4], [2, 3], [1, 3, 1, 4, 1, 4], [8, 2, 2, 4], [4, *emoji, 4], [*emoji, 5, 6], [1, 1, 8, 4], [2]]
    for ids in cases:
        expected = backend.decode(ids)
        text, deltas, _, _ = generate(tokenizer, ids)
        assert text == expected and "".join(deltas) == expected
        assert not any("\ufffd" in delta for delta in deltas)
    assert backend.decode(cases[2]) == "Hello world world"


def test_eos_leaves_no_text(tokenizer):
    ids = [*tokenizer.encode("the dog"), EOS]
    assert generate(tokenizer, ids, "stop")[0] == "the dog"
    assert generate(tokenizer, ids, "stop", skip_special_tokens=False)[0] == "the dog"
    kept = generate(tokenizer, ids, "stop", skip_special_tokens=False, include_stop_str_in_output=True)
    assert kept[0] == "the dog<|im_end|>" and kept[2] == ids
    # as a token that merely comes by, it is special or not
    assert generate(tokenizer, ids, "length", skip_special_tokens=False)[0] == "the dog<|im_end|>"


def test_half_a_character_at_the_end(tokenizer, raw):
    ids = tokenizer.encode("ab😃")[:-1]
    text, deltas, _, _ = generate(tokenizer, ids)
    assert text == raw.decode(ids) == "".join(deltas)
    assert text.startswith("ab\ufffd")


def tokens_up_to(tokenizer, ids, stop):
    """The fewest tokens whose text holds a stop string."""
    for n in range(1, len(ids) + 1):
        if any(s in tokenizer.decode(ids[:n]) for s in stop):
            return ids[:n]
    raise AssertionError("no stop string in the text")


@pytest.mark.parametrize("include", [False, True])
@pytest.mark.parametrize(
    ("stop", "matched"),
    [(["dog"], "dog"), (["ick b"], "ick b"), (["lazy", "ox jumps"], "ox jumps"), (["🇩🇪"], "🇩🇪"), (["h"], "h")],
)
def test_stop_strings_cut_text_and_tokens(tokenizer, stop, matched, include):
    text = "The quick brown fox jumps over the lazy dog 🇩🇪, and on."
    ids = tokenizer.encode(text)
    got, deltas, kept, found = generate(tokenizer, ids, stop=stop, include_stop_str_in_output=include)
    assert found == matched
    assert got == text[: text.index(matched) + (len(matched) if include else 0)]
    assert "".join(deltas) == got
    assert kept == tokens_up_to(tokenizer, ids, stop)


def test_the_token_that_completes_a_stop_string_is_seen_at_once(tokenizer):
    # The token holds the stop string and the beginning of a character: the text must not wait for the rest of it.
    backend = tokenizers.Tokenizer(models.BPE({"a": 0, ".Ã": 1, "©": 2}, []))
    backend.decoder = decoders.ByteLevel()
    odd = Tokenizer(PreTrainedTokenizerFast(tokenizer_object=backend))
    assert odd.decode([0, 1, 2]) == "a.é"
    text, deltas, kept, found = generate(odd, [0, 1, 2, 0], stop=["."])
    assert (text, deltas, kept, found) == ("a", ["a", ""], [0, 1], ".")
    assert generate(odd, [0, 1, 2, 0])[1] == ["a", ".", "é", "a"]


def test_a_stop_string_early_in_a_long_block(tokenizer):
    ids = tokenizer.encode("x and then twelve more tokens follow it")
    assert len(ids) >= 13
    assert generate(tokenizer, ids, stop=["x"])[:3] == ("", [""], ids[:1])


@pytest.mark.parametrize("stream_every", [1, 3, 100])
def test_nothing_of_a_stop_string_is_streamed(tokenizer, stream_every):
    ids = tokenizer.encode("one two three four five")
    _, deltas, _, found = generate(tokenizer, ids, stream_every=stream_every, stop=["three f"])
    assert found == "three f" and "".join(deltas) == "one two "
    for i in range(len(deltas)):
        assert "one two ".startswith("".join(deltas[: i + 1]))


def test_held_back_text_comes_at_the_end(tokenizer):
    ids = tokenizer.encode("one two three")
    detokenizer = Detokenizer(tokenizer, SamplingParams(stop=["three!"]))
    for token in ids:
        assert detokenizer.append(token) is None
    assert detokenizer.delta(False) == "one two "
    assert detokenizer.delta(False) == ""
    assert detokenizer.delta(True) == "three"
    assert detokenizer.delta(True) == ""


def test_nothing_is_held_back_without_need(tokenizer):
    ids = tokenizer.encode("one two three")
    assert all(generate(tokenizer, ids)[1])
    assert all(generate(tokenizer, ids, stop=["?"])[1])
    assert all(generate(tokenizer, ids, stop=["nowhere"], include_stop_str_in_output=True)[1])


@pytest.mark.parametrize("min_tokens", [0, 3, 4, 5, 6])
def test_min_tokens_hides_stop_strings_in_the_first_tokens(tokenizer, min_tokens):
    ids = tokenizer.encode("a a a a a a a")
    ends = [n for n in range(1, len(ids) + 1) if tokenizer.decode(ids[:n]).endswith("a")]
    text, _, kept, found = generate(tokenizer, ids, stop=["a"], min_tokens=min_tokens)
    assert found == "a"
    assert len(kept) == min(n for n in ends if n > min_tokens)
    assert text == tokenizer.decode(kept)[:-1]


def test_without_a_tokenizer():
    detokenizer = Detokenizer(None, SamplingParams())
    assert detokenizer.append(5) is None and detokenizer.append(6, "stop") is None
    assert detokenizer.text == "" and detokenizer.delta(True) == ""
    with pytest.raises(ValueError, match="stop strings need a tokenizer"):
        Detokenizer(None, SamplingParams(stop="x"))


def test_detokenize_off(tokenizer):
    ids = tokenizer.encode("the dog")
    assert generate(tokenizer, ids, detokenize=False)[:3] == ("", [""] * len(ids), ids)
