import torch
from torch import nn

from nestmodel.nn.batch_norm import StepBatchNorm, update_running_stats


def ours_and_torchs() -> tuple[StepBatchNorm, nn.BatchNorm1d]:
    ours, torchs = StepBatchNorm(3), nn.BatchNorm1d(3)
    for norm in (ours, torchs):
        nn.init.normal_(norm.weight, generator=torch.Generator().manual_seed(1))
    return ours, torchs


def end_step(norm: StepBatchNorm, num_microbatches: int) -> None:
    update_running_stats([norm], [norm.pop_collected(num_microbatches) / num_microbatches])


def test_it_equals_torchs_batch_norm_before_collecting() -> None:
    ours, torchs = ours_and_torchs()
    for training in (True, False):
        x = torch.randn(4, 3, 7)
        assert torch.equal(ours.train(training)(x), torchs.train(training)(x))
        assert all(torch.equal(a, b) for a, b in zip(ours.buffers(), torchs.buffers(), strict=True))


def test_collecting_one_microbatch_per_step_equals_torchs_batch_norm() -> None:
    ours, torchs = ours_and_torchs()
    ours.start_collecting()
    for _ in range(3):
        x = torch.randn(4, 3, 7)
        assert torch.equal(ours(x), torchs(x))
        end_step(ours, 1)
        torch.testing.assert_close(dict(ours.named_buffers()), dict(torchs.named_buffers()))


def test_running_statistics_do_not_depend_on_how_microbatches_are_split_over_ranks() -> None:
    microbatches = [torch.randn(4, 3, 7) * scale for scale in (1.0, 2.0, 3.0, 4.0)]
    alone, *ranks = (StepBatchNorm(3) for _ in range(3))
    for norm in (alone, *ranks):
        norm.start_collecting()
    for x in microbatches:
        alone(x)
    for norm, share in zip(ranks, (microbatches[:2], microbatches[2:]), strict=True):
        for x in share:
            norm(x)
    total = ranks[0].pop_collected(2) + ranks[1].pop_collected(2)
    for norm in ranks:
        update_running_stats([norm], [total / 4])
    end_step(alone, 4)
    variances = torch.stack([x.transpose(0, 1).flatten(1).var(dim=1) for x in microbatches])
    torch.testing.assert_close(alone.running_var, 0.9 * torch.ones(3) + 0.1 * variances.mean(dim=0))
    for norm in ranks:
        torch.testing.assert_close(dict(norm.named_buffers()), dict(alone.named_buffers()))
    assert alone.num_batches_tracked.item() == 1


def test_nothing_is_collected_while_statistics_are_frozen() -> None:
    ours, _ = ours_and_torchs()
    ours.start_collecting()
    x = torch.randn(4, 3, 7)
    ours(x)
    with ours.frozen_statistics():
        ours(x)
    once = ours.pop_collected(1)
    ours(x)
    assert torch.equal(ours.pop_collected(1), once)


def test_a_norm_that_is_called_several_times_or_never_has_the_statistics_of_its_calls() -> None:
    once, twice, never = (StepBatchNorm(1) for _ in range(3))
    for norm in (once, twice, never):
        norm.start_collecting()
    for values in (torch.full((4, 1), 100.0), torch.full((4, 1), 200.0)):
        once(values)
        twice(twice(values) * 0 + values)
    for norm in (once, twice):
        assert norm.pop_collected(2)[0].item() == 300.0
    assert never.pop_collected(2).tolist() == [[0.0], [2.0]]  # the initial mean and variance, twice
