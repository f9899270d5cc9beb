from pathlib import Path

import pytest
import torch

from nestdata import CorpusError
from nestmodel import ConfigError, NestModel
from tests.conftest import MessyCorpora
from tests.training import fit, messy_data, tiny_config, trainer


def test_training_walks_through_the_plan_in_order_over_epochs(messy_corpora: MessyCorpora, tmp_path: Path) -> None:
    _, recorder = fit(messy_corpora, tmp_path, max_steps=8)
    assert [(key.step, key.microbatch) for key in recorder.keys] == [(s, m) for s in range(8) for m in range(2)]
    assert recorder.keys[-1].epoch == 1


def test_loader_workers_change_nothing_about_a_run(messy_corpora: MessyCorpora, tmp_path: Path) -> None:
    plain, expected = fit(messy_corpora, tmp_path, max_steps=3)
    same, with_workers = fit(messy_corpora, tmp_path, max_steps=3, num_workers=2)
    assert with_workers.keys == expected.keys
    assert all(torch.equal(a, b) for a, b in zip(same.parameters(), plain.parameters(), strict=True))


def test_accumulation_follows_from_the_plan(messy_corpora: MessyCorpora, tmp_path: Path) -> None:
    runner = trainer(tmp_path, max_steps=1)
    runner.fit(NestModel(tiny_config()), datamodule=messy_data(messy_corpora, microbatches_per_step=4))
    assert runner.accumulate_grad_batches == 4


def test_a_trainer_that_fits_twice_counts_validation_in_steps_both_times(
    messy_corpora: MessyCorpora, tmp_path: Path
) -> None:
    runner = trainer(tmp_path, max_steps=1, val_check_interval=3, check_val_every_n_epoch=None)
    data = messy_data(messy_corpora, microbatches_per_step=4)
    for _ in range(2):
        runner.fit(NestModel(tiny_config()), datamodule=data)
        assert runner.val_check_interval == 12


def test_accumulation_set_by_hand_is_refused(messy_corpora: MessyCorpora, tmp_path: Path) -> None:
    runner = trainer(tmp_path, max_steps=1, accumulate_grad_batches=3)
    with pytest.raises(ConfigError, match=r"accumulate_grad_batches is 3.*Leave it out"):
        runner.fit(NestModel(tiny_config()), datamodule=messy_data(messy_corpora))


def test_a_missing_corpus_is_named(messy_corpora: MessyCorpora, tmp_path: Path) -> None:
    gone = MessyCorpora(speech=tmp_path / "gone.corpus", noise=messy_corpora.noise)
    with pytest.raises(CorpusError, match=r"gone\.corpus: does not exist"):
        messy_data(gone)
