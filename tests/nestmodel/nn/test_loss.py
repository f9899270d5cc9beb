import math

import pytest
import torch

from nestmodel import LossStats, NestOutput, loss_stats
from nestmodel.nn.loss import masked_nll


def test_codebooks_are_averaged() -> None:
    probs = torch.tensor([[[0.5, 0.9], [0.5, 0.1]]])  # one frame, two classes, two codebooks
    nll_sum, num_tokens = masked_nll(probs.log(), torch.tensor([[0, 1]]))
    assert float(nll_sum) == pytest.approx((math.log(2) + math.log(10)) / 2, rel=1e-6)
    assert num_tokens == 1


def test_no_scored_token_gives_zero_loss_and_zero_gradient() -> None:
    weight = torch.randn(4, 5, requires_grad=True)
    logits = (torch.empty(0, 4) @ weight).unsqueeze(-1)
    nll_sum, num_tokens = masked_nll(logits, torch.empty(0, 1, dtype=torch.int64))
    nll_sum.backward()
    assert (float(nll_sum.detach()), num_tokens) == (0.0, 0)
    assert weight.grad is not None
    assert torch.equal(weight.grad, torch.zeros(4, 5))


def test_nll_sum_of_bfloat16_logits_is_float32() -> None:
    nll_sum, _ = masked_nll(torch.zeros(1000, 8, 1, dtype=torch.bfloat16), torch.zeros(1000, 1, dtype=torch.int64))
    assert nll_sum.dtype == torch.float32
    assert float(nll_sum) == pytest.approx(1000 * math.log(8), rel=1e-5)


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


def test_without_scored_tokens_there_is_no_loss_entropy_or_accuracy() -> None:
    zeros = torch.zeros(1, 3)
    stats = LossStats(*torch.zeros(3), zeros, zeros)
    metrics = stats.metrics(torch.stack([zeros, zeros]))
    assert {name for name, value in metrics.items() if not value.isnan()} == {"codebook_use"}
    assert float(stats.loss) == 0.0


def test_with_several_codebooks_use_and_entropy_are_there_for_each() -> None:
    tokens, predictions = torch.tensor([[2.0, 2.0, 0.0], [0.0, 7.0, 0.0]]), torch.ones(2, 3)
    stats = LossStats(*torch.tensor([1.0, 4.0, 2.0]), tokens, predictions)
    metrics = {name: value.item() for name, value in stats.metrics(torch.stack([tokens, predictions])).items()}
    assert metrics["codebook_use"] == pytest.approx(1 / 2)
    assert metrics["token_entropy"] == pytest.approx(math.log(2) / 2)
    assert {name: value for name, value in metrics.items() if "_cb" in name} == {
        "codebook_use_cb0": pytest.approx(2 / 3),
        "token_entropy_cb0": pytest.approx(math.log(2)),
        "codebook_use_cb1": pytest.approx(1 / 3),
        "token_entropy_cb1": 0.0,
    }
