"""The same speech gives the same batches in every form, wherever it is stored and whatever the network does.

Forms, places, numbers of workers, world sizes, cache and faults have 432 combinations of 200 batches each. `RUNS`
covers them: every form is read in every place, and each pair of settings of workers, ranks, cache and faults occurs.
"""

import multiprocessing.forkserver
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from nestdata import (
    AudioNoiseDataset,
    BatchPlan,
    Corpus,
    MicrobatchKey,
    MixConfig,
    NoiseSampler,
    PlanConfig,
    PrepareConfig,
    RemoteConfig,
    SpeakerNoiseMixer,
    microbatches,
    prepare_corpus,
)
from tests.batches import digest
from tests.remote.conftest import upload
from tests.remote.proxy import FaultProxy
from tests.remote.server import S3Server
from tests.speech_forms import FORMS, write_forms
from tests.synthesis import folder_corpus, hiss

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create 4 worker processes")

BATCHES_PER_STEP = 4
NUM_BATCHES = 200
BUCKET = "s3://speech/same"
FAULTS = {
    **dict.fromkeys(("unavailable", "throttled", "reset", "short"), 0.05),
    "flipped": 0.005,
}


class Run(NamedTuple):
    """One way to read the 200 batches from the store."""

    form: str
    num_workers: int
    world_size: int
    is_cached: bool
    has_faults: bool


# Rows 1 to 9 hold every pair of a number of workers and a world size. Cache and faults alternate such that each of
# their four combinations occurs, and each with every number of workers or every world size.
RUNS = [
    Run("files", 0, 1, False, True),
    Run("nemo", 0, 2, True, True),
    Run("shar", 0, 4, True, False),
    Run("webdataset", 1, 1, True, True),
    Run("nemo spans", 1, 2, False, False),
    Run("files", 1, 4, False, True),
    Run("nemo", 4, 1, True, False),
    Run("shar", 4, 2, False, True),
    Run("files spans", 4, 4, True, True),
    Run("webdataset", 0, 2, False, False),
]


class Site(NamedTuple):
    folder: Path
    proxy: FaultProxy
    noise: Path
    environment: dict[str, str]


@pytest.fixture(scope="module")
def site(s3: S3Server, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """Speech in all forms, prepared where it lies locally and where it lies in a store."""
    folder = tmp_path_factory.mktemp("site")
    write_forms(folder / "speech")
    noise = folder_corpus(
        folder / "noise", {f"{i}.wav": hiss(3000 * (i + 4), 50 + i) for i in range(4)}, PrepareConfig(pcm=True)
    )
    with FaultProxy(s3.port) as proxy, pytest.MonkeyPatch.context() as patch:
        environment = s3.environment(endpoint=proxy.url)
        for name, value in environment.items():
            patch.setenv(name, value)
        upload(folder / "speech", BUCKET)
        for form in (*FORMS, "files spans", "nemo spans"):
            _prepare(str(folder / "speech"), form, folder / f"{form} local.corpus")
            _prepare(BUCKET, form, folder / f"{form} remote.corpus")
        # Loader workers get the environment from the fork server, which another test may have started.
        multiprocessing.forkserver._forkserver._stop()
        yield Site(folder, proxy, noise.path, environment)
    multiprocessing.forkserver._forkserver._stop()


@pytest.fixture(autouse=True)
def _access(site: Site, no_settings_of_stores: None, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: ARG001
    for name, value in site.environment.items():
        monkeypatch.setenv(name, value)


def _prepare(root: str, form: str, output: Path) -> None:
    kind, _, spans = form.partition(" ")
    manifest = "spans.json" if spans else "speech.json"
    if kind == "files":
        prepare_corpus([f"{root}/files/{manifest}"], output)
    elif kind == "nemo":
        prepare_corpus(
            [f"{root}/nemo/{manifest}"], output, PrepareConfig(tars=(f"{root}/nemo/audio__OP_0..3_CL_.tar",))
        )
    else:
        prepare_corpus([f"{root}/{kind}"], output)


def _dataset(path: Path, noise: Path, **remote: Any) -> AudioNoiseDataset:
    corpus = Corpus.open(path)
    plan = BatchPlan.of(corpus, PlanConfig(max_batch_seconds=3.0, microbatches_per_step=BATCHES_PER_STEP, seed=3))
    mixer = SpeakerNoiseMixer(MixConfig(prob=0.8))
    return AudioNoiseDataset(corpus, plan, NoiseSampler(Corpus.open(noise)), mixer, remote=RemoteConfig(**remote))


def _digests(dataset: AudioNoiseDataset, num_workers: int = 0, world_size: int = 1) -> dict[MicrobatchKey, Any]:
    """Returns the digests of 200 batches by index, as the ranks read them one after the other."""
    found = {}
    for rank in range(world_size):
        indices = microbatches(
            dataset.plan, rank=rank, world_size=world_size, num_steps=NUM_BATCHES // BATCHES_PER_STEP
        )
        loader = dataset.loader(indices, num_workers=num_workers)
        for index, batch in zip(indices, loader, strict=True):
            found[index] = digest(batch)
    assert len(found) == NUM_BATCHES
    return found


@pytest.fixture(scope="module")
def expected(site: Site) -> dict[str, dict[MicrobatchKey, Any]]:
    """The digests of the local files, whole and with spans."""
    return {
        spans: _digests(_dataset(site.folder / f"files{spans} local.corpus", site.noise)) for spans in ("", " spans")
    }


def test_all_forms_have_the_same_cuts_in_all_places(site: Site) -> None:
    for spans, forms in (("", FORMS), (" spans", ("files", "nemo"))):
        corpora = [
            Corpus.open(site.folder / f"{form}{spans} {place}.corpus")
            for form in forms
            for place in ("local", "remote")
        ]
        first = corpora[0]
        ids = [first.line(index)["id"] for index in range(len(first))]
        assert len(first) == (30 if not spans else 30 + 2 * 6)
        for corpus in corpora:
            assert corpus.fingerprint == first.fingerprint
            assert [corpus.line(index)["id"] for index in range(len(corpus))] == ids
            assert corpus.num_samples.tolist() == first.num_samples.tolist()


@pytest.mark.parametrize("run", RUNS, ids=lambda run: " ".join(map(str, run)))
def test_audio_in_a_store_gives_the_batches_of_local_files(
    site: Site, expected: dict[str, dict[MicrobatchKey, Any]], run: Run, tmp_path: Path
) -> None:
    cache: dict[str, Any] = {"cache_dir": tmp_path / "cache", "cache_bytes": 400_000} if run.is_cached else {}
    dataset = _dataset(site.folder / f"{run.form} remote.corpus", site.noise, **cache)
    before = site.proxy.counts()
    with site.proxy.with_faults(**(FAULTS if run.has_faults else {}), seed=RUNS.index(run)):
        found = _digests(dataset, run.num_workers, run.world_size)
        counts = {kind: count - before.get(kind, 0) for kind, count in site.proxy.counts().items()}
    spans = " spans" if run.form.endswith("spans") else ""
    different = [index for index, one in expected[spans].items() if found[index] != one]
    assert different == []
    if run.has_faults:
        assert all(counts.get(kind) for kind in ("unavailable", "throttled", "reset", "short")), counts
    if run.is_cached:
        assert sum(os.path.getsize(path) for path in (tmp_path / "cache").rglob("*") if path.is_file()) > 100_000
