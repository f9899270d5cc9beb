import json
import os
import re
import resource
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest
import pytorch_lightning as pl
import yaml

from nestguard import EXIT_STALLED
from nestmodel import newest_checkpoint
from nestmodel.training.saving.checkpoint_files import find_checkpoints
from nestmodel.training.stopping.exit_codes import EXIT_NOT_SAVED
from nestmodel.training.stopping.preemption import EXIT_PREEMPTED, Preempted
from tests.cli.test_nestmodel import TINY
from tests.conftest import MessyCorpora
from tests.distributed.runs import REPOSITORY, monitors
from tests.nestguard.runs import wait_until

LIMITS = {"first_step_s": 90, "step_s": 5}


def child_of(pid: int) -> int:
    """Returns the process id of the second rank, which the first rank has started."""
    for path in Path("/proc").glob("[0-9]*"):
        try:
            parent = int((path / "stat").read_text().rpartition(")")[2].split()[1])
            words = (path / "cmdline").read_bytes()
        except OSError:
            continue
        if parent == pid and b"nestmodel\0fit\0" in words:
            return int(path.name)
    raise AssertionError("no second rank was found")


class EndsSlowly(pl.Callback):
    """Delays the exit of the first rank until Lightning has seen the exit codes of the others."""

    def on_exception(self, trainer: pl.Trainer, _module: pl.LightningModule, exception: BaseException) -> None:
        if trainer.is_global_zero and isinstance(exception, Preempted):
            time.sleep(12)


def start(
    corpora: MessyCorpora, directory: Path, *flags: str, max_file_bytes: int | None = None
) -> "subprocess.Popen[bytes]":
    """Starts `nestmodel fit` on two ranks, with the demo preset and a smaller model.

    Args:
        corpora: Prepared speech and noise.
        directory: The working directory.
        flags: Further arguments.
        max_file_bytes: Larger files cannot be written, as on a full disk.
    """
    callbacks = [{"class_path": f"{__name__}.EndsSlowly"}]
    tiny = {**TINY, "trainer": {**TINY["trainer"], "callbacks": callbacks}, "guard": {"limits": LIMITS}}
    (directory / "tiny.yaml").write_text(yaml.safe_dump(tiny))
    command = [str(Path(sys.executable).parent / "nestmodel"), "fit", "--config", "demo", "--config", "tiny.yaml"]
    command += [str(corpora.speech), "--accelerator", "cpu", "--devices", "2", "--trainer.strategy", "ddp"]
    command += ["--output", "run", "--ckpt-path", "last", *flags]
    environment = {name: value for name, value in os.environ.items() if name != "LOCAL_RANK"}
    environment |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPOSITORY)}
    with (directory / "log").open("a") as log:
        return subprocess.Popen(
            command,
            cwd=directory,
            env=environment,
            stdout=log,
            stderr=log,
            preexec_fn=None if max_file_bytes is None else partial(limit_files, max_file_bytes),
        )


def limit_files(num_bytes: int) -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, num_bytes))


def wait_for_steps(run: "subprocess.Popen[bytes]", directory: Path) -> None:
    metrics = directory / "run" / "version_0" / "metrics.csv"
    while not (metrics.exists() and len(metrics.read_text().splitlines()) > 3):
        assert run.poll() is None, (directory / "log").read_text()
        time.sleep(0.2)


@pytest.mark.multiprocess
@pytest.mark.slow
@pytest.mark.faults
def test_fit_has_one_stall_guard_with_the_given_limits(messy_corpora: MessyCorpora, tmp_path: Path) -> None:
    flags = ("--trainer.max_steps", "100000", "--guard.report_dir", "reports", "--guard.limits.step_s", "4")
    run = start(messy_corpora, tmp_path, *flags)
    try:
        wait_for_steps(run, tmp_path)
        assert sum(str(tmp_path) in words for words in monitors().values()) == 1
        os.kill(child_of(run.pid), signal.SIGSTOP)
        assert run.wait(timeout=90) == EXIT_STALLED
    finally:
        run.kill()
        run.wait()
    (report,) = (tmp_path / "reports").glob("*/stall.json")
    limits = json.loads(report.read_text())["limits"]
    assert (limits["first_step_s"], limits["step_s"]) == (90, 4)
    assert (tmp_path / "log").read_text().count("stall guard: rank 1 is stopped") == 1


@pytest.mark.smoke
@pytest.mark.multiprocess
@pytest.mark.slow
@pytest.mark.faults
def test_a_preset_on_two_ranks_exits_on_sigterm_and_resumes_from_there(
    messy_corpora: MessyCorpora, tmp_path: Path
) -> None:
    run = start(messy_corpora, tmp_path, "--trainer.max_steps", "100000")
    try:
        wait_for_steps(run, tmp_path)
        os.kill(child_of(run.pid), signal.SIGTERM)
        assert run.wait(timeout=120) == EXIT_PREEMPTED, (tmp_path / "log").read_text()
        left = Path("/dev/shm", f"nestguard-{os.geteuid()}")
        wait_until(lambda: not list(left.glob(f"{run.pid}-*")), 20)
    finally:
        run.kill()
        run.wait()
    (left,) = find_checkpoints(tmp_path / "run" / "version_0" / "checkpoints")
    assert f"preempted after step {left.step}" in (tmp_path / "log").read_text()
    again = start(messy_corpora, tmp_path, "--trainer.max_steps", str(left.step + 1))
    assert again.wait(timeout=200) == 0, (tmp_path / "log").read_text()
    assert newest_checkpoint(tmp_path / "run") == (
        tmp_path / "run" / "version_1" / "checkpoints" / f"step_{left.step + 1:08d}.ckpt"
    )
    # DDP warns of gradients with other strides than the weights, and of settings that are meant.
    assert not re.findall(".*Grad strides.*", (tmp_path / "log").read_text())


@pytest.mark.multiprocess
@pytest.mark.slow
@pytest.mark.faults
def test_two_ranks_that_are_preempted_with_a_full_disk_end_with_74(messy_corpora: MessyCorpora, tmp_path: Path) -> None:
    flags = ("--trainer.max_steps", "100000", "--data.num_workers", "0")
    run = start(messy_corpora, tmp_path, *flags, max_file_bytes=1 << 16)
    try:
        wait_for_steps(run, tmp_path)
        os.kill(child_of(run.pid), signal.SIGTERM)
        assert run.wait(timeout=120) == EXIT_NOT_SAVED, (tmp_path / "log").read_text()
    finally:
        run.kill()
        run.wait()
    log = (tmp_path / "log").read_text()
    assert re.search(r"error: step \d+: .*could not be written \(File too large\)\. No step can be resumed", log), log
    assert "preempted after" not in log
    assert "stall guard:" not in log
    assert not list(tmp_path.rglob("*.partial"))
    # With space, the same command makes the run from its beginning.
    again = start(messy_corpora, tmp_path, "--trainer.max_steps", "2")
    assert again.wait(timeout=200) == 0, (tmp_path / "log").read_text()
