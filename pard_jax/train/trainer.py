"""The training loop: batches in, updates, checkpoints, evaluations and logs out; resumable at any step, exactly."""

from __future__ import annotations

import dataclasses
import math
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from tqdm import tqdm

from pard_jax.train.checkpoints import Checkpoints
from pard_jax.train.data import Batches
from pard_jax.train.evaluate import Evaluation, Evaluator
from pard_jax.train.logs import Log
from pard_jax.train.objective import DATA_AXIS, Objective, TrainState, make_update
from pard_jax.train.optimizer import OptimizerConfig, learning_rate, make_optimizer


@dataclasses.dataclass(frozen=True)
class Intervals:
    """In steps; 0 for never (but for the end)."""

    log: int = 20
    evaluate: int = 500
    save: int = 500


@dataclasses.dataclass(frozen=True)
class Outcome:
    """How a run ended."""

    params: Any
    step: int
    evaluation: Evaluation | None
    interrupted: bool
    seconds_per_update: float  # without the first one of this process, which compiles, evaluations and checkpoints


def data_mesh(num_devices: int | None = None) -> Mesh:
    """Devices along the data axis: all, or the first ones.

    Raises:
        ValueError: there are not so many.
    """
    devices = jax.devices()
    if num_devices is not None and not 1 <= num_devices <= len(devices):
        raise ValueError(f"{num_devices} devices were asked for; expected 1 to {len(devices)}, as many as JAX sees")
    return Mesh(np.array(devices[:num_devices]), (DATA_AXIS,))


def train(
    objective: Objective,
    optimizer_config: OptimizerConfig,
    params: Any,
    batches: Batches,
    *,
    num_steps: int,
    accumulation: int,
    mesh: Mesh,
    checkpoints: Checkpoints,
    log: Log,
    evaluator: Evaluator | None = None,
    target_params: Any = None,
    intervals: Intervals | None = None,
    progress: bool = True,
    say: Callable[[str], None] = print,
) -> Outcome:
    """Train up to ``num_steps`` updates, going on from the latest checkpoint if there is one.

    Args:
        params: float32; where a checkpoint is found, only their shapes count.
        batches: of ``accumulation`` times what one pass takes.
        evaluator: held-out samples, evaluated at intervals and at the end.
        target_params: the target's, where the objective distills.
        say: prints a line beside the progress bar.

    An interrupt (Ctrl-C, SIGTERM) ends the run after the update under way, with a checkpoint.

    Raises:
        FloatingPointError: the loss is no number; the last checkpoint was saved before and stays.
    """
    intervals = intervals or Intervals()
    optimizer = make_optimizer(optimizer_config, num_steps, params)
    rate = jax.jit(learning_rate(optimizer_config, num_steps))
    everywhere = NamedSharding(mesh, PartitionSpec())

    def start(params: Any) -> TrainState:
        return TrainState(step=jnp.zeros((), jnp.int32), params=params, optimizer=optimizer.init(params))

    abstract = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=everywhere), jax.eval_shape(start, params)
    )
    restored = checkpoints.restore(abstract)
    if restored is None:
        # Copied: the state is donated to every update, and the caller's arrays are not ours to give away.
        copied = jax.tree.map(jnp.copy, jax.device_put(params, everywhere))
        state, first = jax.device_put(start(copied), everywhere), 0
    else:
        first, state = restored
        say(f"going on from the checkpoint of step {first}")
    log.resume(first)
    if target_params is not None:
        target_params = jax.device_put(target_params, everywhere)

    update = make_update(objective, optimizer, mesh)
    sharding = NamedSharding(mesh, PartitionSpec(None, DATA_AXIS))
    evaluation, saved, step = None, first, first
    pending: list[tuple[int, dict[str, jax.Array]]] = []
    clock, since = time.monotonic(), first
    timed_seconds, timed_steps = 0.0, 0
    # Virtual CPU devices share a thread pool, in which collectives of two updates under way can wait for each other.
    lockstep = mesh.devices.size > 1 and mesh.devices.flat[0].platform == "cpu"
    per_step = batches.batch_size * batches.packed.token_ids.shape[1]

    def flush(bar: Any) -> None:
        """Read what has been computed since the last look; the device is a step ahead meanwhile."""
        nonlocal clock, since, timed_seconds, timed_steps
        if not pending:
            return
        last, values = pending[-1][0], jax.device_get([logged for _, logged in pending])
        now = time.monotonic()
        timed_seconds, timed_steps = timed_seconds + now - clock, timed_steps + last - since
        speed = (last - since) * per_step / max(now - clock, 1e-9)
        clock, since = now, last
        for (at, _), logged in zip(pending, values, strict=True):
            numbers = {name: float(value) for name, value in logged.items()}
            _check_finite(numbers, at, saved)
            log.write(at, **numbers, learning_rate=float(rate(at - 1)), tokens_per_second=speed)
        bar.set_postfix(loss=f"{float(values[-1]['loss']):.3f}", tok_s=f"{speed:,.0f}")
        pending.clear()

    def evaluate() -> None:
        nonlocal evaluation, clock
        if evaluator is None:
            return
        before = time.monotonic()
        evaluation = evaluator(state.params)
        _check_finite({"held-out loss": evaluation.loss}, step, saved)
        log.write_evaluation(step, **_flat(evaluation))
        say(
            f"step {step}: held-out loss {evaluation.loss:.3f}, acceptance length {evaluation.acceptance_length:.3f} "
            f"(accepted by position {', '.join(f'{p:.2f}' for p in evaluation.per_position)})"
        )
        clock += time.monotonic() - before  # no part of the training speed

    def save() -> None:
        nonlocal saved, clock
        if step > saved:
            before = time.monotonic()
            checkpoints.save(step, state)
            saved = step
            clock += time.monotonic() - before

    with (
        _interrupts() as interrupted,
        tqdm(total=num_steps, initial=first, desc="Training", unit="step", disable=None if progress else True) as bar,
    ):
        for at, batch in batches.prefetch(first, num_steps):
            stacked = {key: value.reshape(accumulation, -1, value.shape[-1]) for key, value in batch.items()}
            state, logged = update(state, target_params, jax.device_put(stacked, sharding))
            step = at + 1
            pending.append((step, logged))
            if lockstep:
                jax.block_until_ready(logged)
            bar.update()
            stop = interrupted.is_set()
            if at == first:  # apart from the others: it was compiled
                jax.block_until_ready(logged)
                clock, since = time.monotonic(), step
            due = {name: every and step % every == 0 for name, every in dataclasses.asdict(intervals).items()}
            if step == num_steps or stop or any(due.values()):
                flush(bar)
            if step == num_steps or due["evaluate"]:
                evaluate()
            if step == num_steps or stop or due["save"]:
                save()
            if stop:
                break
    if evaluation is None and step == num_steps:  # nothing was left to do
        evaluate()
    seconds = timed_seconds / timed_steps if timed_steps else float("nan")
    return Outcome(state.params, step, evaluation, step < num_steps, seconds)


def _check_finite(numbers: Mapping[str, float], step: int, saved: int) -> None:
    """Refuse to go on with numbers that are none; ``saved``: the step of the last checkpoint."""
    if not all(map(math.isfinite, numbers.values())):
        listed = ", ".join(f"{name} of step {step} is {value}" for name, value in numbers.items())
        kept = f"the checkpoint of step {saved} is intact" if saved else "no checkpoint was written yet"
        raise FloatingPointError(
            f"{listed}; {kept}. Lower the learning rate, lengthen the warm-up, or look at the samples"
        )


def _flat(evaluation: Evaluation) -> dict[str, float]:
    flat = {"loss": evaluation.loss, "acceptance_length": evaluation.acceptance_length}
    flat |= {f"accepted_{i + 1}": p for i, p in enumerate(evaluation.per_position)}
    return flat | {f"loss_block_{i}": loss for i, loss in enumerate(evaluation.block_loss)}


@contextmanager
def _interrupts() -> Iterator[threading.Event]:
    """An event that Ctrl-C and SIGTERM set, instead of ending the process where it stands; the second one does."""
    event = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield event
        return
    previous = {s: signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)}

    def note(number: int, frame: Any) -> None:
        event.set()
        signal.signal(number, previous[signal.Signals(number)])

    for s in previous:
        signal.signal(s, note)
    try:
        yield event
    finally:
        for s, handler in previous.items():
            signal.signal(s, handler)


def write_plot(log: Log) -> Path | None:
    """The curves as an image, where matplotlib is installed."""
    try:
        return log.plot()
    except ImportError:
        return None
