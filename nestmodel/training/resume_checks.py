"""The settings of a run that decide what is learned, and the checks of a run that resumes from a checkpoint.

A checkpoint stores these settings: data, model, precision, gradient clipping, and whether steps are deterministic. A
run may be resumed only with equal settings. The numbers of ranks and loader processes are not included and may change,
and so may mixture stages that start at a later step, and the number of steps unless the schedule ends with the run.
"""

from collections.abc import Iterator, Mapping
from dataclasses import asdict, is_dataclass
from inspect import signature
from pathlib import Path
from typing import Any, cast

import pytorch_lightning as pl
import torch

from nestmodel.config import BackendName, NestConfig
from nestmodel.errors import ConfigError
from nestmodel.training.launcher import determinism

Settings = dict[str, str]
"""Values by dotted name, both as text, so that a checkpoint can be read without this package."""

ABSENT = "(absent)"
STAGE_PREFIX = "data.plan.stages."
"""Start of the name of the settings of a mixture stage; the end is its first step."""

_MIXTURE = ("data.plan.weights", "data.plan.temperature", "data.plan.language_temperature")
_MAX_CHANGES_SHOWN = 8
_MAX_DIGITS = 18


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


def run_settings(config: NestConfig, backend: BackendName, trainer: pl.Trainer, data: Settings) -> Settings:
    """Returns the settings of a run that a checkpoint stores: model, data, gradient clipping and precision.

    `model.backend` is one of them in deterministic mode only: where a compiler fails, a run may go on without it.

    Args:
        config: Configuration of the model.
        backend: `model.backend`.
        trainer: The run's trainer.
        data: Settings of its data module.
    """
    return {
        **flatten_settings(config, "model.config"),
        **({"trainer.max_steps": repr(trainer.max_steps)} if config.optimizer.ends_with_run else {}),
        **data,
        **({"model.backend": repr(backend)} if determinism() else {}),
        **{name: value for callback in cast(Any, trainer).callbacks for name, value in _restored_settings(callback)},
        "trainer.deterministic": repr(determinism()),
        "trainer.gradient_clip_algorithm": repr(trainer.gradient_clip_algorithm),
        "trainer.gradient_clip_val": repr(trainer.gradient_clip_val),
        "trainer.precision": repr(trainer.precision),
    }


def _restored_settings(callback: pl.Callback) -> Iterator[tuple[str, str]]:
    """Yields the arguments of a callback that Lightning restores from a checkpoint, such as a patience.

    A changed argument would silently have no effect.
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


def check_unchanged(before: Settings, now: Settings, *, step: int, path: Path | None = None) -> None:
    """Checks that a run has the settings of the checkpoint that it is resumed from.

    Mixture stages may change if they start at the step of the checkpoint or later.

    Args:
        before: Settings in the checkpoint.
        now: Settings of the run.
        step: Optimizer steps that the run of the checkpoint has made.
        path: The checkpoint, for the message.

    Raises:
        ConfigError: Some settings differ; the message names them with both values.
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
    raise ConfigError(
        f"{path or 'the checkpoint'} was written by a run with other data or settings ({'; '.join(changes)}). Use the "
        f"data and settings of the checkpoint, or start a new run from its weights with --init-from.{advice}"
    )


def _is_later_stage(name: str, old: str, new: str, *, step: int) -> bool:
    """Returns whether a changed setting belongs to a mixture stage that has not begun.

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
