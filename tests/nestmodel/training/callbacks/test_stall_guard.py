import os
import signal
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
from pytorch_lightning.strategies import DDPStrategy

import nestguard
import nestmodel.training.callbacks.stall_guard
from nestguard import StallLimits
from nestmodel import ConfigError, StallGuard
from tests.conftest import MessyCorpora
from tests.training import fit, trainer

SHARED = Path("/dev/shm")


class AtStep(pl.Callback):
    """Calls a function once, before a step."""

    def __init__(self, step: int, action: Any) -> None:
        self.step = step
        self.action = action

    def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_step == self.step:
            action, self.action = self.action, lambda: None
            action()


def heartbeat_directories() -> set[str]:
    return {path.name for path in SHARED.glob(f"nestguard-{os.getpid()}-*")}


def test_training_has_a_heartbeat_and_leaves_no_files(messy_corpora: MessyCorpora, tmp_path: Path) -> None:
    before, during = heartbeat_directories(), []
    look = AtStep(1, lambda: during.append(nestguard.current()))
    guard = StallGuard()
    fit(messy_corpora, tmp_path, max_steps=2, callbacks=[guard, look])
    assert isinstance(during[0], nestguard.Heartbeat)
    assert isinstance(nestguard.current(), nestguard.NoHeartbeat)
    assert heartbeat_directories() <= before
    assert not (tmp_path / "stalls").exists()


def test_an_exception_of_the_only_rank_is_not_reported_as_a_stall(
    messy_corpora: MessyCorpora, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    def fail() -> None:
        raise ValueError("injected failure")

    with pytest.raises(ValueError, match="injected failure"):
        fit(messy_corpora, tmp_path, max_steps=2, callbacks=[StallGuard(), AtStep(1, fail)])
    assert "stall guard" not in capfd.readouterr().err
    assert not (tmp_path / "stalls").exists()


def test_training_continues_with_one_warning_if_the_monitor_dies(
    messy_corpora: MessyCorpora, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nestmodel.training.callbacks.stall_guard, "_MONITOR_CHECK_S", 0.0)
    guard = StallGuard()

    def kill() -> None:
        assert guard._monitor is not None
        os.kill(guard._monitor.pid, signal.SIGKILL)
        guard._monitor.wait(5)

    with pytest.warns(UserWarning, match="monitor has died; training continues unwatched") as warned:
        model, _ = fit(messy_corpora, tmp_path, max_steps=3, callbacks=[guard, AtStep(1, kill)])
    assert model.trainer.global_step == 3
    assert len([one for one in warned if "unwatched" in str(one.message)]) == 1


def test_training_continues_with_a_warning_if_no_heartbeat_can_be_written(
    messy_corpora: MessyCorpora, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nestmodel.training.callbacks.stall_guard, "node_run_id", lambda _: "x" * 300)
    with pytest.warns(
        UserWarning, match="the stall guard cannot start, so the run is not watched: .*File name too long"
    ):
        model, _ = fit(messy_corpora, tmp_path, max_steps=1, callbacks=[StallGuard()])
    assert model.trainer.global_step == 1


def test_a_process_group_timeout_below_the_limit_is_rejected(tmp_path: Path) -> None:
    strategy = DDPStrategy(process_group_backend="gloo", timeout=timedelta(seconds=60))
    runner = trainer(tmp_path, devices=2, strategy=strategy)
    with pytest.raises(ConfigError, match=r"times out after 60 s, before .*limits\.step_s is 90 s"):
        StallGuard(StallLimits(step_s=90)).start(runner)


def test_an_invalid_port_is_rejected() -> None:
    with pytest.raises(ConfigError, match=r"guard\.port is 0: give a port from 1 to 65535"):
        StallGuard(port=0)
