"""Runs of two ranks whose audio is in an S3 store that fails."""

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from nestdata.storage import storage
from tests.addressed import addressed_copy
from tests.conftest import MessyCorpora
from tests.distributed.runs import Run
from tests.distributed.test_exact import state_of
from tests.distributed.test_stall import gone_soon
from tests.remote.conftest import Access
from tests.remote.proxy import FaultProxy

pytestmark = [pytest.mark.multiprocess, pytest.mark.slow]

OUTAGE_S = 6.0
SETTINGS: dict[str, Any] = {
    "world_size": 2,
    "num_workers": 1,
    "max_steps": 8,
    "limits": {"step_s": 100.0, "first_step_s": 200.0},
}


@pytest.fixture(scope="module")
def plain(messy_corpora: MessyCorpora, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A run with the audio in files."""
    run = Run(corpora=messy_corpora, directory=tmp_path_factory.mktemp("plain"), **SETTINGS)
    assert run.start() == [0, 0], run.log(0) + run.log(1)
    return run


@pytest.fixture
def corpora(messy_corpora: MessyCorpora, access: Access, proxy: FaultProxy, tmp_path: Path) -> MessyCorpora:
    """The same speech and noise in a bucket behind the proxy."""
    folder = messy_corpora.speech.parent
    audio = [path for path in folder.rglob("*") if path.suffix in (".flac", ".wav", ".ogg")]
    for path in audio:
        storage().write(f"s3://speech/messy/{path.relative_to(folder)}", path)
    speech, noise = (
        addressed_copy(corpus, tmp_path / corpus.name, folder=folder, root="s3://speech/messy")
        for corpus in (messy_corpora.speech, messy_corpora.noise)
    )
    access.use(endpoint=proxy.url)
    return MessyCorpora(speech, noise, Path(), Path())


def after_step(run: Run, step: int, act: Callable[[], None]) -> threading.Thread:
    """Starts a thread that acts when a run has made a step."""

    def wait_and_act() -> None:
        seen = run.directory / "seen-0.jsonl"
        while not seen.exists() or f'"made": {step}' not in seen.read_text():
            time.sleep(0.05)
        act()

    thread = threading.Thread(target=wait_and_act, daemon=True)
    thread.start()
    return thread


def test_a_run_that_is_killed_and_resumed_ends_bit_for_bit_as_from_files(
    corpora: MessyCorpora, plain: Run, tmp_path: Path
) -> None:
    run = Run(corpora=corpora, directory=tmp_path / "run", **SETTINGS)
    assert run.start(faults={1: ("kill", 2, 3)})[1] == -9, run.log(1)
    assert run.steps()[0].step <= 2
    assert run.start() == [0, 0], run.log(0) + run.log(1)
    assert run.seen() == plain.seen()
    assert run.logged() == plain.logged()
    assert state_of(run) == state_of(plain)
    assert gone_soon(run)


def test_a_run_survives_an_outage_without_an_alarm(
    corpora: MessyCorpora, plain: Run, proxy: FaultProxy, tmp_path: Path
) -> None:
    run = Run(corpora=corpora, directory=tmp_path / "run", remote={"patience_s": 60.0, "ahead_bytes": 0}, **SETTINGS)

    def interrupt() -> None:
        proxy.set(stopped=True)
        time.sleep(OUTAGE_S)
        proxy.set(stopped=False)

    outage = after_step(run, 1, interrupt)
    assert run.start() == [0, 0], run.log(0) + run.log(1)
    outage.join()
    assert run.logged() == plain.logged()
    assert state_of(run) == state_of(plain)
    assert not (run.directory / "stalls").exists()
    assert gone_soon(run)


def test_an_outage_beyond_the_patience_ends_the_run_with_the_url(
    corpora: MessyCorpora, proxy: FaultProxy, tmp_path: Path
) -> None:
    run = Run(corpora=corpora, directory=tmp_path / "run", remote={"patience_s": 3.0, "ahead_bytes": 0}, **SETTINGS)
    after_step(run, 1, lambda: proxy.set(stopped=True))
    codes = run.start()
    log = run.log(0) + run.log(1)
    assert 0 not in codes, log
    assert "StorageError: s3://speech/messy/" in log
    assert "tries in 3 s" in log
    assert gone_soon(run)
