"""What the stall guard costs a training step: runs with it and without in turns, and the time within its own calls.

    python benchmarks/bench_guard.py CORPUS NOISE [--steps 100] [--rounds 10] [--quick]

Prints Markdown. A difference between runs of 50 ms a step is smaller than the noise of a shared machine; the time that
is spent in the guard's own calls, on the same runs, is not.
"""

import argparse
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

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
    with tempfile.TemporaryDirectory() as directory:
        pairs = [
            tuple(_train(arguments, steps, enabled, Path(directory)) for enabled in (True, False))
            for _ in range(rounds + 1)
        ][1:]
    with_guard = [seconds for pair in pairs for seconds in pair[0]]
    own_us = 1e6 * meter.seconds / (steps * (rounds + 1))
    ratios = [statistics.median(on) / statistics.median(off) for on, off in pairs]
    step_ms = 1e3 * statistics.median(with_guard)
    print("# The stall guard\n")
    print(f"Made by `benchmarks/bench_guard.py`, {rounds} pairs of runs of {steps} steps, one rank of one thread.\n")
    print("| what | seen |\n|---|---|")
    print(f"| a step, median | {step_ms:.1f} ms |")
    print(f"| within the guard's own calls | {own_us:.0f} µs a step, {own_us / step_ms / 10:.3f} % |")
    print(
        f"| steps with over steps without, median of pairs | {statistics.median(ratios):.4f} "
        f"({min(ratios):.4f} to {max(ratios):.4f}) |"
    )
    return 0


def _train(arguments: argparse.Namespace, steps: int, enabled: bool, directory: Path) -> list[float]:
    clock = Clock()
    data = NestDataModule(
        arguments.corpus,
        arguments.noise,
        plan=PlanConfig(max_batch_seconds=20, microbatches_per_step=1),
        num_workers=0,
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
