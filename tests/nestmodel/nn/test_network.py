from dataclasses import replace
from typing import Literal

import pytest
import torch

from nestdata import AudioNoiseBatch, MicrobatchKey
from nestmodel import MaskConfig, NestNetwork, loss_stats
from tests.synthesis import chirp, hiss
from tests.training import tiny_config

CONFIG = replace(tiny_config(), masking=MaskConfig(prob=0.02, block_size=16))


def batch(step: int = 0, microbatch: int = 0) -> AudioNoiseBatch:
    """Two utterances of 2 s and 1.5 s with noise; the second one is padded."""
    lens = torch.tensor([32000, 24000])
    is_valid = torch.arange(32000) < lens.unsqueeze(1)
    audio = torch.from_numpy(chirp(100, 3000, 2.0)) * is_valid
    noise = torch.from_numpy(hiss(32000, 1)) * is_valid
    return AudioNoiseBatch(
        audio=audio,
        audio_len=lens,
        noise=noise,
        noise_len=lens,
        noisy_audio=audio + noise,
        noisy_audio_len=lens,
        sample_id=["a", "b"],
        mixes=[],
        bad_cuts=[],
        key=MicrobatchKey(0, step, microbatch),
    )


@pytest.mark.parametrize("position", ["pre_conv", "post_conv"])
def test_output_holds_logits_and_targets_of_the_scored_frames(position: Literal["pre_conv", "post_conv"]) -> None:
    network = NestNetwork(replace(CONFIG, masking=replace(CONFIG.masking, position=position, prob=0.2))).eval()
    output = network(batch())
    feats, feat_lens = network.features(batch().audio, batch().audio_len)
    num_scored = int(output.is_scored.sum())
    assert num_scored > 0
    assert output.is_scored.shape == output.encoded.shape[:2] == (2, feats.shape[2] // 8)
    assert output.enc_lens.tolist() == [25, 19]
    assert output.logits.shape == (num_scored, 32, 1)
    torch.testing.assert_close(output.logits, network.decoder.logits(output.encoded)[output.is_scored])
    assert torch.equal(output.targets, network.tokens(feats, feat_lens)[output.is_scored])


def test_masks_depend_on_the_batch_key_the_purpose_and_the_seed() -> None:
    network = NestNetwork(CONFIG).eval()
    masks = network(batch(step=3, microbatch=1)).is_scored
    assert torch.equal(network(batch(step=3, microbatch=1)).is_scored, masks)
    assert not torch.equal(network(batch(step=4, microbatch=1)).is_scored, masks)
    assert not torch.equal(network(batch(step=3, microbatch=0)).is_scored, masks)
    assert not torch.equal(network(batch(step=3, microbatch=1), mask_purpose="validation mask").is_scored, masks)
    assert not torch.equal(NestNetwork(replace(CONFIG, seed=1)).eval()(batch(step=3, microbatch=1)).is_scored, masks)


def test_eval_mode_leaves_the_global_generator_unchanged() -> None:
    network, state = NestNetwork(CONFIG).eval(), torch.get_rng_state()
    network(batch())
    assert torch.equal(torch.get_rng_state(), state)


def test_a_network_trains_without_a_trainer() -> None:
    config = replace(CONFIG, encoder=replace(CONFIG.encoder, dropout=0.0, dropout_pre_encoder=0.0, dropout_att=0.0))
    network = NestNetwork(replace(config, features=replace(config.features, dither=0.0))).train()
    optimizer = torch.optim.SGD([p for p in network.parameters() if p.requires_grad], lr=0.1)
    losses = []
    for _ in range(5):
        loss = loss_stats(network(batch())).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0] - 0.01
