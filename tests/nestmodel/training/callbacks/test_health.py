import math
from dataclasses import replace
from pathlib import Path

import pytest

from nestmodel import MaskConfig, NestModel
from nestmodel.training.callbacks.health import Health, HealthChecker, HealthMetrics, UnhealthyTrainingWarning
from tests.conftest import MessyCorpora
from tests.training import messy_data, tiny_config, trainer

HEALTHY = HealthMetrics(
    step=0, loss=4.0, token_entropy=6.0, token_perplexity=400.0, prediction_perplexity=300.0, grad_norm=1.0
)


def messages_of(checks: list[HealthMetrics], num_classes: int = 8192, warmup_steps: int = 100) -> list[str]:
    checker = HealthChecker(num_classes, warmup_steps)
    return [message for metrics in checks for message in checker.check(metrics)]


def healthy_run(number: int = 100, first_step: int = 0, **changes: float) -> list[HealthMetrics]:
    return [HEALTHY._replace(step=first_step + 50 * i, **changes) for i in range(number)]


def test_a_healthy_run_gives_no_message() -> None:
    assert messages_of(healthy_run(200)) == []


def test_a_loss_stuck_at_the_token_entropy_is_reported_once_and_not_during_the_warm_up() -> None:
    (message,) = messages_of(healthy_run(200, loss=5.95, prediction_perplexity=1.5))
    assert message.startswith("step 2000: the loss (5.950) is stuck at the entropy of the tokens (6.000)")
    assert "the perplexity of its predictions is 1.5 classes" in message
    assert messages_of(healthy_run(30, loss=5.95)) == []
    assert messages_of(healthy_run(200, loss=5.95), warmup_steps=25000) == []
    assert messages_of(healthy_run(200, loss=5.8)) == []


def test_a_problem_that_returns_is_reported_again() -> None:
    stuck = healthy_run(30, first_step=5000, loss=6.0)
    again = [metrics._replace(step=metrics.step + 3000) for metrics in stuck]
    messages = messages_of([*stuck, *healthy_run(30, first_step=6500), *again])
    assert [message.split(":")[0] for message in messages] == ["step 5950", "step 8900"]


@pytest.mark.parametrize(
    ("perplexity", "num_classes", "is_collapsed"), [(81.0, 8192, True), (83.0, 8192, False), (1.9, 32, True)]
)
def test_a_collapsed_codebook_is_reported(perplexity: float, num_classes: int, is_collapsed: bool) -> None:
    messages = messages_of(healthy_run(25, token_perplexity=perplexity), num_classes)
    assert len(messages) == is_collapsed
    assert all(f"{perplexity:.1f} classes of {num_classes}" in message for message in messages)


def test_gradients_that_stay_above_twenty_times_their_median_are_exploding() -> None:
    spike = [HEALTHY._replace(grad_norm=500.0)]
    assert messages_of([*healthy_run(40), *spike * 2, *healthy_run(40)]) == []
    (message,) = messages_of([*healthy_run(40), *spike * 10])
    assert "the gradient norm is 500, 500 times its recent median" in message
    assert messages_of([*healthy_run(10), *spike * 10]) == []  # the median needs 20 checks
    assert messages_of([*healthy_run(40), *healthy_run(200, grad_norm=15.0)]) == []


@pytest.mark.parametrize("norm", [math.nan, math.inf])
def test_nonfinite_gradients_are_reported_immediately(norm: float) -> None:
    (message,) = messages_of([HEALTHY._replace(grad_norm=norm, loss=math.nan)] * 3)
    assert f"the gradient norm is {norm}" in message


def test_training_with_a_collapsed_codebook_warns(messy_corpora: MessyCorpora, tmp_path: Path) -> None:
    model = NestModel(replace(tiny_config(), masking=MaskConfig(prob=0.5)))
    model.quantizer.codebooks[0, 1:] = -model.quantizer.codebooks[0, :1]  # two different codes, which are opposite
    model.quantizer.proj.weight[0] = 1.0
    model.quantizer.proj.weight[1:] = 0.0
    runner = trainer(tmp_path, [Health()], max_steps=24, log_every_n_steps=1)
    with pytest.warns(UnhealthyTrainingWarning, match=r"step 20: the perplexity .* of 32: the codebook has collapsed"):
        runner.fit(model, datamodule=messy_data(messy_corpora))


def test_the_checked_metrics_are_logged(messy_corpora: MessyCorpora, tmp_path: Path) -> None:
    runner = trainer(tmp_path, max_steps=1, log_every_n_steps=1)
    runner.fit(NestModel(tiny_config()), datamodule=messy_data(messy_corpora))
    figures = {name: float(value) for name, value in runner.callback_metrics.items()}
    assert figures["train_token_perplexity"] == pytest.approx(math.exp(figures["train_token_entropy"]), rel=1e-5)
    assert figures["train_prediction_perplexity"] == pytest.approx(
        math.exp(figures["train_prediction_entropy"]), rel=1e-5
    )
    assert 1.0 <= figures["train_prediction_perplexity"] <= 32.0
