"""Shared by both sides of benchmarks/model/step.py: arguments, input batch, timing and memory. Needs only torch."""

import argparse
import hashlib
import resource
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

STEPS = 6
"""Steps of a process, of which the first two are warm-up."""

WHAT = ("small", "large", "quantizer")
"""What can be measured."""


def sizes(what: str) -> dict[str, Any]:
    """Returns the sizes of the measured model. The quantizer has the same size in every preset."""
    from nemo_model import PRESETS  # beside this file, which the parent process imports from elsewhere

    return {"d_model": 64, "n_heads": 4, "n_layers": 1} if what == "quantizer" else PRESETS[what]


def parse(description: str | None) -> argparse.Namespace:
    """Parses the arguments, and sets the number of threads."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("what", choices=WHAT)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    return arguments


def batch(arguments: argparse.Namespace) -> tuple[Tensor, Tensor, Tensor]:
    """Returns clean and noisy audio, shape (batch, samples), and lengths; equal on both sides."""
    generator = torch.Generator().manual_seed(0)
    samples = int(16000 * arguments.seconds)
    audio = 0.1 * torch.randn(arguments.batch, samples, generator=generator)
    noisy = audio + 0.05 * torch.randn(arguments.batch, samples, generator=generator)
    return audio, noisy, torch.full((arguments.batch,), samples)


def quantizer_weights(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Returns random weights for a quantizer with this state dict; equal on both sides."""
    generator = torch.Generator().manual_seed(1)
    weights = {name: torch.randn(state[name].shape, generator=generator) for name in sorted(state)}
    weights["codebooks"] /= weights["codebooks"].norm(dim=-1, keepdim=True)
    weights["proj.weight"] *= 0.03
    return {name: value.to(state[name].dtype) for name, value in weights.items()}


class Stopwatch:
    """Measures a function over several calls; the first two are warm-up."""

    def __init__(self, run: Callable[[], Tensor], steps: int) -> None:
        self._before_mb = _resident_mb()
        _reset_peak()
        times = []
        for _ in range(steps):
            started = time.perf_counter()
            result = run()
            times.append(time.perf_counter() - started)
        self._seconds = statistics.median(times[2:])
        self._extra_mb = _peak_mb() - self._before_mb
        self._digest = hashlib.sha256(result.detach().numpy().tobytes()).hexdigest()[:16]

    def measured(self) -> dict[str, Any]:
        """Returns the median time, the peak memory in MB, in total and in excess of the start, and a digest."""
        peak_mb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        return {"seconds": self._seconds, "peak_mb": peak_mb, "extra_mb": self._extra_mb, "digest": self._digest}


def _reset_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def _peak_mb() -> float:
    return _status("VmHWM")


def _resident_mb() -> float:
    return _status("VmRSS")


def _status(key: str) -> float:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(key + ":"):
            return int(line.split()[1]) / 1024
    raise KeyError(key)
