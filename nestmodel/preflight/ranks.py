"""How ranks exchange results, and the check whether they have equal settings and reach each other by a collective.

Results travel through the key-value store of the process group: a collective blocks if one rank is missing, and cannot
tell which one. The store shows which ranks have answered.
"""

import importlib.metadata
import json
import time
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any

import pytorch_lightning as pl
import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, _get_default_store

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

_PREFIX = "nestmodel preflight"
_MIN_WAIT_S = 0.05
_FINISH_TIMEOUT_S = 30.0


class StoreExchange:
    """Gathers one value per rank. Rank 0 collects the values of all ranks and publishes the list.

    Args:
        rank: Rank of this process.
        world_size: Number of ranks. With one rank, torch.distributed is not used.
        timeout_s: How long rank 0 waits for the other ranks after its own value is ready, in seconds.
    """

    def __init__(self, rank: int, world_size: int, timeout_s: float) -> None:
        self._rank = rank
        self._world_size = world_size
        self._timeout_s = timeout_s
        self._store = PrefixStore(_PREFIX, _get_default_store()) if world_size > 1 else None

    def all_gather(self, topic: str, value: Any) -> list[Any]:
        """Returns the values of all ranks, in order; None for a rank that is late. The list is equal on all ranks.

        Args:
            topic: A name that was not used before.
            value: Any value that JSON can represent, except None.

        Raises:
            TrainingError: Rank 0 did not publish the list in time.
        """
        if self._store is None:
            return [value]
        self._set(f"{topic}/{self._rank}", value)
        if self._rank == 0:
            deadline = time.monotonic() + self._timeout_s
            values = [self._wait_for(f"{topic}/{rank}", deadline) for rank in range(self._world_size)]
            self._set(f"{topic}/all", values)
            return values
        # Rank 0 may be as late as any other rank, and waits for the others after that.
        deadline = time.monotonic() + 2 * self._timeout_s + _FINISH_TIMEOUT_S
        gathered: list[Any] | None = self._wait_for(f"{topic}/all", deadline)
        if gathered is None:
            raise TrainingError(
                f"rank {self._rank}: rank 0 did not answer for {topic!r} within {2 * self._timeout_s:g} s, or has "
                "ended. Look at its output, and at its machine."
            )
        return gathered

    def finish(self) -> None:
        """Waits until all ranks have finished. Rank 0, whose process may host the store, returns last."""
        if self._store is None:
            return
        deadline = time.monotonic() + _FINISH_TIMEOUT_S
        if self._rank == 0:
            self._set("end", True)
            for rank in range(1, self._world_size):
                self._wait_for(f"left/{rank}", deadline)
        else:
            self._wait_for("end", deadline)
            self._set(f"left/{self._rank}", True)

    def _set(self, key: str, value: Any) -> None:
        assert self._store is not None
        with suppress(RuntimeError):  # the store is gone; the next wait for an answer reports that
            self._store.set(key, json.dumps(value))

    def _wait_for(self, key: str, deadline: float) -> Any:
        """Returns the value of a key; None if it is not set before the deadline or the store is gone."""
        assert self._store is not None
        try:
            self._store.wait([key], timedelta(seconds=max(deadline - time.monotonic(), _MIN_WAIT_S)))
            return json.loads(self._store.get(key))
        except RuntimeError:
            return None


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
