"""A tiny model, its data and a trainer, for tests that train."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytorch_lightning as pl
import torch

from nestdata import AudioNoiseBatch, MicrobatchKey, MixConfig, PlanConfig, RemoteConfig
from nestmodel import (
    DataConfig,
    EncoderConfig,
    MaskConfig,
    NestConfig,
    NestDataModule,
    NestModel,
    OptimizerConfig,
    QuantizerConfig,
)
from nestmodel.training.step_limits import ends_step
from nestmodel.training.step_stats import StopRequests
from tests.conftest import MessyCorpora


def tiny_config(**encoder: Any) -> NestConfig:
    """Returns a model of two layers of dimension 16, with masks so frequent that every batch has scored tokens."""
    return NestConfig(
        encoder=replace(EncoderConfig(d_model=16, num_heads=2, num_layers=2, subsampling_channels=8), **encoder),
        quantizer=QuantizerConfig(num_classes=32),
        masking=MaskConfig(prob=0.05),
        optimizer=OptimizerConfig(lr=1.0, warmup_steps=10),
    )


def messy_data(
    corpora: MessyCorpora,
    *,
    microbatches_per_step: int = 2,
    num_workers: int = 0,
    remote: RemoteConfig = RemoteConfig(),
) -> NestDataModule:
    plan = PlanConfig(max_batch_seconds=10.0, microbatches_per_step=microbatches_per_step)
    return NestDataModule(
        DataConfig(
            corpora.speech,
            corpora.noise,
            corpora.speech,
            plan,
            MixConfig(prob=0.8),
            num_workers=num_workers,
            remote=remote,
        )
    )


def trainer(directory: Path, callbacks: Sequence[pl.Callback] = (), **settings: Any) -> pl.Trainer:
    defaults: dict[str, Any] = {
        "accelerator": "cpu",
        "devices": 1,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "num_sanity_val_steps": 0,
        "limit_val_batches": 0,
        "use_distributed_sampler": False,
        "default_root_dir": directory,
    }
    return pl.Trainer(**{**defaults, **settings, "callbacks": list(callbacks)})


class Recorder(pl.Callback):
    """Records the keys of the training batches and the loss of every step."""

    def __init__(self) -> None:
        self.keys: list[MicrobatchKey] = []
        self.losses: list[float] = []

    def on_train_batch_end(
        self, trainer: pl.Trainer, _module: pl.LightningModule, _outputs: Any, batch: AudioNoiseBatch, index: int
    ) -> None:
        self.keys.append(batch.key)
        if ends_step(trainer, index):
            self.losses.append(float(trainer.callback_metrics["train_loss"]))


class ProportionalSteps(pl.Callback):
    """Sets AdamW's eps to 1, so that updates are about proportional to gradients.

    With the usual eps, a gradient that is only rounding error causes as large an update as any other: after four steps,
    one changed low bit changes the loss by 1e-4. With an eps of 1, runs that sum in a different order differ by
    rounding errors only.
    """

    def on_train_start(self, trainer: pl.Trainer, _module: pl.LightningModule) -> None:
        for group in trainer.optimizers[0].param_groups:
            group["eps"] = 1.0


class RequestPreemption(pl.Callback):
    """Sets the flag that SIGTERM sets, at the first microbatch of a step."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_train_batch_start(
        self, _trainer: pl.Trainer, module: pl.LightningModule, batch: AudioNoiseBatch, _index: int
    ) -> None:
        assert isinstance(module, NestModel)
        module.stop_requests.preempted_here |= batch.key.step == self.step


def fit(
    corpora: MessyCorpora,
    directory: Path,
    *,
    max_steps: int,
    num_workers: int = 0,
    ckpt_path: Path | None = None,
    config: NestConfig | None = None,
    **settings: Any,
) -> tuple[NestModel, Recorder]:
    model, recorder = NestModel(config or tiny_config()), Recorder()
    runner = trainer(directory, [recorder, *settings.pop("callbacks", [])], max_steps=max_steps, **settings)
    runner.fit(model, datamodule=messy_data(corpora, num_workers=num_workers), ckpt_path=ckpt_path)
    return model, recorder


TINY: dict[str, Any] = {
    "trainer": {"max_steps": 4, "log_every_n_steps": 1, "val_check_interval": 2, "accelerator": "cpu"},
    "model": {
        "config": {
            "quantizer": {"num_classes": 32},
            "masking": {"prob": 0.05},
            "encoder": {"d_model": 16, "num_heads": 2, "num_layers": 1, "subsampling_channels": 8},
        }
    },
    "data": {"plan": {"max_batch_seconds": 10.0, "microbatches_per_step": 2}, "num_workers": 0},
}


class StubTrainer(pl.Trainer):
    """Has limits, a step and metrics, and cannot train."""

    is_global_zero: Any = True
    sanity_checking: Any = False
    accumulate_grad_batches: Any = 2
    num_training_batches: Any = 20
    limit_train_batches: Any = 1.0
    max_steps: Any = 100
    max_epochs: Any = None
    global_step: Any = 0
    callback_metrics: Any = None
    lightning_module: Any = None
    world_size: Any = 1

    def __init__(self, step: int = 0, *, metrics: dict[str, float] | None = None, **settings: Any) -> None:
        vars(self).update(settings)
        self.callbacks: Any = settings.get("callbacks", [])
        self.global_step = step
        self.lightning_module = SimpleNamespace(stop_requests=StopRequests())
        self.callback_metrics = {name: torch.tensor(value) for name, value in (metrics or {}).items()}

    def __setattr__(self, name: str, value: Any) -> None:
        vars(self)[name] = value
