from typing import Literal

import pytest
import torch

from nestmodel.config import QuantizerConfig
from nestmodel.nn.quantizer import RandomProjectionQuantizer


def build(num_classes: int = 64, num_codebooks: int = 1, code_dim: int = 16) -> RandomProjectionQuantizer:
    config = QuantizerConfig(num_classes=num_classes, num_codebooks=num_codebooks, code_dim=code_dim)
    return RandomProjectionQuantizer(config, dim=4, num_stacked=2)


def by_hand(codes: list[list[float]]) -> RandomProjectionQuantizer:
    """A quantizer of 2 mel bins and 1 frame whose projection is the identity."""
    config = QuantizerConfig(num_classes=len(codes), code_dim=2)
    quantizer = RandomProjectionQuantizer(config, dim=2, num_stacked=1)
    quantizer.proj.weight.copy_(torch.eye(2))
    quantizer.codebooks.copy_(torch.tensor([codes]))
    return quantizer


def test_nearest_code_by_hand() -> None:
    quantizer = by_hand([[1.0, 0.0], [0.0, 1.0], [-1.0, 0.0]])
    feats = torch.tensor([[[9.0, 0.1, -3.0, 2.0], [1.0, 0.2, 2.0, 3.0]]])
    assert quantizer(feats).tolist() == [[[0], [1], [2], [1]]]


def test_nearest_code_is_by_euclidean_distance_for_codes_of_unequal_norm() -> None:
    # (2, 2) has a larger product with (1, 0) than (0.9, 0) has, but is further away.
    quantizer = by_hand([[2.0, 2.0], [0.9, 0.0]])
    assert quantizer(torch.tensor([[[1.0], [0.0]]])).tolist() == [[[1]]]


def test_cosine_distance_selects_the_largest_product() -> None:
    quantizer = by_hand([[2.0, 2.0], [0.9, 0.0]])
    quantizer.distance = "cosine"
    assert quantizer(torch.tensor([[[1.0], [0.0]]])).tolist() == [[[0]]]  # as in NeMo


def test_frames_are_stacked_in_time_order() -> None:
    quantizer = build(num_classes=2, code_dim=1)
    quantizer.proj.weight.zero_()
    quantizer.proj.weight[0, 4 + 3] = 1.0  # second frame of the stack, mel bin 3
    quantizer.codebooks.copy_(torch.tensor([[[-1.0], [1.0]]]))
    feats = torch.zeros(1, 4, 4)
    feats[0, 3, 1], feats[0, 3, 3] = 5.0, -5.0
    assert quantizer(feats).flatten().tolist() == [1, 0]


@pytest.mark.parametrize(("input_norm", "expected"), [(None, 0), ("frames", 1), ("stacked", 2)])
def test_the_input_norm_is_of_each_frame_or_of_the_stacked_frames(
    input_norm: Literal["frames", "stacked"] | None, expected: int
) -> None:
    config = QuantizerConfig(num_classes=3, code_dim=4, input_norm=input_norm)
    quantizer = RandomProjectionQuantizer(config, dim=2, num_stacked=2)
    quantizer.proj.weight.copy_(torch.eye(4))
    plain, frames, stacked = [9.0, 7.0, 0.1, 0.3], [1.0, -1.0, -1.0, 1.0], [5.0, 3.0, -4.0, -4.0]
    codes = torch.tensor([plain, frames, stacked])
    quantizer.codebooks.copy_(codes / codes.norm(dim=1, keepdim=True))
    feats = torch.tensor([[[9.0, 0.1], [7.0, 0.3]]])
    assert quantizer(feats).tolist() == [[[expected]]]
    assert quantizer(feats, torch.tensor([0])).tolist() == [[expected]]


@pytest.mark.parametrize("num_stacked", [1, 2])
def test_with_the_norm_of_frames_tokens_do_not_depend_on_level_and_mean_of_a_frame(num_stacked: int) -> None:
    config = QuantizerConfig(num_classes=64, num_codebooks=2, input_norm="frames")
    quantizer, feats = RandomProjectionQuantizer(config, dim=40, num_stacked=num_stacked), torch.randn(3, 40, 20)
    tokens = quantizer(feats)
    assert len(tokens.unique()) > 30
    assert torch.equal(quantizer(feats * torch.rand(3, 1, 20).add(1) + torch.randn(3, 1, 20)), tokens)


def test_selected_rows_get_the_tokens_that_they_get_among_all_also_under_autocast() -> None:
    quantizer, feats = build(num_classes=8192, num_codebooks=2), torch.randn(2, 4, 600)
    expected = quantizer(feats).flatten(0, 1)  # of 600 stacks, in chunks of 256
    for rows in (torch.tensor([599, 0, 256, 255, 511]), torch.tensor([], dtype=torch.int64)):
        with torch.autocast("cpu", torch.bfloat16):
            assert torch.equal(quantizer(feats, rows), expected[rows])
