import torch
from torch import nn

from nestmodel.nn.loss import loss_stats
from nestmodel.nn.network import NestNetwork
from nestmodel.preflight.trial import noise_batch
from nestmodel.training.step_stats import GradientSums
from tests.training import tiny_config


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


def test_a_parameter_that_gets_no_gradient_keeps_its_sum() -> None:
    used, unused = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    sums = GradientSums([used, unused])
    for weight in (used * 2 + unused, used * 3):
        sums.set_aside()
        weight.sum().backward()
        sums.add()
    assert used.grad is not None
    assert unused.grad is not None
    assert (used.grad.tolist(), unused.grad.tolist()) == ([5.0, 5.0], [1.0, 1.0])


def test_a_first_gradient_after_others_is_kept() -> None:
    early, late = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    sums = GradientSums([early, late])
    for weight in (early * 2, early + late):
        sums.set_aside()
        weight.sum().backward()
        sums.add()
    assert late.grad is not None
    assert late.grad.tolist() == [1.0, 1.0]
