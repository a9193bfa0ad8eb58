"""The compiled programs: nothing compiles twice, nothing is copied, no weight is baked in, and they run on a mesh."""

from __future__ import annotations

import contextlib
import dataclasses
import re
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxtyping import Array

from pard_jax.decoding.drafters import Drafter, PardDrafter, Proposal, SequentialDrafter
from pard_jax.decoding.state import init_state
from pard_jax.decoding.step import Programs
from pard_jax.models import KVCache, abstract_params, bind, make_mesh
from tests.helpers.loop import Loop, Request
from tests.helpers.models import full_forward, model_config, random_params, tiny_pair
from tests.helpers.reference import greedy

PAIR = tiny_pair(vocab_size=32)
CHUNK, MAX_LEN, K = 8, 48, 3


def pard_of(pair, k: int = K, **overrides: Any) -> PardDrafter:
    mask, vocab = pair.draft.mask_token_id, pair.target.vocab_size
    given: dict[str, Any] = {"num_speculative_tokens": k, "mask_token_id": mask, "config": pair.draft}
    return PardDrafter(**given | {"target_vocab_size": vocab, "max_model_len": 512} | overrides)


def prompt_of(length: int, seed: int = 3) -> list[int]:
    return np.random.default_rng(seed + length).integers(0, 32, length).tolist()


@contextlib.contextmanager
def compilations() -> Iterator[list[str]]:
    """Lists what XLA compiles while the context is open."""
    seen: list[str] = []

    def listen(event: str, duration_secs: float, **kwargs: Any) -> None:
        if event == "/jax/core/compile/backend_compile_duration":
            seen.append(str(kwargs.get("fun_name", event)))

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        yield seen
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)


def compiled_versions(programs: Programs) -> list[int]:
    jitted: list[Any] = [programs.admit, programs.prefill, programs.decode]
    return [program._cache_size() for program in jitted]


def test_nothing_compiles_after_the_first_calls():
    """Whatever the prompts, lengths, settings and acceptance: sampled, greedy, with logprobs, stops, several steps."""
    programs = Programs(PAIR.target, pard_of(PAIR, sampled=True), chunk_size=CHUNK, max_steps=2)
    with compilations() as warm_up:
        loop = Loop(programs, PAIR.params, max_len=MAX_LEN)
        loop.serve([Request(prompt_of(3), MAX_LEN)])
    assert sum("decode" in name for name in warm_up) == 1  # the counter counts
    rng = np.random.default_rng(0)
    requests = [
        Request(
            prompt_of(int(rng.integers(1, MAX_LEN))),
            int(rng.integers(MAX_LEN - 1, MAX_LEN + 1)),
            stop_ids=tuple(rng.integers(0, 32, rng.integers(0, 5)).tolist()),
            min_length=int(rng.integers(0, MAX_LEN)),
            temperature=float(rng.choice([0.0, 0.5, 1.0])),
            top_k=int(rng.choice([0, 1, 7])),
            top_p=float(rng.choice([1.0, 0.8])),
            min_p=float(rng.choice([0.0, 0.1])),
            seed=int(rng.integers(0, 2**32)),
            num_logprobs=int(rng.integers(-1, 21)),
        )
        for _ in range(20)
    ]
    with compilations() as seen:
        loop.serve(requests[:10])
        loop.serve(requests[10:], steps=2)
    assert seen == []
    assert compiled_versions(programs) == [1, 1, 1]


def test_the_state_is_donated_and_both_caches_written_in_place():
    programs = Programs(PAIR.target, pard_of(PAIR), chunk_size=CHUNK, max_steps=2)
    state = init_state(PAIR.target, programs.drafter, 4, 2048, jnp.float32)
    caches = [state.cache.k, state.cache.v, state.draft.cache.k, state.draft.cache.v]
    size = sum(cache.nbytes for cache in caches)
    step = (PAIR.params, state, np.ones(4, bool), np.int32(1))
    chunk = (PAIR.params, state, np.int32(0), np.int32(0), np.int32(3))
    compiled = [
        programs.decode.lower(*step, window=64).compile(),
        programs.prefill.lower(*chunk, window=64).compile(),
    ]
    for program in compiled:
        memory = program.memory_analysis()
        assert memory is not None
        assert memory.alias_size_in_bytes >= size
        assert memory.temp_size_in_bytes < min(cache.nbytes for cache in caches)
    at = [cache.unsafe_buffer_pointer() for cache in caches]
    leaves = jax.tree.leaves(state)
    new, _ = compiled[0](*step)
    assert all(leaf.is_deleted() for leaf in leaves)
    caches = [new.cache.k, new.cache.v, new.draft.cache.k, new.draft.cache.v]
    assert [cache.unsafe_buffer_pointer() for cache in caches] == at


def largest_constant(jitted: Any, *args: Any, **kwargs: Any) -> int:
    """Bytes of the largest constant in a traced and lowered program."""
    traced = jitted.trace(*args, **kwargs)
    closed_over = [int(np.asarray(c).nbytes) for c in traced.jaxpr.consts]
    literals = [len(m) // 2 for m in re.findall(r"dense<(.*?)>", traced.lower().as_text())]
    return max([0, *closed_over, *literals])


def test_no_weight_is_a_constant_of_a_program():
    pair = tiny_pair(vocab_size=16384)
    assert pair.params["target"]["embed"].nbytes > 2**20
    programs = Programs(pair.target, pard_of(pair), chunk_size=CHUNK, max_steps=2)
    state = init_state(pair.target, programs.drafter, 2, 128, jnp.float32)
    decode = (pair.params, state, np.ones(2, bool), np.int32(1))
    assert largest_constant(programs.decode, *decode, window=64) < 2**16
    assert largest_constant(programs.prefill, pair.params, state, *map(np.int32, (0, 0, 3)), window=64) < 2**16
    # The measure sees one that is closed over.
    closed = jax.jit(lambda tokens: pair.params["target"]["embed"][tokens])
    assert largest_constant(closed, np.zeros(3, np.int32)) > 2**20


@pytest.mark.parametrize("kind", ["pard", "sequential"])
def test_a_mesh_gives_the_same_tokens_and_compiles_once(kind):
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
    target = model_config("qwen3", num_hidden_layers=1, vocab_size=32, **heads)
    draft = model_config("llama", num_hidden_layers=1, vocab_size=32, **heads)
    params = {"target": random_params(target, 0), "draft": random_params(draft, 1)}
    model = {"config": draft, "target_vocab_size": 32, "max_model_len": 512, "num_speculative_tokens": K}
    drafter = PardDrafter(**model, mask_token_id=31) if kind == "pard" else SequentialDrafter(**model)
    mesh = make_mesh(2)
    abstract = {
        "target": abstract_params(target, jnp.float32, mesh),
        "draft": abstract_params(draft, jnp.float32, mesh),
    }
    sharded = jax.tree.map(lambda x, a: jax.device_put(x, a.sharding), params, abstract)
    state = init_state(target, drafter, 2, 64, jnp.float32, mesh)
    shardings = jax.tree.map(lambda x: x.sharding, state)
    programs = Programs(target, drafter, chunk_size=CHUNK, max_steps=1, state_sharding=shardings)
    requests = [Request(prompt_of(n), 30) for n in (1, 10, 17)]
    loop = Loop(programs, sharded, max_len=MAX_LEN, rows=2, mesh=mesh)
    runs = loop.serve(requests)
    logits = full_forward(target, params["target"], 32)
    assert [run.tokens for run in runs] == [greedy(logits, r.prompt, r.max_length) for r in requests]
    assert compiled_versions(programs) == [1, 1, 1]
    assert jax.tree.map(lambda x: x.sharding, loop.state) == shardings
    assert {s.data.shape[2] for s in loop.state.draft.cache.k.addressable_shards} == {1}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Watcher(Drafter):
    """Drafts nothing of use, and writes down what it is shown of the target."""

    def init(self, num_rows: int, num_slots: int, dtype: Any, mesh: Any = None) -> Array:
        return jnp.full((len(self.target_layers), num_rows, num_slots, PAIR.target.hidden_size), jnp.nan, dtype)

    def propose(self, params: Any, state: Array, context: Any, *, window: int) -> tuple[Proposal, Array]:
        rows = context.length.shape[0]
        return Proposal(jnp.full((rows, self.num_speculative_tokens), 7, jnp.int32), None), state

    def observe(self, state: Array, features: Array, starts: Array, first_row: Any) -> Array:
        _, r, t, _ = features.shape
        rows = (first_row + jnp.arange(r, dtype=jnp.int32))[:, None]
        at = starts[:, None] + jnp.arange(t, dtype=jnp.int32)[None, :]
        return state.at[:, rows, at].set(features)


def test_a_drafter_that_reads_the_target_sees_every_committed_token():
    """The residual stream of the layers it names, at prefill and at every verification, each at its own position."""
    config = model_config("qwen3", num_hidden_layers=2, vocab_size=32, head_dim=8)
    params = random_params(config, 2)
    layers = (1, 0)
    drafter = Watcher(num_speculative_tokens=2, target_layers=layers)
    programs = Programs(config, drafter, chunk_size=CHUNK, max_steps=1)
    loop = Loop(programs, {"target": params}, max_len=MAX_LEN, rows=2)
    requests = [Request(prompt_of(n), 30) for n in (19, 4)]
    runs = loop.serve(requests)
    logits = full_forward(config, params, 32)
    assert [run.tokens for run in runs] == [greedy(logits, r.prompt, r.max_length) for r in requests]

    @jax.jit
    def features(tokens: Array) -> Array:
        cache = KVCache.zeros((2, 2, config.num_kv_heads, 30, config.head_dim), jnp.float32)
        out = bind(config, params)(tokens, cache, jnp.zeros((2,), jnp.int32), window=30, capture=layers)
        assert out.features is not None
        return out.features

    tokens = np.asarray([[*asked.prompt, *run.tokens] for asked, run in zip(requests, runs, strict=True)], np.int32)
    # The last token was never fed back.
    np.testing.assert_allclose(loop.state.draft[:, :, :29], features(tokens)[:, :, :29], atol=1e-4)
