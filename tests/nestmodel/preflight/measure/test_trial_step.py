from pathlib import Path

import torch

from nestmodel import NestModel
from nestmodel.preflight.measure.trial_step import TrialStep, noise_batch
from tests.training import tiny_config, trainer


def test_a_batch_of_noise_has_interference_everywhere_and_no_padding() -> None:
    batch = noise_batch((3, 16000))
    assert batch.audio.shape == (3, 16000)
    assert batch.audio_len.tolist() == batch.noise_len.tolist() == batch.noisy_audio_len.tolist() == [16000] * 3
    assert torch.equal(batch.noisy_audio, batch.audio + batch.noise)
    for row in batch.noise:
        assert 0.04 < row.std().item() < 0.06


def test_a_trial_step_makes_the_same_change_each_time(tmp_path: Path) -> None:
    batch, changes = noise_batch((2, 16000)), []
    for _ in range(2):
        torch.manual_seed(0)
        step = TrialStep(tiny_config(), trainer(tmp_path))
        before = _weights(step._model)
        time = step(batch)
        assert 0 < time.host_s <= time.microbatch_s
        changes.append(_weights(step._model) - before)
    assert torch.equal(*changes)
    assert changes[0].abs().sum() > 0


def _weights(model: NestModel) -> torch.Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters() if parameter.requires_grad])
