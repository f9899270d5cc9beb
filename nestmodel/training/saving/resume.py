"""The settings of a run, and the checks before it is resumed from a checkpoint.

A checkpoint stores the settings that decide what is learned: data, model, precision, gradient clipping, and whether
steps are deterministic. A run may be resumed only with equal settings. The numbers of ranks and loader processes are
not included and may change, and so may mixture stages that start at a later step, and the number of steps unless the
schedule ends with the run.
"""

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, is_dataclass
from inspect import signature
from pathlib import Path
from typing import Any, NamedTuple, cast

import pytorch_lightning as pl
import torch

from nestmodel.config import BackendName, NestConfig
from nestmodel.errors import ConfigError, WeightsError
from nestmodel.formats.hub import is_on_hub
from nestmodel.formats.model_file import open_model_file
from nestmodel.formats.safetensors import SETTINGS_KEY
from nestmodel.run_config import LAST
from nestmodel.training.saving.checkpoint_files import (
    check_checkpoint,
    checkpoint_folders,
    list_checkpoints,
    newest_checkpoint,
)
from nestmodel.training.starting.deterministic import determinism
from nestmodel.training.starting.ranks import is_first_rank

Settings = dict[str, str]
"""Values by dotted name, both as text, so that a checkpoint can be read without this package."""

ABSENT = "(absent)"
STAGE_PREFIX = "data.plan.stages."
"""Start of the name of the settings of a mixture stage; the end is its first step."""

_MIXTURE = ("data.plan.weights", "data.plan.temperature", "data.plan.language_temperature")
_MAX_CHANGES_SHOWN = 8
_MAX_DIGITS = 18


def find_resumed(given: str, root: Path, *, must_exist: bool, directory: Path | None = None) -> Path | None:
    """Returns the checkpoint that `--ckpt-path` names, after a check that a run can be resumed from it.

    Args:
        given: A path; or `LAST` for the newest checkpoint below `root`.
        root: Output folder of the run.
        must_exist: Whether there has to be a newest one. Otherwise there is none before the first one, so that the same
            command starts and resumes a run.
        directory: `checkpoints.directory`, which holds the checkpoints instead.

    Raises:
        ConfigError: There is no checkpoint, or none that a run can be resumed from.
        WeightsError: All checkpoints are damaged.
    """
    if is_on_hub(given):
        raise ConfigError(
            f"--ckpt-path {given}: a run resumes from a file. Start a new run with weights of the hub by --init-from."
        )
    path = newest_checkpoint(root, directory) if given == LAST else Path(given)
    others = [other for folder in checkpoint_folders(root, directory) for other in folder.glob("*.ckpt")]
    if path is None and others:
        raise ConfigError(
            f"there is no checkpoint of a run in {directory or root}, but {others[0]} is there. To go on from that "
            "file, give it by --ckpt-path."
        )
    if path is None:
        if not must_exist:
            if is_first_rank():
                print(f"no checkpoint in {directory or root}: starting at step 0", file=sys.stderr)  # noqa: T201
            return None
        setting = "checkpoints.directory" if directory else "--output"
        raise ConfigError(
            f"there is no checkpoint in {directory or root}. Check {setting}, or give a file by --ckpt-path; a new run "
            "needs neither --resume nor --ckpt-path."
        )
    try:
        check_checkpoint(path)
    except WeightsError as error:
        raise ConfigError(f"--ckpt-path {error}") from error
    return path


class StoredRun(NamedTuple):
    """What a checkpoint says about its run."""

    step: int
    """Optimizer steps that it has made."""

    settings: Settings | None
    """None for the checkpoint of a network that was saved without a run."""


def read_run(path: Path) -> StoredRun:
    """Returns what a checkpoint says about its run.

    Raises:
        WeightsError: The file cannot be read, or its step or settings are damaged.
    """
    with open_model_file(path) as file:
        step, settings = file.entry("global_step"), file.entry(SETTINGS_KEY)
    is_text = settings is None or (
        isinstance(settings, dict) and all(isinstance(text, str) for item in settings.items() for text in item)
    )
    if not isinstance(step, int) or step < 0 or not is_text:
        raise WeightsError(f"{path}: its global_step or {SETTINGS_KEY} is damaged. Use another checkpoint.")
    return StoredRun(step, settings)


def flatten_settings(value: object, name: str) -> Settings:
    """Returns every field of nested dataclasses and mappings by its dotted name, with its `repr` as the value.

    Args:
        value: A dataclass, a mapping, or a single value. Lists and tuples count as single values.
        name: Prefix of all names.
    """
    if is_dataclass(value) and not isinstance(value, type):
        value = asdict(value)
    if isinstance(value, Mapping):
        return {k: v for key, inner in value.items() for k, v in flatten_settings(inner, f"{name}.{key}").items()}
    return {name: repr(value)}


def run_settings(
    config: NestConfig, backend: BackendName, trainer: pl.Trainer, data: pl.LightningDataModule | None = None
) -> Settings:
    """Returns the settings of a run that a checkpoint stores: model, data, gradient clipping and precision.

    `model.backend` is one of them in deterministic mode only: where a compiler fails, a run may go on without it.

    Args:
        config: Configuration of the model.
        backend: `model.backend`.
        trainer: The run's trainer. Data settings are included if its data module has them.
        data: The data module; by default that of the trainer, which has it only once it runs.
    """
    data = data or getattr(trainer, "datamodule", None)
    return {
        **flatten_settings(config, "model.config"),
        **({"trainer.max_steps": repr(trainer.max_steps)} if config.optimizer.ends_with_run else {}),
        **getattr(data, "settings", {}),
        **({"model.backend": repr(backend)} if determinism() else {}),
        **{name: value for callback in cast(Any, trainer).callbacks for name, value in _restored_settings(callback)},
        "trainer.deterministic": repr(determinism()),
        "trainer.gradient_clip_algorithm": repr(trainer.gradient_clip_algorithm),
        "trainer.gradient_clip_val": repr(trainer.gradient_clip_val),
        "trainer.precision": repr(trainer.precision),
    }


def _restored_settings(callback: pl.Callback) -> Iterator[tuple[str, str]]:
    """Yields the arguments of a callback that Lightning restores from a checkpoint, such as a patience.

    A changed argument would have no effect without a word.
    """
    names = signature(type(callback)).parameters.keys() - {"dirpath"}  # known only once the run has begun
    for name, value in sorted(callback.state_dict().items()):
        if name in names:
            yield f"callback.{type(callback).__name__}.{name}", repr(value)


def changed_settings(before: Settings, now: Settings) -> list[tuple[str, str, str]]:
    """Returns the settings whose values differ, as (name, value before, value now), in the order of the names.

    A setting that exists on one side only has the value "(absent)" on the other.
    """
    names = dict.fromkeys([*before, *now])
    changes = [(name, before.get(name, ABSENT), now.get(name, ABSENT)) for name in names]
    return [change for change in changes if change[1] != change[2]]


def check_unchanged(
    before: Settings, now: Settings, *, step: int, path: Path | None = None, folders: Sequence[Path] = ()
) -> None:
    """Checks that a run has the settings of the checkpoint that it is resumed from.

    Mixture stages may change if they start at the step of the checkpoint or later.

    Args:
        before: Settings in the checkpoint.
        now: Settings of the run.
        step: Optimizer steps that the run of the checkpoint has made.
        path: The checkpoint.
        folders: Folders with other checkpoints of the run.

    Raises:
        ConfigError: Some settings differ; the message names them with both values, and the newest checkpoint in
            `folders` that has the settings of the run.
    """
    changed = [change for change in changed_settings(before, now) if not _is_later_stage(*change, step=step)]
    if not changed:
        return
    changes = [f"{name}: {old} -> {new}" for name, old, new in changed[:_MAX_CHANGES_SHOWN]]
    if len(changed) > _MAX_CHANGES_SHOWN:
        changes.append(f"and {len(changed) - _MAX_CHANGES_SHOWN} more")
    advice = ""
    if any(name in _MIXTURE for name, _, _ in changed):
        advice = f" To change the mixture from step {step} on, keep these, and add a stage to data.plan.stages."
    if (other := _with_settings(now, folders)) is not None:
        advice += f" The run of {other} had the settings of this one: to go on from there, add --ckpt-path {other}"
    raise ConfigError(
        f"{path or 'the checkpoint'} was written by a run with other data or settings ({'; '.join(changes)}). Use the "
        f"data and settings of the checkpoint, or start a new run from its weights with --init-from.{advice}"
    )


def _with_settings(settings: Settings, folders: Sequence[Path]) -> Path | None:
    """Returns the newest checkpoint in some folders whose run had given settings. Only the first rank looks for it."""
    for path in (path for folder in folders if is_first_rank() for path in list_checkpoints(folder)[:1]):
        with suppress(WeightsError):
            if read_run(path).settings == settings:
                return path
    return None


def _is_later_stage(name: str, old: str, new: str, *, step: int) -> bool:
    """Returns whether a changed setting is that of a mixture stage that has not begun.

    Raises:
        ConfigError: The stage has begun before the step of the checkpoint.
    """
    from_step = name.removeprefix(STAGE_PREFIX)
    # Names in a checkpoint may be anything; Python converts no text of thousands of digits.
    if from_step == name or not from_step.isdecimal() or len(from_step) > _MAX_DIGITS:
        return False
    if int(from_step) >= step:
        return True
    raise ConfigError(
        f"data.plan.stages: the mixture from step {from_step} on has changed (repeats per epoch: {old} -> {new}), but "
        f"the checkpoint has made {step} steps. Keep the stages that start before step {step} as they were; others may "
        "be changed and added."
    )


def check_same_step(step: int, rank: int, device: torch.device) -> None:
    """Checks that all ranks start at the same optimizer step. This is a collective operation.

    Each rank finds its checkpoint by itself, so that ranks without a shared disk could find different ones.

    Args:
        step: Optimizer steps that this rank has made.
        rank: Global rank, for the message.
        device: Device of the all-reduce.

    Raises:
        ConfigError: The steps differ; raised on all ranks.
    """
    ends = torch.tensor([step, -step], device=device)
    torch.distributed.all_reduce(ends, torch.distributed.ReduceOp.MAX)
    last, first = int(ends[0]), -int(ends[1])
    if first != last:
        raise ConfigError(
            f"rank {rank} would resume at step {step}, but the steps of the ranks are {first} to {last}: they found "
            "different checkpoints. Give all ranks the same --ckpt-path, on a disk that all nodes share."
        )
