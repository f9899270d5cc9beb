"""The data module: corpora and settings in, loaders out, at the place that the number of optimizer steps tells.

There is no loader state to save or lose: when an epoch starts, or a run is continued, the loader looks up how many
optimizer steps have been made and goes on with the next.
"""

import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytorch_lightning as pl
from torch.utils.data import DataLoader, Sampler

from nestdata import (
    AudioNoiseBatch,
    AudioNoiseDataset,
    AugmentConfig,
    BadAudioConfig,
    BatchPlan,
    Corpora,
    Corpus,
    MixConfig,
    NoiseConfig,
    NoiseSampler,
    PlanConfig,
    ShortAudio,
    SpeakerNoiseMixer,
)
from nestmodel.errors import ConfigError
from nestmodel.training.lightning_private import uses_distributed_sampler
from nestmodel.training.resume import Settings, flatten_settings
from nestmodel.training.step_limits import count_training_in_steps, count_validation_in_steps


class NestDataModule(pl.LightningDataModule):
    """Batches of clean and noisy speech for a `NestModel`, the same optimizer steps under any number of ranks.

    Args:
        corpus: Speech to learn from, a directory that `nestdata prepare` wrote; or several of them, of which
            `plan.weights` and `plan.temperature` say how often each is seen.
        noise: Noise corpus. Without one, interference is other speech alone.
        val_corpus: Speech to validate on; mixed with the same noise, with the same draws every time.
        plan: How cuts are gathered into microbatches and steps.
        mix: How interference is added.
        noise_sampler: When the noise sampler tries again.
        short_audio: How utterances shorter than `plan.min_audio_seconds` are lengthened.
        augment: Chains of audiomentations transforms, for training alone.
        bad_audio: How much unusable audio a run puts up with.
        num_workers: Loader processes of each rank. The batches do not depend on it.

    Raises:
        NestDataError: A corpus cannot be opened, or its cuts do not fit the plan.
    """

    def __init__(
        self,
        # The list comes first: jsonargparse would otherwise save a list of paths as the repr of one path.
        corpus: list[Path] | Path,
        noise: Path | None = None,
        val_corpus: Path | None = None,
        plan: PlanConfig = PlanConfig(),
        mix: MixConfig = MixConfig(),
        noise_sampler: NoiseConfig = NoiseConfig(),
        short_audio: ShortAudio = "repeat",
        augment: AugmentConfig = AugmentConfig(),
        bad_audio: BadAudioConfig = BadAudioConfig(),
        num_workers: int = 2,
    ) -> None:
        super().__init__()
        self.mixer = SpeakerNoiseMixer(mix)
        self.short_audio = short_audio
        self.bad_audio = bad_audio
        self.num_workers = num_workers
        # Opened at once, which costs nothing, so that a wrong path ends the run before it has left anything behind.
        self.noise = NoiseSampler(Corpus.open(noise) if noise else None, noise_sampler)
        self.train_dataset = self._open(corpus if isinstance(corpus, list) else [corpus], plan, augment)
        self.val_dataset = None
        if val_corpus:
            unweighted = replace(plan, weights=None, temperature=1.0)
            self.val_dataset = self._open([val_corpus], unweighted, AugmentConfig())

    def setup(self, stage: str) -> None:
        """Makes each rank accumulate its share of a step, and the trainer's limits of batches count steps."""
        if self.trainer is None:
            return
        # Both plans have as many microbatches in a step.
        share = len(self._microbatches(self.train_dataset, self.trainer))
        if self.val_dataset is not None:
            count_validation_in_steps(self.trainer, share, self.val_dataset.plan.steps_per_epoch)
        if stage == "fit":
            self._share_steps(self.trainer, share)
            # The loader has no state to resume, since it looks up its place.
            warnings.filterwarnings("ignore", message="You're resuming from a checkpoint that ended before the epoch")
            if self.val_dataset is None:
                self.trainer.limit_val_batches = 0

    @property
    def sampling_rate(self) -> int:
        """Rate of the audio in Hz."""
        return self.train_dataset.corpus.sampling_rate

    @property
    def settings(self) -> Settings:
        """All that decides what is in a batch, by name: the checkpoint of a run holds it."""
        plan, noise = self.train_dataset.plan, self.noise.corpus
        return {
            "data.plan.fingerprint": plan.fingerprint,
            "data.corpus": repr([corpus.fingerprint for corpus in self.train_dataset.corpus.corpora]),
            "data.noise": repr(noise.fingerprint if noise else None),
            "data.short_audio": repr(self.short_audio),
            **flatten_settings(plan.config, "data.plan"),
            **flatten_settings(self.mixer.config, "data.mix"),
            **flatten_settings(self.noise.config, "data.noise_sampler"),
            **flatten_settings(self.train_dataset.augment, "data.augment"),
        }

    def train_dataloader(self) -> "DataLoader[AudioNoiseBatch]":
        """Returns the loader of this rank, which starts every epoch where the optimizer stands."""
        trainer = self._trainer()
        return self._loader(self.train_dataset, lambda: trainer.global_step)

    def val_dataloader(self) -> "DataLoader[AudioNoiseBatch] | list[DataLoader[AudioNoiseBatch]]":
        """Returns the loader of this rank's share of the validation corpus, or none without one."""
        return [] if self.val_dataset is None else self._loader(self.val_dataset, lambda: 0)

    def _loader(self, dataset: AudioNoiseDataset, next_step: Callable[[], int]) -> "DataLoader[AudioNoiseBatch]":
        trainer = self._trainer()
        places = _EpochSampler(dataset.plan, self._microbatches(dataset, trainer), next_step)
        on_gpu = trainer.strategy.root_device.type == "cuda"
        return dataset.loader(places, num_workers=self.num_workers, pin_memory=on_gpu)

    def _open(self, paths: list[Path], plan: PlanConfig, augment: AugmentConfig) -> AudioNoiseDataset:
        corpora = Corpora.open(paths)
        return AudioNoiseDataset(
            corpora,
            BatchPlan.of(corpora, plan),
            self.noise,
            self.mixer,
            short_audio=self.short_audio,
            augment=augment,
            bad_audio=self.bad_audio,
        )

    @staticmethod
    def _microbatches(dataset: AudioNoiseDataset, trainer: pl.Trainer) -> range:
        return dataset.plan.microbatches_of(trainer.global_rank, trainer.world_size)

    def _share_steps(self, trainer: pl.Trainer, share: int) -> None:
        if trainer.accumulate_grad_batches not in (1, share):
            raise ConfigError(
                f"trainer.accumulate_grad_batches is {trainer.accumulate_grad_batches}, but it follows from "
                f"data.plan.microbatches_per_step and the number of ranks ({share} here). Leave it out."
            )
        if trainer.world_size > 1 and uses_distributed_sampler(trainer):
            raise ConfigError(
                "trainer.use_distributed_sampler is on, which would divide each rank's share once more. Turn it off."
            )
        if overfit_batches := cast(Any, trainer).overfit_batches:
            raise ConfigError(
                f"trainer.overfit_batches is {overfit_batches}, which needs a loader without an order of its "
                "own. Leave it out, and prepare a corpus of a few utterances instead."
            )
        trainer.accumulate_grad_batches = share
        count_training_in_steps(trainer, share, self.train_dataset.plan.steps_per_epoch)

    def _trainer(self) -> pl.Trainer:
        if self.trainer is None:
            raise RuntimeError("the data module has no trainer yet; use AudioNoiseDataset.loader without one")
        return self.trainer


class _EpochSampler(Sampler[tuple[int, int]]):
    """As many steps as an epoch has, from the one that the optimizer stands at, whatever epochs they are of.

    Lightning counts how far an epoch of its own has got, also before a run was continued, and asks for no more than
    the rest. Its epochs are those of the plan unless `limit_train_batches` makes them shorter.
    """

    def __init__(self, plan: BatchPlan, microbatches: range, next_step: Callable[[], int]) -> None:
        self.plan = plan
        self.microbatches = microbatches
        self.next_step = next_step

    def __iter__(self) -> Iterator[tuple[int, int]]:
        first = self.next_step()
        steps = range(first, first + self.plan.steps_per_epoch)
        return ((step, microbatch) for step in steps for microbatch in self.microbatches)

    def __len__(self) -> int:
        return self.plan.steps_per_epoch * len(self.microbatches)
