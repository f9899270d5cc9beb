"""One rank of a training run, with optional faults; `tests.distributed.runs` starts all ranks.

python -m tests.distributed.training_run RUN.json, with RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT set.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
from pytorch_lightning.strategies import DDPStrategy

import nestmodel.training.module
from nestdata import AudioNoiseBatch, RemoteConfig, start_fork_server
from nestguard import StallLimits
from nestmodel import (
    CheckpointConfig,
    Checkpoints,
    GuardConfig,
    NestModel,
    PreemptionHandler,
    StallGuard,
    newest_checkpoint,
)
from nestmodel.training.callbacks import stall_guard
from nestmodel.training.step_limits import ends_step
from tests.conftest import MessyCorpora
from tests.distributed.faults import DEVICE, Fault, Paced
from tests.distributed.runs import MICROBATCHES_PER_STEP
from tests.training import ProportionalSteps, messy_data, tiny_config, trainer


class Seen(pl.Callback):
    """Appends every batch and every loss to a file, so that they are kept if the process dies."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_train_batch_start(self, _trainer: pl.Trainer, _model: object, batch: AudioNoiseBatch, _index: int) -> None:
        replaced = [[cut.cut_id, cut.reason] for cut in batch.bad_cuts]
        index = {"step": batch.key.step, "microbatch": batch.key.microbatch}
        self._write({**index, "ids": batch.sample_id, "replaced": replaced})

    def on_train_batch_end(
        self, trainer: pl.Trainer, _model: object, _outputs: object, _batch: AudioNoiseBatch, index: int
    ) -> None:
        if ends_step(trainer, index) and "train_loss" in trainer.callback_metrics:
            logged = {name: float(value) for name, value in trainer.callback_metrics.items() if "val" not in name}
            self._write({"made": trainer.global_step, "logged": logged})

    def on_validation_end(self, trainer: pl.Trainer, _module: object) -> None:
        self._write({"validated": trainer.global_step, "loss": float(trainer.callback_metrics["val_loss"])})

    def _write(self, line: dict[str, Any]) -> None:
        with self.path.open("a") as file:
            file.write(json.dumps(line) + "\n")


def fault_of(kind: str, step: int, microbatch: int) -> pl.Callback:
    if not kind.startswith("slow in "):
        return Fault(kind, step, microbatch)
    nestmodel.training.module.WINDOW = 10
    return Paced(kind.removeprefix("slow in "), step, microbatch)


def main(argv: list[str]) -> None:
    run = json.loads(Path(argv[0]).read_text())
    if run["num_workers"] and run["start_method"] == "forkserver":
        start_fork_server(imports_main=False)
    rank, world_size, directory = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), Path(run["directory"])
    is_first = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0"
    if run["has_device"]:
        stall_guard.new_event_of = lambda _: DEVICE.new_event  # type: ignore[assignment, misc]
    max_time_s = None if run["max_minutes"] is None else 60 * run["max_minutes"]
    faults = [fault_of(*fault["what"]) for fault in run["faults"] if fault["rank"] == rank and is_first]
    checkpoints = Checkpoints(CheckpointConfig(every_n_steps=run["every_n_steps"], keep=100))
    guard = StallGuard(GuardConfig(StallLimits(**(run["limits"] or {})), enabled=run["limits"] is not None))
    strategy = DDPStrategy(process_group_backend="gloo")
    microbatches_per_rank = MICROBATCHES_PER_STEP // world_size
    steps = [ProportionalSteps()] if run["proportional_steps"] else []
    runner = trainer(
        directory,
        [Seen(directory / f"seen-{rank}.jsonl"), guard, *steps, *faults, PreemptionHandler(max_time_s), checkpoints],
        max_steps=run["max_steps"],
        gradient_clip_val=1.0,  # as in the presets
        devices=world_size // run["num_nodes"],
        num_nodes=run["num_nodes"],
        strategy=strategy if world_size > 1 else "auto",
        enable_checkpointing=True,
        limit_val_batches=run["limit_val_batches"] * microbatches_per_rank,
        val_check_interval=run["val_check_interval"] * microbatches_per_rank,
        check_val_every_n_epoch=None,
    )
    guard.start(runner)
    data = messy_data(
        MessyCorpora(Path(run["speech"]), Path(run["noise"]), Path(), Path()),
        microbatches_per_step=MICROBATCHES_PER_STEP,
        num_workers=run["num_workers"],
        remote=RemoteConfig(**run["remote"]),
    )
    data.start_method = run["start_method"]
    path = None if rank == run["blind_rank"] else newest_checkpoint(directory)
    runner.fit(NestModel(tiny_config()), datamodule=data, ckpt_path=path)


if __name__ == "__main__":
    main(sys.argv[1:])
