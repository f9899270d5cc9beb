import torch

from nestmodel.nn.loss import LossStats
from nestmodel.training.step_stats import DecayedCounts


def stats_of(tokens: list[float], predicted: list[float]) -> LossStats:
    number = torch.tensor(1.0)
    return LossStats(number, number, number, torch.tensor([tokens]), torch.tensor([predicted]))


def test_class_counts_decay_by_a_two_hundredth_per_step() -> None:
    counts = DecayedCounts()
    first = counts.plus(stats_of([200.0, 0.0], [0.0, 400.0]))
    assert counts.counts is None
    counts.counts = first
    assert first.tolist() == [[[200.0, 0.0]], [[0.0, 400.0]]]
    second = counts.plus(stats_of([1.0, 2.0], [3.0, 0.0]))
    torch.testing.assert_close(second, torch.tensor([[[200.0, 2.0]], [[3.0, 398.0]]]))
