"""A training run from the flags to the exported model: loads, assembles, trains, writes."""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pard_jax import cli
from pard_jax.config import ModelConfig
from pard_jax.models import init_params
from pard_jax.models.attention import resolve_implementation
from pard_jax.presets import resolve_target
from pard_jax.tokenizer import check_same_vocabulary, load_tokenizer
from pard_jax.train import data, export, initial, options
from pard_jax.train.checkpoints import Checkpoints, check_settings
from pard_jax.train.evaluate import Evaluator
from pard_jax.train.logs import Log
from pard_jax.train.objective import Objective
from pard_jax.train.optimizer import OptimizerConfig
from pard_jax.train.trainer import Intervals, Outcome, data_mesh, train, write_plot
from pard_jax.weights import load_params

# Settings without an effect on the result, which may differ when a run is resumed.
_FREE = {"output", "log_every", "evaluate_every", "save_every", "keep", "tensorboard", "overwrite", "evaluation_batch"}


@dataclasses.dataclass(frozen=True)
class _Inputs:
    """What a run starts from, but for the weights: read without a device."""

    layers: list[int] | None
    directory: Path | None  # of the weights; None for random ones
    config: ModelConfig
    config_json: dict[str, Any]
    tokenizer_directory: Path
    batches: data.Batches
    held_out: data.Packed | None
    mask_token_id: int | None
    target: tuple[Path, ModelConfig] | None  # that is distilled


def run(args: argparse.Namespace) -> Outcome:
    """Load, train and export as the flags say.

    Raises:
        KeyboardInterrupt: the run was interrupted, and left a checkpoint.
        ValueError, OSError, FloatingPointError: see the modules that raise them.
    """
    # In the order of what a refusal costs: first all that needs no file, then no device, then no weights.
    optimizer, cod = options.optimizer_config(args), options.cod_config(args)
    options.check(args)
    directory_of_run = Path(args.output)
    check_settings(directory_of_run / "checkpoints", _settings(args))
    inputs = _read_inputs(args)
    config, batches, mask = inputs.config, inputs.batches, inputs.mask_token_id
    num_steps = args.steps or max(1, round(args.epochs * len(batches)))
    num_drafts = args.evaluation_drafts or (args.num_blocks if args.num_blocks > 1 else 8)

    device, about_device = cli.open_device()
    mesh = data_mesh(args.devices)
    options.check_split(args, mesh.devices.size)
    dtype = args.dtype if args.dtype != "auto" else ("float32" if device.platform == "cpu" else "bfloat16")
    attention = resolve_implementation(args.attention, dtype)
    cli.say(about_device)
    if inputs.directory is None:
        params = init_params(config, dtype=jnp.float32, seed=args.seed)
    else:
        params = initial.params_of_checkpoint(inputs.directory, inputs.layers)
    target_config = target_params = None
    if inputs.target is not None:
        target_config = inputs.target[1]
        target_params = load_params(*inputs.target, dtype=dtype)
    objective = Objective(
        config=config,
        cod=cod,
        mask_token_id=mask if mask is not None else 0,
        per_subtask=args.loss == "subtask",
        dtype=jnp.dtype(dtype),
        attention=attention,
        remat=args.remat,
        frozen_embeddings=args.freeze_embeddings,
        distill_weight=args.distill_weight if target_config is not None else 0.0,
        target=target_config,
        seed=args.seed,
    )
    _say_settings(args, config, objective, batches, num_steps, optimizer)
    if inputs.layers is not None:
        scale = initial.calibrate_norm(objective, params, _first(batches.batch(0), 8))
        cli.say(f"start        layers {args.layers}, final norm times {scale}")
        params = {**params, "norm": params["norm"] * scale}

    evaluator = None
    if inputs.held_out is not None:
        evaluator = Evaluator(
            objective, _arrays(inputs.held_out), mesh, num_drafts=num_drafts, batch_size=args.evaluation_batch
        )
    checkpoints = Checkpoints(directory_of_run / "checkpoints", settings=_settings(args), keep=args.keep)
    log = Log(directory_of_run, tensorboard=args.tensorboard)
    try:
        outcome = train(
            objective,
            optimizer,
            params,
            batches,
            num_steps=num_steps,
            accumulation=args.accumulation,
            mesh=mesh,
            checkpoints=checkpoints,
            log=log,
            evaluator=evaluator,
            target_params=target_params,
            intervals=Intervals(args.log_every, args.evaluate_every, args.save_every),
            say=cli.say,
        )
    finally:
        log.close()
        checkpoints.close()
    if (plot := write_plot(log)) is not None:
        cli.say(f"wrote        {plot}")
    if outcome.interrupted:
        cli.say(f"stopped at step {outcome.step} of {num_steps}, with a checkpoint; the same command goes on")
        raise KeyboardInterrupt
    _export(args, outcome, inputs)
    return outcome


def _read_inputs(args: argparse.Namespace) -> _Inputs:
    layers = options.layer_indices(args)
    directory = None
    if args.model is not None:
        directory = resolve_target(args.model, revision=args.revision)
        config, config_json = initial.config_of_checkpoint(directory, layers)
    else:
        config, config_json = initial.config_of_file(Path(args.config))
    tokenizer_directory = Path(args.tokenizer) if args.tokenizer is not None else directory
    assert tokenizer_directory is not None
    tokenizer = load_tokenizer(tokenizer_directory)

    rows, held_out = _read(args, tokenizer, config)
    batches = data.Batches(rows, batch_size=args.batch_size, seed=args.seed)
    mask = None
    if args.num_blocks > 1:
        asked = config.mask_token_id if args.mask_token_id is None else args.mask_token_id
        mask = export.choose_mask_token(tokenizer, config.vocab_size, asked, np.unique(rows.token_ids).tolist())
    target = None
    if args.distill_from is not None:
        target_directory = resolve_target(args.distill_from)
        target_config = ModelConfig.from_pretrained(target_directory)
        sizes = target_config.vocab_size, config.vocab_size
        check_same_vocabulary(load_tokenizer(target_directory), tokenizer, *sizes, mask)
        target = target_directory, target_config
    return _Inputs(layers, directory, config, config_json, tokenizer_directory, batches, held_out, mask, target)


def _read(args: argparse.Namespace, tokenizer: Any, config: ModelConfig) -> tuple[data.Packed, data.Packed | None]:
    """Packed rows to train and to evaluate on. What is evaluated is always what the target wrote, never prompts."""
    read: dict[str, Any] = {
        "vocab_size": config.vocab_size,
        "max_samples": args.max_samples,
        "retokenize": args.retokenize,
    }
    paths = [Path(path) for path in args.data]
    if args.held_out_data is not None or args.held_out == 0:
        samples = data.read_samples(paths, tokenizer, include_prompt=args.prompt_loss, **read)
        read["max_samples"] = None
        paths = [Path(path) for path in args.held_out_data or ()]
        held = data.read_samples(paths, tokenizer, include_prompt=False, **read) if paths else []
    else:
        samples = data.read_samples(paths, tokenizer, include_prompt=False, **read)
        count = min(64, len(samples) // 10) if args.held_out is None else args.held_out
        samples, held = data.split(samples, held_out=count, seed=args.seed)
        samples = data.with_prompts(samples) if args.prompt_loss else samples
    packed = data.pack(samples, length=args.length, seed=args.seed)
    held_rows = data.pack(held, length=args.length, seed=args.seed) if held else None
    tokens = int(np.count_nonzero(packed.segment_ids))
    cli.say(
        f"data         {len(samples):,} samples, {tokens:,} tokens in {len(packed.token_ids):,} rows of {args.length} "
        f"({packed.padding_share:.1%} padding, {packed.num_cut} samples cut); {len(held)} held out"
    )
    return packed, held_rows


def _say_settings(
    args: argparse.Namespace,
    config: ModelConfig,
    objective: Objective,
    batches: data.Batches,
    num_steps: int,
    optimizer: OptimizerConfig,
) -> None:
    counts = objective.cod.counts(args.length)
    mask = "" if args.num_blocks == 1 else f", mask token {objective.mask_token_id}"
    cli.say(f"model        {config.family}, {config.num_layers} layers of {config.hidden_size}, "
         f"{config.num_parameters / 1e6:.1f} M parameters{mask}")  # fmt: skip
    cli.say(f"rows         {sum(counts)} a row of {args.length} tokens ({'+'.join(map(str, counts))})")
    cli.say(f"updates      {num_steps} of {args.batch_size} rows ({len(batches)} an epoch), {optimizer.name}, "
         f"{jnp.dtype(objective.dtype).name}, {objective.attention} attention")  # fmt: skip


def _settings(args: argparse.Namespace) -> dict[str, Any]:
    """What a checkpoint's run must have in common with the one that goes on from it."""
    return {key: value for key, value in vars(args).items() if key not in _FREE}


def _arrays(packed: data.Packed) -> dict[str, np.ndarray]:
    return {"token_ids": packed.token_ids, "segment_ids": packed.segment_ids, "loss_mask": packed.loss_mask}


def _first(batch: dict[str, np.ndarray], rows: int) -> dict[str, np.ndarray]:
    return {key: value[:rows] for key, value in batch.items()}


def _export(args: argparse.Namespace, outcome: Outcome, inputs: _Inputs) -> None:
    training: dict[str, Any] = {"name": Path(args.output).name, "settings": _settings(args), "steps": outcome.step}
    if outcome.evaluation is not None:
        training["evaluation"] = dataclasses.asdict(outcome.evaluation)
    params = jax.tree.map(lambda x: x.astype(args.export_dtype), outcome.params)
    directory = Path(args.output) / "model"
    export.export(
        params,
        inputs.config_json,
        directory,
        tokenizer_directory=inputs.tokenizer_directory,
        mask_token_id=inputs.mask_token_id,
        training=training,
        overwrite=True,
    )
    cli.say(f"wrote        {directory}")
