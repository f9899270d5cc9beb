"""Writes the golden arrays of limited attention, causal convolutions and features without normalisation, with NeMo.

    NEMO_PYTHON benchmarks/peers/nemo_streaming_golden.py tests/golden/nemo_streaming.npz

Needs nemo_toolkit[asr] 3.0.0, but not this package. Everything is computed in double precision and stored in single
precision. Weights and inputs are drawn here; all variants share them where their shapes are equal.
"""

import argparse
import json
import logging
import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch

warnings.filterwarnings("ignore")
NUM_GRADIENTS = 32
"""Values that are kept of each gradient, evenly spaced over the flattened array, and its largest magnitude."""

ENCODER: dict[str, Any] = {
    "feat_in": 20,
    "feat_out": -1,
    "n_layers": 2,
    "d_model": 16,
    "n_heads": 2,
    "subsampling": "dw_striding",
    "subsampling_factor": 8,
    "subsampling_conv_channels": 8,
    "ff_expansion_factor": 2,
    "self_attention_model": "rel_pos",
    "conv_kernel_size": 9,
    "dropout": 0.0,
    "dropout_pre_encoder": 0.0,
    "dropout_emb": 0.0,
    "dropout_att": 0.0,
}
_CAUSAL = {
    "att_context_style": "chunked_limited",
    "att_context_size": [6, 2],
    "conv_context_size": "causal",
    "causal_downsampling": True,
}
VARIANTS: dict[str, dict[str, Any]] = {
    "layer_norm": {"conv_norm_type": "layer_norm"},
    "regular": {"att_context_size": [8, 2]},
    "regular_left_only": {"att_context_size": [8, 0], "conv_context_size": "causal"},
    "chunked": {"att_context_style": "chunked_limited", "att_context_size": [6, 2]},
    "causal": _CAUSAL,
    "causal_layer_norm": {**_CAUSAL, "conv_norm_type": "layer_norm"},
    "conv_context": {"conv_context_size": [5, 3]},
    "causal_downsampling": {"causal_downsampling": True},
    "two_contexts": {
        "att_context_style": "chunked_limited",
        "att_context_size": [[-1, 3], [4, 0]],
        "att_context_probs": [0.25, 0.75],
        "conv_norm_type": "layer_norm",
    },
}


def main() -> int:
    """Computes and writes all arrays."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", type=Path)
    arguments = parser.parse_args()
    import nemo
    from nemo.collections.asr.modules import ConformerEncoder
    from nemo.utils import logging as nemo_logging

    nemo_logging.setLevel(logging.ERROR)
    drawn = np.random.RandomState(7)
    arrays: dict[str, Any] = {
        "nemo_version": np.array(nemo.__version__),
        "variants": np.array(json.dumps({name: {**ENCODER, **values} for name, values in VARIANTS.items()})),
        "feats": drawn.standard_normal((2, 20, 160)).astype(np.float32),
        "feat_lens": np.array([160, 117]),
        "factors": drawn.standard_normal((2, 21, 16)).astype(np.float32),
        **_features(drawn),
    }
    for name, values in VARIANTS.items():
        contexts = values.get("att_context_size", [-1, -1])
        for number, context in enumerate(contexts if isinstance(contexts[0], list) else [contexts]):
            encoder = ConformerEncoder(**{**ENCODER, **values})
            encoder.set_default_att_context_size(context)
            encoder.att_context_size_all = [context]  # so that training mode draws no other
            _set_weights(encoder, arrays, drawn)
            arrays |= {f"{name}/{number}/{key}": value for key, value in _outputs(encoder.double(), arrays).items()}
    np.savez_compressed(arguments.output, **arrays)
    print(f"{arguments.output}: {len(arrays)} arrays, {arguments.output.stat().st_size} bytes")
    return 0


def _set_weights(encoder: Any, arrays: dict[str, Any], drawn: np.random.RandomState) -> None:
    """Sets all weights to values that are drawn once for each name and shape."""
    for name, value in encoder.state_dict().items():
        if not value.is_floating_point():
            continue
        key = f"state/{name}/{'x'.join(map(str, value.shape))}"
        if key not in arrays:
            size = 1.0 / np.sqrt(np.prod(value.shape[1:])) if value.ndim > 1 else 0.2
            is_scale = value.ndim == 1 and name.endswith((".weight", "running_var"))
            noise = size * drawn.standard_normal(tuple(value.shape))
            arrays[key] = (1.0 + np.abs(noise) if is_scale else noise).astype(np.float32)
        value.copy_(torch.from_numpy(arrays[key]))


def _outputs(encoder: Any, arrays: dict[str, Any]) -> dict[str, Any]:
    """Returns outputs in eval and training mode, gradients in training mode, and the visible keys."""
    feats, lens = torch.from_numpy(arrays["feats"]).double(), torch.from_numpy(arrays["feat_lens"])
    found: dict[str, Any] = {}
    hidden: list[torch.Tensor] = []
    encoder.layers[0].register_forward_pre_hook(
        lambda _module, _args, values: hidden.append(values["att_mask"]), with_kwargs=True
    )
    for mode in ("eval", "train"):
        encoder.train(mode == "train")
        encoded, enc_lens = encoder(audio_signal=feats, length=lens.clone())
        frames = encoded.transpose(1, 2)
        found[mode], found["enc_lens"] = frames.detach().numpy().astype(np.float32), enc_lens.numpy()
    num_frames = frames.shape[1]
    is_valid = torch.arange(num_frames) < enc_lens.unsqueeze(1)
    factors = torch.from_numpy(arrays["factors"]).double()[:, :num_frames]
    (frames * factors * is_valid.unsqueeze(2)).sum().backward()
    parameters = sorted(encoder.named_parameters())
    gradients = [parameter.grad.flatten().numpy() for _, parameter in parameters]
    rows = [np.linspace(0, one.size - 1, min(one.size, NUM_GRADIENTS)).astype(int) for one in gradients]
    found["names"] = np.array([name for name, _ in parameters])
    found["largest"] = np.array([np.abs(one).max() for one in gradients], np.float32)
    found["gradients"] = np.concatenate([one[kept] for one, kept in zip(gradients, rows, strict=True)]).astype("f4")
    found["visible"] = ~hidden[-1][0].numpy()  # of the first utterance, which has no padding
    return found


def _features(drawn: np.random.RandomState) -> dict[str, Any]:
    """Returns audio and its features without normalisation."""
    from nemo.collections.asr.modules import AudioToMelSpectrogramPreprocessor

    lens = torch.tensor([6000, 4321])
    audio = np.round(3000 * drawn.standard_normal((2, 6000))).astype(np.int16)
    preprocessor = AudioToMelSpectrogramPreprocessor(
        normalize="NA", features=20, n_fft=512, window_size=0.025, window_stride=0.01, dither=0.0, pad_to=16
    ).eval()
    signal = torch.from_numpy(audio.astype(np.float32) / 32768)
    feats, feat_lens = preprocessor(input_signal=signal, length=lens)
    return {
        "audio": audio,
        "audio_lens": lens.numpy(),
        "na_feats": feats.numpy(),
        "na_feat_lens": feat_lens.numpy(),
    }


if __name__ == "__main__":
    sys.exit(main())
