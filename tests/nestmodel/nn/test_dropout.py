import pytest
import torch

from nestmodel.nn.dropout import Dropout


@pytest.mark.parametrize("prob", [0.1, 0.5, 0.75])
def test_values_are_dropped_with_the_given_probability_and_the_mean_is_preserved(prob: float) -> None:
    torch.manual_seed(0)
    x = torch.full((1001, 1003), 2.0)
    dropped = Dropout(prob).train()(x)
    assert (dropped == 0).float().mean().item() == pytest.approx(prob, abs=4 * (prob * (1 - prob) / x.numel()) ** 0.5)
    kept = dropped[dropped != 0]
    torch.testing.assert_close(kept, torch.full_like(kept, 2.0 / (1 - prob)), rtol=1e-4, atol=0)


def test_values_are_dropped_independently() -> None:
    torch.manual_seed(0)
    is_dropped = (Dropout(0.5).train()(torch.ones(4 * 250_000)) == 0).double()
    for distance in (1, 2, 3, 4, 5, 8):
        both_dropped = (is_dropped[distance:] * is_dropped[:-distance]).mean().item()
        assert both_dropped == pytest.approx(0.25, abs=0.003), distance
    for offset in range(4):  # one draw decides about four values
        assert is_dropped[offset::4].mean().item() == pytest.approx(0.5, abs=0.005)


def test_only_kept_values_receive_gradients() -> None:
    x = torch.randn(37, 5, requires_grad=True)
    dropped = Dropout(0.3).train()(x)
    dropped.sum().backward()
    assert x.grad is not None
    torch.testing.assert_close(x.grad * x, dropped, rtol=1e-5, atol=0)


def test_dropped_values_depend_on_the_seed() -> None:
    seen = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        seen.append(Dropout(0.3).train()(torch.ones(100)))
    assert torch.equal(seen[0], seen[1])
    assert not torch.equal(seen[0], seen[2])


def test_nothing_is_dropped_in_eval_mode_or_with_probability_zero() -> None:
    x = torch.randn(3, 3)
    assert Dropout(0.5).eval()(x) is x
    assert Dropout(0.0).train()(x) is x


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_values_are_dropped_with_the_given_probability_on_a_gpu() -> None:
    dropped = Dropout(0.25).train()(torch.ones(1_000_000, device="cuda"))
    assert (dropped == 0).float().mean().item() == pytest.approx(0.25, abs=0.003)
