import mmap
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nestdata import Address, BatchPlan, Corpora, Corpus, MixConfig, PlanConfig
from nestmodel.preflight.measure.store_speed import remote_member, remote_members
from nestmodel.preflight.stores.check import check_object_store
from nestmodel.preflight.stores.use import StoreUse, noise_use, rounded, speech_use
from tests.addressed import addressed_copy
from tests.conftest import MessyCorpora
from tests.training import messy_data, trainer


class RemoteCorpus(Corpus):
    """A corpus of members of 1,000 bytes a second in a store."""

    is_remote = True  # type: ignore[assignment]
    has_bank = False  # type: ignore[assignment]

    def __init__(self, seconds: list[int], fingerprint: str = "a") -> None:
        index = np.zeros((2, len(seconds)), np.int64)
        index[0] = 16000 * np.array(seconds)
        meta = {"num_cuts": len(seconds), "sampling_rate": 16000, "fingerprint": fingerprint}
        super().__init__(Path("remote.corpus"), meta, index, mmap.mmap(-1, 1))

    def address(self, index: int) -> Address | None:
        return Address("s3://bucket/a.tar", 512 * index, self.num_samples_of(index) // 16, 1 << 40, None, None)


class LocalCorpus(RemoteCorpus):
    is_remote = False

    def address(self, index: int) -> Address | None:  # noqa: ARG002
        return None


class BankedCorpus(RemoteCorpus):
    has_bank = True


def use_of(corpora: list[RemoteCorpus], **plan: Any) -> StoreUse:
    joined = Corpora(corpora)
    settings = {"max_batch_seconds": 100.0, "microbatches_per_step": 1, **plan}
    return speech_use(joined, BatchPlan.of(joined, PlanConfig(**settings)))


def test_an_epoch_takes_one_request_for_each_cut_in_a_store() -> None:
    assert use_of([RemoteCorpus([2, 4, 6])]) == StoreUse(requests=3.0, num_bytes=12_000.0)


@pytest.mark.parametrize("other", [LocalCorpus, BankedCorpus])
def test_local_audio_and_sample_banks_take_none(other: type[RemoteCorpus]) -> None:
    assert use_of([RemoteCorpus([2, 4]), other([50, 60], "b")]).requests == 2.0
    assert use_of([other([50, 60])]) == StoreUse(requests=0.0, num_bytes=0.0)


def test_few_cuts_in_a_store_among_many_local_ones_are_looked_up(
    messy_corpora: MessyCorpora, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nestmodel.preflight.measure.store_speed._MOST_TRIES", 0)  # no random cut was one in a store
    folder = messy_corpora.speech.parent
    copy = addressed_copy(messy_corpora.speech, tmp_path / "copy", folder=folder, root="s3://bucket/speech")
    corpora = Corpora([LocalCorpus([2, 4]), Corpus.open(copy)])
    members = remote_members(corpora, 0)
    found = {next(members) for _ in range(40 * len(corpora))}
    assert found == {remote_member(corpora, index) for index in range(2, len(corpora))}


def test_numbers_are_written_without_an_exponent() -> None:
    numbers = (6150.4, 123.4, 12.34, 1.0, 0.6453, 0.000062)
    assert [rounded(number, 3) for number in numbers] == ["6,150", "123", "12.3", "1", "0.645", "0.000062"]


def test_repeated_corpora_are_requested_as_often_as_they_are_repeated() -> None:
    # Both corpora get half of the 40 s of an epoch, so the first one is seen twice, and the second 2/3 times.
    use = use_of([RemoteCorpus([10]), RemoteCorpus([30], "b")], weights=(1.0, 1.0))
    assert use.num_bytes == pytest.approx(40_000, rel=1e-3)
    assert use.requests == pytest.approx(2 + 2 / 3, rel=1e-3)


def test_noise_takes_one_request_for_each_cut_that_receives_noise() -> None:
    corpora, noise = Corpora([RemoteCorpus([10] * 100)]), RemoteCorpus([60, 60], "noise")
    plan = BatchPlan.of(corpora, PlanConfig(max_batch_seconds=100.0, microbatches_per_step=1))
    mix = MixConfig(prob=0.5, noise_ratio=0.4)
    assert noise_use(noise, mix, plan, corpora).requests == pytest.approx(20.0)
    assert noise_use(noise, mix, plan, corpora).num_bytes == pytest.approx(20 * 60_000)
    assert noise_use(None, mix, plan, corpora).requests == 0.0


def test_members_are_drawn_from_stores_only_and_end_if_there_are_none() -> None:
    mixed = [RemoteCorpus([2, 4]), LocalCorpus([50, 60], "b")]
    members = remote_members(Corpora(mixed), seed=0)
    assert {next(members).audio_s for _ in range(50)} == {2.0, 4.0}
    assert list(remote_members(Corpora(mixed[1:]), seed=0)) == []


@pytest.mark.parametrize(
    ("limits", "share"),
    [
        ({"max_epochs": 3}, 3.0),
        ({"max_epochs": 3, "limit_train_batches": 0.5}, 1.5),
        ({"max_epochs": 3, "limit_train_batches": 1}, "3 steps"),
        ({"max_epochs": 3, "max_steps": 2}, "2 steps"),
        ({"max_epochs": 1, "max_steps": 10**6}, 1.0),
        ({"max_epochs": -1}, None),
    ],
)
def test_the_run_ends_at_its_first_limit_and_its_noise_counts(
    messy_corpora: MessyCorpora, tmp_path: Path, limits: dict[str, Any], share: float | str | None
) -> None:
    folder = messy_corpora.speech.parent
    corpora = [
        addressed_copy(path, tmp_path / path.name, folder=folder, root="s3://bucket/messy")
        for path in (messy_corpora.speech, messy_corpora.noise)
    ]
    data = messy_data(MessyCorpora(*corpora, Path(), Path()))
    result = check_object_store(data, trainer(tmp_path, **limits), 0.0, None)
    plan, corpus = data.train_dataset.plan, data.train_dataset.corpus
    speech = speech_use(corpus, plan)
    noise = noise_use(data.noise.corpus, data.config.mix, plan, corpus)
    assert noise.num_bytes > 0
    assert result.figures["requests_per_epoch"] == speech.requests + noise.requests
    assert result.figures["bytes_per_epoch"] == speech.num_bytes + noise.num_bytes
    if isinstance(share, str):
        share = int(share.split()[0]) / plan.steps_per_epoch
    notes = [note for note in result.notes if note.startswith("the run of ")]
    if share is None:
        assert notes == []
    else:
        total = (speech + noise) * share
        assert notes[0].endswith(f" takes {total.text()}, on all ranks together")
