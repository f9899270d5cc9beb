import pytest
import torch

from nestdata import AudioNoiseBatch, BadCut, MicrobatchKey, Mix


@pytest.fixture
def batch() -> AudioNoiseBatch:
    audio, noise = torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 0.0]]), torch.tensor([[0.5, 0.0, 0.0], [0.0, 0.0, 0.0]])
    return AudioNoiseBatch(
        audio=audio,
        audio_len=torch.tensor([3, 2]),
        noise=noise,
        noise_len=torch.tensor([3, 0]),
        noisy_audio=audio + noise,
        noisy_audio_len=torch.tensor([3, 2]),
        sample_id=["a", "b"],
        mixes=[Mix(mode="noise", sources=("n",), snr_db=3.0, segments=((0, 1),)), Mix(mode="none")],
        bad_cuts=[BadCut("gone", "missing", "it is gone")],
        key=MicrobatchKey(5, 1),
    )


def test_moving_a_batch_moves_every_tensor_and_keeps_the_rest(batch: AudioNoiseBatch) -> None:
    moved = batch.to("meta")
    assert {tensor.device.type for tensor in moved.tensors().values()} == {"meta"}
    assert (moved.sample_id, moved.mixes, moved.key) == (batch.sample_id, batch.mixes, batch.key)
    assert {tensor.device.type for tensor in batch.tensors().values()} == {"cpu"}


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="page-locked memory needs a GPU")
def test_pinned_batch_is_page_locked_and_reaches_the_gpu_unchanged(batch: AudioNoiseBatch) -> None:
    pinned = batch.pin_memory()
    assert all(tensor.is_pinned() for tensor in pinned.tensors().values())
    back = pinned.to("cuda", non_blocking=True).to("cpu")
    assert all(torch.equal(back.tensors()[name], tensor) for name, tensor in batch.tensors().items())
