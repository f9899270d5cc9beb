"""Limited attention and causal convolutions in the encoder and the network; see tests/golden for the values."""

from dataclasses import fields, replace
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from nestmodel import (
    ConfigError,
    FeatureConfig,
    MaskConfig,
    NestNetwork,
    NetworkInput,
    export_model,
    load_network,
    save_network,
)
from nestmodel.attention_context import draw_context, look_ahead
from nestmodel.nn.network import NestOutput
from tests.batches import batch
from tests.nestmodel.networks import CAUSAL
from tests.training import tiny_config

TWO: dict[str, Any] = {"att_context_size": ((6, 2), (2, 0)), "att_context_probs": (0.3, 0.7)}
NUM_SAMPLES = 24000
WITHOUT_DROPOUT: dict[str, Any] = {"dropout": 0.0, "dropout_pre_encoder": 0.0, "dropout_att": 0.0}


def noise(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


def network(normalize: Literal["per_feature", "NA"] = "per_feature", **encoder: Any) -> NestNetwork:
    return NestNetwork(replace(tiny_config(**encoder), features=FeatureConfig(dither=0.0, normalize=normalize)))


@settings(max_examples=16, deadline=None)
@given(
    right=st.integers(0, 4),
    num_left=st.integers(-1, 2),
    first_changed=st.integers(0, NUM_SAMPLES - 1),
    conv_norm=st.sampled_from(["batch_norm", "layer_norm"]),
)
def test_frames_do_not_depend_on_audio_past_their_look_ahead(
    right: int, num_left: int, first_changed: int, conv_norm: str
) -> None:
    left = num_left * (right + 1) if num_left > 0 else num_left
    model = network("NA", att_context_size=((left, right),), conv_norm=conv_norm, **CAUSAL).eval()
    audio = 0.1 * noise(1, NUM_SAMPLES)
    changed = audio.clone()
    changed[:, first_changed:] *= -3.0
    lens = torch.tensor([NUM_SAMPLES])
    with torch.no_grad():
        before, after = (model.encoder(*model.features(samples, lens)).frames[0] for samples in (audio, changed))
    # A frame sees the last frame of its chunk, whose last feature frame is centred 1280 samples per frame from the
    # start, with 200 samples of the window after the centre.
    chunk = right + 1
    ends = torch.arange(len(before)) // chunk * chunk + right
    is_kept = 1280 * ends + 200 <= first_changed
    torch.testing.assert_close(before[is_kept], after[is_kept], rtol=0.0, atol=1e-6)
    # From the chunk on in which the first changed sample is, all differ; the last frames may see only padding.
    is_changed = (1280 * ends >= first_changed) & (torch.arange(len(before)) < NUM_SAMPLES // 1280)
    assert ((before - after)[is_changed].abs().amax(dim=1) > 1e-5).all()


@settings(max_examples=24, deadline=None)
@given(
    context=st.tuples(st.integers(0, 2), st.integers(0, 3)),
    style=st.sampled_from(["regular", "chunked_limited"]),
    conv_right=st.integers(0, 2),
    num_layers=st.integers(1, 3),
)
def test_frames_depend_on_as_many_later_ones_as_the_look_ahead_says(
    context: tuple[int, int], style: Literal["regular", "chunked_limited"], conv_right: int, num_layers: int
) -> None:
    context = (context[0] * (context[1] + 1), context[1])
    model = network(
        att_context_size=(context,),
        att_context_style=style,
        conv_kernel_size=5,
        conv_context_size=(4 - conv_right, conv_right),
        num_layers=num_layers,
    )
    x = noise(1, 40, 16).requires_grad_()
    frames = model.encoder.eval().encode(x, torch.tensor([40]))[0]
    ahead = []
    for query in range(4):  # all places in a chunk
        (grad,) = torch.autograd.grad(frames[query].square().sum(), x, retain_graph=True)
        ahead.append(int(grad[0].abs().sum(dim=1).nonzero().max()) - query)
    assert max(ahead) == look_ahead(context, style, num_layers=num_layers, conv_right=conv_right)


@pytest.mark.parametrize("shift", [1, 3])
def test_a_token_is_predicted_some_frames_later_and_the_last_ones_by_the_last_frame(shift: int) -> None:
    config = tiny_config(att_context_size=((6, 2),), **CAUSAL)
    config = replace(config, masking=replace(config.masking, prob=0.2, target_shift=shift))
    model = NestNetwork(config).eval()
    inputs = NetworkInput.of(batch(), model.draw_masks(batch()), "cpu")
    output = model.forward_masked(inputs)
    feats, lens = model.features(batch().noisy_audio, batch().audio_len)
    encoded, enc_lens = model.encode_masked(feats, lens, inputs.is_masked)
    tokens = output.is_scored.nonzero()
    # Some are predicted by the last frame. There is one frame more than tokens, which suffices for a shift of 1.
    assert bool((tokens[:, 1] + shift >= enc_lens[tokens[:, 0]]).any()) == (shift > 1)
    scored = [
        model.decoder.logits(encoded[row, min(token + shift, int(enc_lens[row]) - 1)].unsqueeze(0))
        for row, token in tokens.tolist()
    ]
    torch.testing.assert_close(output.logits, torch.cat(scored))


def test_a_network_is_used_in_one_of_its_contexts(tmp_path: Path) -> None:
    model = network("NA", **TWO).eval()
    feats, lens = noise(1, 80, 64), torch.tensor([64])
    expected = model.encoder(feats, lens, context=(2, 0)).frames
    save_network(model, tmp_path / "two.ckpt")
    chosen = load_network(tmp_path / "two.ckpt", context=(2, 0))
    assert chosen.config.encoder.att_context_size == ((2, 0),)
    assert torch.equal(chosen.encoder(feats, lens).frames, expected)
    assert load_network(tmp_path / "two.ckpt").config == model.config
    with pytest.raises(ConfigError, match="att_context_size has no 4,0: choose one of 6,2; 2,0"):
        load_network(tmp_path / "two.ckpt", context=(4, 0))
    exported = export_model(
        tmp_path / "two.ckpt", "safetensors", tmp_path / "one.safetensors", parts="all", context=(2, 0)
    )
    assert load_network(exported).config == chosen.config


def test_the_context_of_a_microbatch_is_drawn_from_its_key_in_training_only() -> None:
    model = network(**TWO).train()
    drawn = {
        (step, microbatch): model.draw_masks(batch(step, microbatch)).att_context
        for step in range(12)
        for microbatch in range(2)
    }
    assert {*drawn.values()} == {*TWO["att_context_size"]}
    for (step, microbatch), context in drawn.items():
        seed = model.seed_for("attention context", batch(step, microbatch))
        assert context == draw_context(*TWO.values(), seed)
    assert network(**TWO).train().draw_masks(batch(3, 1)).att_context == drawn[3, 1]  # whatever was drawn before
    assert NetworkInput.of(batch(), model.draw_masks(batch(3, 1)), "cpu").att_context == drawn[3, 1]
    assert model.eval().draw_masks(batch()).att_context is None
    assert network().train().draw_masks(batch()).att_context is None


def test_training_computes_with_the_drawn_context_and_evaluation_with_the_first() -> None:
    model = network(**TWO, **WITHOUT_DROPOUT, conv_norm="layer_norm").train()
    feats = model.features(batch().noisy_audio, batch().audio_len)
    for step in range(4):
        inputs = NetworkInput.of(batch(step), model.draw_masks(batch(step)), "cpu")
        found = model.forward_masked(inputs).encoded
        expected = {
            context: model.encode_masked(*feats, inputs.is_masked, context=context).frames
            for context in TWO["att_context_size"]
        }
        assert not torch.allclose(*expected.values())
        assert inputs.att_context is not None
        assert torch.equal(found, expected[inputs.att_context])
    model.eval()
    first = TWO["att_context_size"][0]
    assert torch.equal(model.encoder(*feats).frames, model.encoder(*feats, context=first).frames)
    for context in (None, *TWO["att_context_size"]):
        last = model.encoder.hidden_states(*feats, context).states[-1]
        assert torch.equal(last, model.encoder(*feats, context=context).frames)


@pytest.mark.parametrize("position", ["pre_conv", "post_conv"])
def test_all_contexts_are_computed_from_the_same_features_and_targets(
    position: Literal["pre_conv", "post_conv"],
) -> None:
    config = replace(tiny_config(**TWO), masking=MaskConfig(position=position, prob=0.2, block_size=16))
    model = NestNetwork(config).eval()
    inputs = NetworkInput.of(batch(), model.draw_masks(batch()), "cpu")
    expected = [model.forward_masked(replace(inputs, att_context=context)) for context in TWO["att_context_size"]]
    computed: list[str] = []
    with (
        model.features.register_forward_hook(lambda *_: computed.append("features")),
        model.quantizer.register_forward_hook(lambda *_: computed.append("targets")),
    ):
        found = list(model.forward_contexts(inputs))
    assert computed == ["features", "targets"]
    for output, of_context in zip(found, expected, strict=True):
        for field in fields(NestOutput):
            assert torch.equal(getattr(output, field.name), getattr(of_context, field.name)), field.name
    assert not torch.equal(found[0].logits, found[1].logits)
