"""What becomes of the measurements: lines on stdout as they come, a report as JSON, a figure."""

from __future__ import annotations

import argparse
import functools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pard_jax import cli
from pard_jax.bench import environment, plot
from pard_jax.bench.result import Measurement, Result
from pard_jax.bench.table import Table, acceptance_lines
from pard_jax.bench.workload import TOTAL, Workload


class Outcome:
    """Everything measured so far: printed as it comes, and written."""

    def __init__(self, args: argparse.Namespace, workloads: Sequence[Workload]) -> None:
        self.results: list[Result] = []
        self._args = args
        self._plain: dict[tuple[str, int, int | None], Measurement] = {}
        groups = workloads[0].groups
        self._report: dict[str, Any] = {
            "settings": {key: value for key, value in vars(args).items() if key != "texts"},
            "num_prompts": {name: len(prompts) for name, prompts in groups.items()},
            "prompt_tokens": [
                {"context": w.context} | {name: sum(map(len, prompts)) for name, prompts in w.groups.items()}
                for w in workloads
            ],
            "environment": environment.describe(),
        }
        names = [*groups, *([TOTAL] if len(groups) > 1 else [])]
        self._whole = names[-1]  # the group that all prompts are in
        self._table = Table(
            args.methods, names, batches=len(args.max_num_seqs) > 1, contexts=len(args.context or []) > 1
        )
        print(f"{self._title(workloads)}\n{environment.in_a_line(self._report['environment'])}\n")
        print(self._table.header, flush=True)

    def add(self, measured: list[Measurement]) -> None:
        """Take one method's measurements of one workload, a group each."""
        if len(measured) > 1:
            measured = [*measured, functools.reduce(lambda a, b: a.join(b, TOTAL), measured)]
        for one in measured:
            if one.case.method == "plain":
                self._plain[one.case.workload] = one
            self.results.append(Result.of(one, self._plain[one.case.workload]))
            print(self._table.row(self.results[-1]), flush=True)
        self._write(finished=False)

    def finish(self) -> None:
        """Print what has no place in the table; write and draw."""
        if lines := acceptance_lines(self.results):
            looping = sum(r.num_looping for r in self.results if r.case.method == "plain" and self._in_whole(r))
            outputs = sum(r.num_prompts for r in self.results if r.case.method == "plain" and self._in_whole(r))
            print(
                f"\nAL: 1 + the drafts accepted a pass of the target, as vLLM counts. no loops: counted up to where "
                f"the plain output begins to repeat itself for good, as {looping} of {outputs} do.\n" + "\n".join(lines)
            )
        self._write(finished=True)
        if self._args.plot is not None:
            title = f"{self._args.model}, {self._report['environment']['device']}"
            plot.write(Path(self._args.plot), [r for r in self.results if self._in_whole(r)], title)

    def _in_whole(self, result: Result) -> bool:
        return result.case.prompts == self._whole

    def _write(self, *, finished: bool) -> None:
        if self._args.output is not None:
            whole = self._report | {"finished": finished, "results": [result.as_dict() for result in self.results]}
            cli.write_whole(Path(self._args.output), json.dumps(whole, indent=2) + "\n")

    def _title(self, workloads: Sequence[Workload]) -> str:
        args = self._args
        tokens = " or ".join(str(sum(len(ids) for p in w.groups.values() for ids in p)) for w in workloads)
        batches = " or ".join(map(str, args.max_num_seqs))
        fitted = "" if args.context is None else " (each made as long as --context says, by repeating and cutting it)"
        return (
            f"{args.model}: {sum(self._report['num_prompts'].values())} prompt(s), {tokens} tokens{fitted}, "
            f"{args.max_tokens} new tokens each{'' if args.ignore_eos else ' at most'}, greedy, batch {batches}, "
            f"{'' if args.quantization in (None, 'none') else f'our weights in {args.quantization}, '}"
            f"median of {args.repeats}"
        )
