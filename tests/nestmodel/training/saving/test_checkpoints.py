import os
import resource
from collections.abc import Iterator
from pathlib import Path

import pytest
import pytorch_lightning as pl
import torch

from nestdata.output import unfinished_name
from nestmodel import CheckpointConfig, Checkpoints, NestModel, PreemptionHandler, newest_checkpoint
from nestmodel.training.ranks import EXIT_NOT_SAVED
from nestmodel.training.saving.checkpoint_files import find_checkpoints, write_checkpoint
from nestmodel.training.saving.checkpoints import NotSaved
from tests.conftest import MessyCorpora
from tests.flushes import Flushes
from tests.nestmodel.training.saving.checkpoints import written
from tests.training import RequestPreemption, fit


class NoSpace(pl.Callback):
    """Lets no file grow beyond a size that is below that of a checkpoint while the one of a step is written."""

    def __init__(self, step: int) -> None:
        self._step = step

    def on_save_checkpoint(self, trainer: pl.Trainer, *_: object) -> None:
        if trainer.global_step == self._step:
            resource.setrlimit(resource.RLIMIT_FSIZE, (4096, resource.RLIM_INFINITY))

    def on_train_batch_start(self, *_: object) -> None:
        self.restore()

    @staticmethod
    def restore() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))


@pytest.fixture(autouse=True)
def _space() -> Iterator[None]:
    yield
    NoSpace.restore()


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def test_the_newest_and_the_last_checkpoint_and_the_chosen_multiples_are_kept(
    messy_corpora: MessyCorpora, tmp_path: Path
) -> None:
    saver = Checkpoints(CheckpointConfig(every_n_steps=2, keep=2, keep_every_n_steps=3, directory=tmp_path / "saved"))
    fit(messy_corpora, tmp_path, max_steps=11, callbacks=[saver], enable_checkpointing=True)
    kept = [f"step_{step:08d}.ckpt" for step in (6, 10, 11)]
    assert names(tmp_path / "saved") == ["last.ckpt", *kept]
    assert (tmp_path / "saved" / "last.ckpt").resolve().name == kept[-1]


class Diverge(pl.Callback):
    """Reports a loss out of its range, or skipped steps, from a step on."""

    def __init__(self, step: int, kind: str) -> None:
        self._step, self._kind = step, kind

    def on_train_batch_end(self, trainer: pl.Trainer, module: NestModel, *_: object) -> None:  # type: ignore[override]
        if trainer.global_step == self._step - 1 and self._kind == "loss":
            with torch.no_grad():
                for weight in module.decoder.parameters():
                    weight.mul_(300)
        elif trainer.global_step >= self._step and self._kind == "skipped":
            module._skipped.in_a_row = 1


@pytest.mark.parametrize("kind", ["loss", "skipped"])
def test_checkpoints_of_a_run_that_diverges_do_not_push_out_the_sound_ones(
    kind: str, messy_corpora: MessyCorpora, tmp_path: Path
) -> None:
    saver = Checkpoints(CheckpointConfig(every_n_steps=1, keep=2, directory=tmp_path / "saved"))
    fit(messy_corpora, tmp_path, max_steps=7, callbacks=[Diverge(4, kind), saver], enable_checkpointing=True)
    assert [found.step for found in find_checkpoints(tmp_path / "saved")] == [7, 6, 3, 2]
    saver = Checkpoints(CheckpointConfig(every_n_steps=1, keep=2, directory=tmp_path / "saved"))
    path = tmp_path / "saved" / "last.ckpt"
    callbacks = [Diverge(0, kind), saver]  # a later start knows which are sound
    fit(messy_corpora, tmp_path, max_steps=8, callbacks=callbacks, enable_checkpointing=True, ckpt_path=path)
    assert [found.step for found in find_checkpoints(tmp_path / "saved")] == [8, 7, 3, 2]


def test_the_newest_undamaged_checkpoint_of_all_versions_is_found(tmp_path: Path) -> None:
    assert newest_checkpoint(tmp_path) is None
    for version, step in ((0, 300), (1, 200), (2, 400)):
        written(tmp_path / f"version_{version}" / "checkpoints" / f"step_{step:08d}.ckpt")
    damaged = tmp_path / "version_2" / "checkpoints" / "step_00000400.ckpt"
    assert newest_checkpoint(tmp_path) == damaged
    damaged.write_bytes(damaged.read_bytes()[:-100])
    with pytest.warns(UserWarning, match=r"step_00000400\.ckpt: .*damaged.* It is skipped"):
        assert newest_checkpoint(tmp_path) == tmp_path / "version_1" / "checkpoints" / "step_00000200.ckpt"


def test_a_run_resumed_from_an_earlier_step_keeps_its_own_checkpoints_and_resumes_from_them(
    messy_corpora: MessyCorpora, tmp_path: Path
) -> None:
    saver = Checkpoints(CheckpointConfig(every_n_steps=1, keep=1, directory=tmp_path / "checkpoints"))
    for step in (900, 1000):
        write_checkpoint({"state": "of an abandoned run"}, tmp_path / "checkpoints" / f"step_{step:08d}.ckpt")
    fit(messy_corpora, tmp_path, max_steps=2, callbacks=[saver], enable_checkpointing=True)
    assert [found.step for found in find_checkpoints(tmp_path / "checkpoints")] == [1000, 900, 2]
    assert newest_checkpoint(tmp_path) == tmp_path / "checkpoints" / "step_00000002.ckpt"


def test_a_checkpoint_is_on_disk_before_its_name_and_its_name_before_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flushes, path = Flushes(monkeypatch), tmp_path / "checkpoints" / "step_00000001.ckpt"
    write_checkpoint({"step": 1}, path)
    assert flushes.of(path, path.parent) == [f"flush {path.name}", f"rename {path.name}", "flush checkpoints"]


def test_a_full_disk_skips_one_checkpoint_with_a_warning(messy_corpora: MessyCorpora, tmp_path: Path) -> None:
    saver = Checkpoints(CheckpointConfig(every_n_steps=1, keep=1, directory=tmp_path / "saved"))
    callbacks = [saver, NoSpace(2)]
    with pytest.warns(UserWarning, match=r"step 2: .*could not be written \(File too.*previous checkpoint is intact"):
        fit(messy_corpora, tmp_path, max_steps=3, callbacks=callbacks, enable_checkpointing=True)
    assert names(tmp_path / "saved") == ["last.ckpt", "step_00000003.ckpt"]
    assert torch.load(tmp_path / "saved" / "last.ckpt", weights_only=False)["global_step"] == 3


def test_a_run_whose_last_checkpoint_is_not_on_disk_says_what_can_be_resumed_and_exits_with_74(
    messy_corpora: MessyCorpora,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    saver = Checkpoints(CheckpointConfig(every_n_steps=1, keep=1, directory=tmp_path / "saved"))
    with caplog.at_level("INFO"), pytest.warns(UserWarning, match="not be written"), pytest.raises(NotSaved) as caught:
        fit(messy_corpora, tmp_path, max_steps=2, callbacks=[saver, NoSpace(2)], enable_checkpointing=True)
    assert caught.value.code == EXIT_NOT_SAVED == 74
    (line,) = [record.getMessage() for record in caplog.records if record.getMessage().startswith("error: ")]
    assert f"step 2: {tmp_path}/saved/step_00000002.ckpt could not be written (File too large" in line
    first = tmp_path / "saved" / "step_00000001.ckpt"
    assert f"newest checkpoint is {first}" in line


def test_a_preempted_run_whose_checkpoint_is_not_on_disk_does_not_ask_for_a_restart(
    messy_corpora: MessyCorpora, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    saver = Checkpoints(CheckpointConfig(every_n_steps=100, directory=tmp_path / "saved"))
    callbacks = [RequestPreemption(1), PreemptionHandler(), saver, NoSpace(2)]
    with caplog.at_level("INFO"), pytest.warns(UserWarning, match="not be written"), pytest.raises(NotSaved) as caught:
        fit(messy_corpora, tmp_path, max_steps=9, callbacks=callbacks, enable_checkpointing=True)
    assert caught.value.code == EXIT_NOT_SAVED
    assert "No step can be resumed" in caplog.text
    assert "preempted after" not in caplog.text


def test_a_resumed_run_removes_partial_files_beside_its_checkpoint_and_no_others(
    messy_corpora: MessyCorpora, tmp_path: Path
) -> None:
    before, now = (tmp_path / name for name in ("before", "now"))
    saver = Checkpoints(CheckpointConfig(every_n_steps=1, directory=before))
    fit(messy_corpora, tmp_path, max_steps=1, callbacks=[saver], enable_checkpointing=True)
    others = ["step_00000002.ckpt.partial", ".download.0123456789ab.partial", ".step_7.ckpt.partial"]
    young = unfinished_name(before / "step_00000003.ckpt")  # perhaps of a run that goes on
    others.append(young.name)
    for path in (unfinished_name(before / "step_00000002.ckpt"), *(before / name for name in others)):
        path.write_bytes(b"half")
        if path != young:
            os.utime(path, (1, 1))
    saver = Checkpoints(CheckpointConfig(every_n_steps=1, directory=now))
    path = before / "last.ckpt"
    fit(messy_corpora, tmp_path, max_steps=2, callbacks=[saver], enable_checkpointing=True, ckpt_path=path)
    assert names(before) == sorted([*others, "last.ckpt", "step_00000001.ckpt"])
