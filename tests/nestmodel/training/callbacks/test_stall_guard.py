import os
import signal
import threading
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
from pytorch_lightning.strategies import DDPStrategy
from torch.distributed.constants import default_pg_timeout

import nestguard
import nestguard.observe.device
import nestmodel.training.callbacks.stall_guard
from nestguard import Phase, StallLimits
from nestguard.observe.view import DevicePosition
from nestmodel import GuardConfig, StallGuard
from nestmodel.training.lightning_private import process_group_timeout_s
from tests.conftest import MessyCorpora
from tests.nestguard.devices import StandIn
from tests.nestguard.runs import wait_until
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
    return {path.name for path in SHARED.glob(f"nestguard-{os.geteuid()}/{os.getpid()}-*")}


def test_training_has_a_heartbeat_and_leaves_no_files(messy_corpora: MessyCorpora, tmp_path: Path) -> None:
    during: list[Any] = []
    look = AtStep(1, lambda: during.extend([nestguard.current(), heartbeat_directories()]))
    guard = StallGuard()
    fit(messy_corpora, tmp_path, max_steps=2, callbacks=[guard, look])
    assert during[0].slot is not None
    assert len(during[1]) == 1
    assert isinstance(nestguard.current(), nestguard.NoHeartbeat)
    assert heartbeat_directories() == set()
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
    assert len([warning for warning in warned if "unwatched" in str(warning.message)]) == 1
    assert heartbeat_directories() == set()


def test_training_continues_with_a_warning_if_no_heartbeat_can_be_written(
    messy_corpora: MessyCorpora, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nestmodel.training.callbacks.stall_guard, "node_run_id", lambda _: "x" * 300)
    with pytest.warns(
        UserWarning, match="the stall guard cannot start, so the run is not watched: .*File name too long"
    ):
        model, _ = fit(messy_corpora, tmp_path, max_steps=1, callbacks=[StallGuard()])
    assert model.trainer.global_step == 1


def timeout_after_check(
    directory: Path, limits: StallLimits, timeout: timedelta | None = default_pg_timeout
) -> float | None:
    """Returns the timeout of the process group in seconds after the guard has checked it."""
    strategy = DDPStrategy(process_group_backend="gloo", timeout=timeout)
    runner = trainer(directory, devices=2, strategy=strategy)
    StallGuard(GuardConfig(limits)).check_timeout(runner)
    return process_group_timeout_s(runner)


def test_a_default_timeout_is_raised_above_the_longest_wait(tmp_path: Path) -> None:
    # 870 s for the first step, 870 s for a validation or checkpoint before it, and 60 s for the report.
    assert timeout_after_check(tmp_path, StallLimits()) == 1800
    assert timeout_after_check(tmp_path, StallLimits(), None) == 1800
    assert timeout_after_check(tmp_path, StallLimits(checkpoint_s=2000)) == 4060
    assert timeout_after_check(tmp_path, StallLimits(step_s=2000)) == 2930
    short = StallLimits(first_step_s=60, validation_s=60, checkpoint_s=60)
    assert timeout_after_check(tmp_path, short) == timeout_after_check(tmp_path, short, None) == 1800


def test_a_chosen_timeout_below_the_longest_wait_is_kept_with_a_warning(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="times out after 600 s, before .* that waits for 1800 s"):
        assert timeout_after_check(tmp_path, StallLimits(), timedelta(seconds=600)) == 600
    assert timeout_after_check(tmp_path, StallLimits(), timedelta(seconds=1800)) == 1800


@pytest.mark.parametrize("accelerator", ["cpu", pytest.param("gpu", marks=pytest.mark.gpu)])
def test_the_device_of_a_rank_is_observed_until_training_ends(
    messy_corpora: MessyCorpora, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, accelerator: str
) -> None:
    seen = []
    monkeypatch.setattr(nestguard.observe.device, "POLL_S", 0.01)
    if accelerator == "cpu":
        device = StandIn()
        monkeypatch.setattr(nestmodel.training.callbacks.stall_guard, "new_event_of", lambda _: device.new_event)

    def look() -> None:
        slot = nestguard.current().slot
        assert slot is not None
        path = slot.directory / "rank-0.beat"
        wait_until(lambda: position(path) == DevicePosition(Phase.FORWARD, 1, 0), 60)
        seen.append(position(path))

    fit(messy_corpora, tmp_path, max_steps=3, callbacks=[StallGuard(), AtStep(1, look)], accelerator=accelerator)
    assert len(seen) == 1
    assert "nestguard-device" not in {thread.name for thread in threading.enumerate()}


def position(path: Path) -> DevicePosition | None:
    reading = nestguard.read_heartbeat(path)
    return None if reading is None else reading.device
