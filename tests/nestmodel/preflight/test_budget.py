import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nestdata import PlanConfig
from nestmodel import (
    BudgetConfig,
    BudgetReport,
    ConfigError,
    DataConfig,
    NestDataModule,
    NestModel,
    TrainingError,
    find_budget,
)
from nestmodel.preflight import budget
from nestmodel.preflight.budget import largest_fitting
from nestmodel.preflight.trial import Shape, TrialResult
from tests.conftest import MessyCorpora
from tests.training import tiny_config, trainer

LIMIT = "6GB"
RATE = 16000


def data_of(corpora: MessyCorpora, *, val_corpus: Path | None = None, **plan: Any) -> NestDataModule:
    # With fixed shapes, microbatches of a small corpus are as full as those of a large one.
    fields = {"max_batch_seconds": 20.0, "microbatches_per_step": 2, "num_shapes": 8, **plan}
    return NestDataModule(DataConfig(corpora.speech, val_corpus=val_corpus, plan=PlanConfig(**fields), num_workers=0))


@given(exact=st.integers(0, 3000), start=st.integers(-5, 400), lowest=st.integers(1, 200), count=st.integers(1, 2000))
def test_the_search_finds_the_largest_number_that_fits_to_two_percent(
    exact: int, start: int, lowest: int, count: int
) -> None:
    highest, tried = lowest + count - 1, []

    def fits(number: int) -> bool:
        tried.append(number)
        return number <= exact

    found = largest_fitting(fits, start=start, lowest=lowest, highest=highest)
    if exact < lowest:
        assert found is None
    else:
        assert found is not None
        largest = min(exact, highest)
        assert found <= largest <= found + max(0, found // 50 - 1)
    assert len(tried) == len(set(tried)) <= 20
    assert all(lowest <= number <= highest for number in tried)


class FakeChild:
    """Stands in for the child process: memory is 1 MB for each second of audio, and a step takes 0.01 s for it."""

    def __init__(self, allowed_mb: int) -> None:
        self._allowed_mb = allowed_mb

    def __call__(self, _settings: object) -> "FakeChild":
        return self

    def close(self) -> None:
        pass

    def run(self, _: PlanConfig, shapes: list[Shape]) -> TrialResult:
        needed = {shape: shape[0] * shape[1] / RATE for shape in shapes}
        too_large = next((shape for shape in shapes if needed[shape] > self._allowed_mb), None)
        return TrialResult(
            too_large=too_large,
            peak_bytes=0 if too_large else round(1e6 * max(needed.values())),
            allowed_bytes=10**6 * self._allowed_mb,
            seconds=tuple(0.01 * seconds for seconds in needed.values()),
        )


def search(
    allowed_mb: int, data: NestDataModule, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> tuple[BudgetReport, list[str]]:
    lines: list[str] = []
    monkeypatch.setattr(budget, "TrialChild", FakeChild(allowed_mb))
    model = NestModel(tiny_config())
    report = find_budget(model, data, trainer(directory), BudgetConfig(memory_limit="1GB"), lines.append)
    return report, lines


def test_the_budget_is_the_largest_whose_largest_shapes_fit(
    messy_corpora: MessyCorpora, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    report, lines = search(26, data_of(messy_corpora), tmp_path, monkeypatch)
    # 30 s would hold batches of 26 to 30 s; those of 25 s hold at most 25 s.
    assert report.largest_seconds == 25.0
    assert not report.is_limited_by_corpus
    assert report.allowed_bytes == 26_000_000
    found = {trial.max_batch_seconds: trial for trial in report.trials}
    assert list(found) == sorted(found)
    assert found[25.0].fits
    assert found[25.0].audio_s_per_s == pytest.approx(100.0)
    assert not found[30.0].fits
    assert found[30.0].too_large is not None
    assert any(re.match(r"trying 30 s: \d+ x ", line) for line in lines)
    assert report.yaml() == "data:\n  plan:\n    max_batch_seconds: 25.0\n"


def test_a_budget_above_which_no_batch_changes_is_said_to_be_limited_by_the_corpus(
    messy_corpora: MessyCorpora, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    report, _ = search(10**6, data_of(messy_corpora), tmp_path, monkeypatch)
    assert report.is_limited_by_corpus
    assert all(trial.fits for trial in report.trials)


def test_cuts_that_are_too_long_are_an_error_that_names_the_longest_of_training_and_validation(
    messy_corpora: MessyCorpora, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(
        TrainingError, match=r"does not fit into 1\.0 MB, .* below 5 s, .* the longest cut of data\.corp"
    ):
        search(1, data_of(messy_corpora), tmp_path, monkeypatch)
    data = data_of(messy_corpora, val_corpus=messy_corpora.noise)
    assert data.val_dataset is not None
    longest_s = max(int(lengths[-1]) for lengths in data.val_dataset.corpus.num_samples) / RATE
    with pytest.raises(TrainingError, match=rf"the longest cut of data\.val_corpus lasts {longest_s:.1f} s"):
        search(1, data, tmp_path, monkeypatch)


def test_a_cpu_needs_a_limit_that_is_available_and_one_process(messy_corpora: MessyCorpora, tmp_path: Path) -> None:
    model, data, one = NestModel(tiny_config()), data_of(messy_corpora), trainer(tmp_path)
    with pytest.raises(ConfigError, match=r"give the memory that one rank may use.*--memory-limit 8GiB.*not set"):
        find_budget(model, data, one)
    with pytest.raises(ConfigError, match=r"that are available here.*It is 900TB"):
        find_budget(model, data, one, BudgetConfig(memory_limit="900TB"))
    several = trainer(tmp_path, devices=2, strategy="ddp")
    with pytest.raises(ConfigError, match=r"the trainer has 2 ranks. Add --trainer.devices 1"):
        find_budget(model, data, several, BudgetConfig(memory_limit=LIMIT))
