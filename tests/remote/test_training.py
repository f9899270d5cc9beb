"""Runs of two ranks whose audio is in an S3 store that fails."""

import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from nestdata import Storage
from nestguard import StallLimits
from tests.addressed import addressed_copy
from tests.conftest import MessyCorpora
from tests.distributed.runs import Run, gone_soon
from tests.remote.conftest import Access
from tests.remote.proxy import FaultProxy
from tests.remote.server import find_weed, s3_server

pytestmark = [pytest.mark.multiprocess, pytest.mark.slow]

OUTAGE_S = 60.0
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
    copies = uploaded(messy_corpora, tmp_path)
    access.use(endpoint=proxy.url)
    return copies


def uploaded(messy_corpora: MessyCorpora, output: Path) -> MessyCorpora:
    """Writes the audio to a bucket, and returns corpora that read it there."""
    folder = messy_corpora.speech.parent
    store = Storage()
    audio = [path for path in folder.rglob("*") if path.suffix in (".flac", ".wav", ".ogg")]
    for path in audio:
        store.write(f"s3://speech/messy/{path.relative_to(folder)}", path)
    speech, noise = (
        addressed_copy(corpus, output / corpus.name, folder=folder, root="s3://speech/messy")
        for corpus in (messy_corpora.speech, messy_corpora.noise)
    )
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


@pytest.mark.smoke
def test_a_run_that_is_killed_and_resumed_ends_bit_for_bit_as_from_files(
    corpora: MessyCorpora, plain: Run, tmp_path: Path
) -> None:
    run = Run(corpora=corpora, directory=tmp_path / "run", **SETTINGS)
    assert run.start(faults={1: ("kill", 2, 3)})[1] == -9, run.log(1)
    assert run.steps()[0].step <= 2
    assert run.start() == [0, 0], run.log(0) + run.log(1)
    assert run.seen() == plain.seen()
    assert run.logged() == plain.logged()
    assert run.state() == plain.state()
    assert gone_soon(run)


@pytest.mark.skipif(find_weed() is None, reason="needs SeaweedFS: make lane LANE=remote installs it")
def test_a_run_goes_on_without_an_alarm_after_its_server_was_away_for_a_minute(
    messy_corpora: MessyCorpora, plain: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The limits and the patience are the defaults of a run.
    settings = SETTINGS | {"limits": {"step_s": StallLimits().step_s, "first_step_s": StallLimits().first_step_s}}
    run = Run(corpora=messy_corpora, directory=tmp_path / "run", remote={"ahead_bytes": 0}, **settings)
    down_s: list[float] = []
    with ExitStack() as stack:
        first = stack.enter_context(ExitStack())
        server = first.enter_context(s3_server(tmp_path / "s3"))
        for name, value in server.environment().items():
            monkeypatch.setenv(name, value)
        run.corpora = uploaded(messy_corpora, tmp_path)

        def interrupt() -> None:
            first.close()
            stopped = time.monotonic()
            time.sleep(OUTAGE_S)
            stack.enter_context(s3_server(tmp_path / "s3", again=server))
            down_s.append(time.monotonic() - stopped)

        outage = after_step(run, 1, interrupt)
        assert run.start() == [0, 0], run.log(0) + run.log(1)
        outage.join()
    assert down_s[0] >= OUTAGE_S
    assert "waiting for s3://" in run.log(0) + run.log(1)
    assert run.logged() == plain.logged()
    assert run.state() == plain.state()
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
    assert gone_soon(run)
