"""Reading samples, packing them, and the batches of every step."""

from __future__ import annotations

import json
import threading
import time

import numpy as np
import pytest

from pard_jax.train.data import Batches, Packed, Sample, pack, read_samples, split, with_prompts

VOCAB = 300


def write(path, *entries, end="\n"):
    path.write_text("\n".join(e if isinstance(e, str) else json.dumps(e) for e in entries) + end, encoding="utf-8")
    return path


def read(path, tokenizer=None, **kwargs):
    options = {"vocab_size": VOCAB, "include_prompt": False, "progress": False}
    return read_samples([path], tokenizer, **(options | kwargs))


def random_samples(count, longest, seed=0):
    rng = np.random.default_rng(seed)
    samples = []
    for _ in range(count):
        n = int(rng.integers(2, longest + 1))
        mask = rng.random(n) < 0.5
        mask[0], mask[-1] = False, True
        samples.append(Sample(rng.integers(1, 1000, n).astype(np.int32), mask))
    return samples


def marked(sample):
    """The ids of the labels."""
    return sample.token_ids[sample.loss_mask].tolist()


# Reading


def test_token_ids_and_ranges(tmp_path):
    path = write(
        tmp_path / "a.jsonl",
        {
            "id": 1,
            "token_ids": [5, 6, 7, 8, 9],
            "loss_ranges": [[1, 2], [3, 5]],
            "messages": [],
            "finish_reason": "stop",
        },
        "",
        {"token_ids": [0, 299], "loss_ranges": [[0, 2]]},
    )
    first, second = read(path)
    assert first.token_ids.dtype == np.int32 and first.loss_mask.dtype == np.bool_
    assert first.token_ids.tolist() == [5, 6, 7, 8, 9]
    assert first.loss_mask.tolist() == [False, True, False, True, True]
    assert second.loss_mask.tolist() == [False, True]  # nothing predicts the first token
    whole = read(path, include_prompt=True)
    assert whole[0].loss_mask.tolist() == [False, True, True, True, True]


def test_several_files_and_a_limit(tmp_path):
    a = write(tmp_path / "a.jsonl", *({"token_ids": [i, i], "loss_ranges": [[0, 2]]} for i in range(3)))
    b = write(tmp_path / "b.jsonl", {"token_ids": [9, 9], "loss_ranges": [[0, 2]]}, end="")  # no newline, yet complete

    def first_ids(**kwargs):
        samples = read_samples([a, b], None, vocab_size=VOCAB, include_prompt=False, progress=False, **kwargs)
        return [int(s.token_ids[0]) for s in samples]

    assert first_ids() == [0, 1, 2, 9]
    assert first_ids(max_samples=3) == [0, 1, 2]
    with pytest.raises(ValueError, match="max_samples must be at least 1, got 0"):
        first_ids(max_samples=0)
    with pytest.raises(ValueError, match="no file of samples"):
        read_samples([], None, vocab_size=VOCAB, include_prompt=False)


def test_assistant_turns_with_their_end_of_turn_token(tmp_path, tokenizer):
    messages = [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "one?"},
        {"role": "assistant", "content": "two three"},
        {"role": "user", "content": "four?"},
        {"role": "assistant", "content": "five"},
    ]
    conversation = [{"human": "one?", "assistant": "two three"}, {"human": "four?", "assistant": "five"}]
    path = write(tmp_path / "a.jsonl", {"messages": messages}, {"conversation": conversation})
    for sample in read(path, tokenizer):
        assert tokenizer.decode(marked(sample), skip_special_tokens=False) == "two three<|im_end|>five<|im_end|>"
    text = tokenizer.decode(read(path, tokenizer)[0].token_ids.tolist(), skip_special_tokens=False)
    assert text == "".join(f"<|im_start|>{m['role']}\n{m['content']}<|im_end|>\n" for m in messages)
    whole = read(path, tokenizer, include_prompt=True)[0].loss_mask
    assert not whole[0] and whole[1:].all()


def test_a_template_that_writes_thoughts_into_the_last_turn_only(tmp_path, tokenizer):
    """As Qwen3's does: an earlier turn alone is then no prefix of the conversation."""
    template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n"
        "{% if loop.last and m.role == 'assistant' %}<think>\n\n</think>\n\n{% endif %}{{ m.content }}<|im_end|>\n"
        "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    conversation = [{"human": "one?", "assistant": "two"}, {"human": "three?", "assistant": "four"}]
    path = write(tmp_path / "a.jsonl", {"conversation": conversation})
    before = tokenizer.hf.chat_template
    tokenizer.hf.chat_template = template
    try:
        (sample,) = read(path, tokenizer)
    finally:
        tokenizer.hf.chat_template = before
    written = tokenizer.decode(marked(sample), skip_special_tokens=False)
    assert written == "two<|im_end|><think>\n\n</think>\n\nfour<|im_end|>"


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{% for m in messages %}{{ m.content }}\n{% endfor %}", "without a special token"),
        (
            "{% for m in messages %}{{ m.content }}<|im_end|>{% endfor %}{% if add_generation_prompt %}go{% endif %}",
            "does not continue the chat template's generation prompt",
        ),
    ],
)
def test_templates_that_do_not_show_the_turns_are_refused(tmp_path, tokenizer, template, message):
    path = write(tmp_path / "a.jsonl", {"conversation": [{"human": "one?", "assistant": "two"}]})
    before = tokenizer.hf.chat_template
    tokenizer.hf.chat_template = template
    try:
        with pytest.raises(ValueError, match=f"line 1: .*{message}"):
            read(path, tokenizer)
        assert read(path, tokenizer, include_prompt=True)  # where the turns do not matter
    finally:
        tokenizer.hf.chat_template = before


def test_plain_text(tmp_path, tokenizer):
    (sample,) = read(write(tmp_path / "a.jsonl", {"text": "once upon a time"}), tokenizer)
    assert sample.token_ids.tolist() == tokenizer.encode("once upon a time")
    assert sample.loss_mask[1:].all()


GOOD = {"token_ids": [1, 2, 3], "loss_ranges": [[1, 3]]}


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{'a': 1}", "not valid JSON"),
        ("[1, 2]", r"expected a JSON object, got \[1, 2\]"),
        ({"prompt": "x"}, "expected the key 'token_ids' or one of 'messages', .*; got the keys 'prompt'"),
        ({"text": "a", "messages": []}, "got the keys 'text', 'messages'"),
        (GOOD | {"token_ids": "1 2"}, "'token_ids' must be a list of integers, got '1 2'"),
        (GOOD | {"token_ids": [1, 2.0, 3]}, "must be a list of integers"),
        (GOOD | {"token_ids": [1, True, 3]}, "must be a list of integers"),
        (GOOD | {"token_ids": [1, 300, 3]}, "token id 300 is outside the vocabulary; expected 0 to 299"),
        (GOOD | {"token_ids": [1, -1, 3]}, "token id -1 is outside"),
        (GOOD | {"token_ids": [1, 10**30, 3]}, "outside the vocabulary"),
        ({"token_ids": [1], "loss_ranges": [[0, 1]]}, "has 1 tokens; expected at least 2"),
        ({"token_ids": [], "loss_ranges": []}, "has 0 tokens"),
        ({"token_ids": [1, 2]}, "without 'loss_ranges'"),
        (GOOD | {"loss_ranges": [[1, 4]]}, r"the loss range \[1, 4\] is none of the sample's 3 tokens"),
        (GOOD | {"loss_ranges": [[-1, 2]]}, r"\[-1, 2\]"),
        (GOOD | {"loss_ranges": [[2, 2]]}, r"0 <= start < end <= 3"),
        (GOOD | {"loss_ranges": [[1]]}, r"loss range \[1\]"),
        (GOOD | {"loss_ranges": [1, 3]}, "loss range 1 is none"),
        (GOOD | {"loss_ranges": {}}, "'loss_ranges' must be a list"),
        (GOOD | {"loss_ranges": []}, "no token is in the loss"),
        (GOOD | {"loss_ranges": [[0, 1]]}, "no token is in the loss"),
        ({"messages": []}, "'messages' must be a list with a turn or more"),
        ({"messages": [{"role": "user", "content": "hi"}]}, "no token is in the loss"),
        ({"messages": ["hi"]}, "a message must have a 'role'"),
        ({"messages": [{"role": "assistant", "content": "hi"}]}, "does not continue the chat template's"),
        ({"messages": [{"role": "judge", "content": "hi"}]}, "the chat template refused"),
        ({"conversation": [{"human": "hi"}]}, "a turn of 'conversation' must have a 'human' and an 'assistant' text"),
        ({"text": 3}, "'text' must be a string, got 3"),
        ({"text": ""}, "has 0 tokens"),
        ('{"text": "\\ud800"}', "not valid Unicode"),
    ],
)
def test_a_line_that_is_no_sample(tmp_path, tokenizer, line, message):
    path = write(tmp_path / "a.jsonl", GOOD, line, GOOD)
    with pytest.raises(ValueError, match=rf"a\.jsonl, line 2: .*{message}"):
        read(path, tokenizer)


def test_files_that_hold_nothing_or_were_cut_off(tmp_path):
    with pytest.raises(ValueError, match=r"a\.jsonl is empty; expected one JSON object a line"):
        read(write(tmp_path / "a.jsonl", end=""))
    with pytest.raises(ValueError, match="holds blank lines only"):
        read(write(tmp_path / "a.jsonl", "", " "))
    with pytest.raises(ValueError, match="line 2: the last line ends in the middle"):
        read(write(tmp_path / "a.jsonl", GOOD, '{"token_ids": [1, 2', end=""))
    with pytest.raises(FileNotFoundError):
        read(tmp_path / "none.jsonl")


@pytest.mark.parametrize(
    ("line", "byte"),
    [
        (json.dumps(GOOD).encode("utf-16"), "byte 1 of it is 0xff"),
        (b'{"text": "\xff"}', "byte 11 of it is 0xff"),
        (b'{"text": "na\xefve"}', "byte 13 of it is 0xef"),
    ],
)
@pytest.mark.parametrize("end", [b"", b"\n"])
def test_other_encodings(tmp_path, line, byte, end):
    (tmp_path / "b.jsonl").write_bytes(json.dumps(GOOD).encode() + b"\n" + line + end)
    with pytest.raises(ValueError, match=rf"b\.jsonl, line 2: {byte}, .*the file must be UTF-8"):
        read(tmp_path / "b.jsonl")


def test_cut_off_within_a_character_and_a_byte_order_mark(tmp_path, tokenizer):
    (tmp_path / "b.jsonl").write_bytes('{"text": "日'.encode()[:-1])
    with pytest.raises(ValueError, match="line 1: the last line ends in the middle"):
        read(tmp_path / "b.jsonl")
    (tmp_path / "b.jsonl").write_bytes('{"text": "once upon"}\n'.encode("utf-8-sig"))
    assert read(tmp_path / "b.jsonl", tokenizer)[0].token_ids.tolist() == tokenizer.encode("once upon")


def test_with_prompts(tmp_path):
    path = write(tmp_path / "a.jsonl", GOOD, {"token_ids": [7, 8, 9, 9], "loss_ranges": [[3, 4]]})
    expected, got = read(path, include_prompt=True), with_prompts(read(path))
    assert [s.token_ids.tolist() for s in got] == [s.token_ids.tolist() for s in expected]
    assert [s.loss_mask.tolist() for s in got] == [s.loss_mask.tolist() for s in expected]
    assert [s.loss_mask.tolist() for s in read(path)] == [[False, True, True], [False, False, False, True]]


def test_text_without_a_tokenizer(tmp_path):
    with pytest.raises(ValueError, match="line 1: 'text' needs a tokenizer"):
        read(write(tmp_path / "a.jsonl", {"text": "hello"}))


def test_split():
    samples = random_samples(20, 8)
    train, held_out = split(samples, held_out=5, seed=3)
    ids = {id(s): i for i, s in enumerate(samples)}
    kept, out = [ids[id(s)] for s in train], [ids[id(s)] for s in held_out]
    assert len(out) == 5 and sorted(kept + out) == list(range(20))
    assert kept == sorted(kept) and out == sorted(out)
    assert [ids[id(s)] for s in split(samples, held_out=5, seed=3)[1]] == out
    assert [ids[id(s)] for s in split(samples, held_out=5, seed=4)[1]] != out
    assert split(samples, held_out=0, seed=0) == (samples, [])
    for wrong in (20, -1):
        with pytest.raises(ValueError, match=f"held_out={wrong} of 20 samples; expected 0 to 19"):
            split(samples, held_out=wrong, seed=0)


# Packing


def segments(packed):
    """The samples that lie in the rows, by the segment ids alone; checks that each is in one piece, and the padding."""
    found = []
    for ids, segs, mask in zip(packed.token_ids, packed.segment_ids, packed.loss_mask, strict=True):
        count = int(segs.max())
        assert [s for s, before in zip(segs, [0, *segs], strict=False) if s != before and s] == list(
            range(1, count + 1)
        )
        used = int((segs > 0).sum())
        assert (segs[:used] > 0).all() and not ids[used:].any() and not mask[used:].any()
        found += [(ids[segs == s].tolist(), mask[segs == s].tolist()) for s in range(1, count + 1)]
    return found


def test_every_sample_lies_in_a_row_once_and_whole():
    samples = random_samples(300, 64)
    packed = pack(samples, length=64, seed=0)
    assert packed.token_ids.dtype == packed.segment_ids.dtype == np.int32 and packed.loss_mask.dtype == np.bool_
    assert packed.token_ids.shape == packed.segment_ids.shape == packed.loss_mask.shape
    given = [(s.token_ids.tolist(), s.loss_mask.tolist()) for s in samples]
    assert sorted(segments(packed)) == sorted(given)
    assert packed.num_cut == 0
    tokens = sum(len(s.token_ids) for s in samples)
    assert packed.padding_share == pytest.approx(1 - tokens / packed.token_ids.size)
    # Best fit, the longest first, takes at most 11/9 of the fewest rows possible (Johnson 1974).
    assert len(packed.token_ids) <= 11 / 9 * -(-tokens // 64) + 1


def test_a_perfect_packing_is_found():
    ones = [Sample(np.full(n, n, np.int32), np.arange(n) > 0) for n in (6, 5, 4, 4, 3, 2)]
    packed = pack(ones, length=8, seed=1)
    assert packed.padding_share == 0 and len(packed.token_ids) == 3


def test_a_long_sample_is_cut_and_no_label_is_lost():
    ids = np.arange(100, 123, dtype=np.int32)  # 23 tokens, 22 labels
    long = Sample(ids, np.arange(23) > 0)
    packed = pack([long, Sample(ids[:8], np.arange(8) > 0)], length=8, seed=0)
    assert packed.num_cut == 1
    pieces = sorted(segments(packed))
    assert [p for p, _ in pieces] == [
        list(range(100, 108)),  # twice: the short sample is the long one's beginning
        list(range(100, 108)),
        list(range(107, 115)),
        list(range(114, 122)),
        [121, 122],
    ]
    assert all(mask == [False] + [True] * (len(mask) - 1) for _, mask in pieces)
    labels = sorted(packed.token_ids[packed.loss_mask].tolist())
    assert labels == sorted([*range(101, 123), *range(101, 108)])


def test_a_piece_without_a_label_is_left_out():
    packed = pack([Sample(np.arange(30, dtype=np.int32), np.arange(30) >= 20)], length=8, seed=0)
    assert sorted(packed.token_ids[packed.loss_mask].tolist()) == list(range(20, 30))
    assert min(ids[0] for ids, _ in segments(packed)) == 14


def test_the_seed_decides_who_meets():
    samples = [Sample(np.full(4, i, np.int32), np.arange(4) > 0) for i in range(40)]
    a, b, c = (pack(samples, length=8, seed=s).token_ids for s in (0, 0, 1))
    np.testing.assert_array_equal(a, b)
    assert (a != c).any()


def test_what_cannot_be_packed():
    with pytest.raises(ValueError, match="rows of 1 tokens hold no label"):
        pack(random_samples(2, 4), length=1, seed=0)
    with pytest.raises(ValueError, match="nothing to pack: 0 samples"):
        pack([], length=8, seed=0)


# Batches


def rows_of(count, length=4):
    ids = np.arange(count, dtype=np.int32)[:, None] * np.ones((1, length), np.int32)
    return Packed(ids, np.ones_like(ids), np.ones(ids.shape, np.bool_), num_cut=0)


def test_every_epoch_is_a_permutation_and_a_step_needs_no_history():
    batches = Batches(rows_of(11), batch_size=3, seed=5)
    assert len(batches) == 3
    epochs = [[batches.batch(e * 3 + i)["token_ids"][:, 0].tolist() for i in range(3)] for e in range(4)]
    for epoch in epochs:
        assert len({row for batch in epoch for row in batch}) == 9
    assert len({str(epoch) for epoch in epochs}) == 4
    # The rows that are left out change.
    assert {row for epoch in epochs for batch in epoch for row in batch} == set(range(11))
    # Steps in any order, and a fresh object: the same.
    again = Batches(rows_of(11), batch_size=3, seed=5)
    for step in (10, 2, 7, 0, 11):
        assert again.batch(step)["token_ids"][:, 0].tolist() == epochs[step // 3][step % 3]
    assert Batches(rows_of(11), batch_size=3, seed=6).batch(0)["token_ids"][:, 0].tolist() != epochs[0][0]


def test_the_arrays_of_a_batch_belong_together():
    packed = pack(random_samples(40, 16), length=16, seed=0)
    batch = Batches(packed, batch_size=4, seed=0).batch(1)
    assert batch.keys() == {"token_ids", "segment_ids", "loss_mask"}
    rows = [int(np.flatnonzero((packed.token_ids == ids).all(1))[0]) for ids in batch["token_ids"]]
    for name, array in batch.items():
        assert array.shape == (4, 16)
        np.testing.assert_array_equal(array, getattr(packed, name)[rows])


def test_fewer_rows_than_a_batch():
    with pytest.raises(ValueError, match="a batch of 4 rows cannot be made of 3 rows of 4 tokens"):
        Batches(rows_of(3), batch_size=4, seed=0)
    with pytest.raises(ValueError, match="a batch of 0 rows"):
        Batches(rows_of(3), batch_size=0, seed=0)


def test_prefetch_gives_the_same_batches():
    batches = Batches(rows_of(8), batch_size=2, seed=0)
    steps = list(batches.prefetch(3, 13))
    assert [step for step, _ in steps] == list(range(3, 13))
    for step, batch in steps:
        np.testing.assert_array_equal(batch["token_ids"], batches.batch(step)["token_ids"])
    assert list(batches.prefetch(3, 3)) == []
    assert [step for step, _ in batches.prefetch(3, 4)] == [3]


class Recording(Batches):
    """Notes which steps were made, and fails at one."""

    def __init__(self, fail_at=-1):
        super().__init__(rows_of(8), batch_size=2, seed=0)
        self.made, self.fail_at = [], fail_at

    def batch(self, step):
        self.made.append(step)
        if step == self.fail_at:
            raise RuntimeError(f"no batch {step}")
        return super().batch(step)


def test_prefetch_works_two_ahead_and_leaves_no_thread():
    threads = threading.active_count()
    batches = Recording()
    steps = batches.prefetch(0, 100)
    next(steps)
    deadline = time.monotonic() + 10
    while len(batches.made) < 3 and time.monotonic() < deadline:
        time.sleep(0.001)
    assert batches.made == [0, 1, 2]
    steps.close()
    assert threading.active_count() == threads


def test_prefetch_raises_what_failed_at_its_step():
    steps = Recording(fail_at=2).prefetch(0, 10)
    assert [next(steps)[0], next(steps)[0]] == [0, 1]
    with pytest.raises(RuntimeError, match="no batch 2"):
        next(steps)
