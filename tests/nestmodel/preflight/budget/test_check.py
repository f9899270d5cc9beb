from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from nestdata import PlanConfig
from nestmodel import BudgetConfig, CheckResult, NestDataModule, NestModel, find_budget
from nestmodel.preflight.budget import check, find
from nestmodel.preflight.budget.check import check_step
from nestmodel.preflight.budget.shapes import critical_shapes, describe_shapes
from nestmodel.preflight.measure.memory import PeakMemory
from nestmodel.preflight.measure.trial import TrialResult
from nestmodel.preflight.measure.trial_step import Shape
from tests.conftest import MessyCorpora
from tests.nestmodel.preflight.budget.test_search import FakeTrials, data_of
from tests.training import tiny_config, trainer


def checked(
    fake: Callable[..., TrialResult],
    data: NestDataModule,
    directory: Path,
    monkeypatch: pytest.MonkeyPatch,
    **encoder: Any,
) -> CheckResult:
    monkeypatch.setattr(check, "run_shapes", fake)
    monkeypatch.setattr(check, "usable_bytes", lambda *_: 10**9)
    return check_step(NestModel(tiny_config(**encoder)), data, trainer(directory))


def test_the_check_tries_the_shapes_that_the_search_tries_first(
    messy_corpora: MessyCorpora, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake, data = FakeTrials(1000), data_of(messy_corpora, max_batch_seconds=12.0)
    result = checked(fake, data, tmp_path, monkeypatch)
    shapes = critical_shapes(data.train_dataset.plan)
    assert fake.tried == [shapes]
    assert result.status == "ok"
    assert result.value.endswith(describe_shapes(shapes, data.sampling_rate))


@pytest.mark.parametrize("plan", [{}, {"quadratic_seconds": 10.0}])
def test_the_check_advises_the_budget_that_the_search_finds(
    plan: dict[str, Any], messy_corpora: MessyCorpora, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = data_of(messy_corpora, max_batch_seconds=80.0, **plan)
    result = checked(FakeTrials(26), data, tmp_path, monkeypatch)
    assert (result.status, result.value) == ("failed", "out of memory, 1.0 GB in total")
    monkeypatch.setattr(find, "run_trial", FakeTrials(26))
    budget = find_budget(NestModel(tiny_config()), data, trainer(tmp_path), BudgetConfig(memory_limit="1GB"))
    assert result.advice == (
        f"Lower data.plan.max_batch_seconds (now 80) to about {budget.largest_seconds:g}; or set "
        "model.config.encoder.checkpoint_activations. The error: no memory"
    )


def test_checkpoints_are_not_advised_to_a_run_that_has_them(
    messy_corpora: MessyCorpora, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = data_of(messy_corpora, max_batch_seconds=80.0)
    advice = checked(FakeTrials(26), data, tmp_path, monkeypatch, checkpoint_activations=True).advice
    assert advice == "Lower data.plan.max_batch_seconds (now 80) to about 25. The error: no memory"


def longest_of(data: NestDataModule) -> float:
    return max(int(lengths[-1]) for lengths in data.train_dataset.corpus.num_samples) / data.sampling_rate


def test_a_budget_that_the_longest_cut_fills_is_not_said_to_be_too_large_for_that_cut(
    messy_corpora: MessyCorpora, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    longest_s = longest_of(data_of(messy_corpora))
    fake, data = FakeTrials(1), data_of(messy_corpora, max_batch_seconds=longest_s + 0.1)
    advice = checked(fake, data, tmp_path, monkeypatch, checkpoint_activations=True).advice
    assert len(fake.tried) == 1  # the step itself: there is no smaller budget to try
    assert advice == (
        f"data.plan.max_batch_seconds (now {longest_s + 0.1:g}) cannot be much lower, because the longest cut of "
        f"data.corpus needs {longest_s:.1f} s: set data.plan.max_cuts, or prepare data.corpus with a lower "
        "--max-seconds. The error: no memory"
    )


def test_the_longest_cut_is_that_of_training_or_validation(
    messy_corpora: MessyCorpora, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = PlanConfig(max_batch_seconds=80.0, num_shapes=8)
    longest_s = longest_of(NestDataModule(messy_corpora.noise, plan=plan))
    data = NestDataModule(messy_corpora.speech, val_corpus=messy_corpora.noise, plan=plan, num_workers=0)
    assert longest_of(data) < longest_s
    advice = checked(FakeTrials(1), data, tmp_path, monkeypatch, checkpoint_activations=True).advice
    assert f"the lowest that the longest cut of data.val_corpus ({longest_s:.1f} s) allows" in advice
    assert "or prepare data.val_corpus with a lower --max-seconds" in advice


@pytest.mark.parametrize(
    ("max_cuts", "allowed_mb", "too_large", "change"),
    [
        (None, 4, "2 x 2.4 s", "set data.plan.max_cuts below 2, or prepare data.corpus with a lower --max-seconds"),
        (1, 3, "1 x 3.1 s", "prepare data.corpus with --max-seconds below 3.1"),
    ],
)
def test_the_advice_names_the_shape_that_did_not_fit(
    max_cuts: int | None,
    allowed_mb: int,
    too_large: str,
    change: str,
    messy_corpora: MessyCorpora,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of two cuts of 2.4 s, for example, where one of 3.1 s, the longest of the corpus, fits."""
    data = data_of(messy_corpora, max_batch_seconds=80.0, max_cuts=max_cuts, num_shapes=None)
    advice = checked(FakeTrials(allowed_mb), data, tmp_path, monkeypatch, checkpoint_activations=True).advice
    assert advice == (
        "data.plan.max_batch_seconds (now 80) does not fit, nor does 5, the lowest that the longest cut of data.corpus "
        f"(3.1 s) allows: a batch of {too_large} is too large. Lower it, and {change}. The error: no memory"
    )


@pytest.mark.parametrize("can_be_reset", [True, False])
def test_only_failed_allocations_count_if_the_peak_of_the_failed_step_remains(
    can_be_reset: bool, messy_corpora: MessyCorpora, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits: list[int] = []
    fake = FakeTrials(26)

    def run_shapes(make_step: object, shapes: list[Shape], *, allowed_bytes: int, **options: object) -> TrialResult:
        limits.append(allowed_bytes)
        return fake(make_step, shapes, **options)

    monkeypatch.setattr(PeakMemory, "reset", lambda _: can_be_reset)
    data = data_of(messy_corpora, max_batch_seconds=80.0)
    assert "to about 25;" in checked(run_shapes, data, tmp_path, monkeypatch).advice
    assert limits[0] == 0
    assert set(limits[1:]) == {900_000_000 if can_be_reset else 0}
