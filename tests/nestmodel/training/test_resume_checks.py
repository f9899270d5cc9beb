from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
from pytorch_lightning.callbacks import LambdaCallback

from nestdata import MixConfig, MixtureStage, PlanConfig
from nestmodel import CheckpointConfig, Checkpoints, ConfigError, DataConfig, NestDataModule, NestModel
from nestmodel.training.resume_checks import check_unchanged
from nestmodel.training.saving.checkpoint_files import find_checkpoints
from nestmodel.training.starting.run_checks import check_run
from tests.conftest import MessyCorpora
from tests.training import fit, messy_data, tiny_config, trainer


def test_equal_settings_pass_and_changed_ones_are_named_with_both_values() -> None:
    check_unchanged({"a": "1"}, {"a": "1"}, step=0)
    with pytest.raises(ConfigError, match=r"a: 1 -> 2; b: 3 -> \(absent\); c: \(absent\) -> 4"):
        check_unchanged({"a": "1", "b": "3", "same": "0"}, {"a": "2", "same": "0", "c": "4"}, step=0)


def test_a_run_that_was_stopped_within_a_step_resumes_at_the_start_of_that_step(
    messy_corpora: MessyCorpora, tmp_path: Path
) -> None:
    _, plain = fit(messy_corpora, tmp_path, max_steps=4)
    saver = Checkpoints(CheckpointConfig(every_n_steps=100, directory=tmp_path / "saved"))

    def stop_within_a_step(trainer: pl.Trainer, _module: object, _outputs: object, batch: Any, _index: int) -> None:
        trainer.should_stop |= (batch.key.step, batch.key.microbatch) == (2, 0)

    callbacks = [LambdaCallback(on_train_batch_end=stop_within_a_step), saver]
    fit(messy_corpora, tmp_path, max_steps=4, callbacks=callbacks, enable_checkpointing=True, min_epochs=0)
    (found,) = find_checkpoints(tmp_path / "saved")
    assert found.step == 2
    _, rest = fit(messy_corpora, tmp_path, max_steps=4, ckpt_path=found.path)
    assert rest.keys == plain.keys[4:]
    assert rest.losses == plain.losses[2:]


def test_resuming_with_other_data_or_settings_is_refused_with_the_changes(
    messy_corpora: MessyCorpora, tmp_path: Path
) -> None:
    saver = Checkpoints(CheckpointConfig(every_n_steps=1, directory=tmp_path / "saved"))
    fit(messy_corpora, tmp_path, max_steps=1, callbacks=[saver], enable_checkpointing=True)
    path = find_checkpoints(tmp_path / "saved")[0].path
    plan = PlanConfig(max_batch_seconds=10.0, microbatches_per_step=2)
    mix = MixConfig(prob=0.8)
    speech, noise = messy_corpora.speech, messy_corpora.noise
    others = {
        r"data\.plan\.seed: 0 -> 1": NestDataModule(DataConfig(speech, noise, None, replace(plan, seed=1), mix)),
        r"data\.mix\.prob: 0\.8 -> 0\.7": NestDataModule(DataConfig(speech, noise, None, plan, MixConfig(prob=0.7))),
        r"data\.noise: '\w+' -> None": NestDataModule(DataConfig(speech, None, None, plan, mix)),
        r"data\.corpus: \['\w+'\] -> \['\w+'\]": NestDataModule(
            DataConfig(messy_corpora.windows, noise, None, plan, mix)
        ),
    }
    for change, data in others.items():
        with pytest.raises(ConfigError, match=rf"other data or settings \(.*{change}.*--init-from"):
            trainer(tmp_path, max_steps=2).fit(NestModel(tiny_config()), datamodule=data, ckpt_path=path)
    with pytest.raises(ConfigError, match=r"model\.config\.encoder\.dropout: 0\.1 -> 0\.2"):
        trainer(tmp_path, max_steps=2).fit(
            NestModel(tiny_config(dropout=0.2)), datamodule=messy_data(messy_corpora), ckpt_path=path
        )
    trainer(tmp_path, max_steps=2).fit(
        NestModel(tiny_config()), datamodule=messy_data(messy_corpora, num_workers=1), ckpt_path=path
    )


def stages(*repeats: tuple[int, str]) -> dict[str, str]:
    return {f"data.plan.stages.{from_step}": text for from_step, text in repeats}


def test_stages_that_begin_at_the_step_of_the_checkpoint_or_later_may_change() -> None:
    before = stages((0, "[1.0]"), (500, "[2.0]"), (900, "[3.0]"))
    check_unchanged(before, stages((0, "[1.0]"), (500, "[4.0]"), (700, "[3.0]")), step=500)
    check_unchanged({}, before, step=0)
    for now in (stages((0, "[1.0]"), (500, "[4.0]"), (900, "[3.0]")), stages((0, "[1.0]"), (900, "[3.0]"))):
        with pytest.raises(ConfigError, match=r"data\.plan\.stages: the mixture from step 500 on .*has made 501 steps"):
            check_unchanged(before, now, step=501)
    with pytest.raises(ConfigError, match=r"from step 3 on .*\(absent\) -> \[9\.0\].*has made 501 steps"):
        check_unchanged(before, {**before, **stages((3, "[9.0]"))}, step=501)


@pytest.mark.parametrize("name", ["", "-1", "x", "9" * 5000])
def test_names_of_stages_in_a_damaged_checkpoint_are_other_settings(name: str) -> None:
    with pytest.raises(ConfigError, match="other data or settings"):
        check_unchanged({f"data.plan.stages.{name}": "[1.0]"}, {}, step=0)


def weighted_data(corpora: MessyCorpora, *stages: MixtureStage, **plan: Any) -> NestDataModule:
    config = PlanConfig(max_batch_seconds=10.0, microbatches_per_step=2, weights=(1.0, 2.0), stages=stages, **plan)
    return NestDataModule(DataConfig([corpora.speech, corpora.windows], corpora.noise, None, config, num_workers=0))


def batches_of(data: NestDataModule, directory: Path, **options: Any) -> list[tuple[int, list[str]]]:
    """Trains, and returns the step and the cuts of every batch."""
    seen: list[tuple[int, list[str]]] = []

    note = LambdaCallback(on_train_batch_end=lambda *given: seen.append((given[3].key.step, given[3].sample_id)))
    saver = Checkpoints(CheckpointConfig(every_n_steps=1, directory=directory))
    ckpt_path = options.pop("ckpt_path", None)
    runner = trainer(directory, [note, saver], enable_checkpointing=True, **options)
    runner.fit(NestModel(tiny_config()), datamodule=data, ckpt_path=ckpt_path)
    return seen


@pytest.mark.slow
def test_a_stage_that_is_added_at_a_resume_gives_the_batches_of_a_run_that_had_it_from_the_start(
    messy_corpora: MessyCorpora, tmp_path: Path
) -> None:
    first, second = MixtureStage(from_step=2, weights=(5.0, 1.0)), MixtureStage(from_step=4, language_temperature=2.0)
    languages = {"languages": ("en", "sw")}
    whole = batches_of(weighted_data(messy_corpora, first, second, **languages), tmp_path / "whole", max_steps=6)
    plain = batches_of(weighted_data(messy_corpora), tmp_path / "plain", max_steps=3)
    assert plain[:4] == whole[:4]
    assert plain[4:] != whole[4:6], "the stage changes the batches"
    begun = tmp_path / "plain" / "step_00000002.ckpt"
    found = batches_of(weighted_data(messy_corpora, first), tmp_path / "one", max_steps=4, ckpt_path=begun)
    ends = tmp_path / "one" / "step_00000004.ckpt"
    found += batches_of(
        weighted_data(messy_corpora, first, second, **languages), tmp_path / "two", max_steps=6, ckpt_path=ends
    )
    assert found == whole[4:]
    data = weighted_data(messy_corpora, replace(first, from_step=1))
    with pytest.raises(ConfigError, match=r"the mixture from step 1 on has changed .*the checkpoint has made 2 steps"):
        batches_of(data, tmp_path / "late", max_steps=3, ckpt_path=begun)


def test_a_stage_after_the_end_of_a_run_is_warned_of(messy_corpora: MessyCorpora, tmp_path: Path) -> None:
    late = weighted_data(messy_corpora, MixtureStage(from_step=5))
    with pytest.warns(UserWarning, match=r"the stage from step 5 on has no effect, because the run ends after 5 steps"):
        check_run(NestModel(tiny_config()), late, trainer(tmp_path, max_steps=5), stage="fit", ckpt_path=None)
