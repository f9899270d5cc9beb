"""What a GPU would run, counted on tensors of a GPU that does not exist. Nothing is computed."""

from dataclasses import replace

import pytest
import torch

from benchmarks.harness.fake_gpu import OperationLog, fake_gpu
from nestmodel.config import FeatureConfig, NestConfig
from nestmodel.nn.backend import KERNELS, step_bytes
from nestmodel.nn.block import KEYS_PER_BLOCK
from nestmodel.nn.encoder import ConformerEncoder
from nestmodel.nn.gpu.subsampling import AcceleratedConvSubsampling
from nestmodel.nn.loss import masked_nll
from nestmodel.nn.network import MultiSoftmaxDecoder
from tests.fake_gpu import needs_fake_gpu

pytestmark = needs_fake_gpu

ROWS, FRAMES = 16, 1504
"""A batch of 240 s: 16 cuts of 15 s. It has 188 encoder frames, which is no multiple of 8."""


def encode(
    *,
    shape: tuple[int, int] = (ROWS, FRAMES),
    **settings: int | bool,
) -> OperationLog:
    """Runs the forward pass of an encoder, the decoder and the loss under autocast."""
    config = replace(NestConfig.preset("large").encoder, **settings)
    with fake_gpu(torch.bfloat16), torch.device("cuda"):
        encoder = ConformerEncoder(config, num_mels=80).train()
        decoder = MultiSoftmaxDecoder(dim=config.d_model, num_classes=8192, num_codebooks=1)
        rows, num_frames = shape
        feats, lens = torch.empty(rows, 80, num_frames), torch.empty(rows, dtype=torch.int64)
        keys = torch.empty(config.num_layers + 1, KEYS_PER_BLOCK, 2, dtype=torch.int32)
        with OperationLog() as log:
            encoded, _ = encoder(feats, lens, keys)
            masked_nll(decoder.logits(encoded[:, 0]), torch.empty(rows, 1, dtype=torch.int64))
    return log


def test_matrix_products_run_in_bfloat16_and_norms_and_the_loss_in_float32() -> None:
    seen: dict[str, set[torch.dtype]] = {}
    for operation in encode(num_layers=1).operations:
        seen.setdefault(operation.name, set()).update(operation.input_types)
    half = ("addmm", "mm", "relative_attention", "gated_convolution")
    assert {name: seen[name] for name in half} == {name: {torch.bfloat16} for name in half}
    assert seen["native_layer_norm"] == seen["_log_softmax"] == seen["nll_loss_forward"] == {torch.float32}
    # The input is bfloat16, and weights and statistics are float32; sums are float32 in the kernel.
    assert seen["native_batch_norm"] == {torch.bfloat16, torch.float32}
    # What remains are sums into the residual path, products of masks and activations.
    others = {name for name, types in seen.items() if torch.float32 in types} - {"_to_copy", "_foreach_copy_"}
    assert not others & {"silu", "drop", "clone"}


def test_a_block_keeps_a_known_number_of_bytes_for_the_backward_pass() -> None:
    kept = {}
    for checkpoint_activations in (False, True):
        sizes = [
            encode(shape=(1, 24000), num_layers=number, checkpoint_activations=checkpoint_activations).kept_bytes
            for number in (1, 2)
        ]
        kept[checkpoint_activations] = (sizes[1] - sizes[0]) / 2**20
    # 240 s are 3000 encoder frames. Their scores are 8 heads of 3000 x 3000 values of two bytes: 137 MiB.
    assert kept[False] <= 299
    assert kept[True] == pytest.approx(3000 * 512 * 4 / 2**20, rel=0.01)  # the input of the block, in float32


@pytest.mark.parametrize("settings", [{}, {"subsampling_factor": 4}, {"causal_downsampling": True}])
def test_the_subsampling_keeps_the_bytes_that_are_counted_for_it(
    settings: dict[str, int | bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = []
    for keeps in (False, True):
        monkeypatch.setattr(AcceleratedConvSubsampling, "backend", replace(KERNELS, keeps_subsampling=keeps))
        found.append(encode(num_layers=1, **settings).kept_bytes)
    encoder = replace(NestConfig.preset("large").encoder, **settings)
    counted, _ = step_bytes(encoder, FeatureConfig(), (ROWS, 160 * (FRAMES - 1)), is_half=True)
    assert 0.99 <= counted / (found[1] - found[0]) <= 1.1
