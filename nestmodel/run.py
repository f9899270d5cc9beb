"""A run from its settings to its end: `fit` and `validate`, which the command line and a notebook call alike."""

import inspect
import logging
import os
import subprocess
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
import yaml
from pytorch_lightning.callbacks import EarlyStopping

from nestdata import redacted
from nestdata.class_path import build_object, class_at
from nestdata.config_checks import nearest_name_hint, require, require_instance
from nestdata.output import replace_file
from nestmodel.class_config import ClassConfig
from nestmodel.config_files import build, read_yaml
from nestmodel.errors import ConfigError
from nestmodel.nn.encoder_base import Encoder
from nestmodel.run_config import LAST, RunConfig, parse_duration
from nestmodel.training.callbacks.curves import Curves
from nestmodel.training.callbacks.live_panel import renderer
from nestmodel.training.callbacks.preemption import PreemptionHandler
from nestmodel.training.callbacks.progress import Progress
from nestmodel.training.callbacks.stall_guard import StallGuard
from nestmodel.training.callbacks.throughput import Throughput
from nestmodel.training.data import NestDataModule
from nestmodel.training.launcher import AgreedExit, check_main_address, prepare_deterministic
from nestmodel.training.lightning_private import attach_model, finds_launcher, forks_ranks, launched_processes
from nestmodel.training.metrics_file import MetricsFile
from nestmodel.training.module import NestModel, check_precision
from nestmodel.training.ranks import Launch, check_start, find_launch, take_ranks
from nestmodel.training.saving.checkpoints import Checkpoints
from nestmodel.training.saving.compiled_code import CompiledCode
from nestmodel.training.saving.resume import find_resumed, read_run
from nestmodel.training.saving.run_folders import only_start
from nestmodel.training.starting.run_checks import check_outputs, check_run
from nestmodel.training.starting.run_summary import (
    Run,
    left_out_rows,
    print_nothing_to_train,
    print_results,
    print_rows,
    print_summary,
)
from nestmodel.training.step_limits import steps_to_microbatches
from nestmodel.training.trackers import open_trackers, tracker_names

_END_S = 10.0
"""Seconds that the other ranks have to end after an error of this one."""


_NOT_SHOWN = (
    # Lightning causes this one; users cannot avoid it.
    ".*LeafSpec.*is deprecated",
    "Be aware that when using .*ckpt_path",
    # SLURM is installed, and this run is outside it; `check_start` finds a job whose tasks do not fit.
    "The `srun` command is available on your system but is not used",
    # The interval counts steps of the run; Lightning compares it with the steps of an epoch.
    "The number of training batches .* is smaller than the logging interval",
    # metrics.csv needs no other logger.
    ".*tensorboard.*has been removed as a dependency",
)


def fit(config: RunConfig, callbacks: Sequence[pl.Callback] = (), *, encoder: Encoder | None = None) -> pl.Trainer:
    """Trains a model.

    Args:
        config: All settings, such as `RunConfig.read(["demo"])` with other values by `dataclasses.replace`.
        callbacks: Further callbacks of Lightning, in addition to `trainer.callbacks`. `config.yaml` does not hold them:
            give them again to resume.
        encoder: An encoder of another author, with its weights, in place of the one that `config` describes.

    Returns:
        Lightning's trainer, after training: `lightning_module` is the model, `callback_metrics` the last metrics. If
        the checkpoint has made all steps, the model has its weights, and there are no metrics.

    Raises:
        ConfigError: Settings contradict each other, the corpus or the checkpoint.
        NestError: Data cannot be read, or training cannot go on.
        SystemExit: A signal or a full disk has ended the run, with its exit code.
    """
    require_instance("config", config, RunConfig)
    require(isinstance(callbacks, list | tuple), "callbacks", callbacks, "a list of objects")
    for number, callback in enumerate(callbacks):
        require_instance(f"callbacks[{number}]", callback, pl.Callback)
    with ExitStack() as stack:
        stack.enter_context(only_start(config.checkpoints.directory))
        run = build_run(config, "fit", callbacks, encoder)
        if run.ckpt_path is not None and run.first_step >= run.config.trainer.max_steps > 0:
            if run.trainer.is_global_zero:
                print_nothing_to_train(run)
            run.model.load_all(run.ckpt_path)
            attach_model(run.trainer, run.model)
            return run.trainer
        check_outputs(run.trainer)
        started_s = time.monotonic()
        _start_logging(run)
        if not run.config.quiet:
            print_summary(run)
        stack.enter_context(_ends_its_ranks(run.trainer))
        _guard(run.trainer).start(run.trainer)  # before the ranks connect to each other
        run.trainer.fit(run.model, run.data, ckpt_path=run.ckpt_path, weights_only=True)
    if not run.config.quiet:
        print_results(run.trainer, time.monotonic() - started_s)
    return run.trainer


def validate(config: RunConfig, *, encoder: Encoder | None = None) -> pl.Trainer:
    """Evaluates a checkpoint, or the weights of `model.init_from`, on the validation corpus.

    Args:
        config: Settings of the run, with `data.val_corpus` and `ckpt_path`.
        encoder: An object like the one that the model was trained with, if that was given as an object.

    Returns:
        Lightning's trainer, whose `callback_metrics` are the result.

    Raises:
        ConfigError: There is nothing to evaluate, or settings contradict each other.
        NestError: Data cannot be read, or the output cannot be written.
    """
    require_instance("config", config, RunConfig)
    if config.ckpt_path is None and not config.resume and config.model.init_from is None:
        raise ConfigError(
            "no checkpoint to evaluate: give --ckpt-path FILE, or --ckpt-path last and the run's folder by -o DIR."
        )
    run = build_run(config, "validate", encoder=encoder)
    check_outputs(run.trainer)
    print_rows(run, left_out_rows(run.data))
    with _ends_its_ranks(run.trainer):
        run.trainer.validate(run.model, run.data, ckpt_path=run.ckpt_path, verbose=False, weights_only=True)
    return run.trainer


def build_run(
    config: RunConfig, stage: str, callbacks: Sequence[pl.Callback] = (), encoder: Encoder | None = None
) -> Run:
    """Builds model, data and trainer, and makes every check of the settings before the ranks connect to each other.

    Args:
        config: All settings.
        stage: `fit` or `validate`.
        callbacks: Callbacks of Lightning, in addition to the callbacks of the settings.
        encoder: As for `fit`.

    Raises:
        ConfigError: Settings contradict each other, the corpus or the checkpoint.
    """
    _silence_libraries()
    check_precision(config.trainer.precision)
    launch = find_launch(os.environ)
    _check_hardware(config, launch)
    if stage == "fit":
        tracker_names(config.log)  # before anything is read: a package may be missing
    found = None
    if config.resume or config.ckpt_path is not None:
        given, directory = config.ckpt_path or LAST, config.checkpoints.directory
        must_exist = config.resume or stage == "validate"
        found = find_resumed(given, config.output, must_exist=must_exist, directory=directory)
    pl.seed_everything(config.seed, workers=True, verbose=False)
    data = NestDataModule(config.data)
    settings = config.model
    model = NestModel(settings.config, settings.init_from, settings.init_parts, settings.backend, encoder)
    if encoder is not None:
        config = replace(config, model=replace(settings, config=model.config))  # which describes the encoder
    first_step = 0 if found is None or stage == "validate" else read_run(found).step
    trainer = _build_trainer(config, stage, callbacks, launch)
    if finds_launcher(trainer):
        check_start(launch, os.environ, trainer.num_devices, trainer.num_nodes)
    steps_to_microbatches(trainer, data.microbatches_per_rank(trainer))
    data.configure(trainer, stage)
    data.use_fork_server()
    check_main_address(trainer)
    _guard(trainer).check_timeout(trainer)
    check_run(model, data, trainer, stage=stage, ckpt_path=found)
    return Run(config, model, data, trainer, found, first_step)


def _silence_libraries() -> None:
    """Filters Lightning's warnings that a user can do nothing about, and its log records below WARNING.

    Log records of `nestmodel`, which uses the same loggers, are shown.
    """
    for message in _NOT_SHOWN:
        warnings.filterwarnings("ignore", message=message)
    for name in ("pytorch_lightning", "lightning_fabric"):
        for handler in logging.getLogger(name).handlers:
            if _is_shown not in handler.filters:
                handler.addFilter(_is_shown)


def _is_shown(record: logging.LogRecord) -> bool:
    return record.levelno >= logging.WARNING or Path(record.pathname).is_relative_to(Path(__file__).parent)


def _build_trainer(
    config: RunConfig, stage: str, callbacks: Sequence[pl.Callback], launch: Launch | None
) -> pl.Trainer:
    settings = config.trainer
    if settings.deterministic:
        prepare_deterministic()
    known = inspect.signature(pl.Trainer.__init__).parameters
    for name in settings.lightning:
        if name not in known:
            raise ConfigError(
                f"trainer.lightning.{name} is not an argument of Trainer{nearest_name_hint(name, known)}."
            )
    devices, num_nodes = settings.devices, settings.num_nodes
    if launch is not None:
        devices, num_nodes = take_ranks(launch, devices, num_nodes)
    interval = settings.val_check_interval
    arguments = {
        "accelerator": settings.accelerator,
        "devices": devices,
        "num_nodes": num_nodes,
        "strategy": _build(settings.strategy),
        "precision": settings.precision,
        "deterministic": settings.deterministic,
        "max_steps": settings.max_steps,
        "max_epochs": -1,
        "gradient_clip_val": settings.gradient_clip_val,
        "log_every_n_steps": settings.log_every_n_steps,
        "val_check_interval": interval,
        # A number of steps counts across epochs.
        "check_val_every_n_epoch": None if isinstance(interval, int) else 1,
        "num_sanity_val_steps": 0,
        "default_root_dir": config.output,
        "logger": MetricsFile(config.output),
        "callbacks": [*map(_build, settings.callbacks), *callbacks, *_own_callbacks(config, stage)],
        "enable_model_summary": False,
        "enable_progress_bar": False,
        "use_distributed_sampler": False,
    }
    try:
        trainer = pl.Trainer(**{**arguments, **_built(settings.lightning)})
    except (TypeError, ValueError) as error:
        raise ConfigError(f"Lightning refuses these settings of trainer: {' '.join(str(error).split())}") from error
    if forks_ranks(trainer):  # the stall guard and CUDA need processes that are started anew
        raise ConfigError(
            f"trainer.devices {settings.devices}: an interactive session, such as a notebook, cannot start several "
            "ranks. Set trainer.devices to 1, or train by the command `nestmodel fit` in a terminal."
        )
    return trainer


def _own_callbacks(config: RunConfig, stage: str) -> list[pl.Callback]:
    max_time, early_stop = config.trainer.max_time, config.trainer.early_stop
    if early_stop and config.data.val_corpus is None:
        raise ConfigError("trainer.early_stop needs validations: give --val-corpus, or leave it out.")
    limit_s = None if max_time is None else parse_duration("trainer.max_time", max_time)
    own: list[pl.Callback] = [StallGuard(config.guard), Throughput(), Curves()]
    if not config.quiet:
        own.append(Progress(renderer()))
    own.append(PreemptionHandler(limit_s))  # after the progress, so that what it says at the end is below the panel
    if stage != "fit":
        return own
    if early_stop:
        # A validation without scored tokens has no loss: it counts as one that is not better.
        own.append(EarlyStopping("val_loss", patience=early_stop, check_on_train_epoch_end=False, check_finite=False))
    return [*own, ConfigFile(config), Checkpoints(config.checkpoints), CompiledCode(config.output / "compiled")]


def _built(value: Any) -> Any:
    """Returns plain values in which each mapping with a `class_path` is the object that it names."""
    if isinstance(value, Mapping):
        if "class_path" in value:
            return _build(build(ClassConfig, value, "trainer"))
        return {key: _built(item) for key, item in value.items()}
    return [_built(item) for item in value] if isinstance(value, list) else value


def _build(given: str | ClassConfig) -> Any:
    """Returns an object of a class that the settings name; a name alone is left to Lightning."""
    if isinstance(given, str):
        return given
    parameters = inspect.signature(class_at(given.class_path, "trainer")).parameters
    arguments = {key: _built(value) for key, value in (given.init_args or {}).items()}
    for key, value in arguments.items():  # YAML has no type for them
        if key in parameters and "timedelta" in str(parameters[key].annotation) and value is not None:
            arguments[key] = timedelta(seconds=parse_duration(key, value) if isinstance(value, str) else value)
    return build_object({"class_path": given.class_path, "init_args": arguments}, "trainer")


def _check_hardware(config: RunConfig, launch: Launch | None) -> None:
    """Raises ConfigError for GPUs that are not there, or if several ranks would share a CPU without being told to."""
    accelerator, devices = config.trainer.accelerator, config.trainer.devices
    if torch.cuda.is_available() or accelerator == "cpu":
        return
    if accelerator in ("gpu", "cuda"):
        raise ConfigError(f"--accelerator {accelerator}: torch {torch.__version__} finds no GPU here. Leave it out.")
    if isinstance(devices, int) and devices > 1 and launch is None:
        number = config.data.plan.microbatches_per_step
        share = "" if number % devices == 0 else f" --microbatches-per-step {number + -number % devices}"
        raise ConfigError(
            f"--devices {devices}: torch finds no GPU here. For {devices} ranks on the CPU: --accelerator cpu{share}."
        )


def _start_logging(run: Run) -> None:
    """Makes the folder of this start, before anything is written into it, and opens the trackers; on rank 0."""
    metrics = run.trainer.logger
    if not run.trainer.is_global_zero or not isinstance(metrics, MetricsFile):  # `fast_dev_run` logs nothing
        return
    environment = getattr(run.trainer.strategy, "cluster_environment", None)
    # Ranks that torchrun or SLURM has started would wait for a first rank that failed.
    has_others = environment is not None and environment.creates_processes_externally
    trackers = open_trackers(
        tracker_names(run.config.log),
        metrics.claim(),
        read_yaml(redacted(yaml.safe_dump(run.config.stored()))),
        run.ckpt_path,
        must_open=run.ckpt_path is None and not has_others,
    )
    run.trainer.loggers = [metrics, *trackers]


def _guard(trainer: pl.Trainer) -> StallGuard:
    return next(callback for callback in trainer.callbacks if isinstance(callback, StallGuard))  # type: ignore[attr-defined]


@contextmanager
def _ends_its_ranks(trainer: pl.Trainer) -> Iterator[None]:
    """Ends the ranks that Lightning has started from this process if this one fails: they would wait for it."""
    try:
        yield
    except AgreedExit:
        raise
    except BaseException:
        for process in launched_processes(trainer):
            process.terminate()
        for process in launched_processes(trainer):
            try:
                process.wait(_END_S)
            except subprocess.TimeoutExpired:
                process.kill()
        raise


class ConfigFile(pl.Callback):
    """Writes `config.yaml`, which starts the same run again, into the folder of this start, and into checkpoints.

    Args:
        config: Settings of the run.
    """

    def __init__(self, config: RunConfig) -> None:
        self._stored = config.stored()
        try:
            self._text = yaml.safe_dump(self._stored, sort_keys=False)
        except yaml.YAMLError as error:
            detail = " ".join(str(error).split())
            raise ConfigError(
                f"config.yaml cannot hold these settings ({detail}): name objects by class_path."
            ) from error

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:  # noqa: ARG002
        """Writes the file. Every rank has to call it: the name of the folder is broadcast."""
        if trainer.log_dir is not None and trainer.is_global_zero and isinstance(trainer.logger, MetricsFile):
            replace_file(trainer.logger.claim() / "config.yaml", self._text.encode())

    def on_save_checkpoint(
        self,
        trainer: pl.Trainer,  # noqa: ARG002
        pl_module: pl.LightningModule,  # noqa: ARG002
        checkpoint: dict[str, Any],
    ) -> None:
        """Adds the settings to a checkpoint, without secrets in URLs."""
        checkpoint["nest_run"] = read_yaml(redacted(self._text))
