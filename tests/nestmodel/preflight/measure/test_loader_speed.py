from pathlib import Path
from typing import Any

import pytest

from nestdata import PlanConfig
from nestmodel import NestDataModule
from nestmodel.preflight.measure import loader_speed
from tests.conftest import MessyCorpora
from tests.training import trainer


def test_the_loader_is_measured_as_training_uses_it_on_a_gpu(
    messy_corpora: MessyCorpora, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = PlanConfig(max_batch_seconds=10.0, microbatches_per_step=2)
    data, on_cpu = (
        NestDataModule(messy_corpora.speech, messy_corpora.banked, plan=plan, num_workers=1),
        trainer(tmp_path),
    )
    loader_of, options = data.loader_of, []

    def without_gpu(dataset: Any, batch_indices: Any, **given: Any) -> Any:
        options.append(given)
        return loader_of(dataset, batch_indices, **{**given, "on_gpu": False})

    monkeypatch.setattr(data, "loader_of", without_gpu)
    monkeypatch.setattr(loader_speed, "on_gpu", lambda _: True)
    rate = loader_speed._delivered(data, on_cpu, loader_speed._own_indices(data, on_cpu), num_workers=0, measure_s=0.01)
    assert rate > 0.0
    assert options == [{"on_gpu": True, "num_workers": 0}]
