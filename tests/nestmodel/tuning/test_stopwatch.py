import torch

from nestmodel.tuning.stopwatch import stopwatch


def test_a_computation_runs_before_it_is_measured_and_at_least_three_times() -> None:
    calls = []

    def run() -> list[torch.Tensor]:
        calls.append(None)
        return []

    times = stopwatch(torch.device("cpu"))(run, 0.0)
    assert len(times) == 3
    assert len(calls) == 5
    assert all(time >= 0 for time in times)
