"""What comes out of training: the id that serves as mask token, and a Hugging Face directory of the draft.

``config.json`` gets the two keys of PARD's published drafts, ``pard_token`` and ``spd_type`` (PARD's pard_train.py),
and is otherwise the base model's: transformers loads the directory as the plain causal language model that a draft is.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from pard_jax.config import ModelConfig
from pard_jax.config.model import MASK_TOKEN_KEYS
from pard_jax.models import abstract_params
from pard_jax.tokenizer import Tokenizer
from pard_jax.weights import names
from pard_jax.weights.save import new_directory, write_json, write_params

# All that may make up a tokenizer, and the generation defaults that belong to it.
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
    "generation_config.json",
)


def choose_mask_token(
    tokenizer: Tokenizer | None, vocab_size: int, asked: int | None, used_token_ids: Iterable[int] = ()
) -> int:
    """The id of the mask token: a row of the embedding that no text ever uses.

    Without one that is asked for, it is the lowest id that names no token (Qwen's embeddings are longer than their
    vocabularies) and, where every row has a name, the lowest reserved special token: one that is not BOS, EOS, padding
    or the like and does not stand in the chat template. PARD's published drafts took ids of the same two kinds.

    Args:
        tokenizer: the draft's, which is the target's; None where the checkpoint has none.
        vocab_size: V, rows of the embedding.
        asked: the id that was asked for.
        used_token_ids: ids that occur in the samples.

    Raises:
        ValueError: ``asked`` lies outside the vocabulary or is an id that text uses, or there is no free id.
    """
    used = set(used_token_ids)
    if asked is not None:
        if not 0 <= asked < vocab_size:
            raise ValueError(f"mask token id {asked} lies outside the vocabulary; expected 0 to {vocab_size - 1}")
        if asked in used:
            raise ValueError(f"mask token id {asked} occurs in the samples; expected an id that no text uses")
    if tokenizer is None:
        if asked is None:
            raise ValueError(
                "without a tokenizer it cannot be told which ids no text uses; give the mask token's id (mask_token_id)"
            )
        return asked
    vocabulary = set(tokenizer.vocab.values())
    unnamed = (i for i in range(vocab_size) if i not in vocabulary)
    reserved = _reserved(tokenizer)
    if asked is not None:
        if asked in vocabulary and asked not in reserved:
            spelled = tokenizer.tokens([asked])[0]
            raise ValueError(
                f"mask token id {asked} is {spelled!r}, which the tokenizer uses; expected an id that names no token, "
                "or a special token that is reserved"
            )
        return asked
    for candidate in (*unnamed, *reserved):
        if candidate not in used and candidate < vocab_size:
            return candidate
    raise ValueError(
        f"each of the {vocab_size} ids of the vocabulary is in use, so there is none for the mask token; add a "
        "reserved special token to the tokenizer, and a row to both models' embeddings if they have none to spare"
    )


def _reserved(tokenizer: Tokenizer) -> list[int]:
    """Special tokens without a part to play, in order."""
    hf = tokenizer.hf
    roles = {hf.bos_token_id, hf.eos_token_id, hf.pad_token_id, hf.unk_token_id, hf.sep_token_id, hf.cls_token_id}
    template = str(hf.chat_template or "")
    return sorted(
        i
        for i, token in hf.added_tokens_decoder.items()
        if token.special and i not in roles and token.content not in template
    )


def export(
    params: Mapping[str, Any],
    config_json: Mapping[str, Any],
    directory: str | Path,
    *,
    tokenizer_directory: Path | None,
    mask_token_id: int | None,
    training: Mapping[str, Any],
    overwrite: bool = False,
    progress: bool = True,
) -> None:
    """Write a trained model as a Hugging Face directory, which appears complete or not at all.

    Args:
        params: the tree of :func:`pard_jax.models.abstract_params`, of one dtype: bfloat16, float16 or float32.
        config_json: the base model's ``config.json``.
        directory: where.
        tokenizer_directory: its tokenizer and ``generation_config.json`` are copied.
        mask_token_id: what the model was trained to draft with; None for a model that is no parallel draft.
        training: how it was trained and how well, for ``training.json`` and the model card. The card has the ``name``
            (else the directory's), the ``settings`` (of which ``model`` is the base model), the ``evaluation``
            (``acceptance_length``, ``loss``) and whatever else there is.
        overwrite: replace a directory that is not empty.
        progress: show a bar, on a terminal.

    Raises:
        CheckpointMismatchError: ``params`` are not those of ``config_json``; every array that differs is listed.
        FileExistsError: ``directory`` is not empty.
        ValueError: ``mask_token_id`` lies outside the vocabulary, arrays of several dtypes, or ``training`` is no JSON.
    """
    directory = Path(directory)
    config = _config(params, config_json, mask_token_id)
    model = ModelConfig.from_hf(config)
    expected = names.stored_tensors(abstract_params(model, jnp.float32))
    found = names.stored_tensors(params)
    names.check_tensors(
        "the parameter tree", {n: t.shape for n, t in expected.items()}, {n: t.shape for n, t in found.items()}
    )
    if mask_token_id is not None and not 0 <= mask_token_id < model.vocab_size:
        raise ValueError(f"mask token id {mask_token_id} lies outside the vocabulary of {model.vocab_size} ids")
    try:
        json.dumps(training)
    except TypeError as e:
        raise ValueError(f"what is said about the training cannot be written as JSON: {e}") from None
    with new_directory(directory, overwrite=overwrite) as partial:
        if tokenizer_directory is not None:
            _copy_tokenizer(Path(tokenizer_directory), partial)
        write_json(partial / "training.json", training)
        (partial / "README.md").write_text(
            _card(str(training.get("name") or directory.name), mask_token_id, training), encoding="utf-8"
        )
        write_params(params, partial, progress=progress)
        write_json(partial / "config.json", config)  # makes the directory loadable, so it comes last


def _config(params: Mapping[str, Any], config_json: Mapping[str, Any], mask_token_id: int | None) -> dict[str, Any]:
    dtypes = {str(leaf.dtype) for leaf in jax.tree.leaves(params)}
    if len(dtypes) != 1:
        raise ValueError(f"the parameters are of the dtypes {', '.join(sorted(dtypes))}; expected one for all")
    # Of a base model that was a parallel draft already: another key would win over pard_token.
    stale = {*(key.partition(".")[0] for key in MASK_TOKEN_KEYS), "spd_type", "torch_dtype"}
    config = {key: value for key, value in config_json.items() if key not in stale} | {"dtype": dtypes.pop()}
    if mask_token_id is not None:
        config |= {"pard_token": mask_token_id, "spd_type": "pard"}
    return config


def _copy_tokenizer(source: Path, target: Path) -> None:
    for name in TOKENIZER_FILES:
        if (source / name).is_file():
            shutil.copyfile(source / name, target / name)


def _card(name: str, mask_token_id: int | None, training: Mapping[str, Any]) -> str:
    settings, evaluation = training.get("settings") or {}, training.get("evaluation") or {}
    base = settings.get("model")
    tags = "".join(f"- {tag}\n" for tag in ("pard", "speculative-decoding") if mask_token_id is not None)
    kind = (
        "A causal language model"
        if mask_token_id is None
        else f"A [PARD](https://arxiv.org/abs/2504.18583) draft model: it proposes the tokens of a step of speculative "
        f"decoding in one pass, with token {mask_token_id} as mask token"
    )
    lines = [
        "---",
        "library_name: transformers",
        "pipeline_tag: text-generation",
        *(["tags:", tags.rstrip()] if tags else []),
        "---",
        "",
        f"# {name}",
        "",
        f"{kind}{f', trained from `{base}`' if base else ''}. Made by `python -m pard_jax.train`.",
        "",
    ]
    if mask_token_id is not None:
        lines += [
            "It is of use beside a target model with the same tokenizer:",
            "",
            "```python",
            "from pard_jax import LLM",
            "",
            'llm = LLM(model="TARGET", speculative_config={',
            f'    "method": "draft_model", "model": "{name}", "num_speculative_tokens": 8, "parallel_drafting": True,',
            "})",
            "```",
            "",
        ]
    lines += ["## Training", ""]
    rows = {
        **settings,
        **{key: value for key, value in training.items() if key not in ("name", "settings", "evaluation")},
    }
    lines += ["| setting | value |", "|---|---|", *(_row(k, v) for k, v in rows.items() if v is not None), ""]
    if evaluation:
        lines += ["## On held-out samples", "", "| measure | value |", "|---|---|"]
        lines += [*(_row(key, value) for key, value in evaluation.items()), ""]
    lines += [
        "## Licence",
        "",
        "Not stated here. The licences of the base model and of the training data apply; who publishes this model",
        "states its own.",
        "",
    ]
    return "\n".join(lines)


def _row(key: str, value: Any) -> str:
    def shown(v: Any) -> str:
        if isinstance(v, list | tuple):
            return ", ".join(map(shown, v))
        return f"{v:.4g}" if isinstance(v, float) else str(v)

    return f"| {key.replace('_', ' ')} | {shown(value)} |".replace("\n", " ")
