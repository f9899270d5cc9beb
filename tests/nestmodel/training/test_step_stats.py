import pytest
import torch
from torch import nn

from nestmodel import SkippedStepWarning, TrainingError
from nestmodel.nn.batch_norm import StepBatchNorm
from nestmodel.nn.loss import LossStats, loss_stats
from nestmodel.nn.network import NestNetwork
from nestmodel.nn.network_input import NetworkInput
from nestmodel.preflight.trial import noise_batch
from nestmodel.training.step_stats import GradientSums, SkippedSteps, StepStats, StopRequests, add_decayed
from tests.training import tiny_config


def stats_of(tokens: list[float], predicted: list[float]) -> LossStats:
    number = torch.tensor(1.0)
    return LossStats(number, number, number, torch.tensor([tokens]), torch.tensor([predicted]))


def input_of(num_samples: int) -> NetworkInput:
    network, batch = NestNetwork(tiny_config()), noise_batch((1, num_samples))
    return NetworkInput.of(batch, network.draw_masks(batch), "cpu")


def test_the_numbers_of_a_step_are_summed_over_microbatches_and_ranks() -> None:
    norm = StepBatchNorm(2)
    norm.start_collecting()
    vectors = []
    for rank, num_samples in enumerate([(3200, 1600), (800, 799, 798)]):
        step = StepStats([norm], num_codebooks=1)
        for number in num_samples:
            norm(torch.full((1, 2, 3), 1.0 + rank))
            step.add(stats_of([1.0, 0.0], [0.0, 1.0]), input_of(number))
        vectors.append(step.flatten(StopRequests(preempted_here=rank == 1)))
    stats, numbers, norm_statistics = StepStats([norm], num_codebooks=1).unflatten(torch.stack(vectors).sum(0))
    assert {name: value.item() for name, value in numbers.items()} == {
        "num_nonfinite": 0,
        "num_preempted": 1,
        "num_out_of_time": 0,
        "num_samples": 7197,
        "num_microbatches": 5,
    }
    assert stats.num_tokens.item() == 5
    torch.testing.assert_close(norm_statistics[0][0], torch.full((2,), (2 * 1.0 + 3 * 2.0) / 5))


def test_class_counts_decay_by_a_two_hundredth_per_step() -> None:
    first = add_decayed(None, stats_of([200.0, 0.0], [0.0, 400.0]))
    assert first.tolist() == [[[200.0, 0.0]], [[0.0, 400.0]]]
    second = add_decayed(first, stats_of([1.0, 2.0], [3.0, 0.0]))
    torch.testing.assert_close(second, torch.tensor([[[200.0, 2.0]], [[3.0, 398.0]]]))


def test_sums_equal_those_of_torch() -> None:
    network = NestNetwork(tiny_config()).train()
    sums, found = GradientSums(p for p in network.parameters() if p.requires_grad), []
    for is_set_aside in (False, True):
        network.zero_grad()
        for seed in range(3):
            torch.manual_seed(seed)
            loss = loss_stats(network(noise_batch((2, 16000)))).nll_sum
            if is_set_aside:
                sums.set_aside()
            loss.backward()
            if is_set_aside:
                sums.add()
        found.append({name: p.grad for name, p in network.named_parameters() if p.grad is not None})
    assert found[0].keys() == found[1].keys() != set()
    assert [name for name, grad in found[0].items() if not torch.equal(grad, found[1][name])] == []


def test_a_parameter_without_a_gradient_in_some_microbatch_keeps_its_sum() -> None:
    always, early, late = (nn.Parameter(torch.ones(2)) for _ in range(3))
    sums = GradientSums([always, early, late])
    for weight in (always * 2 + early, always * 3 + late):
        sums.set_aside()
        weight.sum().backward()
        sums.add()
    assert [p.grad.tolist() for p in (always, early, late) if p.grad is not None] == [[5.0] * 2, [1.0] * 2, [1.0] * 2]


@pytest.mark.parametrize(("has_scaler", "allowed"), [(False, 2), (True, 26)])
def test_skipped_steps_are_counted_with_a_warning_until_too_many_of_them_end_the_run(
    has_scaler: bool, allowed: int
) -> None:
    skipped = SkippedSteps(total=5)
    for _ in range(allowed):
        with pytest.warns(SkippedStepWarning, match=r"^step 7 is skipped\.$"):
            skipped.skip("step 7 is skipped", limit=2, has_scaler=has_scaler)
    assert skipped == SkippedSteps(total=5 + allowed, in_a_row=allowed)
    with pytest.raises(TrainingError, match=rf"{allowed + 1} consecutive steps .* allows \({allowed}\); step 9 is"):
        skipped.skip("step 9 is skipped", limit=2, has_scaler=has_scaler)
