import math
from dataclasses import replace
from pathlib import Path

import pytest

from nestmodel import MaskConfig, NestModel
from nestmodel.training.callbacks.health import Health, HealthChecker, HealthMetrics, UnhealthyTrainingWarning
from tests.conftest import MessyCorpora
from tests.training import messy_data, tiny_config, trainer

WELL = HealthMetrics(
    step=0, loss=4.0, token_entropy=6.0, token_perplexity=400.0, prediction_perplexity=300.0, grad_norm=1.0
)


def diagnose(checks: list[HealthMetrics], num_classes: int = 8192, warmup_steps: int = 100) -> list[str]:
    diagnosis = HealthChecker(num_classes, warmup_steps)
    return [message for vitals in checks for message in diagnosis.check(vitals)]


def course(number: int = 100, first_step: int = 0, **changes: float) -> list[HealthMetrics]:
    return [WELL._replace(step=first_step + 50 * i, **changes) for i in range(number)]


def test_a_healthy_run_is_left_in_peace() -> None:
    assert diagnose(course(200)) == []


def test_a_loss_at_the_entropy_of_the_tokens_is_named_once_and_not_too_early() -> None:
    (message,) = diagnose(course(200, loss=5.95, prediction_perplexity=1.5))
    assert message.startswith("step 2000: the loss (5.950) is where the entropy of the tokens (6.000) is")
    assert "as varied as 1.5 classes" in message
    assert diagnose(course(30, loss=5.95)) == []
    assert diagnose(course(200, loss=5.95), warmup_steps=25000) == []
    assert diagnose(course(200, loss=5.8)) == []


def test_an_illness_that_comes_back_is_named_again() -> None:
    ill = course(30, first_step=5000, loss=6.0)
    messages = diagnose([*ill, *course(30, first_step=6500), *(v._replace(step=v.step + 3000) for v in ill)])
    assert [message.split(":")[0] for message in messages] == ["step 5950", "step 8900"]


@pytest.mark.parametrize(
    ("perplexity", "num_classes", "is_ill"), [(81.0, 8192, True), (83.0, 8192, False), (1.9, 32, True)]
)
def test_a_collapsed_codebook_is_named(perplexity: float, num_classes: int, is_ill: bool) -> None:
    messages = diagnose(course(25, token_perplexity=perplexity), num_classes)
    assert len(messages) == is_ill
    assert all(f"{perplexity:.1f} classes of {num_classes}" in message for message in messages)


def test_gradients_that_grow_twentyfold_and_stay_there_are_exploding() -> None:
    spike = [WELL._replace(grad_norm=500.0)]
    assert diagnose([*course(40), *spike * 2, *course(40)]) == []
    (message,) = diagnose([*course(40), *spike * 10])
    assert "the gradient norm is 500, 500 times what it was" in message
    assert diagnose([*course(10), *spike * 10]) == []  # nothing to compare with yet
    assert diagnose([*course(40), *course(200, grad_norm=15.0)]) == []


@pytest.mark.parametrize("norm", [math.nan, math.inf])
def test_gradients_that_are_no_numbers_are_named_at_once(norm: float) -> None:
    (message,) = diagnose([WELL._replace(grad_norm=norm, loss=math.nan)] * 3)
    assert f"the gradient norm is {norm}" in message


def test_a_run_whose_tokens_have_collapsed_warns(messy_corpora: MessyCorpora, tmp_path: Path) -> None:
    model = NestModel(replace(tiny_config(), masking=MaskConfig(prob=0.5)))
    model.quantizer.codebooks[0, 1:] = -model.quantizer.codebooks[0, :1]  # two codes, opposite to each other
    model.quantizer.proj.weight[0] = 1.0
    model.quantizer.proj.weight[1:] = 0.0
    runner = trainer(tmp_path, [Health()], max_steps=24, log_every_n_steps=1)
    with pytest.warns(UnhealthyTrainingWarning, match=r"step 20: the tokens .* of 32 .* the codebook has collapsed"):
        runner.fit(model, datamodule=messy_data(messy_corpora))


def test_what_is_watched_is_logged(messy_corpora: MessyCorpora, tmp_path: Path) -> None:
    runner = trainer(tmp_path, max_steps=1, log_every_n_steps=1)
    runner.fit(NestModel(tiny_config()), datamodule=messy_data(messy_corpora))
    figures = {name: float(value) for name, value in runner.callback_metrics.items()}
    assert figures["train_token_perplexity"] == pytest.approx(math.exp(figures["train_token_entropy"]), rel=1e-5)
    assert figures["train_prediction_perplexity"] == pytest.approx(
        math.exp(figures["train_prediction_entropy"]), rel=1e-5
    )
    assert 1.0 <= figures["train_prediction_perplexity"] <= 32.0
