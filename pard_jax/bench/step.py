"""``python -m pard_jax.bench step``: what a decode step costs, by batch and K, for any pair of shapes.

The weights are random, made on the device: a step reads and computes the same whatever they are. Only what is accepted
depends on them, so a step's time in plain steps is given instead: the acceptance length at which PARD breaks even.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from pard_jax import cli, report
from pard_jax.bench import environment, plot, step_report
from pard_jax.bench.flags import numbers
from pard_jax.bench.shapes import SHAPES, model_shape
from pard_jax.bench.step_report import Result
from pard_jax.bench.step_run import Bench, Measured, copy_rate
from pard_jax.bench.step_setup import NO_DRAFT, Setup, check_draft_flags, mask_token_id
from pard_jax.config import EngineConfig
from pard_jax.config.engine import IMPLEMENTATIONS
from pard_jax.engine.memory import device_memory
from pard_jax.loading import by_platform, resolve_implementation, specializes
from pard_jax.models import init_params, make_mesh

MEMORY = "lower --batch, --cache or -k, or choose smaller models"  # what to do when it runs out
_ON_CPU = ("demo-target", "demo-draft")
_ELSEWHERE = ("qwen3-8b", "qwen3-0.6b")
_KS = [4, 8, 12]
_CACHE, _CONTEXT = 2048, 1024


def measure(argv: Sequence[str]) -> None:
    """Measure every batch and K, print a table, and write the report and the figure where they are wanted."""
    args = _parser().parse_args(argv)
    _check(args)
    device, _ = cli.open_device()
    setup = _setup(args, device)
    cases = [(batch, k) for batch in args.batch for k in (0, *args.num_speculative_tokens)]
    for batch, k in cases:
        setup.check(batch, k)

    env = environment.describe()
    title = f"{args.target}{'' if setup.draft is None else f' + {args.draft}'}"
    weights = "random weights" if setup.quantization is None else f"random weights in {setup.quantization}"
    print(
        f"{title}: {weights}, {setup.dtype.name}, {setup.implementation}, context {setup.context} of {setup.cache}, "
        f"{setup.num_steps} steps a dispatch, median of {args.repeats}\n{environment.in_a_line(env)}"
    )
    copied = copy_rate(_copy_bytes(device), args.repeats)
    print(f"device copy: {copied.median / 1e9:.1f} GB/s, read and written\n")
    table = step_report.table(prefill=args.prefill)
    print(table.header, flush=True)
    results: list[Result] = []
    document = {
        "settings": _settings(args, setup),
        "environment": env,
        "copy_bytes_per_second": dataclasses.asdict(copied),
    }

    def write(*, finished: bool) -> None:
        if args.output is not None:
            whole = document | {"finished": finished, "results": [result.as_dict() for result in results]}
            cli.write_whole(Path(args.output), json.dumps(whole, indent=2) + "\n")

    plain: dict[int, Measured] = {}
    for batch, k, measured in _measure(setup, cases, args):
        if k == 0:
            plain[batch] = measured
        size = setup.step_bytes(batch, k)
        results.append(Result(batch, k, measured, plain[batch].step, size, copied, report.peak_memory()))
        print(table.row(results[-1]), flush=True)
        write(finished=False)
    write(finished=True)
    if args.plot is not None:
        plot.save(Path(args.plot), step_report.draw(results, f"{title}, {env['device']}"))


def _parser() -> argparse.ArgumentParser:
    parser = cli.Parser(prog="python -m pard_jax.bench step", description=__doc__)
    add = parser.add_argument_group("models", f"a config.json, or one of {', '.join(SHAPES)}").add_argument
    add("--target", metavar="MODEL", help=f"(default: {_ELSEWHERE[0]}; on a CPU {_ON_CPU[0]})")
    add("--draft", metavar="MODEL",
        help=f"or {NO_DRAFT} (default, without --target: {_ELSEWHERE[1]}; on a CPU {_ON_CPU[1]})")  # fmt: skip
    add("--mask-token-id", type=int, metavar="ID",
        help="of the draft (default: its config.json's, or the target's last id)")  # fmt: skip
    add("--dtype", default="auto", help="(default: auto: float32 on a CPU, bfloat16 elsewhere)")
    cli.add_quantization_argument(add)
    add("--implementation", choices=IMPLEMENTATIONS, default="auto",
        help="of decoding passes (default: auto: our kernels on one NVIDIA GPU in 16 bits)")  # fmt: skip
    add = parser.add_argument_group("sizes").add_argument
    add("-k", "--num-speculative-tokens", type=numbers, metavar="K,...",
        help=f"tokens drafted a step, each in turn (default: {','.join(map(str, _KS))})")  # fmt: skip
    add("--batch", type=numbers, default=[1, 8], metavar="N,...", help="rows, each in turn (default: 1,8)")
    add("--context", type=int, metavar="N",
        help=f"tokens of each row (default: {_CONTEXT}, or half of --cache where that is less)")  # fmt: skip
    add("--cache", type=int, metavar="N",
        help=f"tokens that a row may hold (default: {_CACHE}, or the target's limit)")  # fmt: skip
    add("--steps-per-dispatch", type=int, default=8, metavar="N", help="(default: 8)")
    add = parser.add_argument_group("measurement").add_argument
    add("--repeats", type=int, default=10, metavar="N", help="timed dispatches of each program (default: 10)")
    add("--prefill", action="store_true", help="also measure how fast a prompt of the context's length is read")
    add("--output", metavar="FILE", help="also write the report as JSON, anew after every line")
    add("--plot", metavar="FILE", help=f"also draw a figure ({', '.join(plot.FORMATS)}); needs matplotlib")
    return parser


def _check(args: argparse.Namespace) -> None:
    """Refuse what no device is needed to refuse."""
    for name, least in (("steps_per_dispatch", 1), ("repeats", 1), ("context", 2), ("cache", 2)):
        value = getattr(args, name)
        if value is not None and value < least:
            raise ValueError(f"--{name.replace('_', '-')} must be at least {least}, got {value}")
    if args.target is not None and args.draft is None:
        raise ValueError(f"--target {args.target} needs a draft: name one with --draft, or --draft {NO_DRAFT}")
    check_draft_flags(args)
    for name in (args.target, args.draft):
        if name not in (None, NO_DRAFT):
            model_shape(name)
    EngineConfig(dtype=args.dtype)
    if args.output is not None:
        cli.check_writable(Path(args.output))
    if args.plot is not None:
        plot.check(Path(args.plot))


def _setup(args: argparse.Namespace, device: Any) -> Setup:
    """Everything filled in, in ``args`` as well."""
    defaults = _ON_CPU if device.platform == "cpu" else _ELSEWHERE
    args.target, args.draft = args.target or defaults[0], args.draft or defaults[1]
    target = model_shape(args.target)
    draft = None if args.draft == NO_DRAFT else model_shape(args.draft)
    if args.num_speculative_tokens is None:
        args.num_speculative_tokens = [] if draft is None else _KS
    cache = args.cache or min(_CACHE, target.max_position_embeddings)
    engine = EngineConfig(dtype=args.dtype, implementation=args.implementation, quantization=args.quantization)
    dtype, chunk_size, _ = by_platform(engine, device)
    mesh = make_mesh(1)
    return Setup(
        target=target,
        draft=draft,
        mask_token_id=mask_token_id(args.mask_token_id, target, draft),
        dtype=jnp.dtype(dtype),
        implementation=resolve_implementation(args.implementation, dtype, mesh),
        specialize=specializes(device),
        chunk_size=chunk_size,
        num_steps=args.steps_per_dispatch,
        cache=cache,
        context=args.context or min(_CONTEXT, cache // 2),
        memory_bytes=device_memory(device),
        mesh=mesh,
        quantization=engine.quantization,
    )


def _measure(
    setup: Setup, cases: Sequence[tuple[int, int]], args: argparse.Namespace
) -> Iterator[tuple[int, int, Measured]]:
    common: dict[str, Any] = {"dtype": setup.dtype, "mesh": setup.mesh, "quantization": setup.quantization}
    params = {"target": init_params(setup.target, **common)}
    if setup.draft is not None:
        params["draft"] = init_params(setup.draft, **common, seed=1)
    jax.block_until_ready(params)
    for batch, k in cases:
        used = params if k else {"target": params["target"]}
        yield batch, k, Bench(setup, used, batch, k).measure(args.repeats, prefill=args.prefill)


def _settings(args: argparse.Namespace, setup: Setup) -> dict[str, Any]:
    effective = {
        "dtype": setup.dtype.name,
        "implementation": setup.implementation,
        "context": setup.context,
        "cache": setup.cache,
        "mask_token_id": setup.mask_token_id,
        "prefill_chunk_size": setup.chunk_size,
        "greedy_program": setup.specialize,
        "num_parameters": {
            name: config.num_parameters
            for name, config in (("target", setup.target), ("draft", setup.draft))
            if config is not None
        },
    }
    return vars(args) | effective


def _copy_bytes(device: Any) -> int:
    """An array large enough that caches do not help, and reads of it outlast the calls."""
    return 1 << (28 if device.platform == "cpu" else 30)
