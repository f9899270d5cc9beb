"""`AudioNoiseDataset`: loads a microbatch as a pure function of its key."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import Dataset

import nestguard
from nestdata.batch.augment import AugmentConfig, Chain
from nestdata.batch.bad_audio import BadAudioConfig, BadCut
from nestdata.batch.batch import AudioNoiseBatch, Microbatch, bytes_of_batch, tensors_on
from nestdata.batch.loader import BatchLoader
from nestdata.batch.mix import Mix, SpeakerNoiseMixer, Speech
from nestdata.batch.noise import CutReader, NoiseSampler, NoiseSpan
from nestdata.batch.remote import RemoteConfig, RemoteReader
from nestdata.config_checks import require, require_instance
from nestdata.corpus.corpora import Corpora, CorpusInput
from nestdata.corpus.corpus import Corpus
from nestdata.corpus.members import UNREAD
from nestdata.corpus.roles import warn_of_noise, warn_of_validation
from nestdata.errors import AudioError, ConfigError
from nestdata.options import ShortAudio, StartMethod
from nestdata.plan.batch_plan import BatchPlan
from nestdata.plan.microbatch import MicrobatchKey, MicrobatchLike, PlannedMicrobatch
from nestdata.stateless_rng import StatelessRng

# Number of cuts of the same bucket that are tried in place of an unusable cut.
_MAX_SUBSTITUTES = 20
_NO_LENGTH = "a dataset has no last batch: use dataset.loader(microbatches(plan, num_steps=N)), not DataLoader(dataset)"


class AudioNoiseDataset(Dataset[AudioNoiseBatch]):
    """Clean and noisy speech by (step, microbatch).

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
        ConfigError: The noise corpus and the speech have different sampling rates, a transform cannot be used, or an
            argument is of another kind.
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
        require(isinstance(plan, BatchPlan), "plan", plan, "a BatchPlan, such as BatchPlan.of(corpus, PlanConfig(...))")
        require_instance("mixer", mixer, SpeakerNoiseMixer, or_none=True)
        require_instance("augment", augment, AugmentConfig, or_none=True)
        require_instance("bad_audio", bad_audio, BadAudioConfig, or_none=True)
        require_instance("remote", remote, RemoteConfig, or_none=True)
        self.corpus = Corpora.of(corpus)
        self.plan = plan
        self.noise = noise if isinstance(noise, NoiseSampler) else NoiseSampler(noise)
        self.mixer = mixer
        self.short_audio = short_audio
        self.augment = augment or AugmentConfig()
        self.augment_settings = self.augment.recorded()
        """The settings of `augment` as a resume compares them."""

        self.bad_audio = bad_audio or BadAudioConfig()
        rate = self.corpus.sampling_rate
        remedy = None
        if self.augment.speech_on == "noisy":
            remedy = "Set augment.speech_on: both, which changes the clean audio as well, or remove it."
        self._speech_chain = Chain(self.augment.speech, rate, name="augment.speech", remedy=remedy)
        self._noise_chain = Chain(self.augment.noise, rate, name="augment.noise")
        self._mixture_chain = Chain(self.augment.mixture, rate, name="augment.mixture", remedy="Remove it.")
        if self.noise.corpus is not None:
            self.noise.corpus.check_rate(self.corpus.corpora[0])
            warn_of_noise(self.corpus, self.noise.corpus)
        self.remote: RemoteReader | None = None
        """Reads audio from object stores; None if all audio is local."""

        if self.corpus.is_remote or (self.noise.corpus is not None and self.noise.corpus.is_remote):
            self.remote = RemoteReader(self.corpus, self.noise.corpus, remote or RemoteConfig(), plan.repeats_per_epoch)

    def __getitem__(self, index: MicrobatchLike) -> AudioNoiseBatch:
        """Returns the batch of (step, microbatch); steps continue to count after the first epoch.

        `dataset[7]` is microbatch 0 of step 7.

        Raises:
            IndexError: The step is negative, or the step has no such microbatch.
            AudioError: The audio of a cut and of all its substitutes cannot be used.
        """
        return self.load(MicrobatchKey.of(index))

    def load(
        self,
        key: MicrobatchKey,
        memory: NDArray[np.uint8] | None = None,
        upcoming: Sequence[MicrobatchKey] = (),
    ) -> AudioNoiseBatch:
        """Does the work of `dataset[step, microbatch]`, with the tensors of the batch in given memory.

        Args:
            key: The microbatch.
            memory: Bytes for the tensors, `bytes_of_largest_batch` or more; new tensors by default.
            upcoming: The next microbatches of this process, in order, whose remote audio is requested ahead.
        """
        if self.remote is not None:
            self.remote.begin(key, upcoming, self._cuts_of)
        microbatch = self.plan.microbatch(*key)
        shape = len(microbatch.indices), microbatch.padded_samples
        # The system zeroes new memory when it is first used.
        content = np.zeros(bytes_of_batch(*shape), np.uint8) if memory is None else memory
        arrays = tensors_on(content, *shape)
        clean, noise, noisy = arrays["audio"], arrays["noise"], arrays["noisy_audio"]
        if memory is not None:
            noise.fill(0)
        speech: list[Speech] = []
        bad_cuts: list[BadCut] = []
        for position, index in enumerate(microbatch.indices.tolist()):
            cut = self._load_speech(microbatch, position, index, clean[position], bad_cuts)
            # Copied while the samples are still in the processor's cache.
            noisy[position] = clean[position]
            if self._speech_chain:
                # Other cuts receive the changed speech as interference.
                cut = cut._replace(samples=self._speech_chain(cut.samples, self.plan.config.seed, *key, position))
                noisy[position, : len(cut.samples)] = cut.samples
                if self.augment.speech_on == "both":
                    clean[position, : len(cut.samples)] = cut.samples
            speech.append(cut)
        mixes = [self._mix(speech, key, position, noise[position], noisy[position]) for position in range(len(speech))]
        nestguard.current().note_cuts(())  # no cut is being loaded
        arrays["audio_len"][:] = arrays["noisy_audio_len"][:] = [len(cut.samples) for cut in speech]
        arrays["noise_len"][:] = arrays["audio_len"] * [mix.mode != "none" for mix in mixes]
        return AudioNoiseBatch(
            **{name: torch.from_numpy(array) for name, array in arrays.items()},
            sample_id=[cut.cut_id for cut in speech],
            mixes=mixes,
            bad_cuts=bad_cuts,
            key=key,
            indices=[cut.corpus_index for cut in speech],
            sampling_rate=self.corpus.sampling_rate,
            remote=None if self.remote is None else self.remote.new_stats(),
        )

    def cuts(self, batch: Microbatch) -> list[Any]:
        """Returns the cuts of a batch of this dataset as Lhotse `MonoCut`s, by position.

        Text, speaker and language are in their `supervisions`, other labels in `custom`. Where a cut was replaced
        because of its audio, this is the one that replaced it. The cuts are read from the corpora by this call.

        Args:
            batch: A batch in any form: from loader workers, on a GPU, or as a network has read it.

        Raises:
            ConfigError: The batch is from another dataset.
            CorpusError: The line of a cut is damaged.
        """
        located = [self.corpus.locate(index) for index in batch.indices if index < len(self.corpus)]
        cuts = [corpus[own_index] for corpus, own_index in located]
        if [cut.id for cut in cuts] != batch.sample_id:
            raise ConfigError(f"{batch!r} is not from {self!r}: ask the dataset that it was loaded from for its cuts.")
        return cuts

    def __len__(self) -> int:
        raise TypeError(_NO_LENGTH)

    def __iter__(self) -> Iterator[AudioNoiseBatch]:
        raise TypeError(_NO_LENGTH)

    def __bool__(self) -> bool:
        return True

    def __repr__(self) -> str:
        noise = "no noise" if self.noise.corpus is None else f"{len(self.noise.corpus)} cuts of noise"
        return (
            f"AudioNoiseDataset({len(self.corpus)} cuts, {self.corpus.hours:.2f} h, {self.corpus.sampling_rate} Hz; "
            f"{noise}; {self.plan.steps_per_epoch} steps an epoch)"
        )

    def warn_if_trained_on(self, training: Corpora) -> None:
        """Warns if this data set is meant for validation, but one of its corpora is used for training."""
        warn_of_validation(training, self.corpus)

    def loader(
        self,
        keys: Iterable[MicrobatchLike],
        *,
        num_workers: int = 0,
        pin_memory: bool = False,
        start_method: StartMethod | None = None,
        num_slots: int | None = None,
    ) -> BatchLoader:
        """Returns a loader of the given microbatches, in their order.

        Workers fill batches in place in shared memory. A batch may be kept: its memory is used for another batch only
        when none of its tensors exists any more. When the consumer keeps too many batches, no slot is free: further
        batches are copied, and the loader warns once. Copy page-locked batches to a GPU with `batch.to`, which keeps
        them until an asynchronous copy has ended; copying a single tensor with `non_blocking=True` does not.

        The loader logs every unusable cut once, and raises AudioError if there are more than `bad_audio` allows.

        Args:
            keys: The (step, microbatch) of every batch; `microbatches` returns them for one rank.
            num_workers: Number of loader processes; the batches do not depend on it.
            pin_memory: Whether batches are in page-locked memory, for a GPU; without one, it has no effect.
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
            keys,
            num_workers=num_workers,
            pin_memory=pin_memory,
            start_method=start_method,
            num_slots=num_slots,
        )

    @property
    def bytes_of_largest_batch(self) -> int:
        """Number of bytes that the tensors of the largest batch take in shared memory."""
        return max(bytes_of_batch(*shape) for shape in self.plan.shapes)

    def _load_speech(
        self,
        microbatch: PlannedMicrobatch,
        position: int,
        index: int,
        row: NDArray[np.float32],
        bad_cuts: list[BadCut],
    ) -> Speech:
        """Loads a cut, or a substitute from the same bucket if it cannot be used.

        Args:
            microbatch: The microbatch.
            position: Position of the cut in it.
            index: Index of the cut in the corpora.
            row: Receives the samples, which are extended if they are too short, and zeros behind them.
            bad_cuts: Receives the cuts that could not be used.

        Raises:
            AudioError: The cut and all its substitutes cannot be used.
        """
        for attempt in range(_MAX_SUBSTITUTES + 1):
            corpus, own_index = self.corpus.locate(index)
            num_samples = corpus.num_samples_of(own_index)
            try:
                cut_id, _ = self._reader(corpus, own_index)(out=row[:num_samples])
            except AudioError as error:
                if self.remote is not None:
                    self.remote.drop(corpus, own_index)
                bad_cuts.append(BadCut.of(corpus.line(own_index)["id"], error))
                index = self.plan.substitute(microbatch, position, attempt)
                continue
            length = max(num_samples, self.plan.min_samples)
            if num_samples < length:
                repeated = self.short_audio == "repeat"
                row[num_samples:length] = np.resize(row[:num_samples], length)[num_samples:] if repeated else 0
            row[length:] = 0
            return Speech(index, cut_id, row[:length])
        unusable = bad_cuts[-_MAX_SUBSTITUTES - 1 :]
        raise AudioError(
            f"step {microbatch.key.step}, microbatch {microbatch.key.microbatch}: none of {len(unusable)} cuts of "
            f"similar length could be used ({', '.join(cut.cut_id for cut in unusable)}); the last: "
            f"{unusable[-1].detail}"
        )

    def _mix(
        self,
        speech: Sequence[Speech],
        key: MicrobatchKey,
        position: int,
        noise: NDArray[np.float32],
        noisy: NDArray[np.float32],
    ) -> Mix:
        """Writes the interference of a cut to `noise`, adds it to `noisy`, and returns its record."""

        def draw_noise(num_samples: int) -> NoiseSpan:
            span = self.noise.draw(num_samples, self._rng("noise", key, position), reader=self._reader)
            return replace(span, samples=self._noise_chain(span.samples, self.plan.config.seed, *key, position))

        mix = Mix(mode="none")
        if self.mixer is not None:
            mix = self.mixer(position, speech, self._rng("mix", key, position), draw_noise, noise)
        for start, number in mix.segments:
            noisy[start : start + number] += noise[start : start + number]
        if self._mixture_chain:
            number = len(speech[position].samples)
            noisy[:number] = self._mixture_chain(noisy[:number], self.plan.config.seed, *key, position)
        return mix

    def _reader(self, corpus: Corpus, index: int) -> CutReader:
        """Returns what loads a cut of the speech or of the noise, and names it in the heartbeat."""
        given = UNREAD if self.remote is None else self.remote.bytes_of(corpus, index)
        return partial(corpus.load, index, on_cut=nestguard.current().note_cut, given=given)

    def _cuts_of(self, key: MicrobatchKey) -> list[tuple[Corpus, int]]:
        """Returns the speech and the noise that a microbatch reads first; failed reads lead to others.

        Noise that replaces interfering speech, for a cut that is alone in its microbatch, is missing.
        """
        speech = [self.corpus.locate(index) for index in self.plan.indices(*key).tolist()]
        noise = []
        if self.mixer is not None and self.noise.corpus is not None:
            for position in range(len(speech)):
                if self.mixer.draw_mode(self._rng("mix", key, position)) == "noise":
                    noise.append((self.noise.corpus, self.noise.first_index(self._rng("noise", key, position))))
        return speech + noise

    def _rng(self, purpose: str, key: MicrobatchKey, position: int) -> StatelessRng:
        """Returns fresh random numbers for the cut at a position of a microbatch."""
        return StatelessRng(self.plan.config.seed, purpose, *key, position)
