import os
import re
from pathlib import Path

import pytest
import torch
import yaml

from nestcli.nestmodel import main
from nestmodel import NestModel, NestNetwork
from nestmodel.formats.nemo_archive import write_nemo
from nestmodel.training.callbacks.curves import read_metrics
from tests.cli.commands import run
from tests.conftest import MessyCorpora
from tests.synthesis import folder_corpus, hiss
from tests.training import tiny_config

TINY = {
    "trainer": {"max_steps": 4, "log_every_n_steps": 1, "val_check_interval": 2, "check_val_every_n_epoch": None},
    "model": {
        "config": {
            "quantizer": {"num_classes": 32},
            "masking": {"prob": 0.05},
            "encoder": {"d_model": 16, "num_heads": 2, "num_layers": 1, "subsampling_channels": 8},
        }
    },
    "data": {"plan": {"max_batch_seconds": 10.0, "microbatches_per_step": 2}, "num_workers": 0},
}


class RunsCommand:
    """An object whose pickle creates a file when it is loaded."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> object:
        return os.system, (f"touch {self.path}",)


def error_of(capsys: pytest.CaptureFixture[str]) -> str:
    (line,) = [line for line in capsys.readouterr().err.splitlines() if "error" in line]
    assert line.startswith("error: ")
    return line


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
    command = [
        *("fit", "--config", "tiny.yaml"),
        *("--data.noise", str(messy_corpora.noise), "--data.val_corpus", str(messy_corpora.speech)),
        *("--trainer.default_root_dir", "run", "--trainer.accelerator", "cpu"),
    ]
    assert main([*command, "--trainer.fast_dev_run", "true"]) == 0
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
    (checkpoint,) = (directory / "checkpoints").glob("*.ckpt")
    assert NestModel.from_checkpoint(checkpoint).config.encoder.d_model == 16
    stored = yaml.safe_load((directory / "config.yaml").read_text())
    assert stored["model"]["config"]["encoder"]["num_heads"] == 2
    assert stored["data"]["augment"]["speech"] == ["PolarityInversion", {"Gain": {"p": 1.0}}]
    assert max(metrics["cuts_replaced"][1]) > 0  # one of the windows was damaged after the corpus was prepared
    assert "speech replaced, changed" in outcome.err
    assert "Tip" not in outcome.err


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["nonsense"], 2, "nonsense"),
        (["fit", "--config", "demo"], 2, "data.corpus"),
        (["fit"], 2, "give a corpus and a configuration, such as `nestmodel fit speech.corpus --config small`"),
        (["fit", "--config", "nonsense"], 2, "The presets are demo, large, medium, small, xlarge"),
        (["fit", "x", "--config", "unified"], 2, "unified is not a whole model: give it after a size, such as"),
        (
            ["fit", "--config", "demo", "--data.corpus", "a", "--data.plan.max_batch_secs", "3"],
            2,
            "the nearest is 'data.plan.max_batch_seconds'",
        ),
        (["fit", "--config", "demo", "--data.corpus", "a", "--data.mix.prob", "3"], 2, "mix.prob is 3.0"),
        (["fit", "--config", "demo", "--data.corpus", "gone.corpus"], 1, "gone.corpus: does not exist"),
        (
            ["fit", "--config", "demo", "--data.corpus", "a", "--model.config.encoder.d_model", "145"],
            2,
            "encoder.d_model is 145",
        ),
        (["fit", "--config", "demo", "--data.corpus", "a", "--guard.limits.step_s", "0"], 2, "limits.step_s is 0"),
        (["fit", "--config", "demo", "--data.corpus", "a", "--guard.x", "1"], 2, "See `nestmodel fit --help`"),
        (["fit", "--config", "demo", "--data.corpus", "a", "--model.kernels", "graph"], 2, "'auto', 'torch'"),
    ],
)
def test_invalid_input_is_one_line_with_the_remedy(
    arguments: list[str],
    code: int,
    message: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(arguments) == code
    assert message in error_of(capsys)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("flag", "value", "message"),
    [("max_time", "00:00:6:00", "Expected a string in the format DD:HH:MM:SS"), ("devices", "0", "devices='0'")],
)
def test_a_setting_that_lightning_refuses_is_one_line(
    flag: str,
    value: str,
    message: str,
    messy_corpora: MessyCorpora,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.chdir(tmp_path)
    arguments = ["--config", "demo", "--data.corpus", str(messy_corpora.speech), "--trainer.accelerator", "cpu"]
    assert main(["fit", *arguments, f"--trainer.{flag}", value]) == 2
    assert message in error_of(capsys)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--trainer.strategy", "ddp", "--trainer.devices", "3"], "which 3 ranks cannot share evenly"),
        (["--trainer.accumulate_grad_batches", "5"], "trainer.accumulate_grad_batches is 5"),
        (["--trainer.val_check_interval", "9", "--trainer.check_val_every_n_epoch", "1"], "but an epoch has"),
        (["--ckpt_path", "last!"], "there is no checkpoint in "),
        (["--guard.limits.step_s", "1800"], "the process group times out"),
    ],
)
def test_a_mistake_of_configuration_is_exit_code_2_before_anything_is_written(
    flags: list[str], message: str, messy_corpora: MessyCorpora, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    if "guard" in flags[0]:
        flags = [*flags, "--trainer.strategy.class_path", "DDPStrategy", "--trainer.strategy.timeout", "0:10:00"]
    (tmp_path / "tiny.yaml").write_text(yaml.safe_dump(TINY))
    arguments = ["--config", tmp_path / "tiny.yaml", "--data.corpus", messy_corpora.speech]
    arguments += ["--trainer.accelerator", "cpu", "--trainer.default_root_dir", tmp_path / "run", *flags]
    assert main(["fit", *map(str, arguments)]) == 2
    assert message in error_of(capsys)
    assert {path.name for path in tmp_path.rglob("*")} <= {"tiny.yaml", "run"}


@pytest.mark.parametrize(
    ("callbacks", "message"),
    [
        ({"Checkpoints": {"keep": 0}}, "Checkpoints.keep is 0: give at least 1"),
        ({"Checkpoints": {"monitor": "val_los"}}, "Checkpoints.monitor is 'val_los', which is not logged: take one of"),
    ],
)
def test_a_mistake_in_the_settings_of_a_callback_is_one_line_before_anything_is_written(
    callbacks: dict[str, object],
    message: str,
    messy_corpora: MessyCorpora,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    given = [{"class_path": f"nestmodel.{name}", "init_args": settings} for name, settings in callbacks.items()]
    (tmp_path / "tiny.yaml").write_text(yaml.safe_dump({**TINY, "trainer": {**TINY["trainer"], "callbacks": given}}))
    arguments = ["--config", tmp_path / "tiny.yaml", "--data.corpus", messy_corpora.speech]
    arguments += ["--trainer.accelerator", "cpu", "--trainer.default_root_dir", tmp_path / "run"]
    assert main(["fit", *map(str, arguments)]) == 2
    assert message in error_of(capsys)
    assert {path.name for path in tmp_path.rglob("*")} <= {"tiny.yaml", "run"}


@pytest.mark.slow
def test_a_run_says_that_it_starts_anew_and_a_validation_has_the_step_of_its_checkpoint(
    messy_corpora: MessyCorpora, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    trainer = {**TINY["trainer"], "callbacks": [{"class_path": "nestmodel.Checkpoints"}]}
    (tmp_path / "tiny.yaml").write_text(yaml.safe_dump({**TINY, "trainer": trainer}))
    arguments = ["--config", tmp_path / "tiny.yaml", "--data.corpus", messy_corpora.speech, "--ckpt_path", "last"]
    arguments += ["--data.val_corpus", messy_corpora.windows, "--trainer.accelerator", "cpu"]
    arguments += ["--trainer.default_root_dir", tmp_path / "run"]
    command = [*map(str, arguments)]
    assert main(["validate", *command]) == 2
    assert "there is no checkpoint in " in error_of(capsys)
    assert main(["fit", *command]) == 0
    assert capsys.readouterr().err.count(f"no checkpoint in {tmp_path / 'run'}: starting at step 0\n") == 1
    assert main(["validate", *command]) == 0
    assert "no checkpoint in" not in capsys.readouterr().err
    (step,) = read_metrics(tmp_path / "run" / "version_1")["val_loss"][0]
    assert step == 4
    assert main(["fit", *command, "--data.mix.prob", "0.25"]) == 2
    assert "the checkpoint was written by a run with other data or settings (data.mix.prob: " in error_of(capsys)


@pytest.mark.parametrize("place", ["file/run", "/proc/run"])
def test_a_directory_that_cannot_be_written_is_one_line_before_training(
    place: str, messy_corpora: MessyCorpora, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    directory = tmp_path / place
    arguments = ["--config", "demo", "--data.corpus", str(messy_corpora.speech), "--trainer.accelerator", "cpu"]
    assert main(["fit", *arguments, "--trainer.default_root_dir", str(directory)]) == 1
    assert f"error: {directory}: cannot be written (" in error_of(capsys)


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_run_whose_files_are_all_broken_ends_with_their_names(
    num_workers: int, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    corpus = folder_corpus(tmp_path / "speech", {f"{i}.flac": hiss(16000 * 3, i) for i in range(4)})
    for path in (tmp_path / "speech").glob("*.flac"):
        path.write_bytes(path.read_bytes()[:20000])
    (tmp_path / "tiny.yaml").write_text(yaml.safe_dump(TINY))
    arguments = ["--config", tmp_path / "tiny.yaml", "--data.corpus", corpus.path, "--data.num_workers", num_workers]
    assert main([str(a) for a in ("fit", *arguments, "--trainer.default_root_dir", tmp_path / "run")]) == 1
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
        corpus = ["--data.corpus", str(messy_corpora.speech)]
        assert main(["fit", "--config", "demo", *corpus, "--ckpt_path", str(tmp_path / name)]) == 2
        error = error_of(capsys)
        assert f"{name}: " in error
        assert reason in error
        assert "weights_only" not in error  # torch's advice to load the file all the same
    assert not (tmp_path / "created").exists()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("trainer:\n  max_step: 3\n", "'trainer.max_step'; the nearest is 'trainer.max_steps'"),
        ("data:\n  plan: {seeds: 3}\n", "data.plan.seeds"),
        ("model:\n  config:\n    encoder: {d_modl: 8}\n", "the nearest is 'model.config.encoder.d_model'"),
        ("trainer:\n  - [}", "bad.yaml: not YAML"),
        ("", "bad.yaml: expected sections"),
        ("- trainer", "bad.yaml: expected sections"),
    ],
)
def test_an_invalid_configuration_file_is_one_line(
    content: str, message: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "bad.yaml").write_text(content)
    assert main(["fit", "--config", "demo", "--config", str(tmp_path / "bad.yaml"), "--data.corpus", "a"]) == 2
    assert message in error_of(capsys)


def test_a_deterministic_run_sets_what_cublas_and_nccl_need_and_refuses_other_values(
    messy_corpora: MessyCorpora,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", "")
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG")
    monkeypatch.setenv("NCCL_ALGO", "Tree")
    (tmp_path / "tiny.yaml").write_text(yaml.safe_dump(TINY))
    arguments = ["fit", "--config", tmp_path / "tiny.yaml", "--data.corpus", messy_corpora.speech]
    arguments += ["--trainer.default_root_dir", tmp_path / "run", "--trainer.accelerator", "cpu"]
    arguments += ["--trainer.deterministic", "true", "--trainer.fast_dev_run", "true"]
    fills = torch.utils.deterministic.fill_uninitialized_memory
    try:
        assert main([str(argument) for argument in arguments]) == 2
        assert "trainer.deterministic needs NCCL_ALGO=Ring, but the environment sets it to 'Tree'" in error_of(capsys)
        assert "CUBLAS_WORKSPACE_CONFIG" not in os.environ
        monkeypatch.delenv("NCCL_ALGO")
        assert main([str(argument) for argument in arguments]) == 0
        assert torch.are_deterministic_algorithms_enabled()
        assert (os.environ["CUBLAS_WORKSPACE_CONFIG"], os.environ["NCCL_ALGO"]) == (":4096:8", "Ring")
        arguments[arguments.index("true")] = "warn"
        with pytest.warns(UserWarning, match="attention stays non-deterministic on a GPU"):
            assert main([str(argument) for argument in arguments]) == 0
    finally:
        torch.use_deterministic_algorithms(False)
        torch.utils.deterministic.fill_uninitialized_memory = fills


def test_a_name_of_node_0_that_cannot_be_resolved_is_one_line(
    messy_corpora: MessyCorpora,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.setattr("nestmodel.training.starting.launcher._RESOLVE_S", 0.0)
    monkeypatch.setenv("MASTER_ADDR", "n" * 64)  # no name: a part of one has at most 63 characters
    monkeypatch.setenv("NODE_RANK", "0")
    (tmp_path / "tiny.yaml").write_text(yaml.safe_dump(TINY))
    arguments = ["fit", "--config", tmp_path / "tiny.yaml", "--data.corpus", messy_corpora.speech]
    arguments += ["--trainer.default_root_dir", tmp_path / "run", "--trainer.accelerator", "cpu"]
    arguments += ["--trainer.devices", "1", "--trainer.num_nodes", "2", "--trainer.strategy", "ddp"]
    assert main([str(argument) for argument in arguments]) == 1
    assert "error: the name of node 0, 'nnnn" in error_of(capsys)
