"""Part `check`: loss and gradients of each backend in bf16, at the real shape, against float32 without TF32.

A network of two blocks. A gradient is right if its error is at most twice the error of torch's operations in bf16, plus
four units in the last place.
"""

import math
import statistics
import time
from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from benchmarks.gpu.results import Results
from benchmarks.gpu.trial import REFERENCE, Trial, batch_of, config_of, cuts_of, free

LAST_PLACE = 2.0**-7
"""Relative distance of neighbouring numbers in bf16."""

NORM_FLOOR = 0.01
"""Errors are relative to the norm of a gradient, or to this share of the norm of all gradients if that is more."""

Found = Mapping[str, Tensor]
"""The loss, and the gradients by the names of their parameters."""


def check_backends(results: Results, device: torch.device, preset: str, backends: list[str]) -> None:
    """Adds a row for each backend of a preset."""
    config = config_of(preset, device)
    # Without dropout of attention and dither, which a GPU's generator draws.
    encoder = replace(config.conformer, num_layers=2, dropout_att=0.0)
    config = replace(config, encoder=encoder, features=replace(config.features, dither=0.0))
    num_cuts = cuts_of(preset, device)
    where = {"part": "check", "preset": preset, "cuts": num_cuts}
    wanted = [backend for backend in backends if not results.has(**where, backend=backend)]
    if not wanted:
        return
    with results.attempt(**where, backend="float32"):
        with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):  # in products, TF32 is off by default
            exact = passes(Trial(config, device, precision="32-true"), REFERENCE, num_cuts)
        trial = Trial(config, device)
        plain = errors(passes(trial, REFERENCE, num_cuts), exact)
        for backend in wanted:
            with results.attempt(**where, backend=backend):
                started = time.perf_counter()
                row = compare_errors(passes(trial, backend, num_cuts), exact, plain)
                results.put(**where, backend=backend, **row, seconds=time.perf_counter() - started)


def passes(trial: Trial, name: str, num_cuts: int) -> Found:
    """Returns loss and gradients of a microbatch; code for varying shapes has run another shape before."""
    trial.use(name, shorter=batch_of(num_cuts, trial.device, share=0.8))
    loss = trial.microbatch(batch_of(num_cuts, trial.device))
    gradients = {name: p.grad.detach().clone() for name, p in trial.model.named_parameters() if p.grad is not None}
    trial.reset()
    free(trial.device)
    return {"loss": loss.clone(), **gradients}


def errors(found: Found, exact: Found) -> dict[str, float]:
    """Returns the relative error of each value; infinity for a missing value."""
    floor = NORM_FLOOR * math.hypot(*(_norm(x) for name, x in exact.items() if name != "loss"))
    return {
        name: _norm(found[name] - x) / max(_norm(x), 0.0 if name == "loss" else floor) if name in found else math.inf
        for name, x in exact.items()
    }


def _norm(x: Tensor) -> float:
    return float(torch.linalg.vector_norm(x, dtype=torch.float64))


def compare_errors(found: Found, exact: Found, plain: Mapping[str, float]) -> dict[str, object]:
    """Returns whether a backend is right, and the value that is closest to its limit or furthest beyond it.

    Args:
        found: Values of the backend.
        exact: Values in float32.
        plain: Errors of torch's operations in bf16.
    """
    of_backend = errors(found, exact)
    shares = {name: error / (2 * plain[name] + 4 * LAST_PLACE) for name, error in of_backend.items()}
    worst = max(shares, key=lambda name: math.inf if math.isnan(shares[name]) else shares[name])
    return {
        "is_right": all(share <= 1 for share in shares.values()),
        "worst": worst,
        "share_of_limit": shares[worst],
        "relative_error": of_backend[worst],
        "median_over_plain": statistics.median(of_backend[name] / max(plain[name], 1e-9) for name in of_backend),
    }
