"""`nestmodel fit`, `validate` and `preflight`: Lightning's command line with our model and data module."""

import os
import sys
import time
import warnings
from pathlib import Path
from typing import Any, cast

from pytorch_lightning import Trainer
from pytorch_lightning.cli import LightningArgumentParser, LightningCLI

from nestmodel import (
    ConfigError,
    Curves,
    Health,
    NestDataModule,
    NestModel,
    PreemptionHandler,
    Progress,
    StallGuard,
    Throughput,
    prepare_deterministic,
)
from nestmodel.training.lightning_private import finds_launcher, launched_processes
from nestmodel.training.saving.resume import LAST, LAST_REQUIRED, find_resumed, stored_step
from nestmodel.training.starting.before_start import check_outputs, check_run
from nestmodel.training.starting.launcher import check_main_address
from nestmodel.training.starting.origin import is_first_rank
from nestmodel.training.starting.ranks import check_start, take_ranks
from nestmodel.training.starting.run_checks import check_precision
from nestmodel.training.starting.run_summary import left_out_rows, summarise_run
from nestmodel.training.starting.startup import watch_ranks

from ..arguments.errors import UsageError
from ..arguments.keys import SEEDS
from ..arguments.parser import Parser, read_field_docstrings
from ..display import print_results, print_summary, progress_callback, silence_lightning
from ..trackers import LOG_HELP, TrackerName, check_trackers, open_loggers, start_trackers
from .preflight import PreflightTrainer

_ONLY_WARNS = (
    "trainer.deterministic is 'warn': the backward pass of attention stays non-deterministic on a GPU. Set it to true "
    "for equal bits."
)


class _Cli(LightningCLI):
    @staticmethod
    def subcommands() -> dict[str, set[str]]:
        return {
            "fit": {"model", "train_dataloaders", "val_dataloaders", "datamodule"},
            "validate": {"model", "dataloaders", "datamodule"},
            "preflight": {"model", "datamodule"},
        }

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        parser.add_lightning_class_args(StallGuard, "guard")
        parser.add_argument("--log", type=list[TrackerName] | TrackerName | None, default=None, help=LOG_HELP)
        parser.add_argument("--quiet", type=bool, default=False, help="Show no summary and no progress.")
        for target in SEEDS:
            parser.link_arguments("seed_everything", target, compute_fn=int)

    def parse_arguments(self, parser: LightningArgumentParser, args: Any) -> None:
        super().parse_arguments(parser, args)
        settings = self.config[self.config.subcommand]
        if settings.log is not None:
            settings.log = [settings.log] if isinstance(settings.log, str) else settings.log
            if settings.trainer.logger not in (None, True):
                raise UsageError("--log and trainer.logger are both given: leave one of them out.")
            check_trackers(settings.log)
        if (
            self.config.subcommand == "validate"
            and settings.get("ckpt_path") is None
            and settings.model.init_from is None
        ):
            raise UsageError(
                "no checkpoint to evaluate: give --ckpt-path FILE, or --ckpt-path last and the run's folder by -o DIR."
            )
        if (given := settings.get("ckpt_path")) is not None:
            root = Path(settings.trainer.default_root_dir or ".")
            found = find_resumed(
                LAST_REQUIRED if self.config.subcommand == "validate" and given == LAST else given, root
            )
            settings.ckpt_path = None if found is None else str(found)
            if found is None and self.config.subcommand == "fit" and is_first_rank():
                print(f"no checkpoint in {root}: starting at step 0", file=sys.stderr)

    def instantiate_classes(self) -> None:
        try:
            super().instantiate_classes()
        except ValueError as error:
            # jsonargparse lists the types that a callback could be, and ours has refused one of its settings.
            if isinstance(error.__cause__, ConfigError):
                raise error.__cause__ from None
            raise

    def instantiate_trainer(self, **kwargs: Any) -> Trainer:
        settings = self.config_init[self.subcommand]["trainer"]
        if settings["deterministic"] is True:
            prepare_deterministic()
        elif settings["deterministic"] == "warn":
            warnings.warn(_ONLY_WARNS, stacklevel=1)
        check_precision(settings["precision"])
        settings["devices"], settings["num_nodes"] = take_ranks(settings["devices"], settings["num_nodes"])
        trainer = super().instantiate_trainer(**kwargs)
        if finds_launcher(trainer):
            check_start(os.environ, trainer.num_devices, trainer.num_nodes)
        cast(NestDataModule, self.datamodule).use_fork_server()
        if self.config[self.subcommand].quiet or settings["enable_progress_bar"]:
            callbacks = cast(Any, trainer).callbacks
            callbacks[:] = [callback for callback in callbacks if not isinstance(callback, Progress)]
        watch_ranks(lambda: launched_processes(trainer))
        check_main_address(trainer)
        if settings["logger"] in (None, True) and not settings["fast_dev_run"]:
            given = self.config[self.subcommand]
            names = given.log if self.subcommand == "fit" else None
            trainer.loggers = open_loggers(names, Path(trainer.default_root_dir), given.get("ckpt_path"))
        return trainer

    def before_fit(self) -> None:
        guard = next(callback for callback in cast(Any, self.trainer).callbacks if isinstance(callback, StallGuard))
        guard.check_timeout(self.trainer)
        self._check("fit")
        path = self.config[self.subcommand].ckpt_path
        self._first_step = 0 if path is None else stored_step(Path(path))
        self._started_s = time.monotonic()
        self._print_summary(guard)
        self._start_trackers()
        guard.start(self.trainer)  # before the ranks connect to each other

    def _start_trackers(self) -> None:
        given = self.config[self.subcommand]
        if self.trainer.is_global_zero:
            is_new = given.log is not None and given.ckpt_path is None
            dataset = cast(NestDataModule, self.datamodule).train_dataset if is_new else None
            environment = getattr(self.trainer.strategy, "cluster_environment", None)
            # Ranks that torchrun or SLURM has started would wait for a first rank that failed.
            has_others = environment is not None and environment.creates_processes_externally
            must_open = given.ckpt_path is None and not has_others
            start_trackers(self.trainer.loggers, given.as_dict(), dataset, must_open=must_open)

    def _print_summary(self, guard: StallGuard) -> None:
        settings = self.config[self.subcommand]
        if settings.quiet or not self.trainer.is_global_zero:
            return
        rows = summarise_run(
            self.trainer,
            cast(NestModel, self.model),
            cast(NestDataModule, self.datamodule),
            seed=self.config.get("seed_everything", 0),
            ckpt_path=settings.ckpt_path,
            directory=Path(self.trainer.log_dir or self.trainer.default_root_dir),
            loggers=[str(logger.name or "csv") for logger in self.trainer.loggers],
            is_watched=guard.enabled,
        )
        print_summary(rows)

    def before_validate(self) -> None:
        self._check("validate")
        self._print_left_out()

    def before_preflight(self) -> None:
        self._check("fit")
        self._print_left_out()

    def _print_left_out(self) -> None:
        if self.trainer.is_global_zero:
            for name, text in left_out_rows(cast(NestDataModule, self.datamodule)):
                print(f"{name}: {text}", file=sys.stderr)

    def _check(self, stage: str) -> None:
        model, data = cast(NestModel, self.model), cast(NestDataModule, self.datamodule)
        path = self.config[self.subcommand].get("ckpt_path")
        ckpt_path = None if path is None else Path(path)
        check_run(model, data, self.trainer, stage=stage, ckpt_path=ckpt_path)
        if self.subcommand != "preflight":
            check_outputs(self.trainer)

    def after_fit(self) -> None:
        print_results(self.trainer, time.monotonic() - self._started_s, self._first_step)


def run(arguments: list[str]) -> int:
    """Parses the command line, as `nestcli.arguments.dialect` translated it, and runs it; returns the exit code."""
    Parser.command = arguments[0]
    if "--help" in arguments:
        read_field_docstrings()
    # The warning is meant for programs that ignore sys.argv; these are the user's arguments with presets resolved.
    warnings.filterwarnings("ignore", message="LightningCLI's args parameter is intended")
    # Lightning causes this one; users cannot avoid it.
    warnings.filterwarnings("ignore", message=".*LeafSpec.*is deprecated")
    warnings.filterwarnings("ignore", message="Be aware that when using .*ckpt_path")
    # SLURM is installed, and this run is outside it; `check_start` finds a job whose tasks do not fit.
    warnings.filterwarnings("ignore", message="The `srun` command is available on your system but is not used")
    # The interval counts steps of the run; Lightning compares it with the steps of an epoch.
    warnings.filterwarnings("ignore", message="The number of training batches .* is smaller than the logging interval")
    silence_lightning()
    cli = _Cli(
        NestModel,
        NestDataModule,
        trainer_class=PreflightTrainer,
        parser_class=Parser,
        auto_configure_optimizers=False,
        args=arguments,
        seed_everything_default=0,
        save_config_kwargs={"overwrite": True},
        trainer_defaults={
            "callbacks": [
                Throughput(),
                Health(),
                Curves(),
                PreemptionHandler(),
                progress_callback(),
            ],
            "enable_model_summary": False,
            "enable_progress_bar": False,
            "use_distributed_sampler": False,
        },
    )
    return cast(PreflightTrainer, cli.trainer).exit_code
