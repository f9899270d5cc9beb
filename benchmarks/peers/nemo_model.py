"""NeMo's NEST models for the benchmarks: their `model` configuration section, and their outputs and gradients.

As a script, which the benchmark `parity` runs, it builds a model from a section, runs it on given audio and masks, and
writes its weights, outputs and gradients. Needs nemo_toolkit[asr] 3.0.0, but not this package.
"""

import argparse
import json
import logging
import sys
import warnings
from collections.abc import Iterator
from typing import Any

import torch

warnings.filterwarnings("ignore")
_MODULES = "nemo.collections.asr.modules."

PRESETS: dict[str, dict[str, Any]] = {
    "small": {"d_model": 176, "n_heads": 4, "n_layers": 16},
    "medium": {"d_model": 256, "n_heads": 4, "n_layers": 16},
    "large": {"d_model": 512, "n_heads": 8, "n_layers": 17},
    "xlarge": {"d_model": 1024, "n_heads": 8, "n_layers": 24, "xscaling": False, "use_bias": False},
}
"""Arguments of `section` for models of the size of our presets."""


def section(
    *,
    d_model: int,
    n_heads: int,
    n_layers: int,
    num_classes: int = 8192,
    num_books: int = 1,
    dist_fn: str = "l2",
    xscaling: bool = True,
    use_bias: bool = True,
    conv_kernel_size: int = 9,
    conv_norm_type: str = "batch_norm",
    mask_position: str = "pre_conv",
    channels: int = 256,
    dropout: float = 0.1,
    dither: float = 1e-5,
    normalize: str = "per_feature",
    encoder: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """Returns the `model` section of a NEST configuration of NeMo 3.0.0; `encoder` replaces some of its fields."""
    stacked = 8 if mask_position == "pre_conv" else 1
    return {
        "sample_rate": 16000,
        "num_classes": num_classes,
        "num_books": num_books,
        "code_dim": 16,
        "squeeze_single": False,
        "mask_position": mask_position,
        "train_ds": None,
        "validation_ds": None,
        "preprocessor": {
            "_target_": _MODULES + "AudioToMelSpectrogramPreprocessor",
            "sample_rate": 16000,
            "normalize": normalize,
            "window_size": 0.025,
            "window_stride": 0.01,
            "window": "hann",
            "features": 80,
            "n_fft": 512,
            "log": True,
            "frame_splicing": 1,
            "dither": dither,
            "pad_to": 16,
            "pad_value": 0.0,
        },
        "spec_augment": {
            "_target_": _MODULES + "SpectrogramAugmentation",
            "freq_masks": 0,
            "time_masks": 0,
            "freq_width": 27,
            "time_width": 0.05,
        },
        "masking": {
            "_target_": _MODULES + "RandomBlockMasking",
            "block_size": 40,
            "mask_prob": 0.01,
            "feat_in": 80,
            "freeze": True,
            "allow_overlap": True,
        },
        "quantizer": {
            "_target_": _MODULES + "RandomProjectionVectorQuantizer",
            "feat_in": 80,
            "code_dim": 16,
            "num_books": num_books,
            "num_classes": num_classes,
            "dist_fn": dist_fn,
            "freeze": True,
            "squeeze_single": False,
            "combine_time_steps": stacked,
        },
        "encoder": {
            "_target_": _MODULES + "ConformerEncoder",
            "feat_in": 80,
            "feat_out": -1,
            "n_layers": n_layers,
            "d_model": d_model,
            "use_bias": use_bias,
            "subsampling": "dw_striding",
            "subsampling_factor": 8,
            "subsampling_conv_channels": channels,
            "causal_downsampling": False,
            "ff_expansion_factor": 4,
            "self_attention_model": "rel_pos",
            "n_heads": n_heads,
            "att_context_size": [-1, -1],
            "att_context_style": "regular",
            "xscaling": xscaling,
            "untie_biases": True,
            "pos_emb_max_len": 5000,
            "conv_kernel_size": conv_kernel_size,
            "conv_norm_type": conv_norm_type,
            "conv_context_size": None,
            "dropout": dropout,
            "dropout_pre_encoder": dropout,
            "dropout_emb": 0.0,
            "dropout_att": dropout,
            **(encoder or {}),
        },
        "decoder": {
            "_target_": _MODULES + "MultiSoftmaxDecoder",
            "feat_in": d_model,
            "num_classes": num_classes,
            "num_decoders": num_books,
            "squeeze_single": False,
            "use_bias": True,
        },
        "loss": {
            "_target_": "nemo.collections.asr.losses.MultiMLMLoss",
            "combine_time_steps": stacked,
            "mask_threshold": 0.8,
            "num_decoders": num_books,
            "squeeze_single": False,
        },
    }


def build(config: dict[str, Any], seed: int = 0) -> Any:
    """Builds NeMo's model, in training mode."""
    from nemo.collections.asr.models import EncDecDenoiseMaskedTokenPredModel
    from nemo.utils import logging as nemo_logging
    from omegaconf import OmegaConf

    nemo_logging.setLevel(logging.ERROR)
    torch.manual_seed(seed)
    return EncDecDenoiseMaskedTokenPredModel(OmegaConf.create(config)).train()


def main() -> int:
    """Runs the model of every case in eval and in training mode, and writes the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("cases", help="JSON: a list of {section, inputs, output}, paths of torch files")
    arguments = parser.parse_args()
    with open(arguments.cases) as file:
        cases = json.load(file)
    for case in cases:
        for name, found in _passes(case["section"], torch.load(case["inputs"])):
            torch.save(found, f"{case['output']}.{name}")
    return 0


def _passes(config: dict[str, Any], inputs: dict[str, torch.Tensor]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields (name, results) part by part: for the largest model, all parts together would not fit into memory."""
    model = build(config)
    if config["quantizer"]["dist_fn"] == "cosine":
        # NeMo multiplies single- by double-precision tensors here, which raises an error.
        model.quantizer.codebooks.data = model.quantizer.codebooks.data.float()
    perturb(model)
    found: dict[str, Any] = {}
    lens = inputs["audio_lens"]
    for name in ("clean", "noisy"):
        feats, feat_lens = model.preprocessor(input_signal=inputs[name].clone(), length=lens.clone())
        # Copies, because NeMo attaches objects of its own to these tensors.
        found[name], found["feat_lens"] = feats.clone(), feat_lens.clone()
    # Before the training pass, which updates the running statistics.
    yield "state", _state(model)
    for mode in ("eval", "train"):
        model.train(mode == "train")
        tokens, encoded, enc_lens, masks = _encode(model, config, found, inputs["is_masked"])
        log_probs = model.decoder(encoder_output=encoded)
        loss = model.loss(masks=masks, decoder_outputs=log_probs, targets=tokens, decoder_lengths=enc_lens)
        found[mode] = {
            "tokens": tokens.clone(),
            "enc_lens": enc_lens.clone(),
            "encoded": encoded.detach().transpose(1, 2).clone(),
            "log_probs": log_probs.detach().clone(),
            "loss": loss.detach().clone(),
        }
    found["statistics"] = {name: value.clone() for name, value in _state(model).items() if "running" in name}
    loss.backward()
    found["train"]["gradients"] = _gradients(model)
    yield "single", found
    del found["train"]["gradients"], loss, log_probs, encoded
    # Again in double precision, where no input of a ReLU is so near zero that rounding changes its sign.
    model.zero_grad()
    model.double()
    exact = {name: found[name].double() for name in ("clean", "noisy")} | {"feat_lens": found["feat_lens"]}
    _, encoded, enc_lens, masks = _encode(model, config, exact, inputs["is_masked"])
    log_probs, tokens = model.decoder(encoder_output=encoded), found["train"]["tokens"]
    model.loss(masks=masks, decoder_outputs=log_probs, targets=tokens, decoder_lengths=enc_lens).backward()
    yield "double", {"encoded": encoded.detach().transpose(1, 2).clone(), "gradients": _gradients(model)}


def _gradients(model: Any) -> dict[str, torch.Tensor]:
    return {_our_name(name): p.grad for name, p in model.named_parameters() if p.grad is not None}


def _encode(
    model: Any, config: dict[str, Any], feats: dict[str, torch.Tensor], is_masked: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Runs NeMo's forward pass with a given mask; returns tokens, encoder frames, their lengths, and the mask."""
    embedding, lens = model.mask_processor.mask_embedding, feats["feat_lens"]
    if config["mask_position"] == "pre_conv":
        _, tokens = model.quantizer(input_signal=feats["clean"])
        masked = torch.where(is_masked.unsqueeze(1), embedding.view(1, -1, 1), feats["noisy"])
        masks = is_masked.unsqueeze(1).expand_as(masked).float()
        encoded, enc_lens = model.encoder(audio_signal=masked, length=lens)
        return tokens, encoded, enc_lens, masks
    # NeMo's own forward pass fails: its subsampling expects (batch, frames, mels) but receives (batch, mels, frames).
    # It also detaches the masked features. This calls the same modules as intended.
    subsampling, wrapper = model.pre_encoder.pre_encode, model.encoder.pre_encode
    with torch.no_grad():
        clean, _ = subsampling(x=feats["clean"].transpose(1, 2), lengths=lens)
        _, tokens = model.quantizer(input_signal=clean.transpose(1, 2))
    noisy, enc_lens = subsampling(x=feats["noisy"].transpose(1, 2), lengths=lens)
    masked = torch.where(is_masked.unsqueeze(2), embedding.view(1, 1, -1), noisy)
    model.encoder.pre_encode = _FixedOutput(masked, enc_lens)
    encoded, enc_lens = model.encoder(audio_signal=feats["noisy"], length=lens)
    model.encoder.pre_encode = wrapper
    return tokens, encoded, enc_lens, is_masked.unsqueeze(1).expand(-1, masked.shape[2], -1).float()


class _FixedOutput(torch.nn.Module):
    """Returns given values instead of computing the subsampling."""

    def __init__(self, x: torch.Tensor, lens: torch.Tensor) -> None:
        super().__init__()
        self.output = x, lens

    def forward(self, x: torch.Tensor, lengths: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:  # noqa: ARG002
        return self.output


def perturb(model: Any) -> None:
    """Changes weights that are initialised to zero or one, so that losing one of them is noticed."""
    generator = torch.Generator().manual_seed(1)
    for name, value in [*model.encoder.named_parameters(), *model.encoder.named_buffers()]:
        if value.ndim < 3 and value.is_floating_point() and not name.endswith(".weight"):
            value.data += 0.05 * torch.rand(value.shape, generator=generator)
        elif value.ndim == 1:
            value.data += 0.2 * torch.rand(value.shape, generator=generator) - 0.1


def _state(model: Any) -> dict[str, torch.Tensor]:
    state = {_our_name(name): value for name, value in model.state_dict().items()}
    return {name: value for name, value in state.items() if name}


def _our_name(name: str) -> str:
    """Removes the wrapper around the subsampling from a name; returns "" for duplicates of other parameters."""
    if name.startswith(("pre_encoder.", "encoder.pre_encode.masking.")):
        return ""
    return name.replace("encoder.pre_encode.pre_encode.", "encoder.pre_encode.")


if __name__ == "__main__":
    sys.exit(main())
