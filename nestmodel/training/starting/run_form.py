"""What computes the training steps of a run: deterministic mode and forms.

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


@dataclass(frozen=True, kw_only=True)
class RunForm:
    """What computes the training steps of a run."""

    forms: Forms
    why_plain_blocks: str
    """Why the blocks are not compiled; empty if they are as in `forms`."""

    @property
    def summary(self) -> str:
        """The form, for the summary of a run."""
        blocks = f", blocks plain, because {self.why_plain_blocks}" if self.why_plain_blocks else ""
        return f"{self.forms}{blocks}"


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
    return RunForm(
        forms=forms,
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
