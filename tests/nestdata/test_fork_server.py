import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from multiprocessing.synchronize import SemLock
from pathlib import Path
from typing import Any

import pytest

from nestdata import StorageError, microbatches
from nestdata.fork_server import UnnamedContext
from tests.batches import messy_dataset
from tests.conftest import MessyCorpora
from tests.nestdata.full_disk import files_up_to

REPOSITORY = Path(__file__).parents[2]
MARK = "FORK_SERVER_TEST"
PATIENCE_S = 60.0
NUM_WORKERS = 2


def main(speech: str, noise: str) -> None:
    """Loads batches with workers of a fork server; says what the test compares, and waits to be killed."""
    names: list[str] = []
    make_name = SemLock._make_name  # type: ignore[attr-defined]

    def make_and_note() -> str:
        names.append(make_name())
        return names[-1]

    SemLock._make_name = staticmethod(make_and_note)  # type: ignore[attr-defined]
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    dataset = messy_dataset(Path(speech), Path(noise))
    indices = microbatches(dataset.plan, num_steps=20)
    batches = iter(dataset.loader(indices, num_workers=NUM_WORKERS, start_method="forkserver"))
    for _ in range(NUM_WORKERS):
        next(batches)
    next(batches)
    left = [name for name in names if Path(f"/dev/shm/sem.{name.removeprefix('/')}").exists()]
    say({"num_names": len(names), "left": left})
    sys.stdin.readline()  # the whole group was signalled
    say({"num_batches": sum(1 for _ in zip(range(12), batches, strict=False))})
    signal.pause()


def say(what: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(what) + "\n")
    sys.stdout.flush()


def marked_processes(mark: str) -> set[int]:
    """Returns the processes that inherited a variable of the environment."""
    found = set()
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            if f"{MARK}={mark}".encode() in path.read_bytes().split(b"\0"):
                found.add(int(path.parent.name))
        except OSError:
            continue
    return found


@pytest.mark.multiprocess
@pytest.mark.slow
def test_workers_survive_sigterm_end_with_a_killed_owner_and_leave_nothing_in_shared_memory(
    messy_corpora: MessyCorpora, tmp_path: Path
) -> None:
    mark = str(tmp_path)
    code = f"from {__name__} import main; main({str(messy_corpora.speech)!r}, {str(messy_corpora.noise)!r})"
    with subprocess.Popen(
        [sys.executable, "-c", code],
        cwd=REPOSITORY,
        env={**os.environ, MARK: mark, "OMP_NUM_THREADS": "1"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as owner:
        assert owner.stdin is not None
        assert owner.stdout is not None
        semaphores = json.loads(owner.stdout.readline())
        assert semaphores["num_names"] > NUM_WORKERS
        assert semaphores["left"] == []
        before = marked_processes(mark)
        assert len(before) >= 2 + NUM_WORKERS
        os.killpg(owner.pid, signal.SIGTERM)
        owner.stdin.write("\n")
        owner.stdin.flush()
        assert json.loads(owner.stdout.readline()) == {"num_batches": 12}
        owner.kill()
    deadline = time.monotonic() + PATIENCE_S
    while (left := marked_processes(mark)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert left == set()


def test_full_shared_memory_is_an_error_with_its_size() -> None:
    with files_up_to(0), pytest.raises(StorageError, match=r"^/dev/shm: no semaphore .*; \d+ of \d+ KiB are free"):
        UnnamedContext().Lock()


@pytest.mark.slow
@pytest.mark.multiprocess
def test_a_killed_worker_is_noticed_with_the_next_batch(messy_corpora: MessyCorpora) -> None:
    dataset = messy_dataset(messy_corpora.speech, messy_corpora.noise)
    batches = iter(dataset.loader(microbatches(dataset.plan, num_steps=20), num_workers=1, start_method="forkserver"))
    before = set(multiprocessing.active_children())
    next(batches)
    (worker,) = set(multiprocessing.active_children()) - before
    worker.kill()
    worker.join()
    with pytest.raises(RuntimeError, match=rf"pid {worker.pid}\) was killed by SIGKILL.*memory"):
        next(batches)
