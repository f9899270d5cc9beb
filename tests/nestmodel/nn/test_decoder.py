from collections.abc import Iterator

import pytest
import torch

from nestmodel.nn.network import MultiSoftmaxDecoder


@pytest.fixture(autouse=True)
def _seeded() -> Iterator[None]:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        yield


def test_channel_is_class_times_codebooks_plus_codebook() -> None:
    decoder = MultiSoftmaxDecoder(dim=4, num_classes=3, num_codebooks=2)
    layer = decoder.decoder_layers[0]
    assert layer.weight.shape == (6, 4, 1)
    with torch.no_grad():
        layer.weight.zero_()
        layer.bias.copy_(torch.arange(6.0))
    assert decoder.logits(torch.randn(1, 4)).tolist() == [[[0.0, 1.0], [2.0, 3.0], [4.0, 5.0]]]


def test_logits_equal_those_of_the_stored_convolution() -> None:
    decoder, encoded = MultiSoftmaxDecoder(dim=4, num_classes=5, num_codebooks=1), torch.randn(2, 7, 4)
    expected = decoder.decoder_layers(encoded.transpose(1, 2)).transpose(1, 2)
    assert torch.allclose(decoder.logits(encoded).squeeze(-1), expected, atol=1e-6)


def test_probabilities_of_each_codebook_sum_to_one() -> None:
    log_probs = MultiSoftmaxDecoder(dim=4, num_classes=5, num_codebooks=3)(torch.randn(2, 7, 4))
    assert log_probs.shape == (2, 7, 5, 3)
    assert torch.allclose(log_probs.exp().sum(dim=2), torch.ones(2, 7, 3), atol=1e-6)


def test_logits_of_selected_frames_equal_those_of_all_frames() -> None:
    decoder, encoded = MultiSoftmaxDecoder(dim=4, num_classes=5, num_codebooks=2), torch.randn(2, 7, 4)
    is_selected = torch.rand(2, 7) < 0.5
    assert torch.allclose(decoder.logits(encoded[is_selected]), decoder.logits(encoded)[is_selected], atol=1e-6)


def test_no_selected_frame_gives_empty_logits() -> None:
    assert MultiSoftmaxDecoder(dim=4, num_classes=5, num_codebooks=2).logits(torch.empty(0, 4)).shape == (0, 5, 2)


def test_initial_weights_are_xavier_uniform() -> None:
    weight = MultiSoftmaxDecoder(dim=64, num_classes=128, num_codebooks=1).decoder_layers[0].weight
    limit = (6 / (64 + 128)) ** 0.5
    assert 0.99 * limit < float(weight.detach().abs().max()) <= limit
