from dataclasses import replace
from typing import Literal

import pytest
import torch

from nestmodel import ConfigError, FeatureConfig, MaskConfig, NestNetwork, NetworkInput
from nestmodel.nn.features import LogMelFeatures
from nestmodel.nn.network import MultiSoftmaxDecoder
from tests.batches import batch
from tests.nestmodel.networks import CAUSAL
from tests.training import tiny_config

CONFIG = replace(tiny_config(), masking=MaskConfig(prob=0.02, block_size=16))


@pytest.mark.parametrize(
    ("is_causal", "position", "num_frames", "lens"),
    [
        (False, "pre_conv", 26, [25, 19]),
        (False, "post_conv", 26, [25, 19]),
        (True, "pre_conv", 26, [26, 20]),  # the last frame has no token and is cut off
        (True, "post_conv", 27, [26, 20]),
    ],
)
def test_output_holds_logits_and_targets_of_the_scored_frames(
    is_causal: bool, position: Literal["pre_conv", "post_conv"], num_frames: int, lens: list[int]
) -> None:
    config = tiny_config(att_context_size=((6, 2),), **CAUSAL) if is_causal else CONFIG
    network = NestNetwork(replace(config, masking=replace(CONFIG.masking, position=position, prob=0.2))).eval()
    output = network(batch())  # 208 feature frames, 200 and 150 of them valid
    tokens = network.tokens(*network.features(batch().audio, batch().audio_len))
    num_scored = int(output.is_scored.sum())
    assert num_scored > 0
    assert output.is_scored.shape == output.encoded.shape[:2] == (2, num_frames)
    assert output.enc_lens.tolist() == lens
    assert output.logits.shape == (num_scored, 32, 1)
    torch.testing.assert_close(output.logits, network.decoder.logits(output.encoded)[output.is_scored])
    assert torch.equal(output.targets, tokens[output.is_scored[:, : tokens.shape[1]]])


def test_masks_depend_on_the_batch_key_the_purpose_and_the_seed() -> None:
    network = NestNetwork(CONFIG).eval()
    masks = network(batch(step=3, microbatch=1)).is_scored
    assert torch.equal(network(batch(step=3, microbatch=1)).is_scored, masks)
    assert not torch.equal(network(batch(step=4, microbatch=1)).is_scored, masks)
    assert not torch.equal(network(batch(step=3, microbatch=0)).is_scored, masks)
    assert not torch.equal(network(batch(step=3, microbatch=1), mask_purpose="validation mask").is_scored, masks)
    assert not torch.equal(NestNetwork(replace(CONFIG, seed=1)).eval()(batch(step=3, microbatch=1)).is_scored, masks)


@pytest.mark.parametrize("position", ["pre_conv", "post_conv"])
def test_masks_can_be_drawn_before_a_batch_is_copied(position: Literal["pre_conv", "post_conv"]) -> None:
    network = NestNetwork(replace(CONFIG, masking=replace(CONFIG.masking, position=position, prob=0.2))).eval()
    expected = network(batch(step=3))
    inputs = NetworkInput.of(batch(step=3), network.draw_masks(batch(step=3)), "cpu")
    assert torch.equal(inputs.scored_rows, expected.is_scored.flatten().nonzero().squeeze(1))
    assert inputs.num_samples == 56000
    output = network.forward_masked(inputs)
    assert torch.equal(output.logits, expected.logits)
    assert torch.equal(output.targets, expected.targets)
    feats, feat_lens = network.features(torch.cat([batch().audio, batch().noisy_audio]), batch().audio_len.repeat(2))
    again = network.forward_features(*feats.chunk(2), feat_lens[:2], inputs.is_masked)
    assert torch.equal(again.logits, expected.logits)


def test_dropout_depends_on_step_and_microbatch_and_not_on_the_global_generator() -> None:
    network = NestNetwork(replace(CONFIG, features=replace(CONFIG.features, dither=0.0))).train()
    masks = network.draw_masks(batch(step=2, microbatch=1))
    assert masks.dropout_keys is not None
    assert torch.equal(masks.dropout_keys, network.encoder.draw_keys(network.seed_for("dropout", batch(2, 1))))
    assert not torch.equal(masks.dropout_keys, network.draw_masks(batch(2, 0)).dropout_keys)
    logits = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        logits.append(network(batch(step=2, microbatch=1)).logits)
    assert torch.equal(*logits)


@pytest.mark.parametrize("options", [{}, {"pad_to": 24}, {"n_fft": 401, "hop_length": 100}])
def test_the_number_of_padded_frames_is_that_of_the_features(options: dict[str, int]) -> None:
    config = replace(CONFIG.features, **options)
    features = LogMelFeatures(config)
    for num_samples in (1, 159, 160, 2400, 2559, 2560, 4801):
        feats, _ = features(torch.zeros(1, num_samples), torch.tensor([num_samples]))
        assert feats.shape[2] == config.num_padded_frames(num_samples)


def test_channel_of_the_decoder_is_class_times_codebooks_plus_codebook() -> None:
    decoder = MultiSoftmaxDecoder(dim=4, num_classes=3, num_codebooks=2)
    layer = decoder.decoder_layers[0]
    assert layer.weight.shape == (6, 4, 1)
    with torch.no_grad():
        layer.weight.zero_()
        layer.bias.copy_(torch.arange(6.0))
    assert decoder.logits(torch.randn(1, 4)).tolist() == [[[0.0, 1.0], [2.0, 3.0], [4.0, 5.0]]]


def test_tokens_may_be_those_of_normalised_features() -> None:
    plain = tiny_config()
    as_features = replace(plain, features=FeatureConfig(normalize="NA"))
    normalised = replace(as_features, quantizer=replace(plain.quantizer, normalize="per_feature"))
    targets = [NestNetwork(config).eval()(batch()).targets for config in (plain, as_features, normalised)]
    assert torch.equal(targets[0], targets[2])
    assert not torch.equal(targets[0], targets[1])
    with pytest.raises(ConfigError, match=r"quantizer\.normalize is 'per_feature': expected as_features with masking"):
        replace(normalised, masking=replace(plain.masking, position="post_conv"))
