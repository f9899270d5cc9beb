"""Tests that fail when Lightning renames or changes something that `lightning_private` depends on.

They use a model of one weight, so that only Lightning is tested. Where a function turns something off, the test also
shows that it is on without the call.
"""

import csv
import os
import signal
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import LambdaCallback
from pytorch_lightning.loggers import CSVLogger
from pytorch_lightning.strategies import DDPStrategy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from nestmodel.training.lightning_private import (
    allow_clipping,
    disable_signal_handling,
    dump_checkpoint,
    fix_gradient_buckets,
    log_by_global_step,
    process_group_timeout_s,
    scale_loop_progress,
    set_process_group_timeout,
)
from tests.training import trainer


class OneWeight(pl.LightningModule):
    """Multiplies a weight with every batch, and logs the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(1, 1, bias=False)

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:  # noqa: ARG002
        loss: torch.Tensor = self.layer(batch).sum()
        self.log("loss", loss)
        return loss

    def train_dataloader(self) -> "DataLoader[torch.Tensor]":
        return DataLoader(torch.arange(1.0, 13.0).unsqueeze(1), batch_size=1)  # type: ignore[arg-type]

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.125)


class TwoStepsPerBatch(OneWeight):
    """Makes two optimizer steps per batch, so that the number of steps differs from that of batches."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        loss = super().training_step(batch, batch_idx)
        loss.backward()
        for _ in range(2):
            self.optimizers().step()  # type: ignore[union-attr]
        return loss


@pytest.fixture
def clean_environment() -> Iterator[None]:
    """Restores the environment variables that Lightning sets when it starts ranks, and ends the process group."""
    before = dict(os.environ)
    yield
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    os.environ.clear()
    os.environ.update(before)


def logged_steps(directory: Path, model: pl.LightningModule, hook: Callable[..., Any] | None = None) -> list[int]:
    logger = CSVLogger(directory, name="", version="run")
    hooks = LambdaCallback(on_train_batch_start=hook)
    runner = trainer(directory, [hooks], max_steps=4, logger=logger, log_every_n_steps=1)
    runner.fit(model)
    with (directory / "run" / "metrics.csv").open() as file:
        return [int(row["step"]) for row in csv.DictReader(file)]


def test_metrics_are_numbered_by_optimizer_step(tmp_path: Path) -> None:
    assert logged_steps(tmp_path / "plain", TwoStepsPerBatch()) == [0, 1]
    by_step = logged_steps(tmp_path / "by_step", TwoStepsPerBatch(), lambda runner, *_: log_by_global_step(runner))
    assert by_step == [0, 2]


def checkpoint_after_two_steps(directory: Path, microbatches: int) -> dict[str, Any]:
    found = []

    def dump(runner: pl.Trainer, *_: Any) -> None:
        if runner.global_step == 2 and not found:
            found.append(dump_checkpoint(runner))

    settings = {"max_steps": 3, "accumulate_grad_batches": microbatches}
    trainer(directory, [LambdaCallback(on_train_batch_end=dump)], **settings).fit(OneWeight())
    return found[0]


@pytest.mark.parametrize(("before", "now"), [(4, 2), (1, 4)])
def test_scaled_progress_equals_that_of_a_run_with_the_other_number_of_microbatches(
    tmp_path: Path, before: int, now: int
) -> None:
    scaled = checkpoint_after_two_steps(tmp_path, before)
    scale_loop_progress(scaled, now)
    expected = checkpoint_after_two_steps(tmp_path, now)["loops"]["fit_loop"]
    assert expected["epoch_loop.batch_progress"]["total"]["ready"] == 2 * now
    assert scaled["loops"]["fit_loop"] == expected


def test_signals_are_not_handled_by_lightning(tmp_path: Path) -> None:
    handlers: list[Any] = []
    ours: Any = lambda *_: None  # noqa: E731
    before = signal.signal(signal.SIGTERM, ours)
    try:
        for setup in (lambda _: None, disable_signal_handling):
            note = LambdaCallback(
                setup=lambda runner, *_, setup=setup, **__: setup(runner),
                on_train_start=lambda *_: handlers.append(signal.getsignal(signal.SIGTERM)),
            )
            trainer(tmp_path, [note], max_steps=1).fit(OneWeight())
    finally:
        signal.signal(signal.SIGTERM, before)
    assert handlers[0] is not ours, "Lightning no longer handles SIGTERM"
    assert handlers[1] is ours


class Clipped(OneWeight):
    """Uses a fused optimizer."""

    def __init__(self, prepare: Callable[[torch.optim.Optimizer], None]) -> None:
        super().__init__()
        self.prepare = prepare

    def configure_optimizers(self) -> torch.optim.Optimizer:
        optimizer = torch.optim.AdamW(self.parameters(), fused=True)
        self.prepare(optimizer)
        return optimizer


def test_gradients_of_a_fused_optimizer_can_be_clipped(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"max_steps": 1, "precision": "bf16-mixed", "gradient_clip_val": 1.0}
    with pytest.raises(RuntimeError, match="does not allow for gradient clipping"):
        trainer(tmp_path, **settings).fit(Clipped(lambda _: None))
    runner = trainer(tmp_path, **settings)
    runner.fit(Clipped(allow_clipping))
    assert runner.global_step == 1


@pytest.mark.usefixtures("clean_environment")
def test_ddp_receives_fixed_buckets_and_the_group_its_timeout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[dict[str, Any]] = []
    models: list[Any] = []
    start = torch.distributed.init_process_group

    def noting_start(*arguments: Any, **options: Any) -> None:
        started.append(options)
        start(*arguments, **options)

    monkeypatch.setattr(torch.distributed, "init_process_group", noting_start)
    strategy = DDPStrategy(process_group_backend="gloo", timeout=timedelta(seconds=66))
    hooks = LambdaCallback(
        setup=lambda runner, *_, **__: fix_gradient_buckets(runner),
        on_train_start=lambda runner, *_: models.append(runner.strategy.model),
    )
    runner = trainer(tmp_path, [hooks], max_steps=1, strategy=strategy)
    assert process_group_timeout_s(runner) == 66.0
    set_process_group_timeout(runner, 77.0)
    assert process_group_timeout_s(runner) == 77.0
    runner.fit(OneWeight())
    assert [options["timeout"] for options in started] == [timedelta(seconds=77)]
    (model,) = models
    assert isinstance(model, DistributedDataParallel)
    assert (model.find_unused_parameters, model.gradient_as_bucket_view, model.broadcast_buffers) == (True, True, False)
