"""All checks of a run before its ranks start, so that a mistake is one error and not one of every rank.

An error that one rank raises leaves the others waiting: the stall guard would end them with its own exit code, which
asks a scheduler to start the run again. No check is a collective, or reads audio or weights.
"""

from pathlib import Path
from typing import Any, cast

import pytorch_lightning as pl
from pytorch_lightning.utilities import rank_zero_warn

from nestdata.output import check_writable
from nestmodel.attention_context import format_context
from nestmodel.class_config import ClassConfig
from nestmodel.config import NestConfig
from nestmodel.errors import ConfigError
from nestmodel.training.data import NestDataModule
from nestmodel.training.module import NestModel, check_sampling_rate
from nestmodel.training.resume_checks import run_settings
from nestmodel.training.saving.checkpoint_files import checkpoint_folders
from nestmodel.training.saving.checkpoints import savers_of
from nestmodel.training.saving.resume import check_resumes
from nestmodel.training.saving.run_folders import check_checkpoint_folder
from nestmodel.training.schedule import check_schedule
from nestmodel.training.step_limits import num_steps_of_run, validates_at_multiples

MAX_LOOK_AHEAD_S = 3.0
"""Largest look-ahead, in seconds, that training allows with causal convolutions and regular contexts."""


def check_run(
    model: NestModel,
    data: NestDataModule,
    trainer: pl.Trainer,
    *,
    stage: str,
    ckpt_path: Path | None = None,
) -> None:
    """Makes every check of a run's settings. Call it before the ranks connect to each other.

    Args:
        model: Model of the run.
        data: Data of the run.
        trainer: Trainer of the run.
        stage: `fit` or `validate`.
        ckpt_path: Checkpoint that the run resumes from.

    Raises:
        ConfigError: Settings contradict each other or the settings of the checkpoint.
        WeightsError: The checkpoint cannot be read.
    """
    check_sampling_rate(model.config, data.sampling_rate)
    if stage == "validate":
        if data.val_dataset is None:
            raise ConfigError("there is no validation corpus: give data.val_corpus.")
        return
    check_schedule(model.config.optimizer, trainer.max_steps)
    check_look_ahead(model.config)
    plan = data.plan
    num_steps = num_steps_of_run(trainer, plan.steps_per_epoch)
    for from_step in plan.stage_repeats:
        if num_steps is not None and from_step >= num_steps:
            rank_zero_warn(
                f"data.plan.stages: the stage from step {from_step} on has no effect, because the run ends after "
                f"{num_steps} steps."
            )
    check_best(trainer, steps_per_epoch=plan.steps_per_epoch, validates=data.val_dataset is not None)
    savers = savers_of(trainer)
    directory = savers[0].config.directory if savers else None
    check_checkpoint_folder(directory, ckpt_path)
    if ckpt_path is not None:
        folders = checkpoint_folders(Path(trainer.default_root_dir), directory)
        check_resumes(ckpt_path, run_settings(model.config, model.backend_name, trainer, data.settings), folders)


def check_outputs(trainer: pl.Trainer) -> None:
    """Checks that files can be created in every folder of the run, and creates the folders.

    Only rank 0 writes there, but a rank that did not check would wait for one that failed.

    Raises:
        OutputError: A file or folder cannot be created.
    """
    if cast(Any, trainer).fast_dev_run:
        return
    folders = [trainer.default_root_dir, *(logger.save_dir for logger in trainer.loggers)]
    for folder in dict.fromkeys([*folders, *(saver.config.directory for saver in savers_of(trainer))]):
        if folder is not None and "://" not in str(folder):
            check_writable(Path(folder))


def check_look_ahead(config: NestConfig) -> None:
    """Raises ConfigError if the look-ahead of an encoder with causal convolutions adds up to seconds over blocks."""
    if isinstance(config.encoder, ClassConfig):
        return
    encoder = config.encoder
    is_causal = encoder.causal_downsampling or encoder.conv_context[1] == 0
    if not is_causal or encoder.att_context_style != "regular":
        return
    for left, right in encoder.att_context_size:
        seconds = config.look_ahead_s((left, right))
        if right > 0 and seconds is not None and seconds > MAX_LOOK_AHEAD_S:
            raise ConfigError(
                f"model.config.encoder.att_context_size {format_context((left, right))}, att_context_style regular: "
                f"{right} frames to the right add up over {encoder.num_layers} blocks to a look-ahead of {seconds:.1f} "
                "s. Set att_context_style to chunked_limited, with which they do not, or the right side to 0."
            )


def check_best(trainer: pl.Trainer, *, steps_per_epoch: int, validates: bool) -> None:
    """Checks that there will be validations after steps that have checkpoints, if the best checkpoint is kept.

    Args:
        trainer: Trainer of the run.
        steps_per_epoch: Steps of an epoch of the plan.
        validates: Whether there is a validation corpus.

    Raises:
        ConfigError: There is no validation, or some validations come after steps without a checkpoint.
    """
    for saver in savers_of(trainer):
        if saver.config.monitor is None:
            continue
        if not validates or trainer.limit_val_batches == 0:
            raise ConfigError(
                "checkpoints.monitor is val_loss, but there is no validation: give data.val_corpus, leave "
                "limit_val_batches as it is, or leave the monitor out."
            )
        if not validates_at_multiples(trainer, steps_per_epoch, saver.config.every_n_steps):
            raise ConfigError(
                "checkpoints.monitor is val_loss, but some validations come after steps without a checkpoint: set "
                f"trainer.val_check_interval to a multiple of checkpoints.every_n_steps ({saver.config.every_n_steps})."
            )
