"""`NestDataModule`: training and validation loaders built from corpora and settings.

Loaders resume at `trainer.global_step`: at the start of every epoch a loader reads the number of optimizer steps made
and yields the batches of the next one. There is therefore no loader state to save.
"""

import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import Any, cast

import pytorch_lightning as pl
from torch.utils.data import Sampler

from nestdata import AudioNoiseDataset, BatchLoader, BatchPlan, Corpus, MicrobatchKey, StartMethod, start_fork_server
from nestmodel.errors import ConfigError
from nestmodel.run_config import DataConfig
from nestmodel.training.copy_ahead import Loader, copied_ahead
from nestmodel.training.launcher import check_launcher
from nestmodel.training.lightning_private import uses_distributed_sampler
from nestmodel.training.open_data import open_training_data, open_validation_data
from nestmodel.training.resume_checks import STAGE_PREFIX, Settings, flatten_settings
from nestmodel.training.step_limits import round_limit, steps_of_epoch


class NestDataModule(pl.LightningDataModule):
    """Batches of clean and noisy speech for a `NestModel`, with equal optimizer steps for any number of ranks.

    Args:
        config: Corpora, and how batches are made from them.

    Raises:
        NestError: There is no corpus, one cannot be opened, or its cuts do not fit the plan.
    """

    def __init__(self, config: DataConfig) -> None:
        super().__init__()
        self.config = config
        self.num_workers = config.num_workers
        self.start_method: StartMethod | None = config.start_method
        # Opening a corpus is cheap. Opened here, a wrong path ends the run before it has written any file.
        self.train_dataset = open_training_data(config)
        self.noise = self.train_dataset.noise
        self.val_dataset = open_validation_data(config, self.train_dataset)

    def setup(self, stage: str) -> None:
        """Checks the ranks, and configures the trainer; see `configure`.

        Raises:
            ConfigError: A setting of the trainer conflicts with the plan, the ranks cannot share a step equally, or a
                launcher has started other ranks.
        """
        if self.trainer is None:
            return
        if stage == "fit":  # a program may validate with one rank of several
            check_launcher(self.trainer)
        self.configure(self.trainer, stage)
        # Lightning expects a loader with state to resume; ours starts at `trainer.global_step`.
        warnings.filterwarnings("ignore", message="You're resuming from a checkpoint that ended before the epoch")

    def configure(self, trainer: pl.Trainer, stage: str) -> None:
        """Sets gradient accumulation, and rounds the trainer's limits to whole optimizer steps. May be repeated.

        Raises:
            ConfigError: A setting of the trainer conflicts with the plan, or the ranks cannot share a step equally.
        """
        number = self.microbatches_per_rank(trainer)
        if self.val_dataset is not None:
            round_limit(trainer, "limit_val_batches", number, self.val_dataset.plan.steps_per_epoch)
        if stage != "fit":
            return
        _check_settings(trainer, number)
        trainer.accumulate_grad_batches = number
        round_limit(trainer, "limit_train_batches", number, self.plan.steps_per_epoch)
        round_limit(trainer, "val_check_interval", number, steps_of_epoch(trainer, self.plan.steps_per_epoch))
        if self.val_dataset is None:
            trainer.limit_val_batches = 0

    def microbatches_per_rank(self, trainer: pl.Trainer) -> int:
        """Returns how many microbatches of a step each rank processes, in training and in validation.

        Raises:
            ConfigError: The ranks cannot share a step equally.
        """
        return len(self.plan.microbatches_of(0, trainer.num_devices * trainer.num_nodes))

    @property
    def plan(self) -> BatchPlan:
        """The plan of training: which cuts are in which microbatch of which step."""
        return self.train_dataset.plan

    @property
    def sampling_rate(self) -> int:
        """Sampling rate of the audio in Hz."""
        return self.train_dataset.corpus.sampling_rate

    @property
    def settings(self) -> Settings:
        """Everything that decides which batches are trained on, by dotted name; stored in every checkpoint."""
        plan, noise = self.plan, self.noise.corpus
        # Languages have an effect only through the temperatures, and the effect of stages is recorded below.
        plan_settings = flatten_settings(plan.config, "data.plan")
        del plan_settings["data.plan.languages"], plan_settings["data.plan.stages"]
        return {
            "data.plan.fingerprint": plan.first_fingerprint,
            "data.corpus": repr([corpus.fingerprint for corpus in self.train_dataset.corpus.corpora]),
            "data.noise": repr(noise.fingerprint if noise else None),
            "data.short_audio": repr(self.config.short_audio),
            **plan_settings,
            **{f"{STAGE_PREFIX}{from_step}": repr(repeats) for from_step, repeats in plan.stage_repeats.items()},
            **flatten_settings(self.config.mix, "data.mix"),
            **flatten_settings(self.noise.config, "data.noise_sampler"),
            **flatten_settings(self.train_dataset.augment_settings, "data.augment"),
        }

    @property
    def record(self) -> dict[str, str]:
        """The corpora with their hours and fingerprints, for the model card; stored in every checkpoint."""
        val, noise = self.val_dataset, self.noise.corpus
        corpora = {
            "speech": self.train_dataset.corpus.corpora,
            "noise": [noise] if noise else [],
            "validation": val.corpus.corpora if val else [],
        }
        return {name: ", ".join(map(_described, found)) for name, found in corpora.items() if found}

    def train_dataloader(self) -> Loader:
        """Returns the training loader of this rank, which starts every epoch at the next optimizer step."""
        trainer = self._require_trainer()
        return copied_ahead(self._loader(self.train_dataset, lambda: trainer.global_step), trainer)

    def val_dataloader(self) -> "BatchLoader | list[Any]":
        """Returns the validation loader of this rank, or an empty list without a validation corpus."""
        return [] if self.val_dataset is None else self._loader(self.val_dataset, lambda: 0)

    def loader_of(self, dataset: AudioNoiseDataset, keys: Iterable[MicrobatchKey], *, on_gpu: bool) -> BatchLoader:
        """Returns a loader of batches as training uses it.

        Args:
            dataset: The training or the validation data.
            keys: The (step, microbatch) of every batch.
            on_gpu: Whether the model is on a GPU, which gets batches in page-locked memory.
        """
        return dataset.loader(keys, num_workers=self.num_workers, pin_memory=on_gpu, start_method=self.start_method)

    def use_fork_server(self) -> None:
        """Selects a fork server for loader workers and starts it, unless another `start_method` was given.

        A worker that is forked from a rank with threads, such as gloo's, may deadlock. Workers do not import the main
        module of the program, so batches must not need anything that it defines, such as transforms.
        """
        self.start_method = self.start_method or "forkserver"
        if self.num_workers and self.start_method == "forkserver":
            start_fork_server(imports_main=False)

    def _loader(self, dataset: AudioNoiseDataset, next_step: Callable[[], int]) -> BatchLoader:
        trainer = self._require_trainer()
        microbatches = dataset.plan.microbatches_of(trainer.global_rank, trainer.world_size)
        sampler = _EpochSampler(dataset.plan, microbatches, next_step)
        return self.loader_of(dataset, sampler, on_gpu=trainer.strategy.root_device.type == "cuda")

    def _require_trainer(self) -> pl.Trainer:
        if self.trainer is None:
            raise RuntimeError("the data module has no trainer; without one, use AudioNoiseDataset.loader")
        return self.trainer


def _described(corpus: Corpus) -> str:
    return f"{corpus.path.resolve().name} ({corpus.hours:.2f} h, {len(corpus):,} cuts, {corpus.fingerprint})"


class _EpochSampler(Sampler[MicrobatchKey]):
    """Yields the microbatches of one epoch on this rank, from the next optimizer step on.

    The steps may cross an epoch of the plan. Lightning counts the progress within its own epochs, including the part
    before a resume, and takes only the remaining batches. Its epochs are as long as the plan's unless
    `limit_train_batches` shortens them.

    Args:
        plan: Plan of the data set.
        microbatches: Indices within a step of the microbatches of this rank.
        next_step: Returns the index of the next optimizer step.
    """

    def __init__(self, plan: BatchPlan, microbatches: range, next_step: Callable[[], int]) -> None:
        self.plan = plan
        self.microbatches = microbatches
        self.next_step = next_step

    def __iter__(self) -> Iterator[MicrobatchKey]:
        first = self.next_step()
        steps = range(first, first + self.plan.steps_per_epoch)
        return (MicrobatchKey(step, microbatch) for step in steps for microbatch in self.microbatches)

    def __len__(self) -> int:
        return self.plan.steps_per_epoch * len(self.microbatches)


def _check_settings(trainer: pl.Trainer, microbatches_per_rank: int) -> None:
    """Raises ConfigError if a setting of the trainer conflicts with the plan, or with the loader."""
    if trainer.accumulate_grad_batches not in (1, microbatches_per_rank):
        raise ConfigError(
            f"accumulate_grad_batches is {trainer.accumulate_grad_batches}, but it is computed from "
            f"data.plan.microbatches_per_step and the number of ranks ({microbatches_per_rank} here). Leave it out."
        )
    if trainer.num_devices * trainer.num_nodes > 1 and uses_distributed_sampler(trainer):
        raise ConfigError(
            "use_distributed_sampler is on, but the loader of each rank already yields only the "
            "microbatches of that rank. Turn it off."
        )
    if overfit_batches := cast(Any, trainer).overfit_batches:
        raise ConfigError(
            f"overfit_batches is {overfit_batches}, which the loader does not support because it has a "
            "sampler of its own. Leave it out, and prepare a corpus of a few utterances instead."
        )
    if not hasattr(trainer, "val_check_interval"):  # Lightning does not set it to a time
        raise ConfigError(
            "val_check_interval is a time, so that ranks would validate at different steps. Give a number instead."
        )
