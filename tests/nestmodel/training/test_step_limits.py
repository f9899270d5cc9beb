import os
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from torch import Tensor

from nestdata import AudioNoiseBatch, MixConfig, PlanConfig
from nestmodel import CheckpointConfig, Checkpoints, ConfigError, DataConfig, NestDataModule, NestModel
from nestmodel.training.step_limits import num_steps_of_run, steps_to_microbatches
from tests.conftest import MessyCorpora
from tests.synthesis import folder_corpus, hiss
from tests.training import Recorder, fit, messy_data, tiny_config, trainer

MICROBATCHES = 4  # of a step, all of them on one rank
STEPS = 3  # of an epoch, in training and in validation


class Validations(pl.Callback):
    """Records (optimizer steps made, number of microbatches) of every validation."""

    def __init__(self) -> None:
        self.seen: list[tuple[int, int]] = []
        self.num = 0

    def on_validation_batch_start(self, *_: Any) -> None:
        self.num += 1

    def on_validation_end(self, trainer: pl.Trainer, _module: pl.LightningModule) -> None:
        self.seen.append((trainer.global_step, self.num))
        self.num = 0


class OneWeight(pl.LightningModule):
    """The cheapest model that makes optimizer steps."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(()))

    def training_step(self, _batch: AudioNoiseBatch) -> Tensor:
        return self.weight.square()

    def validation_step(self, _batch: AudioNoiseBatch) -> None: ...

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A corpus of one short cut for each microbatch of an epoch, because only their number matters here."""
    audio = {f"{i}.wav": hiss(16000, i) for i in range(STEPS * MICROBATCHES)}
    return folder_corpus(tmp_path_factory.mktemp("steps") / "speech", audio).path


def validations_of(corpus: Path, directory: Path, model: pl.LightningModule, **settings: Any) -> list[tuple[int, int]]:
    plan = PlanConfig(max_batch_seconds=1.0, microbatches_per_step=MICROBATCHES)
    data = NestDataModule(DataConfig(corpus, None, corpus, plan, MixConfig(prob=0.0), num_workers=0))
    seen = Validations()
    assert data.plan.steps_per_epoch == STEPS
    path = settings.pop("ckpt_path", None)
    runner = trainer(directory, [seen, *settings.pop("callbacks", [])], **{"limit_val_batches": 1.0, **settings})
    runner.fit(model, datamodule=data, ckpt_path=path)
    return seen.seen


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, [(3, 12), (6, 12)]),
        ({"val_check_interval": 8, "check_val_every_n_epoch": None}, [(2, 12), (4, 12), (6, 12)]),
        ({"val_check_interval": 5, "check_val_every_n_epoch": None}, [(2, 12), (4, 12), (6, 12)]),
        ({"val_check_interval": 0.1, "limit_val_batches": 0.1}, [(step, 4) for step in range(1, 7)]),
        ({"limit_val_batches": 0.7, "limit_train_batches": 7}, [(2, 8), (4, 8), (6, 8)]),
        ({"limit_train_batches": 0.7, "accumulate_grad_batches": MICROBATCHES}, [(2, 12), (4, 12), (6, 12)]),
        ({"limit_train_batches": 100, "val_check_interval": 0.7}, [(2, 12), (5, 12)]),
        ({"fast_dev_run": True}, [(1, 4)]),
    ],
)
def test_limits_in_microbatches_are_rounded_to_whole_optimizer_steps(
    corpus: Path, tmp_path: Path, settings: dict[str, Any], expected: list[tuple[int, int]]
) -> None:
    assert validations_of(corpus, tmp_path, OneWeight(), max_steps=6, **settings) == expected


def test_a_resumed_run_validates_after_the_same_steps(corpus: Path, tmp_path: Path) -> None:
    settings: dict[str, Any] = {"limit_train_batches": 8, "limit_val_batches": 4}
    plain = validations_of(corpus, tmp_path, OneWeight(), max_steps=8, **settings)
    saver = Checkpoints(CheckpointConfig(every_n_steps=1, directory=tmp_path / "saved", keep=10))
    saving = {"callbacks": [saver], "enable_checkpointing": True, **settings}
    validations_of(corpus, tmp_path, OneWeight(), max_steps=6, **saving)
    path = tmp_path / "saved" / "step_00000005.ckpt"
    resumed = validations_of(corpus, tmp_path, OneWeight(), max_steps=8, ckpt_path=path, **settings)
    assert resumed == plain[-2:]


def test_a_validation_without_training_counts_steps(messy_corpora: MessyCorpora, tmp_path: Path) -> None:
    seen = Validations()
    runner = trainer(tmp_path, [seen], limit_val_batches=2 * MICROBATCHES)
    data = messy_data(messy_corpora, microbatches_per_step=MICROBATCHES)
    runner.validate(NestModel(tiny_config()), datamodule=data, verbose=False)
    assert seen.seen == [(0, 2 * MICROBATCHES)]


@pytest.mark.slow
def test_shortened_epochs_give_the_same_batches(messy_corpora: MessyCorpora, tmp_path: Path) -> None:
    _, plain = fit(messy_corpora, tmp_path, max_steps=7)
    _, shortened = fit(messy_corpora, tmp_path, max_steps=7, limit_train_batches=4)
    assert shortened.keys == plain.keys
    assert shortened.losses == plain.losses


def test_fast_dev_run_makes_one_whole_step_and_writes_nothing(messy_corpora: MessyCorpora, tmp_path: Path) -> None:
    recorder, saver = Recorder(), Checkpoints()
    runner = trainer(tmp_path, [recorder, saver], fast_dev_run=True, enable_checkpointing=True)
    runner.fit(NestModel(tiny_config()), datamodule=messy_data(messy_corpora))
    assert [(key.step, key.microbatch) for key in recorder.keys] == [(0, 0), (0, 1)]
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"overfit_batches": 2}, r"overfit_batches is 2.*a corpus of a few utterances"),
        ({"val_check_interval": "00:00:01:00"}, "val_check_interval is a time.*Give a number"),
    ],
)
def test_unsupported_limits_are_rejected(corpus: Path, tmp_path: Path, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        validations_of(corpus, tmp_path, OneWeight(), max_steps=1, **settings)


@pytest.mark.parametrize("share", [0.7, 1.0])
def test_the_limits_of_a_run_count_steps_and_shares_of_an_epoch(corpus: Path, tmp_path: Path, share: float) -> None:
    limits = {"limit_train_batches": share, "val_check_interval": 2, "limit_val_batches": 1}
    runner = trainer(tmp_path, max_steps=-1, max_epochs=5, check_val_every_n_epoch=None, **limits)
    steps_to_microbatches(runner, MICROBATCHES)
    plan = PlanConfig(max_batch_seconds=1.0, microbatches_per_step=MICROBATCHES)
    data = NestDataModule(DataConfig(corpus, None, corpus, plan, num_workers=0))
    for _ in range(2):
        data.configure(runner, "fit")
        assert (runner.val_check_interval, runner.limit_val_batches) == (2 * MICROBATCHES, MICROBATCHES)
        assert num_steps_of_run(runner, STEPS) == 5 * int(share * STEPS)
