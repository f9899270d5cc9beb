"""Time from resuming a run to its first batch, at step 1 and at a late step of a corpus of 36 million cuts.

    python benchmarks/bench_resume.py [--cuts 36000000] [--step 1000000] [--rounds 7] [--keep DIR] [--quick]

Prints Markdown. Every start is a separate process that resumes from a checkpoint, alternately at the early and at the
late step. The late checkpoint is a copy of the early one with changed counters. The corpus is that of `bench_plan.py`;
audio is written only for the steps that are read. For comparison, Lhotse's sampler is restored from its state dict at a
step that it can reach in a few minutes.
"""

import argparse
import copy
import json
import os
import statistics
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

import lhotse
import numpy as np
import pytorch_lightning as pl
import soundfile
import torch
from bench_plan import prepared_corpus
from lhotse import CutSet
from lhotse.dataset.sampling import DynamicBucketingSampler
from measured import measured_line
from peer import run_peer

from nestdata import AudioNoiseBatch, BatchPlan, Corpus, PlanConfig
from nestmodel import Checkpoints, EncoderConfig, NestConfig, NestDataModule, NestModel

PLAN = PlanConfig(max_batch_seconds=40, microbatches_per_step=8)
CONFIG = NestConfig(encoder=EncoderConfig(d_model=64, num_heads=4, num_layers=2, subsampling_channels=32))


def main() -> int:
    """Runs the measurements and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cuts", type=int, default=36_000_000)
    parser.add_argument("--step", type=int, default=1_000_000)
    parser.add_argument("--lhotse-step", type=int, default=2_000)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--keep", type=Path)
    parser.add_argument("--quick", action="store_true", help="a small corpus and few rounds")
    parser.add_argument("--child", nargs=3, metavar=("CORPUS", "CHECKPOINT", "STEPS"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        corpus, checkpoint, steps = arguments.child
        return _child(Path(corpus), Path(checkpoint), int(steps))
    cuts, rounds = (100_000, 2) if arguments.quick else (arguments.cuts, arguments.rounds)
    late = 5_000 if arguments.quick else arguments.step
    lhotse_step = 200 if arguments.quick else arguments.lhotse_step
    with tempfile.TemporaryDirectory() as name:
        corpus = prepared_corpus(arguments.keep or Path(name), cuts, 1)
        plan = BatchPlan.of(Corpus.open(corpus), PLAN)
        _write_audio(Corpus.open(corpus), plan, [0, 1, 2, late, late + 1])
        early_path, late_path = (Path(name) / f"{which}.ckpt" for which in ("early", "late"))
        _first_checkpoint(corpus, early_path)
        checkpoint = torch.load(early_path, weights_only=False)
        torch.save(_at_step(checkpoint, late, plan), late_path)
        runs: dict[int, list[dict[str, Any]]] = {1: [], late: []}
        for _ in range(rounds + 1):
            for step, path in ((1, early_path), (late, late_path)):
                runs[step].append(_start(corpus, path, step))
        lhotse_s = _lhotse_s(corpus, lhotse_step)
    _print(cuts, late, plan, {step: found[1:] for step, found in runs.items()}, lhotse_step, lhotse_s)
    return 0


def _print(
    cuts: int, late: int, plan: BatchPlan, runs: dict[int, list[dict[str, Any]]], lhotse_step: int, lhotse_s: float
) -> None:
    print("# Resuming\n")
    print(
        f"Made by `benchmarks/bench_resume.py`: {cuts:,} cuts, {plan.steps_per_epoch:,} steps an epoch, 2 loader ",
        end="",
    )
    print(f"processes, {len(runs[late])} alternating starts each; medians with minimum and maximum. ", end="")
    print(f"{os.cpu_count()} cores.\n")
    print(measured_line("benchmarks/bench_resume.py", "nestdata/corpus", "nestdata/plan", "nestmodel/training") + "\n")
    print(f"| seconds | resumed at step 1 | resumed at step {late:,} | ratio |\n|---|---|---|---|")
    for name, label in (
        ("open_s", "opening the corpus and laying out the plan"),
        ("batch_s", "from `fit` to the first batch"),
    ):
        early_s, late_s = ([run[name] for run in runs[step]] for step in (1, late))
        ratio = statistics.median(late_s) / statistics.median(early_s)
        print(f"| {label} | {_spread(early_s)} | {_spread(late_s)} | {ratio:.2f} |")
    minutes = lhotse_s * late / lhotse_step / 60
    print(
        f"\nLhotse {lhotse.__version__}'s DynamicBucketingSampler over the same cuts, from loading its state dict to ",
        end="",
    )
    print(
        f"the first batch after step {lhotse_step:,}: {lhotse_s:.1f} s. It iterates over all earlier batches, so ",
        end="",
    )
    print(f"step {late:,} would take about {minutes:,.0f} minutes at this rate.")


def _spread(seconds: list[float]) -> str:
    return f"{statistics.median(seconds):.3f} ({min(seconds):.3f} to {max(seconds):.3f})"


def _write_audio(corpus: Corpus, plan: BatchPlan, steps: list[int]) -> None:
    """Writes the audio of some steps; no other audio is read."""
    noise = 0.1 * np.random.default_rng(0).standard_normal(16_000 * 60, dtype=np.float32)
    for step in steps:
        for microbatch in range(PLAN.microbatches_per_step):
            for index in plan.indices(step, microbatch):
                recording = corpus.line(int(index))["recording"]
                path = Path(recording["sources"][0]["source"])
                if not path.exists():
                    path.parent.mkdir(parents=True, exist_ok=True)
                    soundfile.write(path, noise[: recording["num_samples"]], recording["sampling_rate"])


class _FirstBatch(pl.Callback):
    """Stores the time of the first batch and its step."""

    def __init__(self) -> None:
        self.time_s: float | None = None
        self.step = -1

    def on_train_batch_start(self, _trainer: pl.Trainer, _model: object, batch: AudioNoiseBatch, _index: int) -> None:
        """Stores time and step of the first batch."""
        if self.time_s is None:
            self.time_s, self.step = time.perf_counter(), batch.key.step


def _trainer(max_steps: int, callbacks: list[pl.Callback], directory: Path) -> pl.Trainer:
    return pl.Trainer(
        accelerator="cpu",
        devices=1,
        max_steps=max_steps,
        callbacks=callbacks,
        logger=False,
        enable_checkpointing=any(isinstance(callback, Checkpoints) for callback in callbacks),
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=directory,
    )


def _first_checkpoint(corpus: Path, path: Path) -> None:
    saver = Checkpoints(every_n_steps=1, directory=path.parent)
    _trainer(1, [saver], path.parent).fit(NestModel(CONFIG), datamodule=NestDataModule(corpus, plan=PLAN))
    (path.parent / "step_00000001.ckpt").rename(path)


def _at_step(checkpoint: dict[str, Any], step: int, plan: BatchPlan) -> dict[str, Any]:
    """Returns a copy of a checkpoint with its counters at a step, as if the run had made that many steps."""
    copied = copy.deepcopy(checkpoint)
    copied["global_step"] = step
    loop = copied["loops"]["fit_loop"]
    epoch, microbatches = plan.epoch(step), PLAN.microbatches_per_step
    num_steps = {"total": step, "current": step - epoch * plan.steps_per_epoch}
    for scope, steps in num_steps.items():
        batches = loop["epoch_loop.batch_progress"][scope]
        unfinished = batches["processed"] - batches["completed"]
        batches.update(dict.fromkeys(batches, steps * microbatches))
        batches["completed"] -= unfinished
        for part in ("step", "zero_grad"):
            counts = loop["epoch_loop.automatic_optimization.optim_progress"]["optimizer"][part][scope]
            counts.update(dict.fromkeys(counts, steps))
        epochs = loop["epoch_progress"][scope]
        epochs.update({name: epoch + (name in ("ready", "started")) for name in epochs})
    copied["epoch"] = epoch
    for schedule in copied["lr_schedulers"]:
        schedule.update(last_epoch=step, _step_count=step + 1)
    return copied


def _start(corpus: Path, checkpoint: Path, step: int) -> dict[str, Any]:
    command = [sys.executable, __file__, "--child", str(corpus), str(checkpoint), str(step + 1)]
    found: dict[str, Any] = json.loads(run_peer(command).splitlines()[-1])
    assert found["step"] == step, found
    return found


def _child(corpus: Path, checkpoint: Path, max_steps: int) -> int:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    started = time.perf_counter()
    data = NestDataModule(corpus, plan=PLAN)
    opened = time.perf_counter()
    model, first = NestModel(CONFIG), _FirstBatch()
    trainer = _trainer(max_steps, [first], checkpoint.parent)
    fitted = time.perf_counter()
    trainer.fit(model, datamodule=data, ckpt_path=str(checkpoint))
    assert first.time_s is not None
    assert trainer.global_step == max_steps
    print(json.dumps({"open_s": opened - started, "batch_s": first.time_s - fitted, "step": first.step}))
    return 0


def _lhotse_s(corpus: Path, step: int) -> float:
    """Returns the seconds from loading the state of Lhotse's sampler after `step` batches to its next batch."""
    sampler = _sampler(corpus)
    for number, _ in enumerate(sampler, start=1):
        if number == step:
            break
    state = sampler.state_dict()
    started = time.perf_counter()
    fresh = _sampler(corpus)
    fresh.load_state_dict(state)
    next(iter(fresh))
    return time.perf_counter() - started


def _sampler(corpus: Path) -> DynamicBucketingSampler:
    return DynamicBucketingSampler(
        CutSet.from_jsonl_lazy(corpus / "cuts.jsonl"),
        max_duration=PLAN.max_batch_seconds * PLAN.microbatches_per_step,
        shuffle=True,
        num_buckets=30,
        buffer_size=20_000,
        drop_last=True,
        seed=0,
        world_size=1,
        rank=0,
    )


if __name__ == "__main__":
    sys.exit(main())
