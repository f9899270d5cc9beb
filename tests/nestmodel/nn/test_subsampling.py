from collections.abc import Iterator
from contextlib import nullcontext

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nestmodel.nn.gpu.subsampling import AcceleratedConvSubsampling
from nestmodel.nn.subsampling import ConvSubsampling, num_subsampled
from tests.kernel_definitions import code_for_gpus


@pytest.fixture(autouse=True, params=[False, True], ids=["code for a CPU", "code for a GPU"])
def _is_on_gpu(request: pytest.FixtureRequest) -> Iterator[None]:
    with code_for_gpus() if request.param else nullcontext():
        yield


def build(factor: int = 8, num_mels: int = 10) -> ConvSubsampling:
    return AcceleratedConvSubsampling(num_mels=num_mels, channels=6, factor=factor, dim=5)


@settings(deadline=None, max_examples=20, derandomize=True)
@given(length=st.integers(1, 60), padding=st.integers(0, 30))
def test_padding_does_not_affect_valid_encoder_frames(length: int, padding: int) -> None:
    torch.manual_seed(0)
    module, feats = build(), torch.randn(1, 10, length + padding)
    alone, alone_lens = module(feats[..., :length], torch.tensor([length]))
    padded, padded_lens = module(feats, torch.tensor([length]))
    num_valid = int(alone_lens)
    assert torch.equal(alone_lens, padded_lens)
    assert torch.allclose(alone[:, :num_valid], padded[:, :num_valid], atol=1e-6)


@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_a_value_that_is_not_finite_stays_visible(value: float) -> None:
    feats = torch.randn(1, 10, 64)
    feats[0, 3, 20] = value
    encoded, _ = build()(feats, torch.tensor([40]))
    assert encoded[0, :5].isfinite().all(1).logical_not().any()


@pytest.mark.parametrize("factor", [2, 4, 8, 16])
@pytest.mark.parametrize("is_causal", [False, True])
def test_sizes_are_those_of_the_stages(factor: int, is_causal: bool) -> None:
    module = AcceleratedConvSubsampling(num_mels=20, channels=2, factor=factor, dim=3, is_causal=is_causal)
    for num_frames in range(1, 60):
        size = num_frames
        for _ in range(factor.bit_length() - 1):
            size = size // 2 + 1 if is_causal else -(-size // 2)
        assert num_subsampled(num_frames, factor, is_causal=is_causal) == size
        with torch.no_grad():
            frames, enc_lens = module(torch.zeros(1, 20, num_frames), torch.tensor([num_frames]))
        assert frames.shape == (1, size, 3)
        assert enc_lens.tolist() == [size]
