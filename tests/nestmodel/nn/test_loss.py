import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nestmodel.nn.loss import masked_nll


def test_nll_sum_by_hand() -> None:
    probs = torch.tensor([[0.5, 0.25, 0.25], [0.1, 0.2, 0.7]]).unsqueeze(-1)
    nll_sum, num_tokens = masked_nll(probs.log(), torch.tensor([[1], [2]]))
    assert float(nll_sum) == pytest.approx(-math.log(0.25) - math.log(0.7), rel=1e-6)
    assert num_tokens == 2


def test_codebooks_are_averaged() -> None:
    probs = torch.tensor([[[0.5, 0.9], [0.5, 0.1]]])  # one frame, two classes, two codebooks
    nll_sum, num_tokens = masked_nll(probs.log(), torch.tensor([[0, 1]]))
    assert float(nll_sum) == pytest.approx((math.log(2) + math.log(10)) / 2, rel=1e-6)
    assert num_tokens == 1


def test_logits_need_not_be_normalised() -> None:
    logits, tokens = torch.tensor([[[3.0], [1.0]]]), torch.tensor([[0]])
    assert torch.equal(masked_nll(logits, tokens)[0], masked_nll(logits + 7.0, tokens)[0])
    assert torch.allclose(masked_nll(logits, tokens)[0], masked_nll(logits.log_softmax(1), tokens)[0])


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


@settings(deadline=None, max_examples=20, derandomize=True)
@given(num_first=st.integers(0, 6), num_second=st.integers(0, 6), num_codebooks=st.integers(1, 3))
def test_sums_over_microbatches_can_be_added(num_first: int, num_second: int, num_codebooks: int) -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(num_first + num_second, 7, num_codebooks, generator=generator)
    tokens = torch.randint(7, (num_first + num_second, num_codebooks), generator=generator)
    first, num_in_first = masked_nll(logits[:num_first], tokens[:num_first])
    second, num_in_second = masked_nll(logits[num_first:], tokens[num_first:])
    both, num_in_both = masked_nll(logits, tokens)
    assert torch.allclose(first + second, both, atol=1e-5)
    assert num_in_first + num_in_second == num_in_both == num_first + num_second
