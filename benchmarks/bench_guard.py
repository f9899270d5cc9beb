"""Cost of the stall guard per training step: alternating runs with and without it, and the time in its own calls.

    python benchmarks/bench_guard.py CORPUS NOISE [--steps 100] [--rounds 10] [--quick]

Prints Markdown. With steps of 50 ms, the difference between the runs is smaller than the noise of a shared machine. So
the time in the guard's own calls is measured as well, less the time that the same calls take while the guard is off.
Without loader processes, it includes the heartbeat for every cut that is loaded.
"""

import argparse
import os
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
from measured import measured_line

import nestguard
from nestdata import PlanConfig
from nestmodel import EncoderConfig, NestConfig, NestDataModule, NestModel, StallGuard

CONFIG = NestConfig(encoder=EncoderConfig(d_model=64, num_heads=4, num_layers=2, subsampling_channels=32))
HOOKS = ("on_train_batch_start", "on_before_backward", "on_train_batch_end")
BEATS = ("beat", "beat_collective", "note_cut", "note_cuts")


class Clock(pl.Callback):
    """Measures the seconds of each step."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self._last: float | None = None

    def on_train_batch_end(self, *_: Any) -> None:
        """Adds the time since the end of the previous step."""
        now = time.perf_counter()
        if self._last is not None:
            self.seconds.append(now - self._last)
        self._last = now


class Meter:
    """Sums the time that is spent in some methods."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._depth = 0

    def wrap(self, method: Callable[..., Any]) -> Callable[..., Any]:
        """Returns the method with its time added to the sum; nested calls of wrapped methods count once."""

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
    """Runs the measurement and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("corpus", type=Path)
    parser.add_argument("noise", type=Path)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument(
        "--seconds",
        type=float,
        default=20.0,
        help="seconds of audio in a step; choose them so that a step takes about 50 ms",
    )
    parser.add_argument("--quick", action="store_true")
    arguments = parser.parse_args()
    rounds, steps = (1, 20) if arguments.quick else (arguments.rounds, arguments.steps)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    meter = Meter()
    for name in HOOKS:
        setattr(StallGuard, name, meter.wrap(getattr(StallGuard, name)))
    for name in BEATS:
        setattr(nestguard.Heartbeat, name, meter.wrap(getattr(nestguard.Heartbeat, name)))
    print("# The stall guard\n")
    print(
        f"Made by `benchmarks/bench_guard.py`, {rounds} pairs of runs of {steps} steps, one rank of one thread, ",
        end="",
    )
    print(f"{os.cpu_count()} cores, torch {torch.__version__}.\n")
    print(
        measured_line(
            "benchmarks/bench_guard.py",
            "nestguard/observe/heartbeat.py",
            "nestguard/observe/record.py",
            "nestmodel/training/callbacks/stall_guard.py",
        )
        + "\n"
    )
    print("| loader processes | step, median | in the guard's own calls, on minus off | share of a step |", end="")
    print(" step with guard / step without, median of pairs |\n|---|---|---|---|---|")
    for num_workers in (0, 2):
        with tempfile.TemporaryDirectory() as directory:
            pairs = [_pair(arguments, steps, num_workers, meter, Path(directory)) for _ in range(rounds + 1)][1:]
        step_ms = 1e3 * statistics.median(seconds for pair in pairs for seconds in pair.on)
        guard_us = [1e6 * pair.guard_s for pair in pairs]
        ratios = [statistics.median(pair.on) / statistics.median(pair.off) for pair in pairs]
        median_us = statistics.median(guard_us)
        print(
            f"| {num_workers} | {step_ms:.1f} ms | {median_us:.0f} µs ({min(guard_us):.0f} to {max(guard_us):.0f}) ",
            end="",
        )
        print(f"| {median_us / step_ms / 10:.3f} % ", end="")
        print(f"| {statistics.median(ratios):.4f} ({min(ratios):.4f} to {max(ratios):.4f}) |", flush=True)
    return 0


class _Pair(NamedTuple):
    on: list[float]
    """Seconds of each step with the guard."""

    off: list[float]
    """Seconds of each step without the guard."""

    guard_s: float
    """Seconds per step in the guard's calls, less the seconds that the same calls take while it is off."""


def _pair(arguments: argparse.Namespace, steps: int, num_workers: int, meter: Meter, directory: Path) -> _Pair:
    steps_s, guard_s = [], []
    for enabled in (True, False):
        before = meter.seconds
        steps_s.append(_train(arguments, steps, num_workers, directory, enabled=enabled))
        guard_s.append((meter.seconds - before) / steps)
    return _Pair(steps_s[0], steps_s[1], guard_s[0] - guard_s[1])


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
