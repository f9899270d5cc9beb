from pathlib import Path
from typing import Any

import pytest

from nestmodel import BudgetConfig, CheckResult, NestDataModule, NestModel, find_budget
from nestmodel.preflight.budget import check, find
from nestmodel.preflight.budget.check import check_step
from nestmodel.preflight.budget.shapes import critical_shapes, describe_shapes
from tests.conftest import MessyCorpora
from tests.nestmodel.preflight.budget.test_search import FakeTrials, data_of
from tests.training import tiny_config, trainer


def checked(
    fake: FakeTrials, data: NestDataModule, directory: Path, monkeypatch: pytest.MonkeyPatch, **encoder: Any
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
