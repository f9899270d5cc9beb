"""Watches over the form of training steps: a form that fails or differs from the plain one is given up.

All forms compute the same values up to rounding, so a rank may change to the plain form by itself, at any microbatch.
"""

import math
import warnings
from collections.abc import Callable
from typing import NamedTuple, TypeVar

import torch

from nestmodel.errors import TrainingError
from nestmodel.nn.batch_norm import StepBatchNorm, collected_statistics, restore_collected
from nestmodel.nn.gpu.forms import PLAIN
from nestmodel.nn.loss import loss_stats
from nestmodel.nn.network import NestNetwork
from nestmodel.nn.network_input import NetworkInput
from nestmodel.nn.precision import product_dtype
from nestmodel.out_of_memory import is_out_of_memory
from nestmodel.training.starting.determinism import determinism

ALLOWED_ROUNDINGS = {"loss": 2.0, "norm of the gradients": 16.0}
"""Largest relative differences between forms, in units in the last place of the type of matrix products.

The loss is a mean over tokens, in which roundings cancel; the norm is dominated by the largest gradients. In `small`,
bfloat16 differs from float32 by 0.01 and 0.25 units, and forms from each other by less. Masks of dropout that differ
would be 0.1 and 3 units: so the check does not depend on how a form draws the dropout of attention weights. It finds
values and gradients that are missing or far off; a mask of padding that is missing changes an untrained model by less
than rounding, and only `benchmarks.gpu` finds it.
"""

LEAST_ALLOWED = 1e-3
"""Smallest bound of a relative difference: for float32, of which convolutions of a GPU use the ten bits of TF32."""

_MAX_CAUSE = 300
"""Characters of an error that are shown."""

_T = TypeVar("_T")


class _Figures(NamedTuple):
    """What two forms are compared by."""

    loss: float
    norm: float

    def difference_to(self, plain: "_Figures", ulp: float) -> str:
        """Returns the first figure that differs from that of the plain form by more than rounding; empty if none."""
        for (name, roundings), found, expected in zip(ALLOWED_ROUNDINGS.items(), self, plain, strict=True):
            allowed = max(LEAST_ALLOWED, roundings * ulp)
            # Without a finite value of the plain form, the data are at fault, and nothing can be compared.
            if math.isfinite(expected) and not abs(found - expected) <= allowed * abs(expected):
                return f"the {name} of the first microbatch is {found:.6g} instead of {expected:.6g}"
        return ""


class FormGuard:
    """Compares the form of a network with the plain one at the first microbatch, and catches its errors later.

    Args:
        network: The network, whose `forms` are watched.
    """

    def __init__(self, network: NestNetwork) -> None:
        self._network = network
        self._norms = [module for module in network.modules() if isinstance(module, StepBatchNorm)]
        self._is_unchecked = False

    def start(self) -> None:
        """Makes `check` compare the next microbatch."""
        self._is_unchecked = self._network.forms != PLAIN

    def check(self, batch: NetworkInput) -> None:
        """Compares loss and norm of the gradients of the first microbatch; calls for later ones do nothing.

        Gradients, statistics and hooks of data-parallel training are left alone. The caller seeds the generators after
        this.

        Args:
            batch: The microbatch, on the device of the network.

        Raises:
            TrainingError: The forms differ, in deterministic mode.
            torch.OutOfMemoryError: A form does not fit into memory.
        """
        if not self._is_unchecked:
            return
        self._is_unchecked = False
        forms, statistics = self._network.forms, collected_statistics(self._norms)
        why = ""
        try:
            found = self._figures(batch)
        except Exception as error:
            if is_out_of_memory(error):
                raise
            why = _cause(error)
        if not why:
            restore_collected(self._norms, statistics)
            self._network.use_forms(PLAIN)
            why = found.difference_to(self._figures(batch), torch.finfo(product_dtype(batch.audio)).eps)
            self._network.use_forms(forms)
        restore_collected(self._norms, statistics)
        if why:
            self._give_up(why)

    def run(self, forward: Callable[[NetworkInput], _T], batch: NetworkInput) -> _T:
        """Returns the result of a forward pass; if its form fails, that of the plain form.

        Args:
            forward: The forward pass of a microbatch.
            batch: The microbatch, for which the generators are seeded again.

        Raises:
            TrainingError: The form fails, in deterministic mode.
        """
        if self._network.forms == PLAIN:
            return forward(batch)
        statistics = collected_statistics(self._norms)
        try:
            return forward(batch)
        except Exception as error:
            if is_out_of_memory(error):
                raise
            why = _cause(error)
        self._give_up(why)
        restore_collected(self._norms, statistics)
        seed_generators(self._network, batch)
        return forward(batch)

    def _give_up(self, why: str) -> None:
        name = self._network.forms
        if determinism() is True:
            raise TrainingError(
                f"the form of the training step ({name}) cannot be used: {why}. Deterministic mode does not change "
                "it within a run: set model.kernels to torch."
            )
        warnings.warn(
            f"Training goes on in the plain form of PyTorch instead of the form {name!s}: {why.rstrip('.')}. With "
            "model.kernels: torch, no other form is tried.",
            stacklevel=3,
        )
        self._network.use_forms(PLAIN)

    def _figures(self, batch: NetworkInput) -> _Figures:
        seed_generators(self._network, batch)
        loss = loss_stats(self._network.forward_masked(batch), batch.scored_rows >= 0).nll_sum
        parameters = [parameter for parameter in self._network.parameters() if parameter.requires_grad]
        # Not `backward`, which calls the hooks of DDP and adds to `.grad`.
        with torch.autocast(loss.device.type, enabled=False):
            grads = torch.autograd.grad(loss, parameters, allow_unused=True)
        norm = torch.nn.utils.get_total_norm([grad for grad in grads if grad is not None])
        return _Figures(float(loss.detach()), float(norm))


def _cause(error: Exception) -> str:
    """Returns an error in one line; those of torch's compiler have many, and end with advice for its developers."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:_MAX_CAUSE]}"


def seed_generators(network: NestNetwork, batch: NetworkInput) -> None:
    """Seeds torch's generators, from which dither and some dropout are drawn, for a microbatch.

    Those of the CPU and of the current GPU; `torch.manual_seed` seeds those of all visible GPUs.
    """
    seed = network.seed_for("dropout", batch)
    torch.default_generator.manual_seed(seed)
    if batch.audio.device.type == "cuda":
        torch.cuda.manual_seed(seed)
