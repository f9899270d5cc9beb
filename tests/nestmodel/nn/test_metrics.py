import math

import pytest
import torch

from nestmodel.nn.metrics import token_counts, token_entropy


def test_token_counts_by_hand() -> None:
    tokens = torch.tensor([[[0, 2], [0, 1]], [[1, 2], [0, 2]]])  # (batch, enc_frames, codebooks)
    assert token_counts(tokens, 4).tolist() == [[3, 1, 0, 0], [0, 1, 3, 0]]


def test_counts_without_tokens_are_zero() -> None:
    assert token_counts(torch.empty(0, 2, dtype=torch.int64), 3).tolist() == [[0, 0, 0], [0, 0, 0]]


def test_entropy_by_hand() -> None:
    expected = -(0.5 * math.log(0.5) + 0.5 * math.log(0.25))
    assert float(token_entropy(torch.tensor([2, 1, 1, 0]))) == pytest.approx(expected, rel=1e-6)


def test_entropy_of_one_class_is_zero_and_of_equal_classes_their_logarithm() -> None:
    assert float(token_entropy(torch.tensor([[0, 9, 0]]))) == 0.0
    assert float(token_entropy(torch.full((1, 8192), 3))) == pytest.approx(math.log(8192), rel=1e-6)


def test_entropy_is_averaged_over_codebooks() -> None:
    assert float(token_entropy(torch.tensor([[1, 1], [7, 0]]))) == pytest.approx(math.log(2) / 2, rel=1e-6)


def test_entropy_does_not_depend_on_the_scale_of_counts() -> None:
    counts = torch.tensor([[2.0, 1.0, 1.0]])
    assert float(token_entropy(counts / 1000)) == pytest.approx(float(token_entropy(counts)), rel=1e-6)


def test_entropy_without_tokens_is_zero() -> None:
    assert float(token_entropy(torch.zeros(2, 5, dtype=torch.int64))) == 0.0
