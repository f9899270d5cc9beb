from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl

from nestmodel.config import OptimizerConfig
from nestmodel.errors import ConfigError
from nestmodel.training.schedule import check_schedule, learning_rate, noam_lr
from tests.conftest import MessyCorpora
from tests.training import fit, tiny_config

CONFIG = OptimizerConfig(lr=5.0, warmup_steps=25000, min_lr=1e-6)


@pytest.mark.parametrize(("step", "rate"), [(1, 5.590e-8), (1000, 5.590e-5), (25000, 1.39754e-3), (40000, 1.10485e-3)])
def test_learning_rate_of_the_large_model(step: int, rate: float) -> None:
    assert noam_lr(step, CONFIG, 512) == pytest.approx(rate, rel=1e-4)


def test_the_minimum_applies_after_the_warm_up_only() -> None:
    config = replace(CONFIG, warmup_steps=10, min_lr=1.0)
    assert noam_lr(10, config, 512) == pytest.approx(5.0 / 512**0.5 / 10**0.5)
    assert noam_lr(11, config, 512) == 1.0


COSINE = OptimizerConfig(lr=1e-3, schedule="cosine", warmup_steps=100, min_lr=1e-5)


@pytest.mark.parametrize(
    ("config", "step", "rate"),
    [
        (COSINE, 0, 1e-5),
        (COSINE, 49, 5e-4),
        (COSINE, 99, 1e-3),
        (COSINE, 549, (1e-3 + 1e-5) / 2),
        (COSINE, 999, 1e-5),
        (COSINE, 1000, 1e-5),
        (replace(COSINE, schedule="wsd"), 799, 1e-3),
        (replace(COSINE, schedule="wsd"), 899, (1e-3 + 1e-5) / 2),
        (replace(COSINE, schedule="wsd"), 999, 1e-5),
        (replace(COSINE, schedule="wsd", decay_share=1.0), 549, (1e-3 + 1e-5) / 2),
    ],
)
def test_a_rate_rises_to_lr_and_ends_at_the_minimum(config: OptimizerConfig, step: int, rate: float) -> None:
    assert learning_rate(step, config, 512, 1000) == pytest.approx(rate)


@pytest.mark.parametrize("num_steps", [-1, 100])
def test_a_schedule_that_ends_with_the_run_needs_its_length(num_steps: int) -> None:
    check_schedule(CONFIG, num_steps)
    with pytest.raises(ConfigError, match=r"optimizer\.schedule cosine ends at trainer\.max_steps"):
        check_schedule(COSINE, num_steps)


class LearningRates(pl.Callback):
    """Records the learning rate of every optimizer step."""

    def __init__(self) -> None:
        self.rates: list[float] = []

    def on_before_optimizer_step(self, _trainer: object, _module: object, optimizer: Any) -> None:
        self.rates.append(optimizer.param_groups[0]["lr"])


def test_each_optimizer_step_has_the_learning_rate_of_the_steps_before_it(
    messy_corpora: MessyCorpora, tmp_path: Path
) -> None:
    seen = LearningRates()
    fit(messy_corpora, tmp_path, max_steps=4, callbacks=[seen])
    # As in NeMo, whose schedule counts finished steps: the first two steps have the learning rate of step 1.
    assert seen.rates == pytest.approx([noam_lr(step, tiny_config().optimizer, 16) for step in (1, 1, 2, 3)], rel=1e-12)
    assert seen.rates[0] == pytest.approx(1 / 4 / 10**1.5)
