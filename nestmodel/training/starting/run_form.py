"""What computes the training steps of a run: deterministic mode, forms, and CUDA graphs.

Lightning's `trainer.deterministic: true` makes torch use deterministic kernels, or raise an error where there is none.
It does not select the algorithm of NCCL, and it makes torch fill every new tensor, which costs time:
`prepare_deterministic` does the rest. Environment variables have to be set before CUDA and the process group start;
ranks that are started from this process inherit them.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import pytorch_lightning as pl
import torch

from nestdata import PlanConfig, last_error_line
from nestmodel.config import Kernels, NestConfig
from nestmodel.errors import ConfigError, TrainingError, is_out_of_memory
from nestmodel.nn.encoder import why_not_compiled
from nestmodel.nn.gpu.forms import PLAIN, Forms, default_forms

_CUBLAS, _NCCL = "CUBLAS_WORKSPACE_CONFIG", "NCCL_ALGO"

REQUIRED = {_CUBLAS: ":4096:8", _NCCL: "Ring"}
"""Environment variables of the deterministic mode and the values that Lightning and this module set.

Sources: cuBLAS's documentation of reproducible results, and NCCL's of NCCL_ALGO. With several algorithms allowed, NCCL
may reduce within switches (NVLS), in an order of its own."""


def prepare_deterministic() -> None:
    """Sets the environment of the deterministic mode, and keeps torch from filling new tensors.

    Call it before a trainer with `deterministic=True` is built; `nestmodel fit` does. It changes nothing on a CPU.

    Raises:
        ConfigError: A variable has another value, which would be overwritten or might not give equal bits.
    """
    for name, required in REQUIRED.items():
        if os.environ.get(name, required).casefold() != required.casefold():
            raise ConfigError(
                f"trainer.deterministic needs {name}={required}, but the environment sets it to "
                f"{os.environ[name]!r}. Unset {name}, or turn trainer.deterministic off."
            )
    for name, required in REQUIRED.items():
        os.environ.setdefault(name, required)
    # All our results are written before they are read, so there is no uninitialised memory whose value could matter.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]  # set by a property


def determinism() -> bool:
    """Returns whether torch uses deterministic algorithms, and fails where there is none."""
    return torch.are_deterministic_algorithms_enabled() and not torch.is_deterministic_algorithms_warn_only_enabled()


MAX_LAUNCH_BOUND_VALUES = 1e8
"""Largest number of values (frames, width, layers) of a microbatch for which graphs win.

On an H100, the CPU needs 110 to 130 ms to launch a compiled microbatch, and the GPU 0.6 to 0.9 ms to compute a million
of them (benchmarks/results/gpu_forms_h100_2026-11.md). Above this number, the GPU soon is the slower one, and launches
are hidden.
"""

_BYTES_PER_VALUE = 250
"""Activations of a microbatch for each of these values: at most, for cuts of up to 240 s (docs/gpu.md, "Memory")."""

_USABLE = 0.8
"""Share of the memory that a run takes; the rest is for fragmentation, the CUDA context and NCCL."""


@dataclass(frozen=True, kw_only=True)
class RunForm:
    """What computes the training steps of a run."""

    forms: Forms
    why_no_graphs: str
    """Why microbatches are not CUDA graphs; empty if they are."""

    why_plain_blocks: str
    """Why the blocks are not compiled; empty if they are as in `forms`."""

    @property
    def summary(self) -> str:
        """The form, for the summary of a run."""
        blocks = f", blocks plain, because {self.why_plain_blocks}" if self.why_plain_blocks else ""
        graphs = f"off, because {self.why_no_graphs}" if self.why_no_graphs else "on"
        return f"{self.forms}{blocks}; graphs: {graphs}"


def run_form(config: NestConfig, kernels: Kernels, trainer: pl.Trainer, plan: PlanConfig | None) -> RunForm:
    """Returns the form of a run.

    Args:
        config: Of the model.
        kernels: `model.kernels`.
        trainer: Of the run.
        plan: Settings of the training batches; None if they are not known.
    """
    device, num_shapes = trainer.strategy.root_device, None if plan is None else plan.num_shapes
    forms = PLAIN if kernels == "torch" else default_forms(device.type, num_shapes)
    why_no_graphs = "data.plan.num_shapes is not set"
    if plan is not None and num_shapes is not None:
        why_no_graphs = _why_no_graphs(config, forms, device, str(trainer.precision), plan.max_batch_seconds)
    return RunForm(
        forms=forms,
        why_no_graphs=why_no_graphs,
        why_plain_blocks=why_not_compiled(config.encoder) if forms.compiled else "",
    )


@contextmanager
def naming_kernels(forms: Forms) -> Iterator[None]:
    """Turns an error of compiled code and kernels, for which a compiler may be missing, into one with the remedy."""
    try:
        yield
    except Exception as error:
        if forms == PLAIN or is_out_of_memory(error):
            raise
        raise TrainingError(
            f"the form of the training step ({forms}) fails: {type(error).__name__}, {last_error_line(error)[:300]} "
            "Operations of PyTorch take its place with model.kernels: torch."
        ) from error


def _why_no_graphs(
    config: NestConfig, forms: Forms, device: torch.device, precision: str, max_batch_seconds: float
) -> str:
    encoder = config.encoder
    num_values = max_batch_seconds / config.frame_s * encoder.d_model * encoder.num_layers
    # Weights, gradients, two moments and DDP's buckets, of 24 squares of the width in each block.
    num_bytes = 2 * _BYTES_PER_VALUE * num_values + 20 * 24 * encoder.d_model**2 * encoder.num_layers
    reasons = {
        "the form is torch": forms == PLAIN,
        "checkpoint_activations is on": encoder.checkpoint_activations,
        "the precision is 16-mixed": precision in ("16-mixed", "16"),
        "there are several attention contexts": len(encoder.att_context_size) > 1,
        "the microbatches are so large that launches take no time": num_values > MAX_LAUNCH_BOUND_VALUES,
        "the activations may not fit into memory twice": num_bytes > _USABLE * _memory_of(device),
    }
    return next((reason for reason, holds in reasons.items() if holds), "")


def _memory_of(device: torch.device) -> float:
    return torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else float("inf")
