"""What the stall guard costs a training step: runs with it and without in turns, and the time within its own calls.

    python benchmarks/bench_guard.py CORPUS NOISE [--steps 100] [--rounds 10] [--quick]

Prints Markdown. A difference between runs of 50 ms a step is smaller than the noise of a shared machine; the time that
is spent in the guard's own calls, in the same runs and less what the same calls take while it is off, is not. Without
loader processes, what is said of every cut that is loaded counts, too.
"""

import argparse
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytorch_lightning as pl
import torch

import nestguard
from nestdata import PlanConfig
from nestmodel import EncoderConfig, NestConfig, NestDataModule, NestModel, StallGuard

CONFIG = NestConfig(encoder=EncoderConfig(d_model=64, num_heads=4, num_layers=2, subsampling_channels=32))
HOOKS = ("on_train_batch_start", "on_before_backward", "on_train_batch_end")
BEATS = ("beat", "beat_collective", "note_cut", "note_cuts")


class Clock(pl.Callback):
    """Takes the time of each step."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self._last: float | None = None

    def on_train_batch_end(self, *_: Any) -> None:
        """Reads the clock."""
        now = time.perf_counter()
        if self._last is not None:
            self.seconds.append(now - self._last)
        self._last = now


class Meter:
    """Adds up the time within some methods."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._depth = 0

    def wrap(self, method: Callable[..., Any]) -> Callable[..., Any]:
        """Returns the method, timed; what it calls that is timed as well counts once."""

        def timed(*arguments: Any, **options: Any) -> Any:
            self._depth += 1
            started = time.perf_counter()
            try:
                return method(*arguments, **options)
            finally:
                self._depth -= 1
                if not self._depth:
                    self.seconds += time.perf_counter() - started

        return timed


def main() -> int:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("corpus", type=Path)
    parser.add_argument("noise", type=Path)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--seconds", type=float, default=20.0, help="of audio in a step, which should take about 50 ms")
    parser.add_argument("--quick", action="store_true")
    arguments = parser.parse_args()
    rounds, steps = (1, 20) if arguments.quick else (arguments.rounds, arguments.steps)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    meter = Meter()
    for name in HOOKS:
        setattr(StallGuard, name, meter.wrap(getattr(StallGuard, name)))
    for kind in (nestguard.Heartbeat, nestguard.NoHeartbeat):
        for name in BEATS:
            setattr(kind, name, meter.wrap(getattr(kind, name)))
    print("# The stall guard\n")
    print(f"Made by `benchmarks/bench_guard.py`, {rounds} pairs of runs of {steps} steps, one rank of one thread.\n")
    print("| loader processes | a step, median | within the guard's own calls, on less off | share of a step |", end="")
    print(" steps with over steps without, median of pairs |\n|---|---|---|---|---|")
    for num_workers in (0, 2):
        with tempfile.TemporaryDirectory() as directory:
            pairs = [_pair(arguments, steps, num_workers, meter, Path(directory)) for _ in range(rounds + 1)][1:]
        step_ms = 1e3 * statistics.median(seconds for pair in pairs for seconds in pair.on)
        within = [1e6 * pair.within_s for pair in pairs]
        ratios = [statistics.median(pair.on) / statistics.median(pair.off) for pair in pairs]
        own_us = statistics.median(within)
        print(f"| {num_workers} | {step_ms:.1f} ms | {own_us:.0f} µs ({min(within):.0f} to {max(within):.0f}) ", end="")
        print(f"| {own_us / step_ms / 10:.3f} % ", end="")
        print(f"| {statistics.median(ratios):.4f} ({min(ratios):.4f} to {max(ratios):.4f}) |", flush=True)
    return 0


class _Pair(NamedTuple):
    on: list[float]
    """Seconds of each step with the guard."""

    off: list[float]
    within_s: float
    """Seconds a step in the guard's calls, those that they take while it is off not counted."""


def _pair(arguments: argparse.Namespace, steps: int, num_workers: int, meter: Meter, directory: Path) -> _Pair:
    found, spent = [], []
    for enabled in (True, False):
        before = meter.seconds
        found.append(_train(arguments, steps, num_workers, directory, enabled=enabled))
        spent.append((meter.seconds - before) / steps)
    return _Pair(found[0], found[1], spent[0] - spent[1])


def _train(
    arguments: argparse.Namespace, steps: int, num_workers: int, directory: Path, *, enabled: bool
) -> list[float]:
    clock = Clock()
    data = NestDataModule(
        arguments.corpus,
        arguments.noise,
        plan=PlanConfig(max_batch_seconds=arguments.seconds, microbatches_per_step=1),
        num_workers=num_workers,
    )
    pl.Trainer(
        accelerator="cpu",
        devices=1,
        max_steps=steps,
        callbacks=[clock, StallGuard(enabled=enabled)],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=directory,
    ).fit(NestModel(CONFIG), datamodule=data)
    return clock.seconds


if __name__ == "__main__":
    sys.exit(main())
