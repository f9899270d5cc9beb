"""Sections `parity` and `golden`: the same model and audio on the device and on the CPU, and NeMo's stored outputs."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.gpu.context import RATE, Context
from benchmarks.gpu.forms import BASE, FORMS, Form, best_form, build_network, settings_of
from benchmarks.gpu.report import Row, Section
from nestmodel import NestConfig, NestNetwork, config_from_nemo, loss_stats

GOLDEN = Path(__file__).parents[2] / "tests" / "golden" / "nemo_tiny.npz"
_NUM_BLOCKS = 2


def measure_parity(context: Context, section: Section) -> None:
    """Adds the largest relative differences from a CPU in float64 (of float32 results) and in float32 (of bf16)."""
    models = context.extent.models
    for name in context.pending(section, models, lambda name: f"{name}, bf16"):
        with _without_tf32():
            section.add(*_parity_rows(context, name, models[name]))
    section.notes.append(f"Models have at most {_NUM_BLOCKS} blocks, no dropout, and no dither; TF32 is off.")


@contextmanager
def _without_tf32() -> Iterator[None]:
    before = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = before


def measure_best_parity(context: Context, section: Section) -> None:
    """Adds the same differences for the form of each model that section `forms` has found to be the fastest."""
    cases = [(model, best_form(context, model)) for model in context.extent.models]
    row = "{}, {}".format
    for model, form in context.pending(section, cases, lambda case: f"{row(*case)}, bf16"):
        with _without_tf32(), settings_of(FORMS[form]):
            section.add(*_parity_rows(context, row(model, form), context.extent.models[model], FORMS[form]))
    section.notes.append("Models, audio and references are those of section `parity`.")


def _parity_rows(context: Context, name: str, config: NestConfig, form: Form = FORMS[BASE]) -> list[Row]:
    network = build_network(_without_randomness(config), form)
    inputs = _inputs(network, context.extent.parity_seconds)
    single = _results(NestNetwork(network.config), inputs)
    double = NestNetwork(network.config).double()
    double.quantizer.float()  # tokens are computed in float32 in every mode
    exact = _results(double, inputs)
    network.to(context.device)
    on_device = [tensor.to(context.device) for tensor in inputs]
    found = {
        "float32": (_results(network, on_device), exact),
        "bf16": (_results(network, on_device, bf16=True), single),
    }
    return [
        {
            "row": f"{name}, {precision}",
            "encoder": relative(values["encoded"], reference["encoded"]),
            "loss": relative(values["loss"], reference["loss"]),
            "gradients": relative(values["gradients"], reference["gradients"]),
            "tokens that differ": int((values["targets"] != reference["targets"]).sum()),
        }
        for precision, (values, reference) in found.items()
    ]


def _without_randomness(config: NestConfig) -> NestConfig:
    encoder = replace(
        config.encoder,
        dropout=0.0,
        dropout_pre_encoder=0.0,
        dropout_att=0.0,
        dropout_emb=0.0,
        num_layers=min(_NUM_BLOCKS, config.encoder.num_layers),
    )
    return replace(config, encoder=encoder, features=replace(config.features, dither=0.0))


def _inputs(network: NestNetwork, seconds: float) -> list[Tensor]:
    """Returns features of clean and noisy noise, their lengths, and masks, all computed on the CPU in float32."""
    generator = torch.Generator().manual_seed(0)
    audio = 0.1 * torch.randn(2, round(RATE * seconds), generator=generator)
    noisy = audio + 0.02 * torch.randn(audio.shape, generator=generator)
    lens = torch.tensor([audio.shape[1], audio.shape[1] * 3 // 4])
    feats, feat_lens = network.features(torch.cat([audio, noisy]), lens.repeat(2))
    clean, noisy = feats.chunk(2)
    is_masked = network.mask_processor.draw(feat_lens[:2], feats.shape[-1], generator)
    is_masked[:, :48] = True  # some tokens are scored in any case
    return [clean, noisy, feat_lens[:2], is_masked]


def _results(network: NestNetwork, inputs: list[Tensor], *, bf16: bool = False) -> dict[str, Tensor]:
    """Runs the network forward and backward in training mode; returns the results on the CPU in float64."""
    network.train().zero_grad()
    dtype = next(network.encoder.parameters()).dtype
    clean, noisy, lens, is_masked = (x.to(dtype) if x.is_floating_point() else x for x in inputs)
    with torch.autocast(clean.device.type, torch.bfloat16, enabled=bf16):
        output = network.forward_features(clean, noisy, lens, is_masked)
        loss = loss_stats(output).loss
    loss.backward()
    gradients = [p.grad.flatten() for p in network.parameters() if p.grad is not None]
    valid = torch.arange(output.encoded.shape[1], device=lens.device) < output.enc_lens.unsqueeze(1)
    found = {
        "encoded": output.encoded[valid],
        "loss": loss,
        "gradients": torch.cat(gradients),
        "targets": output.targets,
    }
    return {name: value.detach().cpu().double() for name, value in found.items()}


def relative(found: Any, expected: Any) -> float:
    """Returns the largest difference as a share of the largest magnitude."""
    found, expected = torch.as_tensor(found).double(), torch.as_tensor(expected).double()
    return float((found - expected).abs().max() / expected.abs().max())


def measure_golden(context: Context, section: Section) -> None:
    """Adds the differences from the outputs of NeMo in tests/golden, on the device in float32 and bf16."""
    with np.load(GOLDEN) as arrays:
        golden = dict(arrays)
    model = NestNetwork(config_from_nemo(json.loads(str(golden["config"])))).eval()
    state = {name[6:]: torch.from_numpy(value) for name, value in golden.items() if name.startswith("state/")}
    model.load_state_dict(state)
    model.to(context.device)
    clean, noise = (torch.from_numpy(golden[name].astype(np.float32) / 32768) for name in ("clean", "noise"))
    audio = torch.cat([clean, clean + noise]).to(context.device)
    lens = torch.from_numpy(golden["lengths"]).repeat(2).to(context.device)
    masked, masked_lens = (torch.from_numpy(golden[n]).to(context.device) for n in ("masked_features", "features_len"))
    stored = np.concatenate([golden["features_clean"], golden["features_noisy"]])
    for precision in context.pending(section, ("float32", "bf16"), str):
        autocast = torch.autocast(context.device.type, torch.bfloat16, enabled=precision == "bf16")
        with torch.no_grad(), _without_tf32(), autocast:
            feats, _ = model.features(audio, lens)
            encoded, enc_lens = model.encoder(masked, masked_lens)
            log_probs = model.decoder(encoded)
            tokens = model.quantizer(feats.chunk(2)[0]).cpu().numpy()
        spans = [slice(0, int(length)) for length in enc_lens]
        section.add(
            {
                "row": precision,
                "features, largest error": float(np.abs(feats.cpu().numpy() - stored).max()),
                "encoder": relative(encoded.transpose(1, 2).float().cpu(), golden["encoded"]),
                "log-probabilities": relative(log_probs.float().cpu(), golden["log_probs"]),
                "tokens that differ": int(
                    sum((tokens[i, span] != golden["tokens"][i, span]).sum() for i, span in enumerate(spans))
                ),
            }
        )
