"""The check of ranks: whether their settings are equal, and whether they reach each other by a collective."""

import importlib.metadata
import time
from collections.abc import Sequence

import pytorch_lightning as pl
import torch
import torch.distributed as dist

from nestmodel.errors import TrainingError
from nestmodel.preflight.preflight_report import CheckResult
from nestmodel.training.data import NestDataModule
from nestmodel.training.launcher import determinism
from nestmodel.training.module import NestModel
from nestmodel.training.resume_checks import Settings, changed_settings, flatten_settings

_NUM_SUMMED = 1_000_000
"""Size of the tensor: large enough that its packets are as long as the packets of gradients."""

_POLL_S = 0.001

_PACKAGES = ("nest-pretrain", "torch", "pytorch-lightning", "lhotse")
_MAX_SHOWN = 5


def rank_settings(model: NestModel, data: NestDataModule, trainer: pl.Trainer) -> Settings:
    """Returns the settings that must be equal on all ranks: versions, data, model and trainer."""
    val = data.val_dataset
    return {
        **{f"version of {package}": importlib.metadata.version(package) for package in _PACKAGES},
        **flatten_settings(model.config, "model.config"),
        **data.settings,
        "data.val_corpus": repr(val.plan.fingerprint if val else None),
        **{f"trainer.{name}": repr(getattr(trainer, name)) for name in ("precision", "gradient_clip_val", "max_steps")},
        "trainer.val_check_interval": repr(trainer.val_check_interval),
        "trainer.deterministic": repr(determinism()),
        "model.backend": repr(model.backend_name),
    }


def compare_ranks(gathered: Sequence[Settings], rank: int, device: torch.device, timeout_s: float) -> CheckResult:
    """Sums a tensor over all ranks, which must call it together, and compares the settings of a rank with rank 0.

    Args:
        gathered: The result of `rank_settings` on each rank.
        rank: This rank.
        device: Its device.
        timeout_s: How long it waits for the sum, in seconds.

    Raises:
        TrainingError: The sum was not complete in time.
    """
    _sum_over_ranks(device, timeout_s)
    settings, changes = gathered[rank], changed_settings(gathered[0], gathered[rank])
    if not changes:
        plan = settings["data.plan.fingerprint"].strip("'")[:12]
        return CheckResult(status="ok", value=f"{len(settings)} settings, plan {plan}")
    differences = [f"{name}: {here} here, {there} on rank 0" for name, there, here in changes[:_MAX_SHOWN]]
    if len(changes) > _MAX_SHOWN:
        differences.append(f"and {len(changes) - _MAX_SHOWN} more")
    advice = f"{'; '.join(differences)}. Give every rank the same flags, files and installed packages."
    return CheckResult(status="failed", value=f"{len(changes)} settings differ", advice=advice)


def _sum_over_ranks(device: torch.device, timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    work = dist.all_reduce(torch.zeros(_NUM_SUMMED, device=device), async_op=True)
    assert work is not None
    while not work.is_completed():
        if time.monotonic() > deadline:
            raise TrainingError(
                f"a sum over ranks was not complete after {timeout_s:g} s. Check the network between the nodes; "
                "NCCL_SOCKET_IFNAME or GLOO_SOCKET_IFNAME selects the network interface."
            )
        time.sleep(_POLL_S)
    work.wait()
