from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nestdata import Address, BatchPlan, Corpora, Corpus, MixConfig, PlanConfig
from nestmodel.preflight.shards import epoch_use


class RemoteCorpus(Corpus):
    """A corpus of members of 1,000 bytes a second in a store."""

    is_remote = True  # type: ignore[assignment]
    has_bank = False  # type: ignore[assignment]

    def __init__(self, seconds: list[int], fingerprint: str = "a") -> None:
        self.path = Path("remote.corpus")
        self.meta = {"num_cuts": len(seconds), "sampling_rate": 16000, "fingerprint": fingerprint}
        self._index = 16000 * np.array([seconds], np.int64)

    def address(self, index: int) -> Address | None:
        return Address("s3://bucket/a.tar", 512 * index, self.num_samples_of(index) // 16, 1 << 40, None, None)


class LocalCorpus(RemoteCorpus):
    is_remote = False


class BankedCorpus(RemoteCorpus):
    has_bank = True


def use_of(
    corpora: list[RemoteCorpus], noise: RemoteCorpus | None = None, mix: MixConfig = MixConfig(), **plan: Any
) -> tuple[float, float]:
    speech = Corpora(corpora)
    settings = {"max_batch_seconds": 100.0, "microbatches_per_step": 1, **plan}
    return epoch_use(speech, BatchPlan.of(speech, PlanConfig(**settings)), noise, mix)


def test_an_epoch_takes_one_request_for_each_cut_in_a_store() -> None:
    assert use_of([RemoteCorpus([2, 4, 6])]) == (3.0, 12_000.0)


@pytest.mark.parametrize("other", [LocalCorpus, BankedCorpus])
def test_local_audio_and_sample_banks_take_none(other: type[RemoteCorpus]) -> None:
    assert use_of([RemoteCorpus([2, 4]), other([50, 60], "b")])[0] == 2.0
    assert use_of([other([50, 60])], other([60], "noise")) == (0.0, 0.0)


def test_repeated_corpora_are_requested_as_often_as_they_are_repeated() -> None:
    # Both corpora get half of the 40 s of an epoch, so the first one is seen twice, and the second 2/3 times.
    requests, num_bytes = use_of([RemoteCorpus([10]), RemoteCorpus([30], "b")], weights=(1.0, 1.0))
    assert num_bytes == pytest.approx(40_000, rel=1e-3)
    assert requests == pytest.approx(2 + 2 / 3, rel=1e-3)


def test_noise_takes_one_request_for_each_cut_that_receives_noise() -> None:
    noise, mix = RemoteCorpus([60, 60], "noise"), MixConfig(prob=0.5, noise_ratio=0.4)
    requests, num_bytes = use_of([RemoteCorpus([10] * 100)], noise, mix)
    assert requests == pytest.approx(100 + 20)
    assert num_bytes == pytest.approx(100 * 10_000 + 20 * 60_000)
