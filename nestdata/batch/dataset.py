"""`AudioNoiseDataset`: loads the microbatch of any batch index as a pure function of its key."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import SupportsIndex

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset

from nestdata.batch.augment import AugmentConfig, Chain
from nestdata.batch.bad_audio import BadAudioConfig
from nestdata.batch.batch import AudioNoiseBatch, BatchIndex, MicrobatchKey
from nestdata.batch.loader import BatchIndices, BatchLoader, StartMethod
from nestdata.batch.memory import BatchMemory, aligned
from nestdata.batch.mix import Mix, SpeakerNoiseMixer
from nestdata.batch.noise import NoiseSampler, NoiseSpan
from nestdata.batch.remote import CutsOf, RemoteConfig, RemoteReader
from nestdata.batch.rows import ShortAudio, SpeechRows
from nestdata.corpus.corpora import Corpora, CorpusInput
from nestdata.corpus.roles import warn_of_noise, warn_of_validation
from nestdata.errors import ConfigError
from nestdata.plan.batch_plan import BatchPlan
from nestdata.stateless_rng import StatelessRng


class AudioNoiseDataset(Dataset[AudioNoiseBatch]):
    """Clean and noisy speech by batch index (step, microbatch).

    Every random number is keyed by (seed, purpose, step, microbatch, position in the microbatch). A batch therefore
    depends on neither the process that loads it nor the order of loading.

    Args:
        corpus: The speech: a path, a `Corpus`, `Corpora`, or a list of paths and corpora.
        plan: The batch plan of the same corpus.
        noise: Source of noise: a sampler, a `Corpus`, or the path of one; none by default.
        mixer: Adds interference; without one, the noisy audio is the clean audio.
        short_audio: How cuts shorter than the plan's `min_audio_seconds` are extended: "repeat" repeats them, "pad"
            appends zeros.
        augment: Chains of audiomentations transforms; none by default.
        bad_audio: Tolerance of the loader for unusable audio.
        remote: How audio in object stores is read; has no effect on other audio.

    Raises:
        CorpusError: A corpus cannot be opened, or something else is given.
        ConfigError: The noise corpus and the speech have different sampling rates, or a transform cannot be used.
    """

    def __init__(
        self,
        corpus: CorpusInput,
        plan: BatchPlan,
        noise: NoiseSampler | CorpusInput | None = None,
        mixer: SpeakerNoiseMixer | None = None,
        *,
        short_audio: ShortAudio = "repeat",
        augment: AugmentConfig | None = None,
        bad_audio: BadAudioConfig | None = None,
        remote: RemoteConfig | None = None,
    ) -> None:
        self.corpus = Corpora.of(corpus)
        self.plan = plan
        self.noise = noise if isinstance(noise, NoiseSampler) else NoiseSampler(noise)
        self.mixer = mixer
        self.short_audio = short_audio
        self.augment = augment or AugmentConfig()
        self.bad_audio = bad_audio or BadAudioConfig()
        rate = self.corpus.sampling_rate
        self._speech_chain = Chain(self.augment.speech, rate, name="augment.speech")
        self._noise_chain = Chain(self.augment.noise, rate, name="augment.noise")
        self._mixture_chain = Chain(self.augment.mixture, rate, name="augment.mixture")
        if self.noise.corpus is not None:
            self.noise.corpus.check_rate(self.corpus.corpora[0])
            warn_of_noise(self.corpus, self.noise.corpus)
        self.remote: RemoteReader | None = None
        """Reads audio from object stores; None if there is none there."""

        if RemoteReader.is_needed(self.corpus, self.noise.corpus):
            self.remote = RemoteReader(
                self.corpus,
                self.noise.corpus,
                remote or RemoteConfig(),
                repeats=plan.repeats_per_epoch,
                cuts_of=self._cuts_of,
            )

    def __getitem__(self, index: BatchIndex | tuple[int, int] | SupportsIndex) -> AudioNoiseBatch:
        """Returns the batch of (step, microbatch); steps continue to count after the first epoch.

        `dataset[7]` is microbatch 0 of step 7.

        Raises:
            IndexError: The step is negative, or the step has no such microbatch.
            AudioError: The audio of a cut cannot be used, and neither can that of its substitutes.
        """
        return self.load(index)

    def load(
        self,
        index: BatchIndex | tuple[int, int] | SupportsIndex,
        memory: BatchMemory | None = None,
        upcoming: Sequence[tuple[int, int]] = (),
    ) -> AudioNoiseBatch:
        """Does the work of `dataset[index]`, with the arrays of the batch in given memory.

        Args:
            index: As for `dataset[index]`.
            memory: Memory for the arrays of the batch; new arrays by default.
            upcoming: Indices of the next batches of this process, in order, whose remote audio is requested ahead.
        """
        rows = self._rows(index, memory, upcoming)
        shape = rows.samples.shape
        noise, noisy = rows.memory.zeros(shape, np.float32), rows.memory.empty(shape, np.float32)
        for i in range(len(rows)):
            rows.load_next()
            # Copied while the samples are still in the processor's cache.
            noisy[i] = rows.samples[i]
            if self._speech_chain:
                self._augment(rows, i, noisy[i])
        mixes = []
        for i, mix in enumerate(self._mixes(rows, noise)):
            for start, number in mix.segments:
                noisy[i, start : start + number] += noise[i, start : start + number]
            if self._mixture_chain:
                number = len(rows.speech[i].samples)
                noisy[i, :number] = self._mixture_chain(noisy[i, :number], *self._seed_and_counters(rows.key, i))
            mixes.append(mix)
        lengths = np.array([len(cut.samples) for cut in rows.speech])
        is_mixed = np.array([mix.mode != "none" for mix in mixes])
        return AudioNoiseBatch(
            audio=torch.from_numpy(rows.samples),
            audio_len=_tensor(lengths, rows.memory),
            noise=torch.from_numpy(noise),
            noise_len=_tensor(lengths * is_mixed, rows.memory),
            noisy_audio=torch.from_numpy(noisy),
            noisy_audio_len=_tensor(lengths, rows.memory),
            sample_id=[cut.cut_id for cut in rows.speech],
            mixes=mixes,
            bad_cuts=rows.bad_cuts,
            key=rows.key,
            sampling_rate=self.corpus.sampling_rate,
            remote=None if self.remote is None else self.remote.new_stats(),
        )

    def __repr__(self) -> str:
        noise = "no noise" if self.noise.corpus is None else f"{len(self.noise.corpus)} cuts of noise"
        return (
            f"AudioNoiseDataset({len(self.corpus)} cuts, {self.corpus.hours:.2f} h, {self.corpus.sampling_rate} Hz; "
            f"{noise}; {self.plan.steps_per_epoch} steps an epoch)"
        )

    def warn_if_trained_on(self, training: Corpora) -> None:
        """Warns if this data set is meant for validation and a corpus of it is one of the training data."""
        warn_of_validation(training, self.corpus)

    def loader(
        self,
        batch_indices: BatchIndices,
        *,
        num_workers: int = 0,
        pin_memory: bool = False,
        start_method: StartMethod | None = None,
        num_slots: int | None = None,
    ) -> BatchLoader[AudioNoiseBatch]:
        """Returns a loader of the batches at the given indices, in their order.

        Workers fill batches in place in shared memory. A batch may be kept: its memory is used for another batch only
        when none of its tensors exists any more. When the consumer keeps too many batches, no slot is free: further
        batches are copied, and the loader warns once. Copy page-locked batches to a GPU with `batch.to`, which keeps
        them until an asynchronous copy has ended; copying a single tensor with `non_blocking=True` does not.

        The loader logs every unusable cut once, and raises AudioError if there are more than `bad_audio` allows.

        Args:
            batch_indices: The (step, microbatch) of every batch; `microbatches` returns those of one rank.
            num_workers: Number of loader processes; the batches do not depend on it.
            pin_memory: Whether batches are in page-locked memory, for a GPU.
            start_method: How workers are started: "fork", "forkserver" or "spawn". By default, "forkserver" for audio
                in object stores, whose client does not survive a fork, and otherwise as Python does.
            num_slots: Number of batches that the shared memory holds; by default, two for each worker and four for the
                consumer. With 0, every batch is copied.

        Raises:
            ConfigError: Workers are to be forked although audio is in an object store.
        """
        if self.remote is not None:
            start_method = start_method or "forkserver"
            if start_method == "fork" and num_workers:
                raise ConfigError(
                    "start_method is 'fork', but audio is read from an object store, whose client does not survive a "
                    "fork. Leave it out, or use 'forkserver' or 'spawn'."
                )
        return BatchLoader(
            self,
            batch_indices,
            load=self.load,
            slot_bytes=self._slot_bytes(),
            limits=self.bad_audio,
            num_workers=num_workers,
            pin_memory=pin_memory,
            start_method=start_method,
            num_slots=num_slots,
            remote=self.remote,
        )

    def _rows(
        self,
        index: BatchIndex | tuple[int, int] | SupportsIndex,
        memory: BatchMemory | None,
        upcoming: Sequence[tuple[int, int]],
    ) -> SpeechRows:
        step, microbatch = BatchIndex.of(index)
        if self.remote is not None:
            self.remote.begin((step, microbatch), upcoming)
        return SpeechRows(
            self.corpus,
            self.plan,
            self._key(step, microbatch),
            short_audio=self.short_audio,
            memory=memory or BatchMemory(),
            remote=self.remote,
        )

    def _key(self, step: int, microbatch: int) -> MicrobatchKey:
        return MicrobatchKey(self.plan.epoch(step), step, microbatch)

    def _cuts_of(self, index: tuple[int, int]) -> CutsOf:
        """Returns the speech of a microbatch, and its noise unless a draw has to be repeated."""
        key, speech = self._key(*index), self.plan.indices(*index).tolist()
        noise = []
        if self.mixer is not None and self.noise.corpus is not None:
            for position in range(len(speech)):
                seed, *counters = self._seed_and_counters(key, position)
                if self.mixer.mixes_noise(StatelessRng(seed, "mix", *counters)):
                    noise.append(self.noise.first_index(StatelessRng(seed, "noise", *counters)))
        return CutsOf(speech, [each for each in noise if each is not None])

    def _augment(self, rows: SpeechRows, position: int, noisy: NDArray[np.float32]) -> None:
        """Applies the transforms of speech to the noisy signal of a cut, or to both signals.

        Other cuts receive the changed speech as interference.
        """
        cut = rows.speech[position]
        changed = self._speech_chain(cut.samples, *self._seed_and_counters(rows.key, position))
        noisy[: len(changed)] = changed
        if self.augment.speech_on == "both":
            rows.samples[position, : len(changed)] = changed
        rows.speech[position] = cut._replace(samples=changed)

    def _mixes(self, rows: SpeechRows, noise: NDArray[np.float32]) -> Iterator[Mix]:
        """Writes the interference of each cut to its row of `noise`, and then yields its record."""
        for position, out in enumerate(noise):
            if self.mixer is None:
                yield Mix(mode="none")
                continue
            seed, *counters = self._seed_and_counters(rows.key, position)
            draw_noise = partial(self._draw_noise, rows, position)
            yield self.mixer(position, rows.speech, StatelessRng(seed, "mix", *counters), draw_noise, out)
        rows.heartbeat.note_cuts(())  # no cut is being loaded

    def _draw_noise(self, rows: SpeechRows, position: int, num_samples: int) -> NoiseSpan:
        seed, *counters = self._seed_and_counters(rows.key, position)
        span = self.noise.draw(
            num_samples,
            StatelessRng(seed, "noise", *counters),
            on_cut=rows.heartbeat.note_cut,
            content_of=None if self.remote is None else self.remote.noise,
            store=None if self.remote is None else self.remote.storage,
        )
        return replace(span, samples=self._noise_chain(span.samples, seed, *counters)) if self._noise_chain else span

    def _seed_and_counters(self, key: MicrobatchKey, position: int) -> tuple[int, int, int, int]:
        """Returns what the random numbers of a cut depend on."""
        return self.plan.config.seed, key.step, key.microbatch, position

    def _slot_bytes(self) -> int:
        """Returns the memory that the arrays of the largest batch take."""
        sizes = []
        for bucket in self.plan.buckets:
            num_cuts = bucket.cuts_per_microbatch
            sizes.append(3 * aligned(4 * num_cuts * bucket.padded_samples) + 3 * aligned(8 * num_cuts))
        return max(sizes)


def _tensor(values: NDArray[np.int64], memory: BatchMemory) -> Tensor:
    """Returns a copy of an array in the memory of a batch."""
    array = memory.empty(values.shape, values.dtype)
    array[...] = values
    return torch.from_numpy(array)
