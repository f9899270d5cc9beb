"""Deterministic mode: what torch, cuBLAS and NCCL need so that equal runs on equal GPUs give equal bits.

Lightning's `trainer.deterministic: true` makes torch use deterministic kernels, or raise an error where there is none.
It does not select the algorithm of NCCL, and it makes torch fill every new tensor, which costs time. This module does
the rest. Environment variables have to be set before CUDA and the process group start; ranks that are started from this
process inherit them.

`trainer.deterministic: warn` is not a deterministic mode: the backward pass of torch's memory-efficient attention then
stays non-deterministic.
"""

import os
from collections.abc import MutableMapping
from typing import Literal

import torch

from nestmodel.errors import ConfigError

_CUBLAS, _NCCL = "CUBLAS_WORKSPACE_CONFIG", "NCCL_ALGO"

REQUIRED = {_CUBLAS: ":4096:8", _NCCL: "Ring"}
"""Environment variables of the deterministic mode and the values that Lightning and this module set.

Sources: cuBLAS's documentation of reproducible results, and NCCL's of NCCL_ALGO. With several algorithms allowed, NCCL
may reduce within switches (NVLS), in an order of its own."""

Determinism = bool | Literal["warn"]


def prepare_deterministic(environment: MutableMapping[str, str] | None = None) -> None:
    """Sets the environment of the deterministic mode, and keeps torch from filling new tensors.

    Call it before a trainer with `deterministic=True` is built; `nestmodel fit` does. It changes nothing on a CPU.

    Args:
        environment: The environment variables; by default, those of this process.

    Raises:
        ConfigError: A variable has another value, which would be overwritten or might not give equal bits.
    """
    environment = os.environ if environment is None else environment
    for name, required in REQUIRED.items():
        if environment.get(name, required).casefold() != required.casefold():
            raise ConfigError(
                f"trainer.deterministic needs {name}={required}, but the environment sets it to "
                f"{environment[name]!r}. Unset {name}, or turn trainer.deterministic off."
            )
    for name, required in REQUIRED.items():
        environment.setdefault(name, required)
    # All our results are written before they are read, so there is no uninitialised memory whose value could matter.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]  # set by a property


def determinism() -> Determinism:
    """Returns whether torch uses deterministic algorithms; "warn" if it only warns where there is none."""
    if not torch.are_deterministic_algorithms_enabled():
        return False
    return "warn" if torch.is_deterministic_algorithms_warn_only_enabled() else True
