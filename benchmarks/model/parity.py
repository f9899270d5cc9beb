"""Compares outputs and gradients of the model with NeMo's, for every variant and size, in eval and training mode.

    python -m benchmarks run parity --nemo-python PATH [--only NAME ...]

Prints Markdown, and exits with 1 if a difference is too large. NeMo needs a separate virtual environment with
`nemo_toolkit[asr]==3.0.0`. Both sides have the same random audio, the same weights (initialised by NeMo and loaded
here), the same masks, and no dropout or dither.
"""

import gc
import json
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.harness.arguments import benchmark_parser
from benchmarks.harness.children import PEERS, run_peer
from benchmarks.harness.report import Report, versions
from benchmarks.peers.nemo_model import PRESETS, section
from nestmodel import NestNetwork, config_from_nemo
from nestmodel.nn.masking import scored_token_mask

SMALL: dict[str, Any] = {"d_model": 64, "n_heads": 4, "n_layers": 3, "num_classes": 512, "channels": 32}
_CHUNKS = {"att_context_size": [70, 13], "att_context_style": "chunked_limited"}
VARIANTS: dict[str, dict[str, Any]] = {
    "as in NeMo's configuration": {},
    "three codebooks": {"num_books": 3},
    "cosine distance": {"dist_fn": "cosine"},
    "no biases": {"use_bias": False},
    "no xscaling": {"xscaling": False},
    "neither (as xlarge)": {"use_bias": False, "xscaling": False},
    "layer norm in the convolution": {"conv_norm_type": "layer_norm"},
    "kernel of 31": {"conv_kernel_size": 31},
    "kernel of 5": {"conv_kernel_size": 5},
    "post_conv": {"mask_position": "post_conv"},
    "attention to 8 and 2 frames": {"encoder": {"att_context_size": [8, 2]}},
    "chunks of 14 frames, causal convolution": {"encoder": _CHUNKS | {"conv_context_size": "causal"}},
    "chunks, unnormalised features, layer norm": {
        "encoder": _CHUNKS | {"conv_context_size": "causal"},
        "conv_norm_type": "layer_norm",
        "normalize": "NA",
    },
    "convolution of 5 and 3 frames": {"encoder": {"conv_context_size": [5, 3]}},
    "post_conv, chunks, causal": {
        "encoder": _CHUNKS | {"conv_context_size": "causal", "causal_downsampling": True},
        "mask_position": "post_conv",
    },
    "post_conv, two codebooks, cosine": {"mask_position": "post_conv", "num_books": 2, "dist_fn": "cosine"},
}
SIZES: dict[str, dict[str, Any]] = {
    "small": PRESETS["small"],
    "large": PRESETS["large"],
    "large, 18 layers": {**PRESETS["large"], "n_layers": 18},
    "xlarge": PRESETS["xlarge"],
}
QUICK = None
OUTPUT_TOLERANCE = 1e-5
GRADIENT_TOLERANCE = 1e-4
FEATURE_TOLERANCE = 1e-4
COLUMNS = ["model", "features", "tokens equal", "loss", "outputs, eval", "outputs, training", "gradients"]
COLUMNS += ["outputs, double", "gradients, double", "parameter, double"]


def main() -> int:
    """Prints the comparison; returns 1 if a difference exceeds its tolerance."""
    parser = benchmark_parser(__doc__)
    parser.add_argument("--nemo-python", required=True, help="Python of an environment with NeMo")
    parser.add_argument("--only", nargs="*", help="names of the variants to compare")
    arguments = parser.parse_args()
    cases = {name: {**SMALL, **values} for name, values in VARIANTS.items()} | SIZES
    chosen = {name: values for name, values in cases.items() if not arguments.only or name in arguments.only}
    report = Report(
        "Parity with NeMo 3.0.0",
        __file__,
        f"on a CPU with {versions('torch')}; each variant is compared once, on one noisy batch.",
        results=arguments.results,
    )
    report.text("""Differences are relative to the largest magnitude of each array, over valid frames; differences of
        features are absolute. All later stages read the features of NeMo. Gradients are compared for every parameter,
        except where the gradient is zero in exact arithmetic: the bias of the keys, and a bias in front of batch
        norm.""")
    report.text("""In single precision, the input of a ReLU in the subsampling can be rounded to a positive number on
        one side and not on the other; gradients then differ by up to 0.002. Training mode is therefore also compared in
        double precision. Limits: features 1e-4, loss and outputs 1e-5, all tokens equal, and gradients in double
        precision 1e-4; single precision has no limit in training mode.""")
    are_equal: list[bool] = []
    report.table(COLUMNS, _rows(arguments.nemo_python, chosen, are_equal))
    return 0 if all(are_equal) else 1


def _rows(nemo_python: str, chosen: dict[str, dict[str, Any]], are_equal: list[bool]) -> Iterator[list[str]]:
    """Yields the rows of the table; adds to `are_equal` whether the differences of a row are within the tolerances."""
    small = [name for name in chosen if name in VARIANTS]
    for names in ([small] if small else []) + [[name] for name in chosen if name in SIZES]:
        with tempfile.TemporaryDirectory() as directory:
            cases = list[dict[str, Any]]()
            for number, name in enumerate(names):
                config = section(**chosen[name], dropout=0.0, dither=0.0)
                inputs = Path(directory) / f"{number}.inputs"
                torch.save(_inputs(config), inputs)
                cases.append({"section": config, "inputs": str(inputs), "output": f"{directory}/{number}.outputs"})
            (Path(directory) / "cases.json").write_text(json.dumps(cases))
            run_peer([nemo_python, PEERS / "nemo_model.py", f"{directory}/cases.json"])
            for name, case in zip(names, cases, strict=True):
                parts = {
                    part: torch.load(f"{case['output']}.{part}", mmap=True) for part in ("state", "single", "double")
                }
                is_equal, cells = _compare(case["section"], torch.load(case["inputs"]), **parts)
                are_equal.append(is_equal)
                yield [name, *cells]
                del parts
                gc.collect()


def _inputs(config: dict[str, Any]) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(2)
    audio_lens = torch.tensor([128000, 127840, 101217, 64000])
    clean = 0.1 * torch.randn(4, 128000, generator=generator)
    clean *= torch.arange(128000) < audio_lens.unsqueeze(1)
    noisy = clean + 0.05 * torch.randn(4, 128000, generator=generator)
    is_masked = torch.zeros(4, 816, dtype=torch.bool)  # 8 s are 801 frames, padded to a multiple of 16
    for utterance, start in ((0, 16), (0, 203), (1, 740), (2, 80), (2, 97), (3, 3)):
        is_masked[utterance, start : start + 40] = True
    if config["mask_position"] == "post_conv":
        # A causal subsampling returns one frame more.
        is_masked = F.pad(is_masked[:, ::8], (0, int(config["encoder"]["causal_downsampling"])))
    return {"audio_lens": audio_lens, "clean": clean, "noisy": noisy, "is_masked": is_masked}


def _compare(
    config: dict[str, Any],
    inputs: dict[str, Tensor],
    *,
    state: dict[str, Tensor],
    single: dict[str, Any],
    double: dict[str, Any],
) -> tuple[bool, list[str]]:
    """Compares with the outputs of NeMo's model with the same weights, in single and double precision.

    Returns:
        Whether all differences are within the tolerances; and the differences, as cells of `COLUMNS`.
    """
    model, nemo = NestNetwork(config_from_nemo(config)), single
    model.load_state_dict(state, strict=True)
    ours = {name: model.features(inputs[name], inputs["audio_lens"])[0] for name in ("clean", "noisy")}
    feats, feat_lens, is_masked = {name: nemo[name] for name in ours}, nemo["feat_lens"], inputs["is_masked"]
    outputs, losses, tokens_equal = {}, [], []
    for mode in ("eval", "train"):
        model.train(mode == "train")
        theirs = nemo[mode]
        is_valid = torch.arange(theirs["encoded"].shape[1]) < theirs["enc_lens"].unsqueeze(1)
        tokens = model.tokens(feats["clean"], feat_lens)
        tokens_equal.append((tokens == theirs["tokens"])[is_valid].float().mean().item())
        encoded = model.encode_masked(feats["noisy"], feat_lens, is_masked).frames
        loss = _loss(model, encoded, theirs["tokens"], is_masked)
        losses.append(_difference(loss.detach(), theirs["loss"]))
        encoded = encoded.detach()
        with torch.no_grad():
            log_probs = model.decoder(encoded)
        outputs[mode] = max(
            _difference(encoded[is_valid], theirs["encoded"][is_valid]),
            _difference(log_probs[is_valid], theirs["log_probs"][is_valid]),
        )
    loss.backward()
    moved = model.state_dict()
    statistics = [_difference(moved[name], value) for name, value in nemo["statistics"].items()]
    gradients = _gradients(model, nemo["train"]["gradients"])
    model.zero_grad()
    model.double()
    encoded = model.encode_masked(feats["noisy"].double(), feat_lens, is_masked).frames
    _loss(model, encoded, nemo["train"]["tokens"], is_masked).backward()
    exact_gradients = _gradients(model, double["gradients"])
    worst = max(exact_gradients, key=lambda name: exact_gradients[name])
    features = max((ours[name] - nemo[name]).abs().max().item() for name in ours)
    train_outputs = max(outputs["train"], *statistics, 0.0)
    exact_outputs = _difference(encoded.detach()[is_valid], double["encoded"][is_valid])
    is_equal = (
        min(tokens_equal) == 1.0
        and features < FEATURE_TOLERANCE
        and max(*losses, outputs["eval"], exact_outputs) < OUTPUT_TOLERANCE
        and exact_gradients[worst] < GRADIENT_TOLERANCE
    )
    figures = [max(losses), outputs["eval"], train_outputs, max(gradients.values())]
    figures += [exact_outputs, exact_gradients[worst]]
    cells = [f"{features:.1e}", f"{100 * min(tokens_equal):g} %", *(f"{figure:.1e}" for figure in figures)]
    return is_equal, [*cells, f"`{worst}`"]


def _loss(model: NestNetwork, encoded: Tensor, tokens: Tensor, is_masked: Tensor) -> Tensor:
    is_scored = scored_token_mask(is_masked, model.num_stacked, model.config.masking.threshold)
    logits, targets = model.decoder.logits(encoded[is_scored]), tokens[is_scored]
    return torch.stack(
        [F.cross_entropy(logits[..., book], targets[:, book]) for book in range(targets.shape[1])]
    ).mean()


def _gradients(model: NestNetwork, theirs: dict[str, Tensor]) -> dict[str, float]:
    """Compares the gradients of all parameters, except those that are zero in exact arithmetic.

    The bias of the keys shifts all scores of a query equally, and batch norm subtracts a bias in front of it. What is
    left of these gradients is rounding, which is checked in double precision only.
    """
    ours = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert ours.keys() == theirs.keys() - {""}, sorted(ours.keys() ^ theirs.keys())
    zero_gradients: tuple[str, ...] = ("linear_k.bias",)
    if any(isinstance(module, nn.BatchNorm1d) for module in model.conformer.layers.modules()):
        zero_gradients += ("depthwise_conv.bias",)
    largest = max(value.abs().max().item() for value in theirs.values())
    found = {}
    for name, gradient in ours.items():
        if name.endswith(zero_gradients):
            rounding = max(gradient.abs().max().item(), theirs[name].abs().max().item())
            assert gradient.dtype == torch.float32 or rounding < 1e-10 * largest, name
        else:
            found[name] = _difference(gradient, theirs[name])
    return found


def _difference(ours: Tensor, theirs: Tensor) -> float:
    assert ours.shape == theirs.shape
    return ((ours - theirs).abs().max() / theirs.abs().max()).item()


if __name__ == "__main__":
    sys.exit(main())
