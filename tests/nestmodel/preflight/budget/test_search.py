import math
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nestdata import BatchPlan, PlanConfig
from nestmodel import (
    BudgetConfig,
    BudgetReport,
    ConfigError,
    NestDataModule,
    NestModel,
    TrainingError,
    find_budget,
)
from nestmodel.preflight.budget import find
from nestmodel.preflight.budget.search import best_budget, largest_fitting
from nestmodel.preflight.budget.shapes import critical_shapes, shapes_of, typical_shapes
from nestmodel.preflight.measure.memory import parse_bytes
from nestmodel.preflight.measure.trial import TrialResult
from nestmodel.preflight.measure.trial_step import Shape, StepTime
from tests.conftest import MessyCorpora
from tests.training import tiny_config, trainer

LIMIT = "6GB"
RATE = 16000


def data_of(corpora: MessyCorpora, **plan: object) -> NestDataModule:
    # With fixed shapes, microbatches of a small corpus are as full as those of a large one.
    fields = {"max_batch_seconds": 20.0, "microbatches_per_step": 2, "num_shapes": 8, **plan}
    return NestDataModule(corpora.speech, plan=PlanConfig(**fields), num_workers=0)  # type: ignore[arg-type]


@given(
    fixed=st.integers(0, 50),
    slope=st.integers(0, 9),
    square=st.sampled_from([0.0, 0.01, 1.0]),
    allowed=st.integers(0, 2000),
    start=st.integers(-5, 400),
    lowest=st.integers(1, 50),
    count=st.integers(1, 500),
)
def test_the_search_finds_the_largest_number_that_fits_to_two_percent(
    fixed: int, slope: int, square: float, allowed: int, start: int, lowest: int, count: int
) -> None:
    highest, tried = lowest + count - 1, []

    def peak(number: int) -> int | None:
        tried.append(number)
        needed = round(fixed + slope * number + square * number**2)
        return needed if needed <= allowed else None

    found = largest_fitting(peak, lambda: allowed, start=start, lowest=lowest, highest=highest)
    exact = max((n for n in range(lowest, highest + 1) if peak(n) is not None), default=None)
    if found is None or exact is None:
        assert found is exact is None
    else:
        assert found <= exact <= found + max(1, found // 50) - (found // 50 < 2)
    searched = tried[: len(tried) - count]
    assert len(searched) == len(set(searched)) <= 20
    assert all(lowest <= number <= highest for number in searched)


def test_linear_memory_is_predicted_so_that_few_trials_are_needed() -> None:
    tried = []

    def peak(number: int) -> int | None:
        tried.append(number)
        return 500 + 10 * number if 500 + 10 * number <= 8000 else None

    assert largest_fitting(peak, lambda: 8000, start=48, lowest=4, highest=10**9) == 750
    assert tried == [48, 96, 384, 750, 751][: len(tried)]


def test_the_smallest_budget_of_nearly_the_best_speed_is_the_best() -> None:
    assert best_budget({240.0: 99.0, 480.0: 100.0, 960.0: 98.0}) == 240.0
    assert best_budget({240.0: 97.0, 480.0: 100.0, 960.0: 101.0}) == 480.0


def test_critical_shapes_have_most_samples_largest_attention_longest_and_most_cuts() -> None:
    lengths = [RATE] * 60 + [4 * RATE] * 14 + [5 * RATE] * 2
    plan = BatchPlan(lengths, RATE, PlanConfig(max_batch_seconds=10.0, microbatches_per_step=1))
    assert critical_shapes(plan) == [(2, 5 * RATE), (10, RATE)]
    assert set(shapes_of(plan)) == {(2, 5 * RATE), (2, 4 * RATE), (10, RATE)}
    assert shapes_of(plan)[:2] == critical_shapes(plan)
    assert typical_shapes(plan) == [(10, RATE), (2, 4 * RATE)]


@pytest.mark.parametrize(("text", "number"), [("8GiB", 8 * 2**30), ("750 MB", 750_000_000), ("1.5TB", 1.5e12)])
def test_sizes_are_read_with_their_unit(text: str, number: int) -> None:
    assert parse_bytes(text, "memory_limit") == number


@pytest.mark.parametrize("text", ["8", "8G", "-1GB", "0GB", "lots"])
def test_a_size_without_unit_or_number_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=f"memory_limit is '{text}': give a size with one of the units KB, MB"):
        parse_bytes(text, "memory_limit")


def test_invalid_settings_are_refused() -> None:
    with pytest.raises(ConfigError, match="memory_margin is 1: expected a share"):
        BudgetConfig(memory_margin=1.0)
    with pytest.raises(ConfigError, match="timeout_s is 0"):
        BudgetConfig(timeout_s=0.0)


def test_a_cpu_needs_a_limit_that_is_available_and_one_process(messy_corpora: MessyCorpora, tmp_path: Path) -> None:
    model, data, one = NestModel(tiny_config()), data_of(messy_corpora), trainer(tmp_path)
    with pytest.raises(ConfigError, match="say how much memory one rank may use: --memory_limit 8GiB"):
        find_budget(model, data, one)
    with pytest.raises(ConfigError, match=r"memory_limit is 900TB, but only .* are available here"):
        find_budget(model, data, one, BudgetConfig(memory_limit="900TB"))
    several = trainer(tmp_path, devices=2, strategy="ddp")
    with pytest.raises(ConfigError, match=r"the trainer has 2 ranks. Add --trainer.devices 1"):
        find_budget(model, data, several, BudgetConfig(memory_limit=LIMIT))


class FakeTrials:
    """Stands in for trials: memory is 1 MB for each second of audio, and more for the length squared."""

    def __init__(self, allowed_mb: int, *, per_square_mb: float = 0.0, overhead_s: float = 0.0) -> None:
        self.allowed_mb, self.per_square_mb, self.overhead_s = allowed_mb, per_square_mb, overhead_s
        self.tried: list[list[Shape]] = []

    def __call__(self, _: object, shapes: list[Shape], **_options: object) -> TrialResult:
        self.tried.append(shapes)
        times, peak = [], 0
        for cuts, samples in shapes:
            seconds = samples / RATE
            needed = round(1e6 * cuts * (seconds + self.per_square_mb * seconds**2))
            peak = max(peak, needed)
            if needed > 1e6 * self.allowed_mb:
                return self._result((cuts, samples), 0, times)
            times.append(StepTime(microbatch_s=self.overhead_s + 0.01 * cuts * seconds, optimizer_s=0.0))
        return self._result(None, peak, times)

    def _result(self, too_large: Shape | None, peak: int, times: list[StepTime]) -> TrialResult:
        return TrialResult(
            too_large=too_large,
            peak_bytes=peak,
            allowed_bytes=10**6 * self.allowed_mb,
            times=tuple(times),
            error="no memory" if too_large else "",
        )


def search(
    fake: FakeTrials, data: NestDataModule, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> tuple[BudgetReport, list[str]]:
    lines: list[str] = []
    monkeypatch.setattr(find, "run_trial", fake)
    model = NestModel(tiny_config())
    report = find_budget(model, data, trainer(directory), BudgetConfig(memory_limit="1GB"), lines.append)
    return report, lines


def test_the_budget_is_the_largest_whose_shapes_all_fit(
    messy_corpora: MessyCorpora, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    report, lines = search(FakeTrials(26), data_of(messy_corpora), tmp_path, monkeypatch)
    # 30 s would hold batches of 26 to 30 s; those of 25 s hold at most 25 s.
    assert report.largest_seconds == 25.0
    assert report.best_seconds == 5.0  # all budgets are equally fast here, and 5 s is the smallest of its halves
    assert not report.is_limited_by_corpus
    assert report.allowed_bytes == 26_000_000
    found = {trial.max_batch_seconds: trial for trial in report.trials}
    assert found[25.0].fits
    assert found[25.0].audio_s_per_s == pytest.approx(100.0)
    assert not found[30.0].fits
    assert found[30.0].too_large is not None
    assert any(re.match(r"trying 30 s: \d+ shapes, ", line) for line in lines)
    assert report.yaml() == f"data:\n  plan:\n    max_batch_seconds: {report.best_seconds:.1f}\n"


def test_a_budget_above_which_no_batch_changes_is_said_to_be_limited_by_the_corpus(
    messy_corpora: MessyCorpora, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    report, _ = search(FakeTrials(10**6, overhead_s=1.0), data_of(messy_corpora), tmp_path, monkeypatch)
    assert report.is_limited_by_corpus
    assert report.best_seconds > 20.0  # a fixed cost of each step makes large batches faster


def test_cuts_that_are_too_long_are_an_error_with_the_length_that_fits(
    messy_corpora: MessyCorpora, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = data_of(messy_corpora)
    longest = max(bucket.padded_samples for bucket in data.train_dataset.plan.buckets) / RATE
    with pytest.raises(TrainingError, match=rf"not even one cut of {longest:.1f} s fits into 2.0 MB; up to 2 s do"):
        search(FakeTrials(2), data, tmp_path, monkeypatch)
    with pytest.raises(TrainingError, match="not even one cut of 1 s fits"):
        search(FakeTrials(0), data, tmp_path, monkeypatch)


def test_the_longest_cut_may_be_one_of_validation(
    messy_corpora: MessyCorpora, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = PlanConfig(max_batch_seconds=20.0, num_shapes=8)
    data = NestDataModule(messy_corpora.speech, val_corpus=messy_corpora.noise, plan=plan, num_workers=0)
    assert data.val_dataset is not None
    longest_s = max(int(lengths[-1]) for lengths in data.val_dataset.corpus.num_samples) / RATE
    allowed_mb = math.ceil(max(bucket.padded_samples for bucket in data.train_dataset.plan.buckets) / RATE)
    with pytest.raises(TrainingError, match=rf"the longest cut of data\.val_corpus lasts {longest_s:.1f} s"):
        search(FakeTrials(allowed_mb), data, tmp_path, monkeypatch)


@pytest.mark.faults
@pytest.mark.slow
def test_a_real_search_finds_a_budget_within_the_limit(messy_corpora: MessyCorpora, tmp_path: Path) -> None:
    data = data_of(messy_corpora, max_cuts=2)  # which bounds the number of trials
    report = find_budget(
        NestModel(tiny_config()), data, trainer(tmp_path), BudgetConfig(memory_limit=LIMIT, memory_margin=0.2)
    )
    assert report.allowed_bytes == 4_800_000_000
    assert report.is_limited_by_corpus
    largest = next(trial for trial in report.trials if trial.max_batch_seconds == report.largest_seconds)
    assert largest.peak_bytes is not None
    assert 10**8 < largest.peak_bytes < report.allowed_bytes
    assert largest.audio_s_per_s is not None
    assert largest.audio_s_per_s > 0
    assert list(tmp_path.iterdir()) == []
