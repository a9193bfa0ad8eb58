"""``python -m pard_jax.bench aot``: what TPUs need for prefill and the decode step, by their compiler, without a TPU.

libtpu, which ``pip install "jax[tpu]"`` brings, compiles for any topology on a machine that has none. Shapes are all
that it takes: no weights are made. Bytes are of one chip; the programs are the engine's, for the longest window.
"""

from __future__ import annotations

import argparse
import itertools
import json
from collections.abc import Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from pard_jax import cli
from pard_jax.bench import aot_report, environment
from pard_jax.bench.aot_compile import WEIGHTS, analyse, chip_memory, open_topology
from pard_jax.bench.aot_report import Case, Result
from pard_jax.bench.flags import names, numbers
from pard_jax.bench.shapes import SHAPES, model_shape
from pard_jax.bench.step_setup import NO_DRAFT, Setup, check_draft_flags, mask_token_id
from pard_jax.config import EngineConfig
from pard_jax.loading import by_platform, check_divisible

_K = 12
MEMORY = "the machine that compiles lacks it, not the TPU: compile fewer sizes at once"


def measure(argv: Sequence[str]) -> None:
    """Compile every case, print a line for each of its programs, and what fits as a table where it is wanted."""
    args = _parser().parse_args(argv)
    check_draft_flags(args)
    for name in args.target if args.draft == NO_DRAFT else [*args.target, args.draft]:
        model_shape(name)
    if args.json is not None:
        cli.check_writable(Path(args.json))
    k = _K if args.num_speculative_tokens is None else args.num_speculative_tokens
    if k < 1:
        raise ValueError(f"-k must be at least 1, got {k}; --draft {NO_DRAFT} is for decoding without")
    k = 0 if args.draft == NO_DRAFT else k
    # Of libtpu, the compiler is all that is wanted: no TPU is opened. JAX cannot read its programs back from a cache.
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_enable_compilation_cache", False)
    meshes = {topology: open_topology(topology) for topology in args.topology}
    cases = [Case(*case) for case in itertools.product(args.topology, args.target, args.weights, args.cache)]
    setups = {case: _setup(case, args, meshes[case.topology]) for case in cases}
    for setup in setups.values():
        setup.plan(args.batch, k)
        setup.drafter(k)

    env = environment.describe()
    drafted = f", draft {args.draft}, K={k}" if k else ""
    print(f"batch {args.batch}{drafted}; figures of the compiler, of one chip\n{environment.in_a_line(env)}\n")
    table = aot_report.table(cases)
    print(table.header, flush=True)
    memory = {topology: chip_memory(mesh) for topology, mesh in meshes.items()}
    results: list[Result] = []
    for case, setup in setups.items():
        results.append(Result(case, analyse(setup, args.batch, k, memory[case.topology])))
        for line in aot_report.lines(results[-1]):
            print(table.row(line), flush=True)
        if args.json is not None:
            document = {"settings": vars(args), "environment": env, "finished": len(results) == len(cases)}
            document["results"] = [result.as_dict() for result in results]
            cli.write_whole(Path(args.json), json.dumps(document, indent=2) + "\n")
    if args.table:
        print(f"\n{aot_report.what_fits(results)}")


def _parser() -> argparse.ArgumentParser:
    parser = cli.Parser(prog="python -m pard_jax.bench aot", description=__doc__)
    add = parser.add_argument_group("models", f"a config.json, or one of {', '.join(SHAPES)}").add_argument
    add("--target", type=names, default=["qwen3-4b"], metavar="MODEL,...", help="each in turn (default: qwen3-4b)")
    add("--draft", default="qwen3-0.6b", metavar="MODEL", help=f"or {NO_DRAFT} (default: qwen3-0.6b)")
    add("--mask-token-id", type=int, metavar="ID",
        help="of the draft (default: its config.json's, or the target's last id)")  # fmt: skip
    add("--weights", type=_weights, default=["bfloat16"], metavar="KIND,...",
        help=f"{', '.join(WEIGHTS)}, each in turn (default: bfloat16)")  # fmt: skip
    add = parser.add_argument_group("sizes").add_argument
    add("--topology", type=names, default=["v5e:1x1"], metavar="NAME,...",
        help="chips that share the model: v5e:1x1, v5e:2x2, v6e:1x1, ...; each in turn (default: v5e:1x1)")  # fmt: skip
    add("--cache", type=numbers, default=[4096], metavar="N,...",
        help="tokens that a row may hold, each in turn (default: 4096)")  # fmt: skip
    add("-k", "--num-speculative-tokens", type=int, metavar="K", help=f"tokens drafted a step (default: {_K})")
    add("--batch", type=int, default=1, metavar="N", help="rows (default: 1)")
    add = parser.add_argument_group("results").add_argument
    add("--table", action="store_true", help="also print, in Markdown, what fits")
    add("--json", metavar="FILE", help="also write the figures as JSON, anew after every case")
    return parser


def _weights(text: str) -> list[str]:
    found = names(text)
    for name in found:
        if name not in WEIGHTS:
            raise argparse.ArgumentTypeError(f"expected of {', '.join(WEIGHTS)} with commas between them, got {text!r}")
    return found


def _setup(case: Case, args: argparse.Namespace, mesh: Mesh) -> Setup:
    """With the engine's defaults for a TPU.

    Raises:
        ValueError: the chips cannot share the models, or the draft has no mask id.
    """
    target = model_shape(case.target)
    draft = None if args.draft == NO_DRAFT else model_shape(args.draft)
    check_divisible(mesh.size, [model for model in (target, draft) if model is not None])
    dtype, quantization = WEIGHTS[case.weights]
    _, chunk_size, num_steps = by_platform(EngineConfig(max_num_seqs=args.batch), mesh.devices.flat[0])
    return Setup(
        target=target,
        draft=draft,
        mask_token_id=mask_token_id(args.mask_token_id, target, draft),
        dtype=jnp.dtype(dtype),
        implementation="xla",
        specialize=False,  # the program for any request, which needs the most
        chunk_size=chunk_size,
        num_steps=num_steps,
        cache=case.cache,
        context=case.cache,
        memory_bytes=None,  # whether it fits is for the compiler to say
        mesh=mesh,
        quantization=quantization,
    )
