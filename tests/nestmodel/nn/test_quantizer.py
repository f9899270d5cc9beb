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


def test_nearest_code_is_by_euclidean_distance_for_codes_of_unequal_norm() -> None:
    # (2, 2) has a larger product with (1, 0) than (0.9, 0) has, but is further away.
    quantizer = by_hand([[2.0, 2.0], [0.9, 0.0]])
    assert quantizer(torch.tensor([[[1.0], [0.0]]])).tolist() == [[[1]]]


def test_cosine_distance_selects_the_largest_product() -> None:
    quantizer = by_hand([[2.0, 2.0], [0.9, 0.0]])
    quantizer.distance = "cosine"
    assert quantizer(torch.tensor([[[1.0], [0.0]]])).tolist() == [[[0]]]  # as in NeMo


def test_selected_rows_get_the_tokens_that_they_get_among_all_also_under_autocast() -> None:
    quantizer, feats = build(num_classes=8192, num_codebooks=2), torch.randn(2, 4, 600)
    expected = quantizer(feats).flatten(0, 1)  # of 600 stacks, in chunks of 256
    for rows in (torch.tensor([599, 0, 256, 255, 511]), torch.tensor([], dtype=torch.int64)):
        with torch.autocast("cpu", torch.bfloat16):
            assert torch.equal(quantizer(feats, rows), expected[rows])
