"""`AudioNoiseDataset`: the microbatch of any (step, microbatch), as a pure function of its key; and a loader for it."""

from collections.abc import Iterable
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import DataLoader, Dataset

from nestdata.audio import load_samples
from nestdata.batch import AudioNoiseBatch, MicrobatchKey
from nestdata.corpus import Corpus
from nestdata.errors import ConfigError
from nestdata.keyed import Draws
from nestdata.mix import Mix, SpeakerNoiseMixer, Speech
from nestdata.noise import NoiseSampler
from nestdata.plan import BatchPlan

ShortAudio = Literal["repeat", "pad"]


class AudioNoiseDataset(Dataset[AudioNoiseBatch]):
    """Clean and noisy speech by (step, microbatch).

    Every draw is keyed by (seed, purpose, epoch, cut), so that a batch depends on neither who asks for it nor when.

    Args:
        corpus: The speech.
        plan: Made from the same corpus.
        noise: Where noise comes from; none by default.
        mixer: What is done with it; without one, the noisy audio is the clean audio.
        short_audio: How cuts shorter than the plan's `min_audio_seconds` are lengthened to it: by repeating them, or by
            zeros at the end.

    Raises:
        ConfigError: The noise corpus has another sampling rate than the speech.
    """

    def __init__(
        self,
        corpus: Corpus,
        plan: BatchPlan,
        noise: NoiseSampler | None = None,
        mixer: SpeakerNoiseMixer | None = None,
        *,
        short_audio: ShortAudio = "repeat",
    ) -> None:
        self.corpus = corpus
        self.plan = plan
        self.noise = noise or NoiseSampler()
        self.mixer = mixer
        self.short_audio = short_audio
        if self.noise.corpus is not None and self.noise.corpus.sampling_rate != corpus.sampling_rate:
            raise ConfigError(
                f"{self.noise.corpus.path} is at {self.noise.corpus.sampling_rate} Hz and {corpus.path} at "
                f"{corpus.sampling_rate} Hz. Prepare the noise with --sampling-rate {corpus.sampling_rate}."
            )

    def __getitem__(self, place: tuple[int, int]) -> AudioNoiseBatch:
        """Returns the batch of (step, microbatch); steps go on past the epoch.

        Raises:
            AudioError: The audio of one of its cuts cannot be used; the message names the cut.
        """
        step, microbatch = place
        key = MicrobatchKey(self.plan.epoch(step), step, microbatch)
        speech = [self._load(int(row)) for row in self.plan.rows(step, microbatch)]
        shape = (len(speech), self.plan.padded_samples(step))
        audio, noise = np.zeros(shape, np.float32), np.zeros(shape, np.float32)
        mixes = []
        for i, cut in enumerate(speech):
            audio[i, : len(cut.samples)] = cut.samples
            added, mix = self._mix(i, speech, key.epoch)
            if added is not None:
                noise[i, : len(added)] = added
            mixes.append(mix)
        lengths = torch.tensor([len(cut.samples) for cut in speech])
        is_mixed = torch.tensor([mix.mode != "none" for mix in mixes])
        return AudioNoiseBatch(
            audio=torch.from_numpy(audio),
            audio_len=lengths,
            noise=torch.from_numpy(noise),
            noise_len=lengths * is_mixed,
            noisy_audio=torch.from_numpy(audio + noise),
            noisy_audio_len=lengths.clone(),
            sample_id=[cut.cut_id for cut in speech],
            mixes=mixes,
            key=key,
        )

    def loader(
        self, places: Iterable[tuple[int, int]], *, num_workers: int = 0, pin_memory: bool = False
    ) -> "DataLoader[AudioNoiseBatch]":
        """Returns a loader of the batches at given places, in their order.

        Args:
            places: The (step, microbatch) of every batch; `microbatches` gives those of one rank.
            num_workers: Loader processes; the batches are the same for any number.
            pin_memory: Whether batches are put into page-locked memory for a GPU.
        """
        return DataLoader(
            self,
            batch_size=None,
            sampler=places,
            num_workers=num_workers,
            collate_fn=_as_it_is,
            pin_memory=pin_memory,
        )

    def _load(self, row: int) -> Speech:
        cut = self.corpus[row]
        samples = load_samples(cut)
        if len(samples) < self.plan.min_samples:
            samples = _lengthen(samples, self.plan.min_samples, self.short_audio)
        return Speech(row, cut.id, samples)

    def _mix(self, index: int, speech: list[Speech], epoch: int) -> tuple[NDArray[np.float32] | None, Mix]:
        if self.mixer is None:
            return None, Mix(mode="none")
        seed, row = self.plan.config.seed, speech[index].row
        draws = Draws(seed, "mix", epoch, row)
        return self.mixer(
            index, speech, draws, lambda needed: self.noise.draw(needed, Draws(seed, "noise", epoch, row))
        )


def microbatches(
    plan: BatchPlan, *, rank: int = 0, world_size: int = 1, start_step: int = 0, num_steps: int
) -> list[tuple[int, int]]:
    """Returns the (step, microbatch) pairs of one rank, in order, from any step on.

    Raises:
        ConfigError: The world size does not divide the plan's microbatches per step.
    """
    share = plan.microbatches_of(rank, world_size)
    return [(step, microbatch) for step in range(start_step, start_step + num_steps) for microbatch in share]


def _lengthen(samples: NDArray[np.float32], num_samples: int, how: ShortAudio) -> NDArray[np.float32]:
    if how == "repeat":
        return np.resize(samples, num_samples)
    return np.pad(samples, (0, num_samples - len(samples)))


def _as_it_is(batch: Any) -> Any:
    return batch
