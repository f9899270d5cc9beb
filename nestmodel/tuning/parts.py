"""The parts of a training step that have several forms, as computations that can be raced.

To add a form, add its name to `FORMS`, and its effect to `NestNetwork.use_kernels`. To add a part, add it to
`nestmodel.nn.gpu.kernel_choice.Kernels` and to `_RUNS`.

The whole microbatch is a part of its own, in `whole_step.py`.

Inputs are noise with the sizes of a microbatch; the last utterance is shorter, so that there is padding. Dropout
decided by a hash of positions is on; dropout drawn by a generator is off, because forms may draw in another order.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor, nn

from nestmodel.config import EncoderConfig, NestConfig
from nestmodel.nn.batch_norm import StepBatchNorm
from nestmodel.nn.gpu.kernel_choice import PARTS, TORCH, Kernels, kernels_of
from nestmodel.nn.network import NestNetwork, num_padded_frames
from nestmodel.nn.precision import product_dtype
from nestmodel.nn.subsampling import num_subsampled
from nestmodel.tuning.race import Part, Run

FORMS = {
    "features": (TORCH, "compiled"),
    "subsampling": (TORCH, "triton"),
    "blocks": (TORCH, "compiled", "combined"),
    "step": (TORCH, "graph"),
}
"""Forms of each part of `Kernels`."""

_FOR_FIXED_SHAPES = ("compiled", "combined")
"""Forms that are raced only if the number of batch shapes is limited. For hundreds of shapes, torch compiles other code
than for the one shape of a race."""


_Context = Callable[[], AbstractContextManager[None]]


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What decides which form is the fastest, besides the device and the versions."""

    config: NestConfig
    num_cuts: int
    """Cuts of a microbatch."""

    num_samples: int
    """Samples to which each cut is padded."""

    num_shapes: int | None
    """As in `NestNetwork.use_kernels`."""

    precision: str
    """Lightning's name of the precision."""


@dataclass(frozen=True, kw_only=True)
class Precision:
    """How a run computes: the device, and what the precision plugin of its trainer does."""

    device: torch.device
    convert: Callable[[nn.Module], nn.Module]
    """Converts the parameters of a network."""

    context: _Context
    """Returns the context of a forward pass."""


def parts(setting: Setting, precision: Precision, names: Sequence[str]) -> list[Part]:
    """Returns the named parts that have several forms with these settings, except the whole step."""
    excluded = _FOR_FIXED_SHAPES if setting.num_shapes is None else ()
    forms = {name: [form for form in FORMS[name] if form not in excluded] for name in names if name in _RUNS}
    return [_part(name, of_part, setting, precision) for name, of_part in forms.items() if len(of_part) > 1]


def _part(name: str, forms: Sequence[str], setting: Setting, precision: Precision) -> Part:
    build = partial(_build, name, setting, precision)
    with precision.context():
        network = precision.convert(nn.Linear(1, 1)).to(precision.device)
        dtype = product_dtype(next(network.parameters()))
    is_full = dtype in (torch.float32, torch.float64) or name == "features"
    return Part(
        name=name,
        reference=partial(build, TORCH, torch.float64 if is_full else torch.float32),
        forms={form: partial(build, form, None) for form in forms},
        ulp=torch.finfo(torch.float32 if name == "features" else dtype).eps,
    )


def _build(name: str, setting: Setting, precision: Precision, form: str, dtype: torch.dtype | None) -> Run:
    """Builds a form of a part.

    Args:
        name: The part.
        setting: Sizes.
        precision: Of the run.
        form: The form of the part; the other parts are plain.
        dtype: Type in which everything is computed; None for the precision of the run.
    """
    kernels = kernels_of({**dict.fromkeys(PARTS, TORCH), name: form})
    network = build_network(setting, precision, kernels, is_collecting=dtype is None)
    if dtype is not None:
        return _with_exact_products(_RUNS[name](network.to(dtype), setting, nullcontext))
    return _RUNS[name](network, setting, precision.context)


def build_network(
    setting: Setting, precision: Precision, kernels: Kernels, *, num_layers: int = 1, is_collecting: bool = True
) -> NestNetwork:
    """Returns a network for training, without what torch's generator draws.

    Args:
        setting: Its sizes.
        precision: Of the run.
        kernels: The form of each part.
        num_layers: Number of blocks.
        is_collecting: Whether batch norm collects the statistics of a step, as in a run.
    """
    config = setting.config
    encoder: EncoderConfig = replace(config.encoder, num_layers=num_layers, dropout_att=0.0)
    if encoder.dropout_source == "generator":
        encoder = replace(encoder, dropout=0.0)
    reduced = replace(config, encoder=encoder, features=replace(config.features, dither=0.0))
    network = precision.convert(NestNetwork(reduced)).to(precision.device).train()
    assert isinstance(network, NestNetwork)
    network.use_kernels(kernels, num_shapes=setting.num_shapes)
    for module in network.modules() if is_collecting else ():
        if isinstance(module, StepBatchNorm):
            module.start_collecting()
    return network


def _with_exact_products(run: Run) -> Run:
    """Returns a computation whose float32 products do not round their inputs to TF32 on a GPU."""
    matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn

    def run_exactly() -> Sequence[Tensor]:
        before = matmul.allow_tf32, cudnn.allow_tf32
        matmul.allow_tf32 = cudnn.allow_tf32 = False
        try:
            return run()
        finally:
            matmul.allow_tf32, cudnn.allow_tf32 = before

    return run_exactly


def _features(network: NestNetwork, setting: Setting, context: _Context) -> Run:  # noqa: ARG001 - as the others
    audio = 0.05 * noise(network, 2 * setting.num_cuts, setting.num_samples)
    lens = shortened_lens(network, setting.num_cuts, setting.num_samples).repeat(2)
    return lambda: network.features(audio, lens)[:1]


def _subsampling(network: NestNetwork, setting: Setting, context: _Context) -> Run:
    num_frames = num_padded_frames(setting.num_samples, setting.config.features)
    feats = noise(network, setting.num_cuts, setting.config.features.num_mels, num_frames)
    lens = shortened_lens(network, setting.num_cuts, setting.num_samples // setting.config.features.hop_length)
    subsample = network.encoder.pre_encode
    return _with_gradients(lambda: subsample(feats, lens)[0], list(subsample.parameters()), context)


def _block(network: NestNetwork, setting: Setting, context: _Context) -> Run:
    config, subsample = setting.config, network.encoder.pre_encode
    num_frames = num_subsampled(
        num_padded_frames(setting.num_samples, config.features), subsample.factor, is_causal=subsample.is_causal
    )
    x = noise(network, setting.num_cuts, num_frames, config.encoder.d_model).requires_grad_()
    lens = subsample.out_lens(
        shortened_lens(network, setting.num_cuts, setting.num_samples // config.features.hop_length)
    )
    drawn = network.encoder.draw_keys(0)[1].to(x.device)
    keys = drawn if config.encoder.dropout_source == "position" else None
    (block,) = network.encoder.layers
    return _with_gradients(lambda: block(x, network.encoder.describe(x, lens), keys), [x, *block.parameters()], context)


_RUNS: dict[str, Callable[[NestNetwork, Setting, _Context], Run]] = {
    "features": _features,
    "subsampling": _subsampling,
    "blocks": _block,
}


def _with_gradients(forward: Callable[[], Tensor], leaves: list[Tensor], context: _Context) -> Run:
    """Returns a computation with its backward pass, for a gradient that is noise.

    Args:
        forward: Computes the output.
        leaves: What the gradients are computed of.
        context: That of the forward pass; the backward pass is outside of it, as in training.
    """
    grads: list[Tensor] = []

    def run() -> Sequence[Tensor]:
        with context():
            out = forward()
        if not grads:
            # The same values for each precision, so they are drawn in one that all of them represent.
            grads.append(_noise_like(out))
        return [out.detach(), *torch.autograd.grad(out, leaves, grads[0])]

    return run


def _noise_like(out: Tensor) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    drawn = torch.randn(out.shape, generator=generator, device="cpu").bfloat16()
    return drawn.to(out.device, out.dtype)


def noise(network: NestNetwork, *shape: int) -> Tensor:
    """Returns noise of the network's type: the same values for each type, which bfloat16 represents."""
    weight = next(network.parameters())
    drawn = torch.randn(shape, generator=torch.Generator().manual_seed(0), device="cpu").bfloat16()
    return drawn.to(weight.device, weight.dtype)


def shortened_lens(network: NestNetwork, num_cuts: int, full: int) -> Tensor:
    """Returns lengths of which the last one is shorter, so that there is padding."""
    lens = torch.full((num_cuts,), full)
    if num_cuts > 1:
        lens[-1] = 3 * full // 4
    return lens.to(next(network.parameters()).device)
