from contextlib import nullcontext
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from nestmodel.config import EncoderConfig
from nestmodel.nn.attention import Frames, describe_frames
from nestmodel.nn.convolution import ConvModule
from nestmodel.nn.encoder import ConformerEncoder
from tests.kernel_definitions import code_for_gpus
from tests.kernels import run_alone

TINY = EncoderConfig(d_model=16, num_heads=2, num_layers=2, subsampling_channels=8)


def build(**settings: float | bool) -> ConformerEncoder:
    """A small encoder in eval mode whose running statistics are not the initial ones."""
    torch.manual_seed(0)
    encoder = ConformerEncoder(replace(TINY, **settings), num_mels=20)
    for module in encoder.modules():
        if isinstance(module, torch.nn.BatchNorm1d):
            assert module.running_mean is not None
            assert module.running_var is not None
            module.running_mean.normal_()
            module.running_var.uniform_(0.5, 2.0)
    return encoder.eval()


def frames(x: Tensor, *lens: int) -> Frames:
    return describe_frames(x, torch.tensor(lens or [x.shape[1]] * len(x)))


@settings(deadline=None, max_examples=15, derandomize=True)
@given(length=st.integers(1, 80), padding=st.integers(0, 80))
def test_encoder_frames_do_not_depend_on_padding_or_batch(length: int, padding: int) -> None:
    encoder = build()
    feats = torch.randn(2, 20, length + padding, generator=torch.Generator().manual_seed(length))
    alone, alone_lens = encoder(feats[:1, :, :length], torch.tensor([length]))
    batch, batch_lens = encoder(feats, torch.tensor([length, length + padding]))
    num_valid = int(alone_lens)
    assert batch_lens[0] == num_valid == -(-length // 8)
    assert torch.allclose(alone[0, :num_valid], batch[0, :num_valid], atol=1e-5)


def test_gradients_have_the_strides_of_their_weights() -> None:
    encoder = ConformerEncoder(TINY, num_mels=20)
    strides = {}
    for name, weight in encoder.named_parameters():
        weight.register_hook(lambda grad, name=name: strides.update({name: grad.stride()}))
    encoder(torch.randn(2, 20, 64), torch.tensor([64, 50]))[0].square().sum().backward()
    assert strides == {name: weight.stride() for name, weight in encoder.named_parameters()}


@pytest.mark.parametrize("name", ["dropout", "dropout_pre_encoder", "dropout_att", "dropout_emb"])
def test_each_dropout_setting_acts_in_training_only(name: str) -> None:
    none = dict.fromkeys(("dropout", "dropout_pre_encoder", "dropout_att", "dropout_emb"), 0.0)
    feats, feat_lens = torch.randn(1, 20, 32), torch.tensor([32])
    without, dropping = build(**none).train(), build(**{**none, name: 0.5}).train()
    assert torch.equal(without(feats, feat_lens)[0], without(feats, feat_lens)[0])
    assert not torch.equal(dropping(feats, feat_lens)[0], dropping(feats, feat_lens)[0])
    dropping.eval()
    assert torch.equal(dropping(feats, feat_lens)[0], dropping(feats, feat_lens)[0])


def test_hidden_states_are_the_inputs_of_the_blocks_and_the_last_output() -> None:
    encoder, feats, feat_lens = build(num_layers=3), torch.randn(2, 20, 48), torch.tensor([48, 30])
    inputs: list[Tensor] = []
    for layer in encoder.layers:
        layer.register_forward_pre_hook(lambda _, args: inputs.append(args[0]))
    states, enc_lens = encoder.hidden_states(feats, feat_lens)
    encoded, expected_lens = encoder(feats, feat_lens)
    assert enc_lens.tolist() == expected_lens.tolist()
    assert len(states) == 4
    assert all(torch.equal(state, seen) for state, seen in zip(states[:3], inputs[:3], strict=True))
    assert torch.equal(states[-1], encoded)


def test_use_bias_false_removes_biases_of_feed_forward_attention_and_convolution_only() -> None:
    with_bias = {name for name, _ in build().named_parameters()}
    without = {name for name, _ in build(use_bias=False).named_parameters()}
    dropped = {name.removeprefix("layers.0.") for name in with_bias - without if name.startswith("layers.0.")}
    assert dropped == {
        *(f"feed_forward{number}.linear{layer}.bias" for number in (1, 2) for layer in (1, 2)),
        *(f"self_attn.linear_{part}.bias" for part in ("q", "k", "v", "out")),
        *(f"conv.{part}.bias" for part in ("pointwise_conv1", "depthwise_conv", "pointwise_conv2")),
    }
    assert not without - with_bias
    assert {name for name in with_bias if name.startswith("pre_encode")} <= without


def test_xscaling_multiplies_the_input_of_the_first_block() -> None:
    seen: list[Tensor] = []
    for xscaling in (True, False):
        encoder = build(xscaling=xscaling)
        encoder.layers[0].register_forward_pre_hook(lambda _, args: seen.append(args[0]))
        encoder(torch.ones(1, 20, 16), torch.tensor([16]))
    assert torch.allclose(seen[0], seen[1] * 4.0)  # the square root of 16


@pytest.mark.parametrize("conv_norm", ["batch_norm", "layer_norm"])
def test_checkpointed_activations_drop_the_same_values_and_give_equal_results_bit_for_bit(conv_norm: str) -> None:
    feats, feat_lens = torch.randn(2, 20, 48), torch.tensor([48, 30])
    seen = []
    for checkpoint_activations in (False, True):
        torch.manual_seed(0)
        encoder = build(conv_norm=conv_norm, checkpoint_activations=checkpoint_activations, dropout=0.3).train()
        encoded, _ = encoder(feats, feat_lens, encoder.draw_keys(1))
        (encoded * torch.linspace(-1, 1, encoded.numel()).view_as(encoded)).sum().backward()
        seen.append([encoded, *(p.grad for p in encoder.parameters()), *encoder.state_dict().values()])
    assert all(torch.equal(plain, saved) for plain, saved in zip(*seen, strict=True))


@pytest.mark.parametrize("conv_norm", ["batch_norm", "layer_norm"])
def test_the_code_for_gpus_gives_the_same_output_and_gradients(conv_norm: str) -> None:
    feats, feat_lens = torch.randn(2, 20, 100, dtype=torch.float64), torch.tensor([100, 30])
    dropout = {"dropout": 0.3, "dropout_pre_encoder": 0.3, "dropout_emb": 0.3, "dropout_att": 0.3}
    seen = []
    for code in (nullcontext, code_for_gpus):
        encoder = build(conv_norm=conv_norm, **dropout).double().train()
        with code():
            encoded, _ = encoder(feats, feat_lens, encoder.draw_keys(1))
            (encoded * torch.linspace(-1, 1, encoded.numel(), dtype=torch.float64).view_as(encoded)).sum().backward()
        seen.append([encoded.detach(), *(p.grad for p in encoder.parameters()), *encoder.buffers()])
    for ours, theirs in zip(*seen, strict=True):
        # Also where an utterance is padded, as batch norm computes its statistics over padding as well.
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("use_bias", [True, False])
def test_gradients_of_cast_weights_are_float32_and_accumulate(use_bias: bool) -> None:
    feats, feat_lens, seen = torch.randn(2, 20, 64), torch.tensor([64, 50]), []
    for code in (nullcontext, code_for_gpus):
        encoder = build(num_layers=1, use_bias=use_bias)
        for _ in range(2):
            with code():
                with torch.autocast("cpu", torch.bfloat16):
                    encoded, _ = encoder(feats, feat_lens)
                encoded.square().sum().backward()
        seen.append({name: p.grad for name, p in encoder.named_parameters()})
    for name, expected in seen[0].items():
        assert expected is not None
        assert seen[1][name].dtype == torch.float32, name
        # bfloat16 has 8 bits. Each path rounds about 20 times at other places.
        assert (seen[1][name] - expected).norm() < 0.05 * expected.norm() + 1e-3, name


def test_each_place_of_dropout_has_a_key_of_its_own() -> None:
    encoder = build(dropout=0.3, dropout_pre_encoder=0.3, dropout_att=0.3, dropout_emb=0.3).train()
    feats, feat_lens = torch.randn(2, 20, 64), torch.tensor([64, 50])
    keys = encoder.draw_keys(1)
    before = encoder(feats, feat_lens, keys).frames
    unused = []
    for place in product(range(keys.shape[0]), range(keys.shape[1])):
        others = keys.clone()
        others[place] = encoder.draw_keys(2)[place]
        if torch.equal(encoder(feats, feat_lens, others).frames, before):
            unused.append(place)
    assert unused == [(0, column) for column in range(2, 7)]  # before the blocks: input and positions


COMPILED = """
import sys
from functools import partial
import torch
from nestmodel.config import EncoderConfig
from nestmodel.nn.backend import KERNELS, Backend
from nestmodel.nn.encoder import ConformerEncoder
from tests.kernel_definitions import code_for_gpus

torch.set_num_threads(1)
lengths = (48, 80, 48)
if sys.argv[1] == "gpu":
    # Without generating code: all steps of the compiler before that, as for a GPU.
    lengths, code = (48,), code_for_gpus()
    code.__enter__()
    torch.compile = partial(torch.compile, backend="aot_eager_decomp_partition")

config = EncoderConfig(d_model=16, num_heads=2, num_layers=2, subsampling_channels=8, dropout=0.2, dropout_att=0.2)
torch.manual_seed(0)
plain, compiled = (ConformerEncoder(config, num_mels=20).train() for _ in range(2))
compiled.load_state_dict(plain.state_dict())
for encoder in (plain, compiled):
    for layer in encoder.layers:
        layer.conv.batch_norm.start_collecting()
compiled.use_backend(Backend(kernels=True, compiled=True, num_shapes=2))
assert compiled.state_dict().keys() == plain.state_dict().keys()
for num_frames in lengths:
    feats, feat_lens = torch.randn(2, 20, num_frames), torch.tensor([num_frames, 30])
    seen = []
    for encoder in (plain, compiled):
        encoder.zero_grad()
        for microbatch in range(3):
            encoded, _ = encoder(feats, feat_lens, encoder.draw_keys(num_frames + microbatch))
            (encoded * torch.linspace(-1, 1, encoded.numel()).view_as(encoded)).sum().backward()
        statistics = [layer.conv.batch_norm.pop_collected(3) for layer in encoder.layers]
        seen.append([encoded.detach(), *(p.grad for p in encoder.parameters()), *statistics])
    for ours, theirs in zip(*seen, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=6e-5)  # 2e-5 a microbatch
compiled.use_backend(KERNELS)
keys = plain.draw_keys(1)
assert torch.equal(plain(feats, feat_lens, keys).frames, compiled(feats, feat_lens, keys).frames)
from torch._dynamo.utils import counters
print(counters["stats"]["unique_graphs"], sum(counters["graph_break"].values()))
"""


@pytest.mark.faults
@pytest.mark.slow
@pytest.mark.parametrize(("code", "num_graphs"), [("cpu", "2"), ("gpu", "1")])
def test_compiled_blocks_give_the_same_output_and_gradients(code: str, num_graphs: str, tmp_path: Path) -> None:
    # In a separate process, because the compiler cannot trace the annotation checks that tests enable; with a cache of
    # its own, because torch reuses code that was generated for another instruction set.
    counted = run_alone(COMPILED, code, TORCHINDUCTOR_CACHE_DIR=str(tmp_path))
    # One graph per length, shared by the blocks and by all microbatches of a step, and no graph breaks.
    assert counted.split() == [num_graphs, "0"]


def test_layer_norm_in_the_convolution_normalises_each_frame_independently() -> None:
    module, x = ConvModule(replace(TINY, conv_norm="layer_norm", conv_kernel_size=1)).train(), torch.randn(3, 7, 16)
    whole = module(x, frames(x))
    alone = module(x[1:2, 4:5], frames(x[1:2, 4:5]))
    assert torch.allclose(whole[1, 4], alone[0, 0], atol=1e-6)
    assert set(module.state_dict()) >= {"batch_norm.weight", "batch_norm.bias"}
    assert "batch_norm.running_mean" not in module.state_dict()
