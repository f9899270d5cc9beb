import time

import pytest
import torch

from nestmodel.training.pace import Pace, SlowRank, SlowRanks, by_time


def rows(*ranks: tuple[float, float, float]) -> torch.Tensor:
    return torch.tensor(ranks)


EQUAL = (0.1, 1.0, 2.0)


@pytest.mark.parametrize(
    ("phase", "slow"), [("loading", (0.8, 1.0, 2.0)), ("forward", (0.1, 1.7, 2.0)), ("backward", (0.1, 1.0, 2.7))]
)
def test_a_slow_rank_is_named_once_with_its_phase_after_two_windows(
    phase: str, slow: tuple[float, float, float]
) -> None:
    ranks, found = SlowRanks(), by_time(rows(EQUAL, slow, EQUAL))
    assert found[0] == SlowRank(1, pytest.approx(sum(slow) / sum(EQUAL)), phase)
    assert [ranks.newly_slow(found) for _ in range(3)] == [[], [found[0]], []]


def test_ranks_that_differ_by_less_than_a_tenth_are_not_slow() -> None:
    ranks, found = SlowRanks(), by_time(rows((0.1, 1.05, 2.1), EQUAL))
    assert [ranks.newly_slow(found) for _ in range(3)] == [[], [], []]


def test_a_rank_that_is_slow_now_and_then_is_not_named() -> None:
    ranks = SlowRanks()
    slow = (0.2, 2.0, 4.0)
    for number in range(6):
        assert ranks.newly_slow(by_time(rows(EQUAL, slow if number % 2 else EQUAL))) == []


def test_without_a_measurement_of_every_rank_nothing_is_compared() -> None:
    assert by_time(rows((0.0, 0.0, 0.0), EQUAL)) == []
    assert by_time(rows(EQUAL)) == []


def step(pace: Pace, loading_s: float, forward_s: float, backward_s: float) -> None:
    class Slow(torch.autograd.Function):
        @staticmethod
        def forward(ctx: object, x: torch.Tensor) -> torch.Tensor:  # noqa: ARG004
            return x.clone()

        @staticmethod
        def backward(ctx: object, grad: torch.Tensor) -> torch.Tensor:  # noqa: ARG004
            time.sleep(backward_s)
            return grad

    pace.wait_for_batch()
    time.sleep(loading_s)
    pace.begin_forward()
    time.sleep(forward_s)
    loss = Slow.apply(torch.ones((), requires_grad=True))
    pace.begin_backward(loss)
    loss.backward()
    pace.end_step()


def test_the_phases_of_a_step_are_measured() -> None:
    pace = Pace(torch.device("cpu"))
    for _ in range(3):
        step(pace, 0.03, 0.01, 0.02)
    loading, forward, backward = pace.take_means()
    assert loading >= 0.03
    assert forward >= 0.01
    assert backward >= 0.02
    assert pace.take_means() == (0.0, 0.0, 0.0)


def test_a_rank_whose_loader_delivers_in_bursts_is_measured_by_what_it_costs() -> None:
    pace = Pace(torch.device("cpu"))
    for number in range(8):
        step(pace, 0.08 if number == 0 else 0.0, 0.01, 0.01)
    assert 0.01 <= pace.take_means()[0] < 0.02


def test_a_step_in_which_something_else_happened_does_not_count() -> None:
    pace = Pace(torch.device("cpu"))
    pace.wait_for_batch()
    pace.begin_forward()
    pace.discard_step()
    step(pace, 0.0, 0.0, 0.0)
    assert len(pace._steps) == 1
