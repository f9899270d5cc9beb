import os
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from nestcli.nestmodel import main
from nestmodel import ConfigError, NestNetwork, RunConfig, WeightsError, fit, load_network
from nestmodel.formats.nemo_archive import write_nemo
from nestmodel.training.callbacks.curves import read_metrics
from nestmodel.training.saving.resume import read_run
from tests.cli.commands import error_of, run
from tests.conftest import MessyCorpora
from tests.own_encoders import Convolutions
from tests.synthesis import folder_corpus, hiss
from tests.training import TINY, Recorder, tiny_config


class RunsCommand:
    """An object whose pickle creates a file when it is loaded."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> object:
        return os.system, (f"touch {self.path}",)


def tiny(directory: Path, **sections: Any) -> list[str]:
    """Returns the options of a small run in `run`, whose configuration is written to the directory."""
    path = directory / "tiny.yaml"
    path.write_text(yaml.safe_dump({**TINY, **sections}))
    return ["--config", str(path), "--output", str(directory / "run")]


@pytest.mark.smoke
@pytest.mark.slow
def test_fit_writes_checkpoints_metrics_and_curves_and_prints_their_paths(
    messy_corpora: MessyCorpora, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    data = {
        **TINY["data"],
        "corpus": [str(messy_corpora.speech), str(messy_corpora.windows)],
        "plan": {"max_batch_seconds": 10.0, "microbatches_per_step": 2, "weights": [0.5, 0.5], "num_shapes": 3},
        "augment": {"speech": ["PolarityInversion", {"Gain": {"p": 1.0}}], "speech_on": "both"},
        "bad_audio": {"max_share": 0.5},
    }
    (tmp_path / "tiny.yaml").write_text(yaml.safe_dump({**TINY, "data": data}))
    command = ["fit", "--config", "tiny.yaml", "--noise", messy_corpora.noise, "--val-corpus", messy_corpora.speech]
    command += ["--output", "run"]
    assert main([*map(str, command), "--trainer.lightning", "{fast_dev_run: true}"]) == 0
    assert "run/" not in capsys.readouterr().out
    assert not (tmp_path / "run").exists()
    outcome = run("nestmodel", *command, cwd=tmp_path)
    assert outcome.code == 0, outcome.err
    directory = tmp_path / "run" / "version_0"
    for name in ("metrics.csv", "curves.png", "config.yaml", "checkpoints", "tensorboard"):
        assert (directory / name).exists(), name
    for name in ("metrics.csv", "curves.png", "checkpoints"):
        assert f"run/version_0/{name}" in outcome.out
    metrics = read_metrics(directory)
    steps, losses = metrics["train_loss"]
    assert len(steps) == 4
    assert all(loss > 0 for loss in losses)
    assert len(metrics["val_loss"][0]) == 2
    assert {"lr", "grad_norm", "train_accuracy", "val_token_entropy", "audio_s_per_s", "data_wait"} <= metrics.keys()
    checkpoint = directory / "checkpoints" / "last.ckpt"
    assert load_network(checkpoint).config.encoder.d_model == 16
    stored = yaml.safe_load((directory / "config.yaml").read_text())
    assert stored == torch.load(checkpoint, weights_only=True)["nest_run"]
    assert stored["data"]["augment"]["speech"] == ["PolarityInversion", {"Gain": {"p": 1.0}}]
    assert max(metrics["cuts_replaced"][1]) > 0  # one of the windows was damaged after the corpus was prepared
    assert "speech replaced, changed" in outcome.err
    assert "Tip" not in outcome.err


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--trainer.strategy", "ddp", "--devices", "3"], "which 3 ranks cannot share evenly"),
        (
            ["--trainer.lightning", "{check_val_every_n_epoch: 1}", "--val-check-interval", "99"],
            "counts optimizer steps",
        ),
        (["--trainer.callbacks", "[{class_path: nestmodel.Gone}]"], "class_path nestmodel.Gone: "),
        (["--resume"], "there is no checkpoint in "),
    ],
)
def test_a_mistake_of_configuration_is_exit_code_2_before_anything_is_written(
    flags: list[str], message: str, messy_corpora: MessyCorpora, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert main(["fit", str(messy_corpora.speech), *tiny(tmp_path), *flags]) == 2
    assert message in error_of(capsys)
    assert {path.name for path in tmp_path.rglob("*")} <= {"tiny.yaml", "run"}


@pytest.mark.slow
def test_a_run_says_that_it_starts_anew_and_a_validation_has_the_step_of_its_checkpoint(
    messy_corpora: MessyCorpora, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    command = [str(messy_corpora.speech), *tiny(tmp_path), "--val-corpus", str(messy_corpora.windows)]
    command += ["--ckpt-path", "last"]
    assert main(["validate", *command]) == 2
    assert "there is no checkpoint in " in error_of(capsys)
    assert main(["fit", *command]) == 0
    assert capsys.readouterr().err.count(f"no checkpoint in {tmp_path / 'run'}: starting at step 0\n") == 1
    assert main(["validate", *command]) == 0
    assert "no checkpoint in" not in capsys.readouterr().err
    (step,) = read_metrics(tmp_path / "run" / "version_1")["val_loss"][0]
    assert step == 4
    assert main(["fit", *command, "--max-steps", "6", "--mix-prob", "0.25"]) == 2
    assert "step_00000004.ckpt was written by a run with other data or settings (data.mix.prob: " in error_of(capsys)


@pytest.mark.slow
def test_the_longest_time_counts_this_start_and_what_ended_a_run_is_said(
    messy_corpora: MessyCorpora, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    command = ["fit", str(messy_corpora.speech), *tiny(tmp_path), "--max-steps", "1000", "--max-time", "0.001s"]
    steps = []
    for resume in ([], ["--resume"]):
        assert main([*command, *resume]) == 0
        assert "trainer.max_time has passed" in capsys.readouterr().out
        steps.append(read_run(max((tmp_path / "run").rglob("*.ckpt"), key=lambda path: path.stat().st_mtime)).step)
    assert steps == [1, 2]


@pytest.mark.slow
def test_a_command_its_stored_settings_and_python_train_the_same_weights(
    messy_corpora: MessyCorpora, tmp_path: Path
) -> None:
    command = ["fit", str(messy_corpora.speech), *tiny(tmp_path), "--noise", str(messy_corpora.noise), "--seed", "5"]
    assert main(command) == 0
    stored = tmp_path / "run/version_0/config.yaml"
    assert main(["fit", "--config", str(stored)]) == 0
    config = RunConfig.read([stored])
    assert config.stored() == yaml.safe_load((tmp_path / "run/version_1/config.yaml").read_text())
    trained = fit(config)
    assert trained.global_step == 4
    checkpoints = sorted((tmp_path / "run").glob("version_*/checkpoints/last.ckpt"))
    first, *others = [load_network(path).state_dict() for path in checkpoints]
    assert len(others) == 2
    for other in others:
        assert all(torch.equal(weights, other[name]) for name, weights in first.items())


def test_a_run_with_a_transform_and_a_callback_of_its_own_is_resumed_with_equal_ones_only(
    messy_corpora: MessyCorpora, tmp_path: Path
) -> None:
    def config(output: str, max_steps: int, level: float = 0.8) -> RunConfig:
        echo = {"class_path": "tests.nestdata.batch.own_transforms.Echo", "init_args": {"level": level}}
        data = {**TINY["data"], "corpus": str(messy_corpora.speech), "augment": {"speech": [echo]}}
        path = tmp_path / "own.yaml"
        path.write_text(yaml.safe_dump({**TINY, "data": data, "output": str(tmp_path / output)}))
        read = RunConfig.read([path])
        return replace(read, trainer=replace(read.trainer, max_steps=max_steps), resume=output == "parts")

    whole, parts = Recorder(), Recorder()
    fit(config("whole", 4), [whole])
    fit(replace(config("parts", 2), resume=False), [parts])
    with pytest.raises(ConfigError, match=r"data\.augment\.speech: .*0\.8.* -> .*0\.7"):
        fit(config("parts", 4, level=0.7))
    trained = fit(config("parts", 4), [parts])
    assert [key.step for key in parts.keys] == [0, 0, 1, 1, 2, 2, 3, 3]
    assert (parts.keys, parts.losses) == (whole.keys, whole.losses)
    assert trained.global_step == 4


def test_a_directory_that_cannot_be_written_is_one_line_before_training(
    messy_corpora: MessyCorpora, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    directory = tmp_path / "file/run"
    assert main(["fit", str(messy_corpora.speech), *tiny(tmp_path), "--output", str(directory)]) == 1
    assert f"error: {directory}: cannot be written (" in error_of(capsys)


def test_a_run_whose_files_are_all_broken_ends_with_their_names(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    corpus = folder_corpus(tmp_path / "speech", {f"{i}.flac": hiss(16000 * 3, i) for i in range(4)})
    for path in (tmp_path / "speech").glob("*.flac"):
        path.write_bytes(path.read_bytes()[:20000])
    assert main(["fit", str(corpus.path), *tiny(tmp_path)]) == 1
    assert re.match(r"error: step 0, microbatch 0: none of 21 cuts .* cut '\d': .*/\d\.flac", error_of(capsys))


def test_an_unusable_checkpoint_is_named(
    messy_corpora: MessyCorpora, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "broken.ckpt").write_bytes(b"half a file")
    torch.save({"state_dict": {}, "hyper_parameters": RunsCommand(tmp_path / "created")}, tmp_path / "hostile.ckpt")
    torch.save({"state_dict": {}, "epoch": 3, "pytorch-lightning_version": "2.6.0"}, tmp_path / "foreign.ckpt")
    write_nemo(tmp_path / "model.nemo", tiny_config(), NestNetwork(tiny_config()).state_dict())
    reasons = {
        "gone.ckpt": "does not exist",
        "broken.ckpt": "damaged",
        "hostile.ckpt": "holds other objects than tensors and plain values, which are not loaded",
        "foreign.ckpt": "holds no nest_config",
        "model.nemo": "not a checkpoint but a nemo file, from which no run can be resumed",
    }
    for name, reason in reasons.items():
        assert main(["fit", str(messy_corpora.speech), "-c", "demo", "--ckpt-path", str(tmp_path / name)]) == 2
        error = error_of(capsys)
        assert f"{name}: " in error
        assert reason in error
        assert "weights_only" not in error  # torch's advice to load the file all the same
    assert not (tmp_path / "created").exists()


def test_a_deterministic_run_refuses_other_values_than_nccl_needs(
    messy_corpora: MessyCorpora, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("NCCL_ALGO", "Tree")
    assert main(["fit", str(messy_corpora.speech), *tiny(tmp_path), "--trainer.deterministic"]) == 2
    assert "trainer.deterministic needs NCCL_ALGO=Ring, but the environment sets it to 'Tree'" in error_of(capsys)


def own_encoder(directory: Path, name: str) -> list[str]:
    """Returns the options of the tiny model with an encoder of `tests.own_encoders`."""
    encoder = {"class_path": f"tests.own_encoders.{name}"}
    return tiny(directory, model={"config": {**TINY["model"]["config"], "encoder": encoder}})


def test_an_encoder_without_gradients_ends_the_run_at_its_first_step(
    messy_corpora: MessyCorpora, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["fit", str(messy_corpora.speech), *own_encoder(tmp_path, "Detached")]) == 1
    assert "Detached" in error_of(capsys)


@pytest.mark.slow
def test_an_encoder_that_draws_from_numpy_and_python_resumes_exactly(
    messy_corpora: MessyCorpora, tmp_path: Path
) -> None:
    losses = []
    for name, stops in (("whole", (4,)), ("parts", (2, 4))):
        directory = tmp_path / name
        directory.mkdir()
        for steps in stops:
            options = [*own_encoder(directory, "RandomElsewhere"), "--max-steps", str(steps)]
            assert main(["fit", str(messy_corpora.speech), *options, *(["--resume"] if steps != stops[0] else [])]) == 0
        checkpoint = max(directory.rglob("step_00000004.ckpt"))
        losses.append(load_network(checkpoint).state_dict())
    assert all(torch.equal(value, losses[1][name]) for name, value in losses[0].items())


@pytest.mark.slow
@pytest.mark.parametrize("stops", [(2, 5), (3, 4, 5), (4, 5), (2, 4, 5)])
def test_a_run_that_was_ended_at_the_end_of_an_epoch_goes_on_with_the_next_one(
    messy_corpora: MessyCorpora, tmp_path: Path, stops: tuple[int, ...]
) -> None:
    states, validations = [], []
    for name, ends in (("whole", (5,)), ("parts", stops)):
        directory = tmp_path / name
        directory.mkdir()
        options = [str(messy_corpora.windows), "--val-corpus", str(messy_corpora.windows), *tiny(directory)]
        options += ["--data.bad-audio.max-share", "0.5", "--val-check-interval", "1.0"]
        for end in ends:  # an epoch has two steps of two microbatches
            resumed = [] if end == ends[0] else ["--resume"]
            assert main(["fit", *options, "--max-steps", str(end), *resumed]) == 0
        states.append(load_network(max(directory.rglob("step_00000005.ckpt"))).state_dict())
        found: dict[int, float] = {}
        for folder in sorted((directory / "run").glob("version_*")):
            series = read_metrics(folder)
            found |= dict(zip(*series["val_loss"], strict=True)) if "val_loss" in series else {}
        validations.append(found)
    assert all(torch.equal(value, states[1][name]) for name, value in states[0].items())
    assert validations[0] == validations[1]
    assert len(validations[0]) == 2


@pytest.mark.parametrize("steps", [2, 3])
def test_a_run_is_not_resumed_with_an_object_of_another_size(
    messy_corpora: MessyCorpora, tmp_path: Path, steps: int
) -> None:
    def settings_of(max_steps: int, *, resume: bool) -> RunConfig:
        config = RunConfig.read([tmp_path / "tiny.yaml"])
        return replace(
            config,
            data=replace(config.data, corpus=(messy_corpora.speech,)),
            trainer=replace(config.trainer, max_steps=max_steps),
            output=tmp_path / "run",
            resume=resume,
            quiet=True,
        )

    (tmp_path / "tiny.yaml").write_text(yaml.safe_dump(TINY))
    fit(settings_of(2, resume=False), encoder=Convolutions(dim=16))
    with pytest.raises(WeightsError, match="encoder"):
        fit(settings_of(steps, resume=True), encoder=Convolutions(dim=24))
