"""Cost of the stall guard per training step: alternating runs with and without it, and the time in its own calls.

    python -m benchmarks run guard CORPUS NOISE [--steps 100] [--rounds 10] [--quick]

Prints Markdown. With steps of 50 ms, the difference between the runs is smaller than the noise of a shared machine. So
the time in the guard's own calls is measured as well, less the time that the same calls take while the guard is off.
Without loader processes, it includes the heartbeat for every cut that is loaded.
"""

import argparse
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytorch_lightning as pl
import torch

import nestguard
from benchmarks.harness.arguments import benchmark_parser
from benchmarks.harness.report import Report, machine, versions
from benchmarks.harness.rounds import run_rounds, spread
from nestdata import PlanConfig
from nestmodel import DataConfig, EncoderConfig, GuardConfig, NestConfig, NestDataModule, NestModel, StallGuard

QUICK = ["{corpus}", "{noise_corpus}", "--quick", "--seconds", "10"]
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
    parser = benchmark_parser(__doc__, rounds=10, quick={"rounds": 1, "steps": 20})
    parser.add_argument("corpus", type=Path)
    parser.add_argument("noise", type=Path)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument(
        "--seconds",
        type=float,
        default=20.0,
        help="seconds of audio in a step; choose them so that a step takes about 50 ms",
    )
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    meter = Meter()
    for name in HOOKS:
        setattr(StallGuard, name, meter.wrap(getattr(StallGuard, name)))
    for name in BEATS:
        setattr(nestguard.Heartbeat, name, meter.wrap(getattr(nestguard.Heartbeat, name)))
    report = Report(
        "The stall guard",
        __file__,
        f"{arguments.rounds} pairs of runs of {arguments.steps} steps, one rank of one thread, {machine()}, "
        f"{versions('torch')}.",
        results=arguments.results,
    )
    columns = ["loader processes", "step, median", "in the guard's own calls, on minus off", "share of a step"]
    columns += ["step with guard / step without, median of pairs"]
    report.table(columns, (_row(arguments, num_workers, meter) for num_workers in (0, 2)))
    return 0


def _row(arguments: argparse.Namespace, num_workers: int, meter: Meter) -> list[str]:
    with tempfile.TemporaryDirectory() as directory:
        measure = {"pair": partial(_pair, arguments, num_workers, meter, Path(directory))}
        pairs = [measured["pair"] for measured in run_rounds(measure, arguments.rounds)]
    step_ms = 1e3 * statistics.median(seconds for pair in pairs for seconds in pair.on)
    guard_us = [1e6 * pair.guard_s for pair in pairs]
    times = [statistics.median(pair.on) / statistics.median(pair.off) for pair in pairs]
    share = f"{statistics.median(guard_us) / step_ms / 10:.3f} %"
    return [f"{num_workers}", f"{step_ms:.1f} ms", f"{spread(guard_us, 0)} µs", share, spread(times, 4)]


class _Pair(NamedTuple):
    on: list[float]
    """Seconds of each step with the guard."""

    off: list[float]
    """Seconds of each step without the guard."""

    guard_s: float
    """Seconds per step in the guard's calls, less the seconds that the same calls take while it is off."""


def _pair(arguments: argparse.Namespace, num_workers: int, meter: Meter, directory: Path) -> _Pair:
    steps_s, guard_s = [], []
    for enabled in (True, False):
        before = meter.seconds
        steps_s.append(_train(arguments, num_workers, directory, enabled=enabled))
        guard_s.append((meter.seconds - before) / arguments.steps)
    return _Pair(steps_s[0], steps_s[1], guard_s[0] - guard_s[1])


def _train(arguments: argparse.Namespace, num_workers: int, directory: Path, *, enabled: bool) -> list[float]:
    clock = Clock()
    data = NestDataModule(
        DataConfig(
            arguments.corpus,
            arguments.noise,
            plan=PlanConfig(max_batch_seconds=arguments.seconds, microbatches_per_step=1),
            num_workers=num_workers,
        )
    )
    pl.Trainer(
        accelerator="cpu",
        devices=1,
        max_steps=arguments.steps,
        callbacks=[clock, StallGuard(GuardConfig(enabled=enabled))],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=directory,
    ).fit(NestModel(CONFIG), datamodule=data)
    return clock.seconds


if __name__ == "__main__":
    sys.exit(main())
