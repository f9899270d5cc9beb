"""`nestmodel fit` on two ranks that Lightning starts: its stall guard, preemption, and a full disk."""

import json
import os
import re
import signal
import subprocess
import time
from pathlib import Path

import pytest
import pytorch_lightning as pl

from nestguard import EXIT_STALLED
from nestmodel import newest_checkpoint
from nestmodel.training.callbacks.preemption import EXIT_PREEMPTED, Preempted
from nestmodel.training.saving.checkpoint_files import find_checkpoints
from tests.conftest import MessyCorpora
from tests.distributed.commands import fit_command, kill_all, ranks_of, start, wait_for_steps
from tests.distributed.runs import monitors
from tests.nestguard.runs import wait_until
from tests.training import TINY

pytestmark = [pytest.mark.multiprocess, pytest.mark.slow, pytest.mark.faults]


class EndsSlowly(pl.Callback):
    """Delays the exit of the first rank until Lightning has seen the exit codes of the others."""

    def on_exception(self, trainer: pl.Trainer, _module: pl.LightningModule, exception: BaseException) -> None:
        if trainer.is_global_zero and isinstance(exception, Preempted):
            time.sleep(12)


def command_of(corpora: MessyCorpora, directory: Path, *flags: str) -> list[str]:
    trainer = {**TINY["trainer"], "callbacks": [{"class_path": f"{__name__}.EndsSlowly"}]}
    guard = {"limits": {"first_step_s": 90, "step_s": 5}}
    flags = ("--config", "demo", "--config", "tiny.yaml", "--ckpt-path", "last", *flags)
    return fit_command(corpora, directory, 2, *flags, trainer=trainer, guard=guard)


def signal_second_rank(run: "subprocess.Popen[bytes]", directory: Path, number: signal.Signals) -> None:
    """Waits for some steps, and sends a signal to the rank that the first one has started."""
    wait_for_steps(run, directory, 3)
    (second,) = [pid for pid in ranks_of(directory) if pid != run.pid]
    os.kill(second, number)


def test_fit_has_one_stall_guard_with_the_given_limits(messy_corpora: MessyCorpora, tmp_path: Path) -> None:
    flags = ("--trainer.max_steps", "100000", "--guard.report_dir", "reports", "--guard.limits.step_s", "4")
    run = start(command_of(messy_corpora, tmp_path, *flags), tmp_path)
    try:
        signal_second_rank(run, tmp_path, signal.SIGSTOP)
        assert sum(str(tmp_path) in words for words in monitors().values()) == 1
        assert run.wait(timeout=90) == EXIT_STALLED
    finally:
        kill_all(run, tmp_path)
    (report,) = (tmp_path / "reports").glob("*/stall.json")
    limits = json.loads(report.read_text())["limits"]
    assert (limits["first_step_s"], limits["step_s"]) == (90, 4)
    assert (tmp_path / "log").read_text().count("stall guard: rank 1 is stopped") == 1


@pytest.mark.smoke
def test_a_preset_on_two_ranks_exits_on_sigterm_and_resumes_from_there(
    messy_corpora: MessyCorpora, tmp_path: Path
) -> None:
    run = start(command_of(messy_corpora, tmp_path, "--trainer.max_steps", "100000"), tmp_path)
    try:
        signal_second_rank(run, tmp_path, signal.SIGTERM)
        assert run.wait(timeout=120) == EXIT_PREEMPTED, (tmp_path / "log").read_text()
        beats = Path("/dev/shm", f"nestguard-{os.geteuid()}")
        wait_until(lambda: not list(beats.glob(f"{run.pid}-*")), 20)
    finally:
        kill_all(run, tmp_path)
    (left,) = find_checkpoints(tmp_path / "run" / "version_0" / "checkpoints")
    assert f"preempted after step {left.step}" in (tmp_path / "log").read_text()
    again = start(command_of(messy_corpora, tmp_path, "--trainer.max_steps", str(left.step + 1)), tmp_path)
    assert again.wait(timeout=200) == 0, (tmp_path / "log").read_text()
    assert newest_checkpoint(tmp_path / "run") == (
        tmp_path / "run" / "version_1" / "checkpoints" / f"step_{left.step + 1:08d}.ckpt"
    )
    # DDP warns of gradients with other strides than the weights, and of settings that are meant.
    assert not re.findall(".*Grad strides.*", (tmp_path / "log").read_text())
