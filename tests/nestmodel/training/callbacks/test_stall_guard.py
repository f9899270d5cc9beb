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
    """Does something once, before a step."""

    def __init__(self, step: int, does: Any) -> None:
        self.step = step
        self.does = does

    def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_step == self.step:
            does, self.does = self.does, lambda: None
            does()


def places() -> set[str]:
    return {path.name for path in SHARED.glob(f"nestguard-{os.getpid()}-*")}


def test_a_run_is_watched_while_it_trains_and_leaves_nothing_behind(
    messy_corpora: MessyCorpora, tmp_path: Path
) -> None:
    before, during = places(), []
    look = AtStep(1, lambda: during.append(nestguard.current()))
    guard = StallGuard()
    fit(messy_corpora, tmp_path, max_steps=2, callbacks=[guard, look])
    assert isinstance(during[0], nestguard.Heartbeat)
    assert isinstance(nestguard.current(), nestguard.NoHeartbeat)
    assert places() <= before
    assert not (tmp_path / "stalls").exists()


def test_an_exception_of_the_only_rank_is_no_stall(
    messy_corpora: MessyCorpora, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    def fail() -> None:
        raise ValueError("of the only rank")

    with pytest.raises(ValueError, match="of the only rank"):
        fit(messy_corpora, tmp_path, max_steps=2, callbacks=[StallGuard(), AtStep(1, fail)])
    assert "stall guard" not in capfd.readouterr().err
    assert not (tmp_path / "stalls").exists()


def test_training_goes_on_without_its_monitor_and_says_so(
    messy_corpora: MessyCorpora, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nestmodel.training.callbacks.stall_guard, "_LOOK_S", 0.0)
    guard = StallGuard()

    def kill() -> None:
        assert guard._monitor is not None
        os.kill(guard._monitor.pid, signal.SIGKILL)
        guard._monitor.wait(5)

    with pytest.warns(UserWarning, match="monitor has died; training goes on unwatched") as told:
        model, _ = fit(messy_corpora, tmp_path, max_steps=3, callbacks=[guard, AtStep(1, kill)])
    assert model.trainer.global_step == 3
    assert len([one for one in told if "unwatched" in str(one.message)]) == 1


def test_training_goes_on_where_no_heartbeat_can_be_written(
    messy_corpora: MessyCorpora, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nestmodel.training.callbacks.stall_guard, "node_run_id", lambda _: "x" * 300)
    with pytest.warns(UserWarning, match="the stall guard does not watch: .*File name too long"):
        model, _ = fit(messy_corpora, tmp_path, max_steps=1, callbacks=[StallGuard()])
    assert model.trainer.global_step == 1


def test_a_group_that_gives_up_before_the_guard_is_refused(tmp_path: Path) -> None:
    strategy = DDPStrategy(process_group_backend="gloo", timeout=timedelta(seconds=60))
    runner = trainer(tmp_path, devices=2, strategy=strategy)
    with pytest.raises(ConfigError, match=r"gives up after 60 s, before .*limits\.step_s is 90 s"):
        StallGuard(StallLimits(step_s=90)).start(runner)


def test_a_port_that_is_none_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"guard\.port is 0: give a port from 1 to 65535"):
        StallGuard(port=0)
