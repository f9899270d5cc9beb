"""Batches of audio that a web server on loopback holds, compared with those of the same audio in files."""

import itertools
import pickle
import shutil
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import nestguard
from nestdata import (
    AudioNoiseBatch,
    AudioNoiseDataset,
    ConfigError,
    Corpora,
    Corpus,
    MicrobatchKey,
    NoiseSampler,
    RemoteConfig,
    RemoteStats,
    StorageError,
    last_error_line,
    microbatches,
)
from nestdata.corpus.cache import num_bytes_of, shares_of_corpora
from tests.addressed import WebServer, addressed_copy
from tests.batches import digest, messy_dataset
from tests.conftest import MessyCorpora

pytest.importorskip("obstore")
pytestmark = [
    pytest.mark.multiprocess,
    pytest.mark.filterwarnings("ignore:This DataLoader will create"),
]

NUM_BATCHES = 8
WAIT_S = 60.0


@pytest.fixture(scope="module")
def web(messy_corpora: MessyCorpora) -> Iterator[WebServer]:
    with WebServer(messy_corpora.speech.parent).running() as server:
        yield server


@pytest.fixture(scope="module")
def corpora(messy_corpora: MessyCorpora, web: WebServer, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Speech and noise on the web server."""
    output, folder = tmp_path_factory.mktemp("addressed"), messy_corpora.speech.parent
    speech, noise = (
        addressed_copy(corpus, output / corpus.name, folder=folder, root=web.url)
        for corpus in (messy_corpora.speech, messy_corpora.noise)
    )
    return speech, noise


def remote(corpora: tuple[Path, Path], **settings: Any) -> AudioNoiseDataset:
    plain = messy_dataset(*corpora)
    config = RemoteConfig(**{"patience_s": 30.0, **settings})
    return AudioNoiseDataset(plain.corpus, plain.plan, plain.noise, plain.mixer, remote=config)


def content(batch: AudioNoiseBatch) -> dict[str, Any]:
    """Returns what does not depend on where the audio is; messages name locations."""
    found: dict[str, Any] = digest(batch)
    del found["bad_cuts"]
    mixes = [replace(mix, bad_noise=tuple(cut._replace(detail="") for cut in mix.bad_noise)) for mix in batch.mixes]
    return found | {"mixes": str(mixes)}


@pytest.fixture(scope="module")
def expected(messy_corpora: MessyCorpora) -> list[dict[str, Any]]:
    dataset = messy_dataset(messy_corpora.speech, messy_corpora.noise)
    return [content(dataset[index]) for index in indices(dataset)]


def indices(dataset: AudioNoiseDataset) -> list[Any]:
    return microbatches(dataset.plan, num_steps=2)[:NUM_BATCHES]


def loaded(dataset: AudioNoiseDataset, **options: Any) -> list[AudioNoiseBatch]:
    return list(dataset.loader(indices(dataset), **options))


def total(batches: list[AudioNoiseBatch]) -> RemoteStats:
    return sum((batch.remote for batch in batches if batch.remote is not None), RemoteStats())


@pytest.mark.parametrize("num_workers", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_batches_are_those_of_the_same_audio_in_files(
    corpora: tuple[Path, Path], expected: list[dict[str, Any]], num_workers: int
) -> None:
    batches = loaded(remote(corpora), num_workers=num_workers)
    assert [content(batch) for batch in batches] == expected
    counted = total(batches)
    assert counted.bytes_fetched > 100_000
    assert counted.cache_hits == 0


def test_the_bytes_of_the_next_batches_arrive_before_they_are_loaded(
    corpora: tuple[Path, Path], web: WebServer
) -> None:
    dataset = remote(corpora)
    ahead = indices(dataset)[1:3]
    dataset.load(MicrobatchKey(0, 0), upcoming=ahead)
    assert dataset.remote is not None
    held = dataset.remote.ahead
    wanted = [request for index in ahead for request in dataset.remote._known[index]]
    deadline = time.monotonic() + WAIT_S
    while not all(held._held[request].done() for request in wanted) and time.monotonic() < deadline:
        time.sleep(0.01)
    asked = web.requests.total()
    waited = held.waited_s
    dataset.load(ahead[0], upcoming=ahead[1:])
    assert web.requests.total() - asked <= 2  # a noise cut that is missing, and the one drawn instead
    assert held.waited_s - waited < 1.0


def test_workers_of_remote_corpora_are_not_forked(corpora: tuple[Path, Path]) -> None:
    dataset = remote(corpora)
    with pytest.raises(ConfigError, match=r"start_method is 'fork'.*does not survive a fork.*'forkserver'"):
        dataset.loader(indices(dataset), num_workers=1, start_method="fork")
    assert dataset.loader(indices(dataset), num_workers=1).multiprocessing_context.get_start_method() == "forkserver"


def test_a_dataset_that_was_used_can_be_pickled(corpora: tuple[Path, Path], expected: list[dict[str, Any]]) -> None:
    dataset = remote(corpora)
    dataset.load(MicrobatchKey(0, 0))
    copy = pickle.loads(pickle.dumps(dataset))
    assert content(copy.load(MicrobatchKey(0, 0))) == expected[0]


def test_a_damaged_byte_on_the_way_changes_nothing(
    corpora: tuple[Path, Path], expected: list[dict[str, Any]], web: WebServer
) -> None:
    flipped = {f"/speech-{i:02d}.{suffix}" for i, suffix in zip(range(36), itertools.cycle(("flac", "wav", "ogg")))}
    web.flips |= flipped
    batches = loaded(remote(corpora))
    assert [content(batch) for batch in batches] == expected
    assert len(flipped & web.flips) < len(flipped)
    web.flips.clear()


def test_a_server_that_is_away_for_a_while_changes_nothing_and_is_named_in_the_heartbeat(
    corpora: tuple[Path, Path], expected: list[dict[str, Any]], web: WebServer, tmp_path: Path
) -> None:
    identity = nestguard.Identity(rank=0, local_rank=0, node_rank=0, world_size=1, local_world_size=1, host="here")
    heartbeat = nestguard.Heartbeat(tmp_path / "beats", identity)
    heartbeat.beat(nestguard.Phase.LOADING)
    waits_for: list[str | None] = []
    refused_before = web.num_refused

    def end_outage() -> None:
        while not waits_for or waits_for[-1] is None or web.num_refused - refused_before < 3:
            reading = nestguard.read_heartbeat(tmp_path / "beats" / "rank-0.beat")
            assert reading is not None
            waits_for.append(reading.waits_for)
            time.sleep(0.02)
        web.is_down.clear()

    web.is_down.set()
    nestguard.set_current(heartbeat)
    watcher = threading.Thread(target=end_outage)
    watcher.start()
    try:
        batches = loaded(remote(corpora))
    finally:
        nestguard.set_current(nestguard.NoHeartbeat())
        web.is_down.clear()
        watcher.join()
    assert [content(batch) for batch in batches] == expected
    assert str(waits_for[-1]).startswith(f"{web.url}/speech-")
    assert total(batches).wait_s > 0
    reading = nestguard.read_heartbeat(tmp_path / "beats" / "rank-0.beat")
    assert reading is not None
    assert (reading.cuts, reading.waits_for) == ((), None)


@pytest.mark.parametrize("num_workers", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_a_server_that_is_away_for_longer_than_the_patience_ends_the_run_with_one_line(
    corpora: tuple[Path, Path], web: WebServer, num_workers: int
) -> None:
    web.is_down.set()
    try:
        with pytest.raises(StorageError) as caught:
            loaded(remote(corpora, patience_s=0.5), num_workers=num_workers)
    finally:
        web.is_down.clear()
    line = last_error_line(caught.value)
    assert line.startswith(f"{web.url}/")
    assert "503" in line


def test_the_cache_answers_in_place_of_the_store(
    corpora: tuple[Path, Path], expected: list[dict[str, Any]], tmp_path: Path
) -> None:
    settings = {"cache_dir": tmp_path / "cache", "cache_bytes": 10**9}
    first = total(loaded(remote(corpora, **settings)))
    assert first.bytes_fetched > 0
    again = loaded(remote(corpora, **settings))
    assert [content(batch) for batch in again] == expected
    counted = total(again)
    assert counted.bytes_fetched == 0
    assert counted.cache_hits > 10
    # Damaged on the disk: dropped, and fetched once more.
    damaged = next(path for path in (tmp_path / "cache").glob("???/*"))
    data = bytearray(damaged.read_bytes())
    data[10] ^= 1
    damaged.write_bytes(data)
    repaired = loaded(remote(corpora, **settings))
    assert [content(batch) for batch in repaired] == expected
    assert total(repaired).bytes_fetched == len(data) - 4


def test_noise_with_a_bank_is_not_remote(messy_corpora: MessyCorpora, corpora: tuple[Path, Path]) -> None:
    plain = messy_dataset(messy_corpora.speech, messy_corpora.noise)
    banked = NoiseSampler(Corpus.open(messy_corpora.banked))
    assert AudioNoiseDataset(plain.corpus, plain.plan, banked).remote is None
    assert AudioNoiseDataset(plain.corpus, plain.plan, NoiseSampler(Corpus.open(corpora[1]))).remote is not None


def test_the_cache_is_divided_among_noise_and_then_the_corpora_that_repeat_most(
    corpora: tuple[Path, Path], tmp_path: Path
) -> None:
    copy = Path(shutil.copytree(corpora[0], tmp_path / "copy.corpus"))
    speech, noise = Corpora.open([corpora[0], copy]), Corpus.open(corpora[1])
    noise_bytes, speech_bytes = num_bytes_of(noise), num_bytes_of(speech.corpora[0])
    assert shares_of_corpora(noise_bytes // 2, speech, noise, [1.0, 2.0]) == pytest.approx(
        {noise.path: 0.5, copy: 0.0, corpora[0]: 0.0}, abs=1e-4
    )
    enough = noise_bytes + speech_bytes + speech_bytes // 4
    shares = {noise.path: 1.0, copy: 1.0, corpora[0]: 0.25}
    assert shares_of_corpora(enough, speech, noise, [1.0, 2.0]) == pytest.approx(shares, abs=1e-4)
    assert shares_of_corpora(speech_bytes // 4, speech, None, [2.0, 1.0]) == pytest.approx(
        {corpora[0]: 0.25, copy: 0.0}, abs=1e-4
    )
