"""Seconds that training stands still for a checkpoint, beside another commit, and the pace of steps meanwhile.

    python benchmarks/bench_checkpoint.py [--before CHECKOUT] [--preset xlarge] [--rounds 5] [--directory DIR] [--quick]

Prints Markdown. Each round trains the preset on noise in a process for each work tree, in turn, with one thread and a
batch of one short cut, so that the steps of a large model take seconds. The time is that of `Checkpoints.save`, which
an earlier commit spends on writing. For comparison, the tensors of the same state are copied to memory that exists.
If there is not enough memory for the preset, `large` is measured instead. Checkpoints are written to DIR, which has to
be on a real disk, such as the current directory.
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytorch_lightning as pl
import soundfile
import torch
from peer import run_peer

from nestdata import PlanConfig, PrepareConfig, prepare_corpus
from nestmodel import Checkpoints, ConformerEncoder, NestConfig, NestDataModule, NestModel
from nestmodel.preflight.memory import available_bytes, gigabytes

SECONDS = 4.0
WARM_UP_STEPS = 2
STEPS_ALONE = 3
"""Steps between the end of one write and the start of the next."""

NAMES = {"before": "before", "now": "this tree"}


def main() -> int:
    """Measures and prints the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--before", type=Path, help="work tree of the commit to compare with")
    parser.add_argument("--preset", default="xlarge")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--saves", type=int, default=3, help="checkpoints in each process")
    parser.add_argument("--directory", type=Path, default=Path(), help="where checkpoints are written for the moment")
    parser.add_argument("--quick", action="store_true", help="the demo preset and one round")
    parser.add_argument("--child", nargs=2, type=Path, metavar=("AUDIO", "DIR"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        print(json.dumps(_measure_here(arguments.preset, *arguments.child, arguments.saves)))
        return 0
    preset = "demo" if arguments.quick else _affordable(arguments.preset)
    trees = {"before": arguments.before.resolve()} if arguments.before else {}
    trees["now"] = Path(__file__).resolve().parents[1]
    rounds: list[dict[str, dict[str, Any]]] = []
    with tempfile.TemporaryDirectory(dir=arguments.directory.resolve()) as name:
        audio = _noise_files(Path(name))
        for number in range(1 if arguments.quick else arguments.rounds):
            rounds.append({})
            for tree, path in trees.items():
                with tempfile.TemporaryDirectory(dir=name) as saved:
                    rounds[-1][tree] = _measure(path, preset, audio, Path(saved), arguments.saves)
                print(f"round {number}, {tree}: {rounds[-1][tree]}", file=sys.stderr, flush=True)
    _print(preset, rounds)
    return 0


def _affordable(preset: str) -> str:
    """Returns the preset, or `large` if the memory does not suffice for its training and the copy of its state."""
    with torch.device("meta"):
        encoder = ConformerEncoder(NestConfig.preset(preset).encoder, num_mels=80)
    num_parameters = sum(parameter.numel() for parameter in encoder.parameters())
    needed = 28 * num_parameters + 2 * 10**9  # weights, gradients, two moments, and a copy of all but the gradients
    if needed <= available_bytes():
        return preset
    print(
        f"{preset} needs {gigabytes(needed)}, {gigabytes(available_bytes())} are free: large instead", file=sys.stderr
    )
    return "large"


def _noise_files(directory: Path) -> Path:
    audio = directory / "audio"
    audio.mkdir()
    generator = np.random.default_rng(0)
    for number in range(200):
        noise = 0.1 * generator.standard_normal(int(16_000 * SECONDS), dtype=np.float32)
        soundfile.write(audio / f"{number}.wav", noise, 16_000)
    return audio


def _measure(tree: Path, preset: str, audio: Path, saved: Path, saves: int) -> dict[str, Any]:
    command = [sys.executable, Path(__file__).resolve(), "--preset", preset, "--saves", str(saves)]
    environment = {**os.environ, "PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1"}
    output = run_peer([*command, "--child", audio, saved], cwd=tree, env=environment)
    found: dict[str, Any] = json.loads(output.splitlines()[-1])
    return found


class _Meter(pl.Callback):
    """Saves whenever nothing has been written for a few steps, and measures saves and steps."""

    def __init__(self, saver: Checkpoints, directory: Path, saves: int) -> None:
        self.saver, self.directory, self.saves = saver, directory, saves
        self.stands_s: list[float] = []
        self.written_s: list[float] = []
        self.steps_s: dict[str, list[float]] = {"alone": [], "beside": []}
        self._num_alone = -WARM_UP_STEPS
        self._started_s, self._was_writing = 0.0, False

    def on_train_batch_start(self, *_: Any) -> None:
        """Notes when the step starts, and whether a checkpoint is being written."""
        self._started_s, self._was_writing = time.perf_counter(), self._is_writing()

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        """Adds the time of the step; saves if enough steps were made alone."""
        now, is_writing = time.perf_counter(), self._is_writing()
        if len(self.written_s) < len(self.stands_s) and not is_writing:
            self.written_s.append(now - self._saved_s)
        if is_writing and self._was_writing:
            self.steps_s["beside"].append(now - self._started_s)
        elif not is_writing and not self._was_writing:
            self._num_alone += 1
            if self._num_alone > 0:
                self.steps_s["alone"].append(now - self._started_s)
        if self._num_alone >= STEPS_ALONE:
            self._save(trainer)

    def _save(self, trainer: pl.Trainer) -> None:
        self._num_alone, self._saved_s = 0, time.perf_counter()
        self.saver.save(trainer)
        self.stands_s.append(time.perf_counter() - self._saved_s)
        trainer.should_stop = len(self.stands_s) == self.saves

    def _is_writing(self) -> bool:
        return any(self.directory.glob("*.partial"))


def _measure_here(preset: str, audio: Path, directory: Path, saves: int) -> dict[str, Any]:
    """Trains with the code of this process; returns seconds and bytes."""
    warnings.simplefilter("ignore")
    corpus = directory / "noise.corpus"
    prepare_corpus([audio], corpus, PrepareConfig())
    torch.set_num_threads(1)
    saver = Checkpoints(every_n_steps=10**9, keep=1, directory=directory)
    meter = _Meter(saver, directory, saves)
    model = NestModel(NestConfig.preset(preset))
    data = NestDataModule(corpus, plan=PlanConfig(max_batch_seconds=SECONDS, microbatches_per_step=1), num_workers=0)
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=1,
        max_steps=10**6,
        callbacks=[meter, saver],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=directory,
    )
    trainer.fit(model, datamodule=data)
    return {
        "first_s": meter.stands_s[0],
        "stands_s": meter.stands_s[1:],
        "written_s": meter.written_s,
        **{f"{name}_s": seconds for name, seconds in meter.steps_s.items()},
        "bytes": (directory / "last.ckpt").stat().st_size,
        "copy_s": _bare_copy_s(model, trainer.optimizers[0]),
    }


def _bare_copy_s(model: NestModel, optimizer: torch.optim.Optimizer) -> float:
    """Returns the seconds for a copy of weights and optimizer state to memory that exists; median of five."""
    states = [value for state in optimizer.state.values() for value in state.values()]
    tensors = [value.detach() for value in [*model.state_dict().values(), *states]]
    copies, seconds = [tensor.clone() for tensor in tensors], []
    for _ in range(5):
        started = time.perf_counter()
        for copied, tensor in zip(copies, tensors, strict=True):
            copied.copy_(tensor)
        seconds.append(time.perf_counter() - started)
    return statistics.median(seconds)


def _print(preset: str, rounds: list[dict[str, dict[str, Any]]]) -> None:
    size = gigabytes(rounds[0]["now"]["bytes"])
    print("# Checkpoints beside training\n")
    print(
        f"Made by `benchmarks/bench_checkpoint.py`: preset {preset}, files of {size}, {len(rounds)} rounds of ", end=""
    )
    print(f"one process for each tree, torch {torch.__version__}, one thread. Medians; minimum and maximum.\n")
    print("| seconds | " + " | ".join(NAMES[tree] for tree in rounds[0]) + " |\n|---|" + "---|" * len(rounds[0]))
    for key, label in (
        ("first_s", "training stands still for the first checkpoint"),
        ("stands_s", "training stands still for each further checkpoint"),
        ("copy_s", "bare copy of the same tensors"),
        ("written_s", "until the checkpoint is on disk, in whole steps"),
        ("alone_s", "a step while nothing is written"),
        ("beside_s", "a step while a checkpoint is written"),
    ):
        print(f"| {label} | " + " | ".join(_spread(_values(rounds, tree, key)) for tree in rounds[0]) + " |")
    ratios = {"standing still / bare copy": [_ratio(found["now"], "stands_s", "copy_s") for found in rounds]}
    if "before" in rounds[0]:
        ratios["standing still, now / before"] = [
            _median(found["now"]["stands_s"]) / _median(found["before"]["stands_s"]) for found in rounds
        ]
    if all(found["now"]["beside_s"] for found in rounds):
        ratios["step while writing / step alone, now"] = [
            _ratio(found["now"], "beside_s", "alone_s") for found in rounds
        ]
    print("\n| ratio of medians within a round | median | minimum | maximum |\n|---|---|---|---|")
    for label, values in ratios.items():
        print(f"| {label} | {statistics.median(values):.2f} | {min(values):.2f} | {max(values):.2f} |")


def _values(rounds: list[dict[str, dict[str, Any]]], tree: str, key: str) -> list[float]:
    found = [measured[tree][key] for measured in rounds]
    return [value for values in found for value in (values if isinstance(values, list) else [values])]


def _median(values: Sequence[float] | float) -> float:
    return values if isinstance(values, float) else statistics.median(values)


def _ratio(measured: dict[str, Any], key: str, other: str) -> float:
    return _median(measured[key]) / _median(measured[other])


def _spread(seconds: list[float]) -> str:
    if not seconds:
        return ""
    return f"{statistics.median(seconds):.3f} ({min(seconds):.3f} to {max(seconds):.3f})"


if __name__ == "__main__":
    sys.exit(main())
