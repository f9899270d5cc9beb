"""The deterministic mode of a run.

Lightning's `trainer.deterministic: true` makes torch use deterministic kernels, or raise an error where there is none.
It does not select the algorithm of NCCL, and it makes torch fill every new tensor, which costs time:
`prepare_deterministic` does the rest. Environment variables have to be set before CUDA and the process group start;
ranks that are started from this process inherit them.
"""

import os

import torch

from nestmodel.errors import ConfigError

_CUBLAS, _NCCL = "CUBLAS_WORKSPACE_CONFIG", "NCCL_ALGO"

REQUIRED = {_CUBLAS: ":4096:8", _NCCL: "Ring"}
"""Environment variables of the deterministic mode and the values that Lightning and this module set.

Sources: the documentation of reproducible results in cuBLAS, and of NCCL_ALGO in NCCL. If several algorithms are
allowed, NCCL may reduce within switches (NVLS), in an order of its own."""


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
