import errno
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from pytorch_lightning.callbacks import LambdaCallback

from nestmodel import CheckpointConfig, Checkpoints
from nestmodel.training.saving.best_checkpoint import BestCheckpoint
from nestmodel.training.saving.checkpoint_files import checkpoint_name
from tests.conftest import MessyCorpora
from tests.training import fit


def written(directory: Path, step: int) -> Path:
    directory.mkdir(exist_ok=True)
    path = directory / checkpoint_name(step)
    path.write_text(f"state of step {step}")
    return path


def best_of(directory: Path) -> str:
    return (directory / "best.ckpt").read_text()


def test_the_first_of_the_lowest_losses_is_kept_when_its_checkpoint_is_removed(tmp_path: Path) -> None:
    best = BestCheckpoint()
    for step, value in enumerate([2.0, 1.0, 3.0, 1.0, 3.0, float("nan")], start=1):
        path = written(tmp_path, step)
        best.offer(path, tmp_path, step, value)
        path.unlink()
    assert best_of(tmp_path) == "state of step 2"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["best.ckpt", "best.json"]


def test_a_resumed_run_knows_the_best_so_far_and_has_it_in_its_own_directory(tmp_path: Path) -> None:
    before, now = tmp_path / "before", tmp_path / "now"
    BestCheckpoint().offer(written(before, 1), before, 1, 1.0)
    resumed = BestCheckpoint()
    resumed.resume(before, now, step=2)
    assert best_of(now) == "state of step 1"
    resumed.offer(written(now, 3), now, 3, 1.5)
    assert best_of(now) == "state of step 1"
    resumed.offer(written(now, 4), now, 4, 0.5)
    assert (best_of(now), best_of(before)) == ("state of step 4", "state of step 1")


def test_a_kill_between_the_record_and_the_file_is_repaired_by_the_next_start(tmp_path: Path) -> None:
    best = BestCheckpoint()
    best.offer(written(tmp_path, 1), tmp_path, 1, 2.0)
    record = {"step": 2, "val_loss": 1.0}
    written(tmp_path, 2)
    (tmp_path / "best.json").write_text(json.dumps(record))
    BestCheckpoint().resume(tmp_path, tmp_path, step=2)
    assert best_of(tmp_path) == "state of step 2"


def test_the_best_of_abandoned_steps_is_not_taken_over(tmp_path: Path) -> None:
    before, now = tmp_path / "before", tmp_path / "now"
    BestCheckpoint().offer(written(before, 1), before, 1, 1.0)
    (before / "best.json").write_text(json.dumps({"step": 3, "val_loss": 1.0}))
    resumed = BestCheckpoint()
    resumed.resume(before, now, step=2)
    assert not now.exists()
    resumed.offer(written(now, 3), now, 3, 9.0)
    assert best_of(now) == "state of step 3"


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"step": "a", "val_loss": 1}'])
def test_a_damaged_record_is_a_warning(tmp_path: Path, text: str) -> None:
    (tmp_path / "best.json").write_text(text)
    with pytest.warns(UserWarning, match=r"best\.json: cannot be read, so that the best checkpoint is sought anew"):
        BestCheckpoint().resume(tmp_path, tmp_path / "now", step=2)


def test_without_hard_links_the_file_is_copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr("os.link", refuse)
    path = written(tmp_path, 1)
    BestCheckpoint().offer(path, tmp_path, 1, 1.0)
    path.unlink()
    assert best_of(tmp_path) == "state of step 1"


def test_a_copy_that_fails_leaves_the_best_checkpoint_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    best = BestCheckpoint()
    best.offer(written(tmp_path, 1), tmp_path, 1, 2.0)

    def fail(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as full:
        full.setattr("os.link", fail)
        full.setattr("shutil.copyfile", fail)
        with pytest.raises(OSError, match="No space left"):
            best.offer(written(tmp_path, 2), tmp_path, 2, 1.0)
    assert best_of(tmp_path) == "state of step 1"
    assert json.loads((tmp_path / "best.json").read_text())["step"] == 1
    assert not list(tmp_path.glob("*.partial"))
    best.offer(written(tmp_path, 3), tmp_path, 3, 1.5)
    assert best_of(tmp_path) == "state of step 3"


@pytest.mark.slow
def test_the_best_checkpoint_of_a_validation_is_kept(messy_corpora: MessyCorpora, tmp_path: Path) -> None:
    saver = Checkpoints(CheckpointConfig(every_n_steps=1, keep=1, directory=tmp_path / "saved", monitor="val_loss"))
    losses: list[float] = []

    seen = LambdaCallback(
        on_validation_end=lambda runner, *_: losses.append(float(runner.callback_metrics["val_loss"]))
    )
    settings: dict[str, Any] = {
        "limit_val_batches": 1.0,
        "val_check_interval": 1,
        "check_val_every_n_epoch": None,
        "callbacks": [seen, saver],
    }
    fit(messy_corpora, tmp_path, max_steps=3, enable_checkpointing=True, **settings)
    assert torch.load(tmp_path / "saved" / "best.ckpt", weights_only=False)["global_step"] == 1 + losses.index(
        min(losses)
    )
