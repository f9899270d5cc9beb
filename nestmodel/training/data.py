"""`NestDataModule`: training and validation loaders built from corpora and settings.

Loaders resume at `trainer.global_step`: at the start of every epoch a loader reads the number of optimizer steps made
and yields the batches of the next one. There is therefore no loader state to save.
"""

import os
import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import Any, cast

import pytorch_lightning as pl
from torch.utils.data import Sampler

from nestdata import AudioNoiseDataset, BatchLoader, BatchPlan, Corpus, MicrobatchKey, StartMethod, start_fork_server
from nestmodel.errors import ConfigError
from nestmodel.run_config import DataConfig
from nestmodel.training.copy_ahead import Loader, copied_ahead
from nestmodel.training.lightning_private import finds_launcher, uses_distributed_sampler
from nestmodel.training.open_data import open_training_data, open_validation_data
from nestmodel.training.ranks import check_ranks
from nestmodel.training.resume_checks import STAGE_PREFIX, Settings, flatten_settings
from nestmodel.training.step_limits import convert_training_limits, convert_validation_limit


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
        """Sets gradient accumulation, and converts the trainer's limits from optimizer steps to microbatches.

        Raises:
            ConfigError: A setting of the trainer conflicts with the plan, or the ranks cannot share a step equally.
        """
        if self.trainer is None:
            return
        # Both plans have the same number of microbatches per step.
        microbatches_per_rank = len(self._microbatches(self.train_dataset, self.trainer))
        if self.val_dataset is not None:
            convert_validation_limit(self.trainer, microbatches_per_rank, self.val_dataset.plan.steps_per_epoch)
        if stage == "fit":
            self._configure_accumulation(self.trainer)
            # Lightning expects a loader with state to resume; ours starts at `trainer.global_step`.
            warnings.filterwarnings("ignore", message="You're resuming from a checkpoint that ended before the epoch")
            if self.val_dataset is None:
                self.trainer.limit_val_batches = 0

    @property
    def sampling_rate(self) -> int:
        """Sampling rate of the audio in Hz."""
        return self.train_dataset.corpus.sampling_rate

    @property
    def settings(self) -> Settings:
        """Everything that decides which batches are trained on, by dotted name; stored in every checkpoint."""
        plan, noise = self.train_dataset.plan, self.noise.corpus
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
        sampler = _EpochSampler(dataset.plan, self._microbatches(dataset, trainer), next_step)
        return self.loader_of(dataset, sampler, on_gpu=trainer.strategy.root_device.type == "cuda")

    @staticmethod
    def _microbatches(dataset: AudioNoiseDataset, trainer: pl.Trainer) -> range:
        return dataset.plan.microbatches_of(trainer.global_rank, trainer.world_size)

    def _configure_accumulation(self, trainer: pl.Trainer) -> None:
        microbatches_per_rank = check_accumulation(trainer, self.train_dataset.plan)
        trainer.accumulate_grad_batches = microbatches_per_rank
        convert_training_limits(trainer, microbatches_per_rank, self.train_dataset.plan.steps_per_epoch)

    def _require_trainer(self) -> pl.Trainer:
        if self.trainer is None:
            raise RuntimeError("the data module has no trainer; without one, use AudioNoiseDataset.loader")
        return self.trainer


def _described(corpus: Corpus) -> str:
    return f"{corpus.path.resolve().name} ({corpus.hours:.2f} h, {len(corpus):,} cuts, {corpus.fingerprint})"


class _EpochSampler(Sampler[MicrobatchKey]):
    """Yields the microbatches of one epoch on this rank, from the next optimizer step on.

    The steps may cross an epoch of the plan. Lightning counts the progress within its own epochs, including the part
    before a resume, and takes only the remaining batches. Its epochs are those of the plan unless
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


def num_ranks(trainer: pl.Trainer) -> int:
    """Returns the number of ranks of a run.

    Raises:
        ConfigError: A launcher that Lightning has found by itself has started others.
    """
    if finds_launcher(trainer):
        check_ranks(os.environ, trainer.num_devices, trainer.num_nodes)
    return trainer.num_devices * trainer.num_nodes


def check_share(trainer: pl.Trainer, plan: BatchPlan) -> int:
    """Returns how many microbatches of a step each rank processes.

    Raises:
        ConfigError: The ranks cannot share a step equally, or are not those that a launcher has started.
    """
    return len(plan.microbatches_of(0, num_ranks(trainer)))


def check_accumulation(trainer: pl.Trainer, plan: BatchPlan) -> int:
    """Checks that the trainer leaves the microbatches of a step to the plan, and that the ranks can share them.

    Returns:
        Number of microbatches that each rank processes per step.

    Raises:
        ConfigError: A setting of the trainer conflicts with the plan, or the ranks cannot share a step equally.
    """
    world_size = num_ranks(trainer)
    microbatches_per_rank = check_share(trainer, plan)
    if trainer.accumulate_grad_batches not in (1, microbatches_per_rank):
        raise ConfigError(
            f"accumulate_grad_batches is {trainer.accumulate_grad_batches}, but it is computed from "
            f"data.plan.microbatches_per_step and the number of ranks ({microbatches_per_rank} here). Leave it out."
        )
    if world_size > 1 and uses_distributed_sampler(trainer):
        raise ConfigError(
            "use_distributed_sampler is on, but the loader of each rank already yields only the "
            "microbatches of that rank. Turn it off."
        )
    if overfit_batches := cast(Any, trainer).overfit_batches:
        raise ConfigError(
            f"overfit_batches is {overfit_batches}, which the loader does not support because it has a "
            "sampler of its own. Leave it out, and prepare a corpus of a few utterances instead."
        )
    return microbatches_per_rank
