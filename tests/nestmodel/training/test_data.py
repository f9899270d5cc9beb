import math
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from nestdata import AugmentConfig, BadAudioConfig, PlanConfig, prepare_corpus
from nestmodel import ConfigError, DataConfig, NestDataModule, NestModel
from tests.conftest import MessyCorpora
from tests.nestdata.bad_files import BAD_FILES_CONFIG, bad_files
from tests.training import Recorder, fit, messy_data, tiny_config, trainer


def test_a_run_does_not_depend_on_the_number_of_loader_workers(messy_corpora: MessyCorpora, tmp_path: Path) -> None:
    plain, expected = fit(messy_corpora, tmp_path, max_steps=3)
    same, with_workers = fit(messy_corpora, tmp_path, max_steps=3, num_workers=2)
    assert with_workers.keys == expected.keys
    assert all(torch.equal(a, b) for a, b in zip(same.parameters(), plain.parameters(), strict=True))


def test_another_accumulation_is_rejected(messy_corpora: MessyCorpora, tmp_path: Path) -> None:
    runner = trainer(tmp_path, max_steps=1, accumulate_grad_batches=3)
    with pytest.raises(ConfigError, match=r"accumulate_grad_batches is 3.*Leave it out"):
        runner.fit(NestModel(tiny_config()), datamodule=messy_data(messy_corpora))


def test_corpora_are_weighted_and_augmented_in_training_only(
    messy_corpora: MessyCorpora,
) -> None:
    plan = PlanConfig(max_batch_seconds=10.0, microbatches_per_step=2, weights=(1.0, 3.0))
    augment = AugmentConfig(speech=["PolarityInversion"], speech_on="both")
    paths = [messy_corpora.speech, messy_corpora.windows]
    data = NestDataModule(DataConfig(paths, messy_corpora.noise, messy_corpora.speech, plan, augment=augment))
    assert data.val_dataset is not None
    assert data.plan.repeats_per_epoch[1] > 1.0 > data.plan.repeats_per_epoch[0]
    assert data.val_dataset.plan.repeats_per_epoch == [1.0]
    assert data.train_dataset.augment == augment
    assert data.val_dataset.augment == AugmentConfig()


def test_training_replaces_files_that_fail_only_when_decoded(tmp_path: Path) -> None:
    reasons = bad_files(tmp_path)
    config = replace(BAD_FILES_CONFIG, probe="all")  # reads headers only
    report = prepare_corpus([tmp_path / "speech.json"], tmp_path / "speech.corpus", config)
    kept = {"silent", "not_finite-nan", "not_finite-inf"}
    assert report.num_cuts == 2 + len(kept)
    assert report.rejected == Counter(reason for name, reason in reasons.items() if name not in kept)
    plan = PlanConfig(max_batch_seconds=4.0, microbatches_per_step=2)
    data = NestDataModule(
        DataConfig(tmp_path / "speech.corpus", plan=plan, bad_audio=BadAudioConfig(max_share=1.0), num_workers=0)
    )
    recorder = Recorder()
    num_steps = 3 * data.plan.steps_per_epoch
    trainer(tmp_path, [recorder], max_steps=num_steps).fit(NestModel(tiny_config()), datamodule=data)
    assert all(math.isfinite(loss) for loss in recorder.losses)
    assert len(recorder.keys) == 2 * num_steps
    bad = [cut for key in recorder.keys for cut in data.train_dataset[key.step, key.microbatch].bad_cuts]
    assert {cut.cut_id: cut.reason for cut in bad} == {name: reasons[name] for name in kept - {"silent"}}
