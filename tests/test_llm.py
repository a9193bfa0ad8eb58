"""The offline API, used as vLLM's documentation uses it, on checkpoints of a few kilobytes."""

from __future__ import annotations

import itertools
import json
import shutil
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from pard_jax import LLM, Logprob, RequestOutput, SamplingParams, SpeculativeConfig
from pard_jax.config import EngineConfig
from pard_jax.loading import load_engine
from pard_jax.outputs import RequestSpecMetrics
from pard_jax.weights import load_params
from tests.helpers.engine import (
    DRAFT_LIMIT,
    TARGET_LIMIT,
    TARGET_VOCAB,
    Checkpoints,
    count_compiles,
    save_pair,
    tokens_of,
)
from tests.helpers.models import full_forward, stands_for

# A user's script for vLLM, with the calls and keys of its documentation's offline PARD example
# (docs/features/speculative_decoding/parallel_draft_model.md).
VLLM_SCRIPT = """
from vllm import LLM, SamplingParams

prompts = ["The future of AI is", "One two three"]
sampling_params = SamplingParams(temperature=0.8, top_p=0.95)
llm = LLM(
    model="Qwen/Qwen3-8B",
    tensor_parallel_size=1,
    speculative_config={
        "model": "amd/PARD-Qwen3-0.6B",
        "num_speculative_tokens": 12,
        "method": "draft_model",
        "parallel_drafting": True,
    },
)
outputs = llm.generate(prompts, sampling_params)
for output in outputs:
    print(f"{output.prompt!r} -> {output.outputs[0].text!r}")
"""
IDS = [5, 6, 7, 100, 200]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Checkpoints:
    return save_pair(tmp_path_factory.mktemp("pair"))


@pytest.fixture(scope="module")
def script(pair) -> dict[str, Any]:
    """The names that the script leaves behind: its import line and its two paths are changed, and nothing else."""
    code = VLLM_SCRIPT.replace("from vllm", "from pard_jax")
    code = code.replace("Qwen/Qwen3-8B", str(pair.target)).replace("amd/PARD-Qwen3-0.6B", str(pair.draft))
    printed: list[str] = []
    names: dict[str, Any] = {"print": printed.append, "printed": printed}
    exec(code, names)
    return names


@pytest.fixture
def llm(script) -> Iterator[LLM]:
    yield script["llm"]
    assert not script["llm"].engine._known


def speculation_of(output: RequestOutput) -> RequestSpecMetrics:
    metrics = output.metrics.speculative_decoding
    assert metrics is not None
    return metrics


def greedy(**keys: Any) -> SamplingParams:
    return SamplingParams(**({"temperature": 0.0, "ignore_eos": True} | keys))


def test_a_script_for_vllm_runs_as_it_stands(script):
    tokenizer = script["llm"].get_tokenizer()
    for prompt, output in zip(script["prompts"], script["outputs"], strict=True):
        assert isinstance(output, RequestOutput) and output.prompt == prompt and output.finished
        assert output.prompt_token_ids == tokenizer.encode(prompt)
        assert 1 <= len(output.outputs[0].token_ids) <= 16
        assert speculation_of(output).num_spec_tokens == 12
    texts = [output.outputs[0].text for output in script["outputs"]]
    assert script["printed"] == [f"{p!r} -> {text!r}" for p, text in zip(script["prompts"], texts, strict=True)]


def test_greedy_output_is_transformers_own(llm, pair):
    """Vocabularies of 304 and 320 rows, one tokenizer of 300; and up to 256 tokens with a draft that ends at 64."""
    prompts = [IDS, [9], list(range(3, 60))]
    outputs = llm.generate(prompts, greedy(max_tokens=1000))
    for prompt, output in zip(prompts, outputs, strict=True):
        (got,) = output.outputs
        assert pair.is_greedy(prompt, got.token_ids)
        assert got.finish_reason == "length" and len(prompt) + len(got.token_ids) == TARGET_LIMIT
        metrics = speculation_of(output)
        # No drafts where the draft's own limit would be passed.
        assert metrics.num_spec_steps <= max(0, DRAFT_LIMIT - 12 - len(prompt) + 1)
    accepted = [speculation_of(output).num_accepted_draft_tokens for output in outputs]
    assert sum(accepted) > 5 and accepted[2] == 0


def test_prompts_in_every_form(llm):
    tokenizer = llm.get_tokenizer()
    text = "The quick brown fox"
    ids = tokenizer.encode(text)
    params = greedy(max_tokens=5)
    forms: list[Any] = [text, {"prompt": text}, {"prompt_token_ids": ids}, ids, tuple(ids)]
    each = [llm.generate(form, params)[0] for form in forms]
    each += llm.generate(forms, params)
    each += llm.generate(prompts={"prompt": text, "prompt_token_ids": ids}, sampling_params=params, use_tqdm=False)
    assert all(output.prompt_token_ids == ids for output in each)
    assert len({tuple(tokens) for tokens in tokens_of(each)}) == 1
    assert [output.prompt for output in each[:5]] == [text, text, None, None, None]
    assert each[-1].prompt == text
    assert len({output.request_id for output in each}) == len(each)
    assert llm.generate([], params) == []


def test_results_in_the_prompts_order_whatever_ends_first(llm, pair):
    prompts = [[i, i + 1, i + 2] for i in range(3, 60, 5)]
    params = [greedy(max_tokens=1 + 7 * (i % 3)) for i in range(len(prompts))]
    outputs = llm.generate(prompts, params)
    assert [output.prompt_token_ids for output in outputs] == prompts
    for prompt, p, tokens in zip(prompts, params, tokens_of(outputs), strict=True):
        assert len(tokens) == p.max_tokens and pair.is_greedy(prompt, tokens)


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        ([IDS, []], "The decoder prompt cannot be empty"),
        ([IDS, ""], "The decoder prompt cannot be empty"),
        ([IDS, [1] * 256], r"The prompt \(256 input tokens\) plus the number of requested output tokens"),
        ([IDS, [304]], "Token id 304 is out of vocabulary; expected 0 to 303"),
        ([IDS, ["a"]], "prompt_token_ids must be a list of integers, got 'a' in it"),
        ([IDS, [True]], "prompt_token_ids must be a list of integers, got True in it"),
        ([{"prompt_token_ids": "abc"}], "prompt_token_ids must be a list of integers, got 'abc'"),
        ([{"text": "a"}], r"a prompt with the keys \['text'\] was given; expected 'prompt' or 'prompt_token_ids'"),
        ([{"prompt": None}], r"a prompt with the keys \['prompt'\] was given"),
        ([3.5], "prompt_token_ids must be a list of integers, got 3.5"),
        ([IDS, b"ab"], "prompt_token_ids must be a list of integers, got b'ab'"),
        (b"ab", "a prompt of bytes was given"),
        ([IDS, "\ud800 x"], r"not valid Unicode \('\\ud800' at character 0\)"),
    ],
)
def test_a_prompt_that_cannot_run_is_refused_before_any_runs(llm, prompts, message):
    steps = llm.engine.num_steps
    with pytest.raises(ValueError, match=message):
        llm.generate(prompts, greedy())
    assert llm.engine.num_steps == steps


def test_as_many_params_as_prompts(llm):
    with pytest.raises(ValueError, match=r"lengths of prompts \(2\) and sampling_params \(3\) must be the same"):
        llm.generate([IDS, IDS], [greedy()] * 3)
    # A request that is refused late takes those before it along.
    with pytest.raises(ValueError, match="33 stop token ids"):
        llm.generate([IDS, IDS], [greedy(), SamplingParams(stop_token_ids=list(range(10, 42)))])
    with pytest.raises(ValueError, match="stop token id 304 is out of vocabulary; expected 0 to 303"):
        llm.generate([IDS, IDS], [greedy(), SamplingParams(stop_token_ids=[303, 304])])
    for params in ({"temperature": 1}, [greedy(), {"temperature": 1}], "greedy"):
        with pytest.raises(ValueError, match="sampling_params must be SamplingParams, or a list of them"):
            llm.generate([IDS, IDS], params)
    assert len(llm.generate([IDS, IDS], [greedy(), greedy(max_tokens=1)])) == 2


def test_several_completions_of_one_prompt(llm):
    params = SamplingParams(temperature=1.0, n=4, max_tokens=9, ignore_eos=True)
    one, other = llm.generate([IDS, [9]], params)
    for output in (one, other):
        assert [c.index for c in output.outputs] == [0, 1, 2, 3]
        assert len({tuple(c.token_ids) for c in output.outputs}) == 4
        assert output.finished and output.metrics.speculative_decoding is None
        assert output.metrics.num_generation_tokens == 36
    assert one.prompt_token_ids == IDS and other.prompt_token_ids == [9]
    # With a seed, completion i is what seed + i gives alone.
    seeded = llm.generate(IDS, SamplingParams(temperature=1.0, n=3, seed=40, max_tokens=9, ignore_eos=True))[0]
    alone = llm.generate([IDS] * 3, [SamplingParams(temperature=1.0, seed=40 + i, max_tokens=9, ignore_eos=True)
                                     for i in range(3)])  # fmt: skip
    assert [c.token_ids for c in seeded.outputs] == tokens_of(alone)


def test_updates_come_as_they_are_made(llm):
    """By prompt and completion; together they are the outputs, which are what a call without them gives."""
    params = SamplingParams(temperature=1.0, n=2, seed=3, max_tokens=20, ignore_eos=True, logprobs=1)
    seen: dict[tuple[int, int], list[Any]] = {(i, n): [] for i in range(3) for n in range(2)}
    outputs = llm.generate([IDS, [9], [20, 30]], params, on_update=lambda i, n, update: seen[i, n].append(update))
    for (i, n), updates in seen.items():
        completion = outputs[i].outputs[n]
        assert "".join(u.text for u in updates) == completion.text
        assert list(itertools.chain.from_iterable(u.token_ids for u in updates)) == completion.token_ids
        assert list(itertools.chain.from_iterable(u.logprobs for u in updates)) == completion.logprobs
        assert len(updates) > 2 and [u.finished for u in updates] == [False] * (len(updates) - 1) + [True]
    again = llm.generate([IDS, [9], [20, 30]], params)
    assert [c.token_ids for o in again for c in o.outputs] == [c.token_ids for o in outputs for c in o.outputs]


def test_logprobs_are_dicts_by_id(llm):
    output = llm.generate(IDS, greedy(max_tokens=6, logprobs=3))[0].outputs[0]
    assert len(output.logprobs) == len(output.token_ids) == 6
    tokenizer = llm.get_tokenizer()
    for token, entry in zip(output.token_ids, output.logprobs, strict=True):
        assert next(iter(entry)) == token and len(entry) == 3
        for candidate, logprob in entry.items():
            assert isinstance(logprob, Logprob) and logprob.logprob < 0
            assert logprob.decoded_token == tokenizer.convert_id_to_piece(candidate)
        assert [logprob.rank for logprob in entry.values()] == [1, 2, 3]
    total = sum(entry[token].logprob for token, entry in zip(output.token_ids, output.logprobs, strict=True))
    assert output.cumulative_logprob == pytest.approx(total)
    plain = llm.generate(IDS, greedy(max_tokens=6))[0].outputs[0]
    assert plain.logprobs is None and plain.cumulative_logprob is None and plain.token_ids == output.token_ids


def test_text_tokens_and_logprobs_end_together(llm):
    """At a stop string that is cut out of the middle of what was generated."""
    whole = llm.generate(IDS, greedy(max_tokens=40, logprobs=0))[0].outputs[0]
    tokenizer = llm.get_tokenizer()
    letters = [i for i, c in enumerate(whole.text) if c.isascii() and c.isprintable()]
    stop = whole.text[letters[len(letters) // 2]]
    for include in (False, True):
        params = greedy(max_tokens=40, logprobs=0, stop=[stop], include_stop_str_in_output=include)
        output = llm.generate(IDS, params)[0]
        (got,) = output.outputs
        end = whole.text.index(stop) + include
        assert (got.text, got.finish_reason, got.stop_reason) == (whole.text[:end], "stop", stop)
        n = len(got.token_ids)
        assert n < 40 and len(got.logprobs) == n == output.metrics.num_generation_tokens
        assert got.token_ids == whole.token_ids[:n] and list(got.logprobs) == whole.logprobs[:n]
        assert stop in tokenizer.decode(got.token_ids) and stop not in tokenizer.decode(got.token_ids[:-1])


def test_chat(llm):
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    tokenizer = llm.get_tokenizer()
    params = greedy(max_tokens=3)
    (one,) = llm.chat(messages, params)
    assert one.prompt == "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n"
    assert one.prompt_token_ids == tokenizer.apply_chat_template(messages)
    two = llm.chat([messages, [*messages, {"role": "assistant", "content": "Paris"}]], params, use_tqdm=False)
    assert two[0].prompt_token_ids == one.prompt_token_ids and "Paris" in two[1].prompt
    assert tokens_of(two)[0] == tokens_of([one])[0]
    (quiet,) = llm.chat(messages, params, chat_template_kwargs={"enable_thinking": False})
    assert quiet.prompt.endswith("<think>\n\n</think>\n\n")
    (closed,) = llm.chat(messages, params, add_generation_prompt=False)
    assert closed.prompt.endswith("<|im_end|>\n")
    parts = [{"type": "text", "text": "What is the capital"}, {"type": "text", "text": "of France?"}]
    (joined,) = llm.chat([{"role": "user", "content": parts}], params)
    assert joined.prompt == one.prompt.replace("capital of", "capital\nof")
    for bad, message in (
        ([{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}], "must be text.*image_url"),
        ([{"role": "user"}], "must have a 'role' and a 'content' of text"),
        ([{"content": "x"}], "must have a 'role' and a 'content' of text"),
        ([{"role": "user", "content": 3}], "content must be text, got 3"),
        ([{"role": "user", "content": "\udce9"}], "not valid Unicode"),
        ([[]], "the conversation has no messages"),
    ):
        with pytest.raises(ValueError, match=message):
            llm.chat(bad, params)
    with pytest.raises(ValueError, match="unknown role nobody"):
        llm.chat([{"role": "nobody", "content": ""}], params)


def test_calling_again_compiles_nothing(llm):
    prompts, params = ["One two three", IDS], SamplingParams(temperature=0.9, top_k=7, seed=3, logprobs=2)
    first = llm.generate(prompts, params)
    with count_compiles() as compiled:
        again = llm.generate(prompts, params)
    assert not compiled and tokens_of(first) == tokens_of(again)


@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError])
def test_usable_after_an_interruption(llm, pair, monkeypatch, error):
    """Whatever was running is gone, nothing of it comes up in the next call."""
    step, calls = llm.engine.step, []

    def interrupted() -> Any:
        calls.append(1)
        if len(calls) == 4:
            raise error
        return step()

    with monkeypatch.context() as patch, pytest.raises(error):
        patch.setattr(llm.engine, "step", interrupted)
        llm.generate([IDS] * 12, greedy(max_tokens=200))
    assert len(calls) > 4 and not llm.engine.has_work()
    outputs = llm.generate([IDS, [9]], greedy(max_tokens=10))
    for prompt, tokens in zip([IDS, [9]], tokens_of(outputs), strict=True):
        assert len(tokens) == 10 and pair.is_greedy(prompt, tokens)


# -- construction: nothing is compiled ----------------------------------------------------------------------------


def test_arguments_that_are_refused(pair):
    target = str(pair.target)
    for keys, message in [
        ({"foo": 1}, "LLM: got an unexpected keyword argument 'foo'"),
        ({"quantization": "int4"}, "quantization='int4' is not supported; choose 'int8', or 'none' to keep"),
        ({"dtype": "int8"}, "dtype='int8' is not supported; choose one of auto, float32, bfloat16, float16"),
        ({"max_num_seqs": 0}, "max_num_seqs=0; expected a whole number of at least 1"),
        ({"gpu_memory_utilization": 1.5}, "gpu_memory_utilization=1.5"),
        ({"max_model_len": 257}, "max_model_len=257 is larger than the model's max_position_embeddings=256"),
        ({"tensor_parallel_size": 64}, "tensor_parallel_size=64, but there are 8 cpu"),
        ({"speculative_config": {"model": target}}, "`num_speculative_tokens` was not provided"),
        ({"speculative_config": {"modell": target}}, "did you mean 'model'"),
    ]:
        with pytest.raises(ValueError, match=message):
            LLM(target, **keys)
    with pytest.raises(FileNotFoundError, match="does not exist"):
        LLM("/no/such/directory")


def test_settings_say_what_is_in_effect(pair):
    config = SpeculativeConfig(model=str(pair.draft), num_speculative_tokens=4, parallel_drafting=True)
    settings = LLM(str(pair.target), speculative_config=config, max_num_seqs=2, use_tqdm=False).settings
    assert (settings.method, settings.num_speculative_tokens) == ("pard", 4)
    assert (settings.model, settings.draft_model) == (pair.target, pair.draft)
    assert settings.dtype == np.float32 and settings.plan.max_model_len == TARGET_LIMIT
    plain = LLM(str(pair.target), max_model_len=100, dtype="bfloat16", steps_per_dispatch=3).settings
    assert (plain.method, plain.num_speculative_tokens, plain.draft_model) == ("none", 0, None)
    assert plain.dtype == "bfloat16" and plain.plan.max_model_len == 100 and plain.steps_per_dispatch == 3


def test_without_a_tokenizer_only_ids_go(pair, tmp_path):
    directory = shutil.copytree(pair.target, tmp_path / "bare")
    for path in directory.glob("tokenizer*"):
        path.unlink()
    llm = LLM(str(directory), max_num_seqs=1)
    for call in (llm.get_tokenizer, lambda: llm.generate("text"), lambda: llm.chat([{"role": "user", "content": ""}])):
        with pytest.raises(ValueError, match=r"holds no tokenizer.*give prompt_token_ids instead"):
            call()
    with pytest.raises(ValueError, match="stop strings need a tokenizer"):
        llm.generate(IDS, greedy(stop="a"))


def test_defaults_come_from_generation_config(pair, tmp_path):
    directory = shutil.copytree(pair.target, tmp_path / "model")
    (directory / "generation_config.json").write_text(
        json.dumps({"temperature": 0.6, "top_k": 20, "top_p": 0.95, "eos_token_id": [2, 0], "max_new_tokens": 7})
    )
    llm = LLM(str(directory), max_num_seqs=1)
    expected = SamplingParams(temperature=0.6, top_k=20, top_p=0.95, max_tokens=7)
    assert llm.get_default_sampling_params() == expected
    assert llm._params_for(2, None) == [expected] * 2
    assert LLM(str(pair.target), max_num_seqs=1).get_default_sampling_params() == SamplingParams()


def test_speculation_can_be_turned_off(pair):
    """The weights stay, the output does, and nothing is drafted any more."""
    speculative = SpeculativeConfig(model=str(pair.draft), num_speculative_tokens=2, parallel_drafting=True)
    llm = LLM.from_loaded(load_engine(pair.target, EngineConfig(max_num_seqs=2, max_model_len=60), speculative))
    weights = llm.engine._params["target"]
    llm.disable_speculation()
    assert llm.engine._params["target"] is weights and llm.settings.num_speculative_tokens == 0
    (output,) = llm.generate([IDS], greedy(max_tokens=12))
    assert len(output.outputs[0].token_ids) == 12 and pair.is_greedy(IDS, output.outputs[0].token_ids)
    assert output.metrics.speculative_decoding is None and llm.engine.num_steps == 12


def test_int8_weights_speak_as_what_they_stand_for(pair):
    """With drafts by int8 weights and without any, on two devices."""
    speculative = {"model": str(pair.draft), "num_speculative_tokens": 3, "parallel_drafting": True}
    common: dict[str, Any] = {"tensor_parallel_size": 2, "max_model_len": 60, "max_num_seqs": 2}
    llm = LLM(str(pair.target), quantization="int8", speculative_config=speculative, **common)
    config = llm.settings.config
    forward = full_forward(
        config, stands_for(load_params(pair.target, config, dtype="float32", quantization="int8")), 60
    )
    prompts = [IDS, [9]]
    drafted = tokens_of(llm.generate(prompts, greedy(max_tokens=50)))
    assert sum(llm.engine.acceptance.acceptance_histogram[1:]) > 0
    llm.disable_speculation()
    assert tokens_of(llm.generate(prompts, greedy(max_tokens=50))) == drafted
    for prompt, output in zip(prompts, drafted, strict=True):
        assert len(output) == 50
        assert forward([*prompt, *output]).argmax(axis=-1)[len(prompt) - 1 : -1].tolist() == output


# -- two devices --------------------------------------------------------------------------------------------------


def test_two_devices_give_what_one_gives(llm, pair):
    """Greedy output and log-probabilities; and nothing compiles after warm-up."""
    speculative = {"model": str(pair.draft), "num_speculative_tokens": 3, "parallel_drafting": True}
    two = LLM(
        str(pair.target),
        tensor_parallel_size=2,
        speculative_config=speculative,
        max_model_len=100,
        max_num_seqs=2,
        steps_per_dispatch=2,
    )
    two.engine.warm_up()
    state = two.engine._state
    for cache in (state.cache, state.draft.cache):
        assert {shard.data.shape[2] for shard in cache.k.addressable_shards} == {1}  # of two key/value heads
        assert len(cache.k.addressable_shards) == 2
    prompts = [IDS, [9], list(range(3, 70)), [20, 30]]
    settings = [greedy(max_tokens=20), greedy(max_tokens=25, logprobs=2), greedy(max_tokens=40)]
    settings.append(SamplingParams(temperature=1.0, top_p=0.9, max_tokens=9, seed=1))
    with count_compiles() as compiled:
        outputs = two.generate(prompts, settings)
        two.generate(prompts[::-1], settings)
    assert not compiled
    for prompt, count, tokens in zip(prompts, (20, 25, 33), tokens_of(outputs), strict=False):
        assert len(tokens) == count and pair.is_greedy(prompt, tokens)
    (one,) = llm.generate([prompts[1]], settings[1])
    here, there = outputs[1].outputs[0].logprobs, one.outputs[0].logprobs
    assert here is not None and there is not None
    for mine, theirs in zip(here, there, strict=True):
        assert list(mine) == list(theirs)
        assert [v.logprob for v in mine.values()] == pytest.approx([v.logprob for v in theirs.values()], abs=1e-4)
    assert sum(speculation_of(o).num_accepted_draft_tokens for o in outputs) > 5
    assert max(max(tokens) for tokens in tokens_of(outputs)) < TARGET_VOCAB
