"""Preflight of a run whose speech is in an object store."""

import dataclasses
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from nestdata import Corpus, PlanConfig, RemoteConfig, Storage, prepare_corpus
from nestguard import StallLimits
from nestmodel import NestDataModule, NestModel, PreflightConfig, StallGuard, run_preflight
from nestmodel.preflight.shards import check_shards
from nestmodel.preflight.stores.check import check_object_store
from tests.remote.conftest import Access
from tests.remote.server import OWNER, S3Server
from tests.speech_forms import write_forms
from tests.training import tiny_config, trainer

pytestmark = pytest.mark.usefixtures("access")

BUCKET = "s3://speech/preflight"
PLAN = PlanConfig(max_batch_seconds=6.0, microbatches_per_step=2)


class Site(NamedTuple):
    speech: Path
    noise: Path


@pytest.fixture(scope="module")
def site(s3: S3Server, tmp_path_factory: pytest.TempPathFactory) -> Site:
    """NeMo tars in a store; the noise is in the store as well, without a bank."""
    folder = tmp_path_factory.mktemp("site")
    write_forms(folder / "forms")
    with pytest.MonkeyPatch.context() as patch:
        for name, value in s3.environment().items():
            patch.setenv(name, value)
        storage = Storage()
        for path in sorted((folder / "forms" / "nemo").iterdir()):
            storage.write(f"{BUCKET}/{path.name}", path)
        prepare_corpus([f"{BUCKET}/speech.json"], folder / "speech.corpus")
        prepare_corpus([f"{BUCKET}/spans.json"], folder / "noise.corpus")
    return Site(folder / "speech.corpus", folder / "noise.corpus")


def data_of(site: Site, **settings: Any) -> NestDataModule:
    return NestDataModule(site.speech, plan=PLAN, num_workers=0, **settings)


def test_a_preflight_measures_the_store_and_counts_requests(site: Site, tmp_path: Path) -> None:
    config = PreflightConfig(num_batches=1, feeding_seconds=0.1, store_seconds=0.2)
    report = run_preflight(NestModel(tiny_config()), data_of(site), trainer(tmp_path, max_epochs=3), config)
    results = {check.name: check.ranks[0] for check in report.checks}
    assert not report.has_failed, report.problems()
    assert results["shards"].status == "ok"
    assert results["shards"].value.startswith("4 shards asked for, ")
    store = results["store"]
    assert store.figures["requests_per_epoch"] == 30
    corpus = Corpus.open(site.speech)
    addresses = [corpus.address(index) for index in range(len(corpus))]
    num_bytes = sum(address.length for address in addresses if address is not None)
    assert store.figures["bytes_per_epoch"] == pytest.approx(num_bytes)
    assert 0 < store.figures["latency_seconds"] <= store.figures["p95_latency_seconds"]
    assert store.figures["requests_per_s_32_at_once"] > 0
    speed, epoch, run, feeding = store.notes
    assert speed.startswith("one request at a time takes ")
    assert epoch.startswith("an epoch takes 30 requests, ")
    assert run.startswith("the run of 3 epochs takes 90 requests, ")
    assert run.endswith(", on all ranks together")
    assert "audio-s/s to this rank, steps take " in feeding


def test_missing_and_changed_shards_are_counted_and_named(site: Site, tmp_path: Path) -> None:
    storage = Storage()
    names = [f"{BUCKET}/audio_{number}.tar" for number in (0, 2)]
    contents = [storage.read(name) for name in names]
    storage.delete(names[0])
    storage.write(names[1], contents[1] + bytes(512))
    try:
        result = check_shards(data_of(site), trainer(tmp_path), 60.0)
    finally:
        for name, content in zip(names, contents, strict=True):
            storage.write(name, content)
    assert result.status == "failed"
    assert ", 1 missing" in result.value
    assert ", 1 changed" in result.value
    assert names[0] in result.advice
    assert f"{names[1]} has {len(contents[1]) + 512} bytes instead of {len(contents[1])}" in result.advice
    assert result.figures["bad_shards"] == 2
    assert result.figures["unreachable_shards"] == 0


def test_a_wrong_key_fails_once_and_nothing_waits_for_the_store(site: Site, access: Access, tmp_path: Path) -> None:
    access.use(dataclasses.replace(OWNER, secret_key="not-the-secret"))
    config = PreflightConfig(num_batches=1, feeding_seconds=0.0)
    report = run_preflight(NestModel(tiny_config()), data_of(site), trainer(tmp_path), config)
    results = {check.name: check.ranks[0] for check in report.checks}
    assert results["shards"].status == "failed"
    assert "AWS_SECRET_ACCESS_KEY" in results["shards"].advice
    assert results["reading"].status == "skipped"
    assert results["store"].status in ("ok", "warning")
    assert results["store"].value == "not measured"


def test_noise_in_a_store_and_too_much_patience_are_warnings(site: Site, tmp_path: Path) -> None:
    data = data_of(site, noise=site.noise, remote=RemoteConfig(patience_s=300.0))
    guard = StallGuard(StallLimits(step_s=200.0))
    result = check_object_store(data, trainer(tmp_path, [guard]), 0.0, None)
    assert result.status == "warning"
    assert "Prepare the noise with --pcm." in result.advice
    assert "data.remote.patience_s (300) is not 30 s below guard.limits.step_s (200)" in result.advice
    assert " for noise" in result.notes[0]


def test_a_slow_store_is_the_bottleneck(site: Site, tmp_path: Path) -> None:
    result = check_object_store(data_of(site), trainer(tmp_path), 0.1, 1e9)
    assert result.status == "warning"
    assert "the store delivers " in result.advice
    assert result.notes[-1].endswith("the store is the bottleneck")


def test_local_audio_is_no_store(tmp_path: Path) -> None:
    from tests.synthesis import folder_corpus, hiss

    corpus = folder_corpus(tmp_path / "local", {f"{i}.wav": hiss(16000, i) for i in range(4)})
    data = NestDataModule(corpus.path, plan=PLAN, num_workers=0)
    assert check_object_store(data, trainer(tmp_path), 0.1, None).status == "skipped"
