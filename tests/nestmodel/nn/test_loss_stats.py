import math

import pytest
import torch

from nestmodel import LossStats, NestOutput, loss_stats
from nestmodel.nn.loss_stats import METRIC_NAMES


def output(probs: list[list[float]], targets: list[int]) -> NestOutput:
    """The output of a network with one codebook of three classes, scored at frames with these probabilities."""
    logits = torch.tensor(probs).reshape(-1, 3, 1).log()
    return NestOutput(
        logits=logits,
        targets=torch.tensor(targets, dtype=torch.int64).reshape(-1, 1),
        is_scored=torch.ones(1, len(logits), dtype=torch.bool),
        encoded=torch.zeros(1, len(logits), 2),
        enc_lens=torch.tensor([len(logits)]),
    )


FIRST = output([[0.5, 0.25, 0.25], [0.1, 0.2, 0.7]], [1, 2])
SECOND = output([[0.8, 0.1, 0.1]], [0])


def test_loss_stats_by_hand() -> None:
    stats = loss_stats(FIRST)
    assert stats.nll_sum.item() == pytest.approx(-math.log(0.25) - math.log(0.7), rel=1e-6)
    assert stats.loss.item() == pytest.approx((-math.log(0.25) - math.log(0.7)) / 2, rel=1e-6)
    assert stats.num_tokens.item() == 2
    assert stats.num_correct.item() == 1
    assert stats.token_counts.tolist() == [[0, 1, 1]]
    assert stats.predicted_counts.tolist() == [[1, 0, 1]]


def test_sums_of_microbatches_give_the_loss_over_all_their_tokens() -> None:
    total = LossStats.unflatten(loss_stats(FIRST).flatten() + loss_stats(SECOND).flatten(), num_codebooks=1)
    assert total.loss.item() == pytest.approx(-(math.log(0.25) + math.log(0.7) + math.log(0.8)) / 3, rel=1e-6)
    assert total.num_correct.item() == 2
    assert total.token_counts.tolist() == [[1, 1, 1]]
    assert total.predicted_counts.tolist() == [[2, 0, 1]]


def test_loss_without_scored_tokens_is_zero() -> None:
    assert loss_stats(output([], [])).loss.item() == 0.0


def test_metrics_by_hand() -> None:
    stats = loss_stats(FIRST)
    metrics = stats.metrics(torch.stack([stats.token_counts, stats.predicted_counts]))
    assert {name: value.item() for name, value in metrics.items()} == {
        "loss": stats.loss.item(),
        "accuracy": 0.5,
        "codebook_use": pytest.approx(2 / 3),
        "token_entropy": pytest.approx(math.log(2)),
        "token_perplexity": pytest.approx(2),
        "prediction_entropy": pytest.approx(math.log(2)),
        "prediction_perplexity": pytest.approx(2),
    }


def test_the_names_of_metrics_are_those_of_the_metrics() -> None:
    stats = loss_stats(FIRST)
    assert tuple(stats.metrics(torch.stack([stats.token_counts, stats.predicted_counts]))) == METRIC_NAMES
