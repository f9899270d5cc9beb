from pathlib import Path
from typing import Any

import pytest
from pytorch_lightning.loggers import CSVLogger

from nestmodel import CheckpointConfig, Checkpoints, Curves, Preempted, PreemptionHandler
from nestmodel.training.callbacks.curves import copy_earlier_metrics, draw_curves, read_metrics
from tests.conftest import MessyCorpora
from tests.training import RequestPreemption, fit


def test_truncated_rows_and_files_of_other_programs_are_ignored(tmp_path: Path) -> None:
    (tmp_path / "metrics.csv").write_text("lr,step,train_loss\n0.1,4,2.5\n0.1,9\n0.1,14,2.125,1\n0.1,19,2.0\n0.1,24,2.")
    assert read_metrics(tmp_path)["train_loss"] == ([4, 19], [2.5, 2.0])
    copy_earlier_metrics(tmp_path, tmp_path / "next", 9)
    assert (tmp_path / "next" / "earlier_metrics.csv").read_text() == "lr,step,train_loss\n0.1,4,2.5\n"
    (tmp_path / "metrics.csv").write_text("name,value\nx,y\n")
    assert read_metrics(tmp_path) == {}


def test_curves_are_drawn_when_some_metrics_are_missing(tmp_path: Path) -> None:
    path = tmp_path / "metrics.csv"
    path.write_text("step,train_loss,lr\n4,2.5,0.1\n9,2.25,0.2\n")
    draw_curves(tmp_path, tmp_path / "curves.png")
    assert (tmp_path / "curves.png").read_bytes()[:4] == b"\x89PNG"


@pytest.mark.smoke
@pytest.mark.slow
def test_a_run_that_was_resumed_twice_has_the_metrics_of_an_uninterrupted_run(
    messy_corpora: MessyCorpora, tmp_path: Path
) -> None:
    def train(name: str, max_steps: int, after: str | None = None) -> Path:
        logger = CSVLogger(tmp_path, name="", version=name)
        saved = tmp_path / name / "checkpoints"
        path = None
        if after is not None:
            path = tmp_path / after / "checkpoints" / f"step_{max_steps - 2:08d}.ckpt"
        fit(
            messy_corpora,
            tmp_path,
            # Each start makes one step more than the checkpoint that the next start resumes from, as a killed run does.
            max_steps=max_steps + 1,
            ckpt_path=path,
            callbacks=[Checkpoints(CheckpointConfig(every_n_steps=1, keep=3, directory=saved)), Curves()],
            enable_checkpointing=True,
            logger=logger,
            log_every_n_steps=1,
            val_check_interval=4,
            check_val_every_n_epoch=None,
            limit_val_batches=1,
        )
        assert (tmp_path / name / "curves.png").exists()
        return tmp_path / name

    plain = read_metrics(train("plain", 6))
    train("first", 2)
    train("second", 4, after="first")
    last = train("third", 6, after="second")
    (tmp_path / "first").rename(tmp_path / "gone")
    assert read_metrics(last) == plain
    assert plain["train_loss"][0] == list(range(7))


def test_the_last_step_of_a_preempted_run_is_logged(messy_corpora: MessyCorpora, tmp_path: Path) -> None:
    logger = CSVLogger(tmp_path, name="", version="run")
    callbacks = [RequestPreemption(2), Checkpoints(), PreemptionHandler(), Curves()]
    settings: dict[str, Any] = {"callbacks": callbacks, "logger": logger, "log_every_n_steps": 1}
    with pytest.raises(Preempted):
        fit(messy_corpora, tmp_path, max_steps=9, enable_checkpointing=True, **settings)
    assert read_metrics(tmp_path / "run")["train_loss"][0] == [0, 1, 2]
    assert (tmp_path / "run" / "checkpoints" / "step_00000003.ckpt").exists()
