"""Preflight of a run whose speech is in an object store."""

from pathlib import Path

import pytest

from nestdata import PlanConfig, Storage, prepare_corpus
from nestmodel import DataConfig, NestDataModule, NestModel, PreflightConfig, run_preflight
from nestmodel.preflight.shards import check_shards
from tests.remote.conftest import upload
from tests.remote.server import S3Server
from tests.speech_forms import write_forms
from tests.training import tiny_config, trainer

pytestmark = pytest.mark.usefixtures("access")

BUCKET = "s3://speech/preflight"
PLAN = PlanConfig(max_batch_seconds=6.0, microbatches_per_step=2)


@pytest.fixture(scope="module")
def speech(s3: S3Server, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A corpus of NeMo tars in a store."""
    folder = tmp_path_factory.mktemp("site")
    write_forms(folder / "forms")
    with pytest.MonkeyPatch.context() as patch:
        for name, value in s3.environment().items():
            patch.setenv(name, value)
        upload(folder / "forms" / "nemo", BUCKET)
        prepare_corpus([f"{BUCKET}/speech.json"], folder / "speech.corpus")
    return folder / "speech.corpus"


def data_of(speech: Path) -> NestDataModule:
    return NestDataModule(DataConfig(speech, plan=PLAN, num_workers=0))


def test_a_preflight_asks_for_all_shards(speech: Path, tmp_path: Path) -> None:
    report = run_preflight(NestModel(tiny_config()), data_of(speech), trainer(tmp_path), PreflightConfig(num_batches=1))
    assert not report.has_failed, report.problems()
    shards = report.checks[1].ranks[0]
    assert shards.status == "ok"
    assert shards.value.startswith("4 shards asked for, ")


def test_missing_and_changed_shards_are_counted_and_named(speech: Path, tmp_path: Path) -> None:
    storage = Storage()
    names = [f"{BUCKET}/audio_{number}.tar" for number in (0, 2)]
    contents = [storage.read(name) for name in names]
    storage.delete(names[0])
    storage.write(names[1], contents[1] + bytes(512))
    try:
        result = check_shards(data_of(speech), trainer(tmp_path), 60.0)
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
