import importlib
from dataclasses import replace
from types import ModuleType

import pytest
import torch
import torch.nn.functional as F

from nestmodel import NestConfig, NestNetwork
from nestmodel.nn import loss
from nestmodel.nn.quantizer import RandomProjectionQuantizer
from tests.extras import needs
from tests.nestmodel.nn.test_network import batch

pytestmark = needs("probe", "sklearn")
TOKEN, HOP = 10, 160


@pytest.fixture
def targets(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Returns a part of the benchmarks, whose changes of the network end with the test."""
    for name in ("draw_masks", "tokens"):
        monkeypatch.setattr(NestNetwork, name, getattr(NestNetwork, name))
    monkeypatch.setattr(RandomProjectionQuantizer, "forward", RandomProjectionQuantizer.forward)
    monkeypatch.setattr(loss, "masked_nll", loss.masked_nll)
    return importlib.import_module("benchmarks.learning.parts.fit_targets")


def test_the_next_token_is_predicted_without_its_audio(targets: ModuleType) -> None:
    tokens_of = NestNetwork.tokens
    targets.predict_next_token()
    demo = NestConfig.preset("demo")
    encoder = replace(
        demo.encoder,
        conv_norm="layer_norm",
        conv_context_size="causal",
        causal_downsampling=True,
        att_context_style="chunked_limited",
        att_context_size=((70, 0),),
    )
    features, quantizer = replace(demo.features, normalize="NA"), replace(demo.quantizer, normalize="per_feature")
    network = NestNetwork(replace(demo, encoder=encoder, features=features, quantizer=quantizer)).eval()
    whole = batch()
    noisy = whole.noisy_audio.clone()
    # The windows of the token's feature frames begin less than two hops before their centres.
    noisy[:, (TOKEN * encoder.subsampling_factor - 2) * HOP :] *= -0.5
    with torch.no_grad():
        first, second = network(whole), network(replace(whole, noisy_audio=noisy))
    tokens = first.is_scored.flatten().nonzero().squeeze(1) % first.is_scored.shape[1] + 1
    lens = -(-(whole.audio_len // HOP) // encoder.subsampling_factor)
    assert first.is_scored.sum(1).tolist() == (lens - 1).tolist()
    all_tokens = tokens_of(network, *network.features(whole.audio, whole.audio_len))
    assert torch.equal(first.targets, torch.cat([of[1:num] for of, num in zip(all_tokens, lens.tolist(), strict=True)]))
    changed = (first.logits != second.logits).flatten(1).any(1)
    assert not changed[tokens <= TOKEN].any()
    assert changed[tokens == TOKEN + 1].all()


def test_soft_tokens_add_the_divergence_of_the_predictions_from_similar_codes(targets: ModuleType) -> None:
    demo = NestConfig.preset("demo")
    network, whole = NestNetwork(replace(demo, quantizer=replace(demo.quantizer, num_codebooks=2))).eval(), batch()
    plain = loss.loss_stats(network(whole))
    targets.soften_tokens()
    output = network(whole)
    feats, _ = network.features(whole.audio, whole.audio_len)
    quantizer = network.quantizer
    stacks = feats.transpose(1, 2).reshape(-1, quantizer.proj.in_features)[output.is_scored.flatten()]
    points = F.normalize(quantizer.proj(stacks).unflatten(1, (2, -1)), dim=-1)
    divergence = 0.0
    for codebook, codes in enumerate(quantizer.codebooks):
        soft = (points[:, codebook] @ codes.T / targets.TEMPERATURE).softmax(-1)
        predicted = output.logits[:, :, codebook].softmax(-1)
        divergence += (soft * (soft.log() - predicted.log())).sum() / 2
    torch.testing.assert_close(loss.loss_stats(output).nll_sum, plain.nll_sum + divergence)
    with torch.no_grad():
        torch.testing.assert_close(loss.loss_stats(network(whole)).nll_sum, plain.nll_sum)
