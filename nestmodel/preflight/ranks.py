"""The check of ranks: whether their settings are equal, and whether they reach each other by a collective."""

import importlib.metadata
import time
from collections import Counter
from collections.abc import Sequence

import pytorch_lightning as pl
import torch
import torch.distributed as dist

from nestdata import last_error_line
from nestmodel.errors import TrainingError
from nestmodel.preflight.report import CheckResult
from nestmodel.source_digest import source_digest
from nestmodel.training.data import NestDataModule
from nestmodel.training.module import NestModel
from nestmodel.training.saving.resume import ABSENT, Settings, changed_settings, flatten_settings
from nestmodel.training.starting.determinism import determinism

ERROR = "error"
"""The only key of the settings of a rank that failed to collect its settings; the value is the error."""

_NUM_SUMMED = 1_000_000
"""Size of the tensor: large enough that its packets are as long as those of gradients."""

_POLL_S = 0.001

_PACKAGES = ("nestdata", "nestguard", "nestmodel")
_MAX_SHOWN = 5


def rank_settings(model: NestModel, data: NestDataModule, trainer: pl.Trainer) -> Settings:
    """Returns the settings that must be equal on all ranks: code, versions, data, model and trainer."""
    val = data.val_dataset
    return {
        **{f"code of {package}": source_digest(package) for package in _PACKAGES},
        "version of torch": torch.__version__,
        "version of pytorch-lightning": importlib.metadata.version("pytorch-lightning"),
        "version of lhotse": importlib.metadata.version("lhotse"),
        **flatten_settings(model.config, "model.config"),
        **data.settings,
        "data.val_corpus": repr(val.plan.fingerprint if val else None),
        **{f"trainer.{name}": repr(getattr(trainer, name)) for name in ("precision", "gradient_clip_val", "max_steps")},
        "trainer.val_check_interval": repr(trainer.val_check_interval),
        "trainer.deterministic": repr(determinism()),
        "model.kernels": repr(model.kernels),
    }


def rank_settings_or_error(model: NestModel, data: NestDataModule, trainer: pl.Trainer) -> Settings:
    """Returns `rank_settings`, or the error under the key `ERROR` if they cannot be collected."""
    try:
        return rank_settings(model, data, trainer)
    except Exception as error:
        return {ERROR: last_error_line(error)}


def check_ranks(
    settings_of_ranks: Sequence[Settings], rank: int, device: torch.device, timeout_s: float
) -> CheckResult:
    """Compares the settings of a rank with those of the others, and sums a tensor over all ranks.

    All ranks must call it together. A rank fails if it differs from the most frequent values. If two values are equally
    frequent, the value of the lowest rank counts.

    Args:
        settings_of_ranks: The result of `rank_settings_or_error` on each rank.
        rank: This rank.
        device: Its device.
        timeout_s: How long it waits for the sum, in seconds.

    Raises:
        TrainingError: The sum was not complete in time.
    """
    _sum_over_ranks(device, timeout_s)
    expected = _most_frequent([settings for settings in settings_of_ranks if ERROR not in settings])
    return _compare_rank(settings_of_ranks[rank], expected)


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


def _most_frequent(settings_of_ranks: Sequence[Settings]) -> Settings:
    """Returns the most frequent value of each setting; a setting that most ranks lack is left out."""
    names = dict.fromkeys(name for settings in settings_of_ranks for name in settings)
    values = {
        name: Counter(settings.get(name) for settings in settings_of_ranks).most_common(1)[0][0] for name in names
    }
    return {name: value for name, value in values.items() if value is not None}


def _compare_rank(settings: Settings, expected: Settings) -> CheckResult:
    if ERROR in settings:
        return CheckResult(status="failed", value="not known", advice=settings[ERROR])
    changes = changed_settings(expected, settings)
    if not changes:
        plan = settings.get("data.plan.fingerprint", ABSENT).strip("'")[:12]
        return CheckResult(status="ok", value=f"{len(settings)} settings, plan {plan}")
    differences = [f"{name}: {here} here, {elsewhere} elsewhere" for name, elsewhere, here in changes[:_MAX_SHOWN]]
    if len(changes) > _MAX_SHOWN:
        differences.append(f"and {len(changes) - _MAX_SHOWN} more")
    advice = f"{'; '.join(differences)}. Give every rank the same flags, files and installed packages."
    return CheckResult(status="failed", value=f"{len(changes)} differ", advice=advice)
