import warnings
from dataclasses import replace
from pathlib import Path

import pytest
import pytorch_lightning as pl
import torch

from nestdata import AudioNoiseBatch, MixConfig, PlanConfig
from nestmodel import Checkpoints, ConfigError, Kernels, NestDataModule, NestModel
from nestmodel.training.checkpoints import find_checkpoints
from nestmodel.training.resume import changed_settings, check_same_step, check_unchanged, flatten_settings, run_settings
from tests.conftest import MessyCorpora
from tests.training import fit, messy_data, tiny_config, trainer


def test_nested_settings_are_flattened_to_dotted_names() -> None:
    found = flatten_settings({"mix": MixConfig(prob=0.5), "names": ["a"]}, "data")
    assert found["data.mix.prob"] == "0.5"
    assert found["data.names"] == "['a']"


def test_changed_settings_are_listed_with_both_values() -> None:
    assert changed_settings({"a": "1"}, {"a": "1"}) == []
    assert changed_settings({"a": "1", "b": "3", "same": "0"}, {"a": "2", "same": "0", "c": "4"}) == [
        ("a", "1", "2"),
        ("b", "3", "(absent)"),
        ("c", "(absent)", "4"),
    ]


def test_equal_settings_pass_and_changed_ones_are_named_with_both_values() -> None:
    check_unchanged({"a": "1"}, {"a": "1"})
    with pytest.raises(ConfigError, match=r"a: 1 -> 2; b: 3 -> \(absent\); c: \(absent\) -> 4"):
        check_unchanged({"a": "1", "b": "3", "same": "0"}, {"a": "2", "same": "0", "c": "4"})


def test_at_most_eight_changed_settings_are_shown() -> None:
    before = {str(i): "0" for i in range(10)}
    with pytest.raises(ConfigError, match=r"7: 0 -> \(absent\); and 2 more\)"):
        check_unchanged(before, {})


class StopsAt(pl.Callback):
    """Stops training at the end of a microbatch, as a time limit does."""

    def __init__(self, step: int, microbatch: int) -> None:
        self.index = step, microbatch

    def on_train_batch_end(
        self, trainer: pl.Trainer, _module: object, _outputs: object, batch: AudioNoiseBatch, _index: int
    ) -> None:
        trainer.should_stop |= (batch.key.step, batch.key.microbatch) == self.index


def test_a_run_that_was_stopped_within_a_step_resumes_at_the_start_of_that_step(
    messy_corpora: MessyCorpora, tmp_path: Path
) -> None:
    _, plain = fit(messy_corpora, tmp_path, max_steps=4)
    saver = Checkpoints(every_n_steps=100, directory=tmp_path / "saved")
    callbacks = [StopsAt(2, 0), saver]
    fit(messy_corpora, tmp_path, max_steps=4, callbacks=callbacks, enable_checkpointing=True, min_epochs=0)
    (found,) = find_checkpoints(tmp_path / "saved")
    assert found.step == 2
    _, rest = fit(messy_corpora, tmp_path, max_steps=4, ckpt_path=found.path)
    assert rest.keys == plain.keys[4:]
    assert rest.losses == plain.losses[2:]


def test_resuming_within_an_epoch_gives_no_warning(messy_corpora: MessyCorpora, tmp_path: Path) -> None:
    saver = Checkpoints(every_n_steps=1, directory=tmp_path / "saved")
    fit(messy_corpora, tmp_path, max_steps=1, callbacks=[saver], enable_checkpointing=True)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        fit(messy_corpora, tmp_path, max_steps=2, ckpt_path=tmp_path / "saved" / "step_00000001.ckpt")
    assert not [warning for warning in seen if "resum" in str(warning.message)]


def test_resuming_with_other_data_or_settings_is_refused_with_the_changes(
    messy_corpora: MessyCorpora, tmp_path: Path
) -> None:
    saver = Checkpoints(every_n_steps=1, directory=tmp_path / "saved")
    fit(messy_corpora, tmp_path, max_steps=1, callbacks=[saver], enable_checkpointing=True)
    path = find_checkpoints(tmp_path / "saved")[0].path
    plan = PlanConfig(max_batch_seconds=10.0, microbatches_per_step=2)
    mix = MixConfig(prob=0.8)
    speech, noise = messy_corpora.speech, messy_corpora.noise
    others = {
        r"data\.plan\.seed: 0 -> 1": NestDataModule(speech, noise, None, replace(plan, seed=1), mix),
        r"data\.mix\.prob: 0\.8 -> 0\.7": NestDataModule(speech, noise, None, plan, MixConfig(prob=0.7)),
        r"data\.noise: '\w+' -> None": NestDataModule(speech, None, None, plan, mix),
        r"data\.corpus: \['\w+'\] -> \['\w+'\]": NestDataModule(messy_corpora.windows, noise, None, plan, mix),
    }
    for change, data in others.items():
        with pytest.raises(ConfigError, match=rf"other data or settings \(.*{change}.*--model\.init_from"):
            trainer(tmp_path, max_steps=2).fit(NestModel(tiny_config()), datamodule=data, ckpt_path=path)
    with pytest.raises(ConfigError, match=r"model\.config\.encoder\.dropout: 0\.1 -> 0\.2"):
        trainer(tmp_path, max_steps=2).fit(
            NestModel(tiny_config(dropout=0.2)), datamodule=messy_data(messy_corpora), ckpt_path=path
        )
    trainer(tmp_path, max_steps=2).fit(
        NestModel(tiny_config()), datamodule=messy_data(messy_corpora, num_workers=1), ckpt_path=path
    )


def test_a_run_from_before_dropout_had_a_source_goes_on_with_the_generator_only(tmp_path: Path) -> None:
    drawn = run_settings(tiny_config(dropout_source="generator"), trainer(tmp_path), kernels=Kernels())
    earlier = {name: value for name, value in drawn.items() if not name.endswith("dropout_source")}
    check_unchanged(earlier, drawn)
    now = run_settings(tiny_config(), trainer(tmp_path), kernels=Kernels())
    with pytest.raises(ConfigError, match=r"model\.config\.encoder\.dropout_source: 'generator' -> 'position'"):
        check_unchanged(earlier, now)


@pytest.mark.usefixtures("gloo")
def test_a_rank_whose_step_is_that_of_all_ranks_goes_on() -> None:
    check_same_step(80_000, 0, torch.device("cpu"))
