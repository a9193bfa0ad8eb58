"""Engines small enough to test: with a target and a draft that say what the test wants, or with random models.

The scripted target is a real decoder whose attention and MLP add nothing: its logits hang on the last token alone and
are a table that the test writes. The scripted drafter reads its drafts from a table as well. Both tables are
parameters, so a test changes them without compiling anything. Token ids are bytes: a script is a piece of text.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pard_jax.config import EngineConfig, ModelConfig
from pard_jax.decoding.drafters import DraftContext, Drafter, Proposal
from pard_jax.decoding.sampling import Role, role_keys, sample
from pard_jax.engine.adaptive import Policy
from pard_jax.engine.engine import Engine
from pard_jax.engine.memory import MemoryPlan, Speculation, plan_memory
from pard_jax.engine.request import RequestUpdate
from pard_jax.models import abstract_params
from pard_jax.outputs import RequestOutput
from pard_jax.sampling_params import SamplingParams
from pard_jax.tokenizer import Tokenizer
from tests.helpers.models import hf_config, hf_model, save_hf
from tests.helpers.tokenizer import make_tokenizer

GREEDY: dict[str, Any] = {"temperature": 0.0}
BYTES = 256
EOS, SECOND_EOS = ord("$"), ord("%")


class ByteTokenizer(Tokenizer):
    """Ids are UTF-8 bytes; what is no character decodes to U+FFFD, as with a byte-level BPE."""

    def __init__(self) -> None:
        super().__init__(None)

    @property
    def eos_token_id(self) -> int:
        return EOS

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return list(text.encode())

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        ids = [i for i in token_ids if not (skip_special_tokens and i in (EOS, SECOND_EOS))]
        return bytes(ids).decode(errors="replace")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ScriptedDrafter(Drafter):
    """Drafts by the last token, from ``params``: ``tokens [V, K]`` or, to be drawn from, ``probs [V, K, V]``."""

    sampled: bool = False

    def propose(self, params: Any, state: Any, context: DraftContext, *, window: int) -> tuple[Proposal, Any]:
        last = jnp.take_along_axis(context.tokens, context.length[:, None] - 1, axis=1)[:, 0]
        if not self.sampled:
            return Proposal(params["tokens"][last][:, : self.num_speculative_tokens], None), state
        probs = params["probs"][last][:, : self.num_speculative_tokens]
        positions = context.length[:, None] + jnp.arange(self.num_speculative_tokens)[None, :]
        drawn = sample(jnp.log(probs), role_keys(context.sampling.seed, positions, Role.DRAFT))
        best = jnp.argmax(probs, axis=-1).astype(jnp.int32)
        return Proposal(jnp.where(context.sampling.greedy[:, None], best, drawn), probs), state


def table_config(vocab_size: int, max_position_embeddings: int) -> ModelConfig:
    """A one-layer Llama as wide as its vocabulary, so that an embedding can be one-hot."""
    return ModelConfig.from_hf(
        {
            "architectures": ["LlamaForCausalLM"],
            "vocab_size": vocab_size,
            "hidden_size": vocab_size,
            "num_hidden_layers": 1,
            "num_attention_heads": 1,
            "head_dim": 2,
            "intermediate_size": 1,
            "max_position_embeddings": max_position_embeddings,
            "rope_theta": 1e4,
        }
    )


def table_params(config: ModelConfig, logits: np.ndarray) -> dict[str, Any]:
    """Weights of a model whose logits after token u are ``logits[u]``, whatever came before."""
    v = config.vocab_size
    params = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), abstract_params(config, jnp.float32))
    norm = np.sqrt(1 / v + config.rms_norm_eps)  # of a one-hot row
    return params | {
        "embed": jnp.eye(v, dtype=jnp.float32),
        "norm": jnp.ones(v),
        "lm_head": jnp.asarray(logits.T * norm, jnp.float32),
    }


class ScriptedEngine(Engine):
    """An engine over bytes whose target and drafts follow a script."""

    def __init__(
        self,
        k: int,
        *,
        num_rows: int = 3,
        steps_per_dispatch: int = 1,
        sampled: bool = False,
        max_model_len: int = 400,
        vocab_size: int = BYTES,
        eos_token_ids: Sequence[int] = (EOS, SECOND_EOS),
        seed: int | None = 0,
        specialize: bool = False,
        policy: Policy | None = None,
    ) -> None:
        config = table_config(vocab_size, max_model_len)
        drafter = ScriptedDrafter(num_speculative_tokens=k, sampled=sampled)
        tokenizer = ByteTokenizer() if vocab_size == BYTES else None
        draft = {"probs": None} if sampled else {"tokens": jnp.full((vocab_size, k), -1, jnp.int32)}
        self.scripts = {"target": table_params(config, np.zeros((vocab_size, vocab_size))), "draft": draft}
        super().__init__(
            config,
            drafter,
            self.scripts,
            plan_for(config, Speculation(num_speculative_tokens=k), max_model_len, num_rows, chunk_size=16),
            num_rows=num_rows,
            chunk_size=16,
            steps_per_dispatch=steps_per_dispatch,
            dtype=jnp.float32,
            speculative_slots=k,
            tokenizer=tokenizer,
            eos_token_ids=eos_token_ids,
            seed=seed,
            specialize=specialize,
            policy=policy,
        )

    @property
    def k(self) -> int:
        return self.drafter.num_speculative_tokens

    def play(self, logits: np.ndarray, drafts: np.ndarray) -> None:
        """Set the target's ``logits [V, V]`` after each token, and its ``tokens [V, K]`` or ``probs [V, K, V]``."""
        assert not self.has_work()
        self.scripts["target"] = table_params(self.config, logits)
        if drafts.ndim == 2:
            self.scripts["draft"] = {"tokens": jnp.asarray(drafts, jnp.int32)}
        else:
            self.scripts["draft"] = {"probs": jnp.asarray(drafts, jnp.float32)}
        self.acceptance.reset()

    def say(self, *texts: str | bytes, drafts: str | int = "right") -> None:
        """Let the target walk through texts, each of distinct bytes and each begun again at its end.

        ``drafts``: how many of every block are what the target says, the next one being wrong; "right" for all of
        them, "wrong" for 0; "none" for no drafts at all.
        """
        follows = successors(*texts)
        self.play(one_hot_logits(follows), draft_table(follows, self.k, drafts))


@functools.cache
def scripted(k: int, steps_per_dispatch: int = 1) -> ScriptedEngine:
    """An engine that tests share, for it to be compiled once."""
    return ScriptedEngine(k, steps_per_dispatch=steps_per_dispatch)


def successors(*texts: str | bytes) -> np.ndarray:
    """``[256]``: the byte after each byte; those of no text follow themselves."""
    follows = np.arange(BYTES)
    for text in texts:
        ids = list(text.encode() if isinstance(text, str) else text)
        assert len(set(ids)) == len(ids), f"{text!r} repeats a byte"
        follows[ids] = [*ids[1:], ids[0]]
    return follows


def one_hot_logits(follows: np.ndarray, height: float = 20.0) -> np.ndarray:
    """``[V, V]``: ``height`` at the token that follows, 0 elsewhere."""
    return np.eye(len(follows))[follows] * height


def draft_table(follows: np.ndarray, k: int, drafts: str | int = "right") -> np.ndarray:
    """``[V, K]``: the drafts of :meth:`ScriptedEngine.say`."""
    if drafts == "none":
        return np.full((len(follows), k), -1)
    num_right = drafts if isinstance(drafts, int) else {"right": k, "wrong": 0}[drafts]
    table, token = [], np.arange(len(follows))
    for i in range(k):
        token = follows[token]
        table.append(token if i < num_right else (token + 1) % len(follows))
    return np.stack(table, axis=1)


def plan_for(
    config: ModelConfig, speculation: Speculation, max_model_len: int, num_rows: int, chunk_size: int, **engine: Any
) -> MemoryPlan:
    """A plan where memory is no object; one window unless ``smallest_window`` says otherwise."""
    settings: dict[str, Any] = {"max_model_len": max_model_len, "max_num_seqs": num_rows, "smallest_window": 4096}
    settings |= engine
    return plan_memory(
        config, EngineConfig(**settings), speculation, dtype=jnp.float32, chunk_size=chunk_size, memory_bytes=1 << 40
    )


def params_of_request(**keys: Any) -> SamplingParams:
    """Greedy unless a temperature is given."""
    return SamplingParams(**(GREEDY | keys))


def submit(engine: Engine, prompts: Mapping[str, tuple[str | list[int], SamplingParams]]) -> None:
    """Queue requests, by id."""
    for request_id, (prompt, params) in prompts.items():
        ids = list(prompt.encode()) if isinstance(prompt, str) else prompt
        engine.add_request(request_id, ids, params, prompt=prompt if isinstance(prompt, str) else None)


def drain(engine: Engine, updates: list[RequestUpdate] | None = None) -> dict[str, Any]:
    """Step until nothing is left; every ``RequestOutput`` by its id. ``updates`` collects all updates on the way."""
    outputs: dict[str, Any] = {}
    while engine.has_work():
        for update in engine.step():
            if updates is not None:
                updates.append(update)
            if update.output is not None:
                assert update.request_id not in outputs, "a request ended twice"
                outputs[update.request_id] = update.output
    return outputs


def generate(
    engine: Engine, prompts: Sequence[str | list[int]], params: SamplingParams | Sequence[SamplingParams] | None = None
) -> list[Any]:
    """Run prompts to their end, greedily unless told otherwise; their ``RequestOutput`` in order."""
    assert not engine.has_work()
    if params is None or isinstance(params, SamplingParams):
        params = [params or params_of_request()] * len(prompts)
    submit(engine, {str(i): pair for i, pair in enumerate(zip(prompts, params, strict=True))})
    outputs = drain(engine)
    return [outputs[str(i)] for i in range(len(prompts))]


def tokens_of(outputs: Sequence[RequestOutput]) -> list[list[int]]:
    """The token ids of the first completions."""
    return [output.outputs[0].token_ids for output in outputs]


@contextmanager
def count_compiles() -> Iterator[list[str]]:
    """Collects what XLA compiles inside the block, whatever asked for it."""
    compiled: list[str] = []

    def listen(event: str, duration_secs: float, **_: Any) -> None:
        if event == "/jax/core/compile/backend_compile_duration":
            compiled.append(event)

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        yield compiled
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)


def forward_passes(function: Any, *args: Any) -> int:
    """How often ``function(*args)`` runs a decoder: its scans over layers, the innermost that carry a cache.

    A pass within a loop of static length counts as often as the loop runs; a ``while_loop`` body counts once.
    """

    def count(jaxpr: Any) -> int:
        total = 0
        for equation in jaxpr.eqns:
            if equation.primitive.name == "cond":  # no decoder runs in a branch; one writes a cache row by row
                continue
            values = [x for v in equation.params.values() for x in (v if isinstance(v, tuple) else (v,))]
            inner = [getattr(x, "jaxpr", x) for x in values]
            times = sum(count(x) for x in inner if hasattr(x, "eqns"))
            if equation.primitive.name == "scan":
                passed = any(getattr(x.aval, "ndim", 0) == 5 for x in equation.invars)  # the cache, and nothing else
                times = equation.params["length"] * times if times else int(passed)
            total += times
        return total

    return count(jax.make_jaxpr(function)(*args).jaxpr)


class Checkpoints(NamedTuple):
    """A target and a parallel draft as Hugging Face directories, and the target as transformers runs it."""

    target: Path
    draft: Path
    hf: Any

    def is_greedy(self, prompt: Sequence[int], output: Sequence[int]) -> bool:
        """Whether every token is the likeliest one behind those before it, by transformers, in one pass."""
        torch = pytest.importorskip("torch")

        with torch.no_grad():
            logits = self.hf(torch.tensor([[*prompt, *output]])).logits[0]
        return logits.argmax(dim=-1)[len(prompt) - 1 : -1].tolist() == list(output)


NUM_TOKENS, TARGET_VOCAB, DRAFT_VOCAB, MASK = 300, 304, 320, 310
TARGET_LIMIT, DRAFT_LIMIT = 256, 64


def save_pair(directory: Path) -> Checkpoints:
    """Write a tiny pair of one tokenizer, whose vocabularies are padded differently.

    The draft's limit is a quarter of the target's. It is the target with some noise, so that it is right now and then,
    and it would most like to say an id of its own padding.
    """
    torch = pytest.importorskip("torch")

    shape = {"num_hidden_layers": 1, "head_dim": 8, "max_position_embeddings": TARGET_LIMIT}
    config = hf_config("qwen3", **shape, vocab_size=TARGET_VOCAB)
    target = hf_model(config)
    draft = hf_model(config | {"vocab_size": DRAFT_VOCAB, "max_position_embeddings": DRAFT_LIMIT}, seed=1)
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        theirs = dict(target.named_parameters())
        for name, ours in draft.named_parameters():
            weight = theirs[name]
            noise = 0.02 * torch.randn(weight.shape, generator=generator)
            ours[tuple(slice(n) for n in weight.shape)] = weight + noise
        # Rows of the padding: larger than any real one, in both directions.
        draft.lm_head.weight[-8:-4] = 3 * theirs["lm_head.weight"][:4]
        draft.lm_head.weight[-4:] = -3 * theirs["lm_head.weight"][:4]
    for name, model, extra in (("target", target, {}), ("draft", draft, {"pard_token": MASK})):
        save_hf(model, directory / name, **extra)
        make_tokenizer(directory / name, NUM_TOKENS)
        (directory / name / "generation_config.json").unlink(missing_ok=True)
    return Checkpoints(directory / "target", directory / "draft", target)
