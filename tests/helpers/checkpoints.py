"""Tiny random checkpoints on disk: a target and drafts that go with it, or do not."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

from pard_jax.config import ModelConfig
from pard_jax.weights import save_hf
from tests.helpers.models import hf_config, random_params
from tests.helpers.tokenizer import make_tokenizer

VOCABULARY = 304  # the tokenizer's 300 and some padding; the mask id is one of the padding
MASK = 303


class Checkpoints(NamedTuple):
    target: str
    pard: str  # the target's own weights, so that the first draft is always right, and a mask id
    no_mask: str  # an ordinary draft
    bad_mask: str
    other_vocabulary: str
    ids_only: str  # the target without tokenizer files

    def params(self) -> dict[str, Any]:
        return random_params(ModelConfig.from_pretrained(self.target), 0)


def make_checkpoints(root: Path) -> Checkpoints:
    """Write them all below ``root``."""

    def make(name: str, *, seed: int = 0, tokenizer: bool = True, **config: Any) -> str:
        hf = hf_config("qwen3", vocab_size=VOCABULARY, head_dim=8, num_hidden_layers=1, **config)
        save_hf(random_params(ModelConfig.from_hf(hf), seed), hf, root / name, progress=False)
        if tokenizer:
            make_tokenizer(root / name)
        return str(root / name)

    other = make("other_vocabulary", tokenizer=False, pard_token=MASK)
    make_tokenizer(other, vocab_size=280)
    return Checkpoints(
        target=make("target"),
        pard=make("pard", pard_token=MASK),
        no_mask=make("no_mask", seed=1),
        bad_mask=make("bad_mask", pard_token=VOCABULARY),
        other_vocabulary=other,
        ids_only=make("ids_only", tokenizer=False),
    )
