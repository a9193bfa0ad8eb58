"""``python -m pard_jax.bench quantization``: what int8 weights change: logits, choices, and what drafts are worth.

The text is what the model says greedily after the prompts, by its weights as they are. All weights then read that text
(teacher forcing), so that one difference does not become many. How decoding with int8 weights would go on is not said.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import itertools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int

from pard_jax import LLM, SamplingParams, cli
from pard_jax.bench import environment, ours
from pard_jax.bench.workload import add_prompt_arguments, encode_groups, read_groups
from pard_jax.config import EngineConfig, ModelConfig
from pard_jax.decoding.drafters import DraftContext, Drafter, PardDrafter
from pard_jax.decoding.sampling import SamplingState
from pard_jax.loading import Loaded, Parts
from pard_jax.models import KVCache, bind, param_bytes
from pard_jax.presets import DEFAULT, fill_preset, resolve_draft, resolve_target
from pard_jax.tokenizer import load_tokenizer
from pard_jax.train.evaluate import play
from pard_jax.weights import load_params

MEMORY = "lower --limit or --max-tokens"  # what to do when it runs out
QUANTIZATION = "int8"
_SLOT_MULTIPLE = 128


@dataclasses.dataclass(frozen=True)
class Text:
    """A prompt and what the model says after it."""

    prompt: list[int]
    output: list[int]

    @property
    def predicted(self) -> slice:
        """The positions whose next token is of the output."""
        return slice(len(self.prompt) - 1, len(self.prompt) + len(self.output) - 1)


@dataclasses.dataclass(frozen=True)
class LogitChange:
    """What quantized weights change of the target, over all tokens of the outputs.

    Attributes:
        error: root mean square of the logits' change, in that of their spread over the vocabulary.
        divergence: Kullback-Leibler, of the quantized distribution from the other one; nats a token, the mean.
        agreement: share of the tokens that are the quantized weights' first choice too.
    """

    error: float
    divergence: float
    agreement: float


@dataclasses.dataclass(frozen=True)
class Drafted:
    """What drafts are worth to a target, each with weights as they are (None) or quantized.

    Attributes:
        length: tokens a step, the target's own included.
        per_position: share of the steps that accept the draft there, with all before it.
    """

    target: str | None
    draft: str | None
    length: float
    per_position: list[float]


def measure(argv: Sequence[str]) -> None:
    """Measure, print two tables, and write the figures where they are wanted."""
    args = _parser().parse_args(argv)
    _check(args)
    prompts = read_groups(args.texts, args.prompts, args.limit)
    cli.open_device()
    directory = resolve_target(args.model)
    config = ModelConfig.from_pretrained(directory)
    speculative = None
    if args.draft_model is not None:
        draft = resolve_draft(args.draft_model, directory).absolute()
        speculative = ours.speculative_config("pard", args.num_speculative_tokens, draft, args.mask_token_id)
    tokenizer = load_tokenizer(directory)
    (workload,) = encode_groups(prompts, tokenizer, [None], args)
    longest = min(workload.longest + args.max_tokens, config.max_position_embeddings)
    engine = EngineConfig(max_model_len=longest, dtype=args.dtype, max_num_seqs=args.max_num_seqs)
    parts = ours.load(directory, engine, [args.max_num_seqs], [speculative], tokenizer)

    texts = say(parts, [ids for group in workload.groups.values() for ids in group], args.max_tokens)
    params = {None: parts.params, QUANTIZATION: _quantized(parts)}
    change, best = compare_logits(parts, params, texts)
    dtype = parts.settings.dtype
    sizes = [param_bytes(config, dtype, quantization) / 1e6 for quantization in params]
    env = environment.describe()
    print(
        f"{args.model}: {len(texts)} prompt(s), {sum(len(t.output) for t in texts)} tokens said by the weights as they "
        f"are, {dtype.name}\n{environment.in_a_line(env)}\n\n"
        f"{QUANTIZATION}: target {sizes[1]:.1f} MB instead of {sizes[0]:.1f}, logit error {change.error:.2%}, "
        f"divergence {change.divergence:.5f} nats, same token {change.agreement:.2%}"
    )
    drafted = compare_drafts(parts, params, texts, best)
    if drafted:
        print(f"\n{'target':8}  {'draft':8}  {'AL':>5}  by position (K={len(drafted[0].per_position)})")
    for row in drafted:
        shares = " ".join(f"{share:.3f}" for share in row.per_position)
        print(f"{row.target or dtype.name:8}  {row.draft or dtype.name:8}  {row.length:5.2f}  {shares}")
    if args.output is not None:
        report = {
            "settings": {key: value for key, value in vars(args).items() if key != "texts"} | {"dtype": dtype.name},
            "environment": env,
            "num_prompts": len(texts),
            "num_tokens": sum(len(text.output) for text in texts),
            "logits": dataclasses.asdict(change),
            "drafts": [dataclasses.asdict(row) for row in drafted],
        }
        cli.write_whole(Path(args.output), json.dumps(report, indent=2) + "\n")


def _parser() -> argparse.ArgumentParser:
    parser = cli.Parser(prog="python -m pard_jax.bench quantization", description=__doc__)
    add_prompt_arguments(parser, files="several are one set")
    add = parser.add_argument_group("models").add_argument
    add("--model", default=DEFAULT, help=f"checkpoint directory, hub id or preset (default: {DEFAULT})")
    add("--draft-model", metavar="MODEL", help="a PARD draft (default: the preset's, where --model is one)")
    add("--mask-token-id", type=int, metavar="ID", help="of the draft, where its config.json names none")
    add("-k", "--num-speculative-tokens", type=int, metavar="K", help="tokens drafted (default: the preset's)")
    add("--dtype", default="auto", help="of what is not int8 (default: auto)")
    add = parser.add_argument_group("measurement").add_argument
    add("--max-tokens", type=int, default=128, metavar="N", help="new tokens a prompt, at most (default: 128)")
    add("--max-num-seqs", type=int, default=8, metavar="N", help="requests that run at once (default: 8)")
    add("--output", metavar="FILE", help="also write the figures as JSON")
    return parser


def _check(args: argparse.Namespace) -> None:
    """Refuse what no model is needed to refuse. Fills in what a preset brings."""
    if args.max_tokens < 1:
        raise ValueError(f"--max-tokens must be at least 1, got {args.max_tokens}")
    EngineConfig(dtype=args.dtype, max_num_seqs=args.max_num_seqs)
    fill_preset(args)
    if args.draft_model is not None and args.num_speculative_tokens is None:
        raise ValueError("--draft-model needs -k/--num-speculative-tokens, the number of tokens to draft a step")
    if args.output is not None:
        cli.check_writable(Path(args.output))


def say(parts: Parts, prompts: Sequence[list[int]], max_tokens: int) -> list[Text]:
    """What the target says greedily after each prompt."""
    llm = LLM.from_loaded(Loaded(parts.build(), parts.settings, parts.tokenizer, {}, parts))
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens)
    outputs = llm.generate([{"prompt_token_ids": ids} for ids in prompts], params)
    return [Text(ids, out.outputs[0].token_ids) for ids, out in zip(prompts, outputs, strict=True)]


def _quantized(parts: Parts) -> dict[str, Any]:
    """The same weights, read again and quantized."""
    settings = parts.settings
    common: dict[str, Any] = {"dtype": settings.dtype, "mesh": parts.mesh, "quantization": QUANTIZATION}
    params = {"target": load_params(settings.model, settings.config, **common)}
    if settings.draft_model is not None and isinstance(settings.drafter, PardDrafter):
        params["draft"] = load_params(settings.draft_model, settings.drafter.config, **common)
    return params


def compare_logits(
    parts: Parts, params: dict[str | None, dict[str, Any]], texts: Sequence[Text]
) -> tuple[LogitChange, dict[str | None, Int[np.ndarray, "P C"]]]:
    """How the target's logits change; and the first choices, of all weights, after each token of each text."""
    tokens = _padded(texts)
    score = jax.jit(functools.partial(_score, parts.settings.config, parts.settings.dtype))
    rows = [jax.device_get(score(*(p["target"] for p in params.values()), row[None])) for row in tokens]
    # Of each text, only what was said after the prompt counts.
    said = [[values[text.predicted] for values in row] for row, text in zip(rows, texts, strict=True)]
    squares, spread, divergence, before, after = (np.concatenate(column) for column in zip(*said, strict=True))
    change = LogitChange(
        error=float(np.sqrt(squares.mean() / spread.mean())),
        divergence=float(divergence.mean()),
        agreement=float((before == after).mean()),
    )
    return change, {key: np.stack([row[3 + i] for row in rows]) for i, key in enumerate(params)}


def _score(
    config: ModelConfig, dtype: Any, plain: Any, quantized: Any, tokens: Int[Array, "1 C"]
) -> tuple[Float[Array, "C"], Float[Array, "C"], Float[Array, "C"], Int[Array, "C"], Int[Array, "C"]]:
    """Mean squares of the change and of the spread, divergences, and the first choices of both, by position."""
    length = tokens.shape[1]
    shape = (config.num_layers, 1, config.num_kv_heads, length, config.head_dim)

    def logits(params: Any) -> Float[Array, "C V"]:
        model = bind(config, params)
        out = model(tokens, KVCache.zeros(shape, dtype), jnp.zeros(1, jnp.int32), window=length)
        raw = model.logits(out.hidden)[0]
        return raw - raw.mean(axis=-1, keepdims=True)  # what is added to all of them changes nothing

    before, after = logits(plain), logits(quantized)
    p, q = jax.nn.log_softmax(before), jax.nn.log_softmax(after)
    divergence = jnp.sum(jnp.exp(p) * (p - q), axis=-1)
    squares = [jnp.mean(x * x, axis=-1) for x in (after - before, before)]
    first = [jnp.argmax(x, axis=-1).astype(jnp.int32) for x in (before, after)]
    return squares[0], squares[1], divergence, first[0], first[1]


def compare_drafts(
    parts: Parts,
    params: dict[str | None, dict[str, Any]],
    texts: Sequence[Text],
    best: dict[str | None, Int[np.ndarray, "P C"]],
) -> list[Drafted]:
    """Acceptance of all pairs of weights, the steps of decoding played along the texts; none without a draft."""
    drafter = parts.settings.drafter
    if not drafter.num_speculative_tokens:
        return []
    tokens = _padded(texts)
    propose = jax.jit(functools.partial(_proposals, drafter, parts.settings.dtype))
    drafts = {key: np.asarray(propose(p["draft"], tokens)) for key, p in params.items()}
    found = []
    for target, draft in itertools.product(params, params):
        accepted: list[int] = []
        for row, text in enumerate(texts):
            hits = accepted_at(drafts[draft][row], best[target][row], tokens[row])
            accepted += play(hits, text.predicted.start + 1, text.predicted.stop + 1)
        shares = [float(np.mean([n > i for n in accepted])) for i in range(drafter.num_speculative_tokens)]
        found.append(Drafted(target, draft, 1 + sum(shares), shares))
    return found


def accepted_at(drafts: Int[np.ndarray, "C K"], best: Int[np.ndarray, "C"], tokens: Int[np.ndarray, "C"]) -> np.ndarray:
    """``[K, C]``: whether draft k behind token a is the target's choice there, the text having been it so far.

    Where the target would leave the text, what it says next is not known: no later draft counts.
    """
    length, k = drafts.shape
    chosen, said = (np.pad(x, (0, k + 1), constant_values=-1) for x in (best, tokens))
    ahead = np.arange(length)[None, :] + np.arange(k)[:, None]
    follows = chosen[ahead] == said[ahead + 1]
    followed = np.vstack([np.ones((1, length), bool), np.logical_and.accumulate(follows)[:-1]])
    return followed & (chosen[ahead] == drafts.T)


def _proposals(drafter: Drafter, dtype: Any, params: Any, tokens: Int[Array, "P C"]) -> Int[Array, "P C K"]:
    """The drafts behind every token of every text, greedy, the text before them being given."""
    rows, length = tokens.shape
    slots = -(-(length + 2 * drafter.num_speculative_tokens) // _SLOT_MULTIPLE) * _SLOT_MULTIPLE
    zeros, active = jnp.zeros(rows), jnp.ones(rows, bool)
    whole = zeros.astype(jnp.int32)
    greedy = SamplingState(temperature=zeros, top_k=whole, top_p=zeros + 1, min_p=zeros, seed=whole.astype(jnp.uint32))

    def one(state: Any, known: Array) -> tuple[Any, Array]:
        context = DraftContext(tokens, jnp.full(rows, known, jnp.int32), active, greedy)
        proposal, state = drafter.propose(params, state, context, window=slots)
        return state, proposal.tokens

    state = drafter.init(rows, slots, dtype)
    return lax.scan(one, state, jnp.arange(1, length + 1, dtype=jnp.int32))[1].swapaxes(0, 1)


def _padded(texts: Sequence[Text]) -> Int[np.ndarray, "P C"]:
    longest = max(len(text.prompt) + len(text.output) for text in texts)
    tokens = np.zeros((len(texts), longest), np.int32)
    for row, text in zip(tokens, texts, strict=True):
        row[: len(text.prompt) + len(text.output)] = [*text.prompt, *text.output]
    return tokens
