import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from nestguard import EXIT_STALLED
from tests.cli.test_nestmodel import TINY
from tests.conftest import MessyCorpora

LIMITS = {"first_step_s": 90, "step_s": 5}


def child_of(pid: int) -> int:
    """The rank that Lightning has started beside the first."""
    for path in Path("/proc").glob("[0-9]*"):
        try:
            parent = int((path / "stat").read_text().rpartition(")")[2].split()[1])
            words = (path / "cmdline").read_bytes()
        except OSError:
            continue
        if parent == pid and b"nestmodel\0fit\0" in words:
            return int(path.name)
    raise AssertionError("there is no second rank")


@pytest.mark.multiprocess
@pytest.mark.slow
@pytest.mark.faults
def test_fit_has_one_guard_with_the_limits_that_it_was_given(messy_corpora: MessyCorpora, tmp_path: Path) -> None:
    (tmp_path / "tiny.yaml").write_text(yaml.safe_dump({**TINY, "guard": {"limits": LIMITS}}))
    command = [str(Path(sys.executable).parent / "nestmodel"), "fit", "--config", "tiny.yaml"]
    command += ["--data.corpus", str(messy_corpora.speech), "--trainer.accelerator", "cpu", "--trainer.devices", "2"]
    command += ["--trainer.strategy", "ddp", "--trainer.max_steps", "100000", "--trainer.default_root_dir", "run"]
    command += ["--guard.report_dir", "reports", "--guard.limits.step_s", "4"]
    with (tmp_path / "log").open("w") as log:
        run = subprocess.Popen(
            command, cwd=tmp_path, env={**os.environ, "OMP_NUM_THREADS": "1"}, stdout=log, stderr=log
        )
    try:
        metrics = tmp_path / "run" / "version_0" / "metrics.csv"
        while not (metrics.exists() and len(metrics.read_text().splitlines()) > 3):
            assert run.poll() is None, (tmp_path / "log").read_text()
            time.sleep(0.2)
        os.kill(child_of(run.pid), signal.SIGSTOP)
        assert run.wait(timeout=30) == EXIT_STALLED
    finally:
        run.kill()
        run.wait()
    time.sleep(1)  # a second guard would have its say, too
    (report,) = (tmp_path / "reports").glob("*/stall.json")
    assert (
        json.loads(report.read_text())["limits"] | {**LIMITS, "step_s": 4} == json.loads(report.read_text())["limits"]
    )
    assert (tmp_path / "log").read_text().count("stall guard: rank 1 is stopped") == 1
