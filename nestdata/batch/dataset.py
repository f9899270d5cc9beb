"""`AudioNoiseDataset`: loads the microbatch of any batch index as a pure function of its key."""

import signal
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import DataLoader, Dataset

import nestguard
from nestdata.batch.augment import AugmentConfig, Chain
from nestdata.batch.bad_audio import BadAudioConfig, BadAudioCounter, BadCut
from nestdata.batch.batch import AudioNoiseBatch, BatchIndex, MicrobatchKey
from nestdata.batch.mix import Mix, SpeakerNoiseMixer, Speech
from nestdata.batch.noise import NoiseSampler, NoiseSpan
from nestdata.corpus.corpora import Corpora
from nestdata.corpus.corpus import Corpus
from nestdata.errors import AudioError
from nestdata.plan.batch_plan import BatchPlan
from nestdata.stateless_rng import StatelessRng

ShortAudio = Literal["repeat", "pad"]
Samples = NDArray[np.float32]

# Time after SIGTERM at which an alarm ends a loader worker that is still running.
_SECONDS_TO_FINISH = 60

# Number of cuts of the same bucket that are tried in place of an unusable cut.
_MAX_SUBSTITUTES = 20


class AudioNoiseDataset(Dataset[AudioNoiseBatch]):
    """Clean and noisy speech by batch index (step, microbatch).

    Every random number is keyed by (seed, purpose, step, microbatch, position in the microbatch). A batch therefore
    depends on neither the process that loads it nor the order of loading.

    Args:
        corpus: The speech; several corpora as `Corpora`.
        plan: The batch plan of the same corpus.
        noise: Source of noise; none by default.
        mixer: Adds interference; without one, the noisy audio is the clean audio.
        short_audio: How cuts shorter than the plan's `min_audio_seconds` are extended: "repeat" repeats them, "pad"
            appends zeros.
        augment: Chains of audiomentations transforms; none by default.
        bad_audio: Tolerance of the loader for unusable audio.

    Raises:
        ConfigError: The noise corpus and the speech have different sampling rates, or a transform cannot be used.
    """

    def __init__(
        self,
        corpus: Corpus | Corpora,
        plan: BatchPlan,
        noise: NoiseSampler | None = None,
        mixer: SpeakerNoiseMixer | None = None,
        *,
        short_audio: ShortAudio = "repeat",
        augment: AugmentConfig | None = None,
        bad_audio: BadAudioConfig | None = None,
    ) -> None:
        self.corpus = corpus if isinstance(corpus, Corpora) else Corpora([corpus])
        self.plan = plan
        self.noise = noise or NoiseSampler()
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

    def __getitem__(self, index: BatchIndex | tuple[int, int]) -> AudioNoiseBatch:
        """Returns the batch of (step, microbatch); steps continue to count after the first epoch.

        Raises:
            AudioError: The audio of a cut cannot be used, and neither can that of its substitutes.
        """
        step, microbatch = index
        key = MicrobatchKey(self.plan.epoch(step), step, microbatch)
        corpus_indices = self.plan.indices(step, microbatch)
        heartbeat = nestguard.current()
        shape = (len(corpus_indices), self.plan.padded_samples(step, microbatch))
        audio, noise, noisy = np.empty(shape, np.float32), np.zeros(shape, np.float32), np.empty(shape, np.float32)
        bad_cuts: list[BadCut] = []
        speech = []
        for i, corpus_index in enumerate(corpus_indices):
            # Samples are decoded into the batch, and copied while they are still in the processor's cache.
            cut = self._load(key, i, int(corpus_index), audio[i], bad_cuts, heartbeat.note_cut)
            audio[i, len(cut.samples) :] = 0.0
            noisy[i] = audio[i]
            speech.append(self._augmented(cut, key, i, audio[i], noisy[i]) if self._speech_chain else cut)
        mixes = [self._mix(key, i, speech, noise[i], noisy[i], heartbeat.note_cut) for i in range(len(speech))]
        heartbeat.note_cuts(())  # no cut is being loaded
        lengths = torch.tensor([len(cut.samples) for cut in speech])
        is_mixed = torch.tensor([mix.mode != "none" for mix in mixes])
        return AudioNoiseBatch(
            audio=torch.from_numpy(audio),
            audio_len=lengths,
            noise=torch.from_numpy(noise),
            noise_len=lengths * is_mixed,
            noisy_audio=torch.from_numpy(noisy),
            noisy_audio_len=lengths.clone(),
            sample_id=[cut.cut_id for cut in speech],
            mixes=mixes,
            bad_cuts=bad_cuts,
            key=key,
        )

    def loader(
        self,
        batch_indices: Iterable[BatchIndex | tuple[int, int]],
        *,
        num_workers: int = 0,
        pin_memory: bool = False,
    ) -> "DataLoader[AudioNoiseBatch]":
        """Returns a loader of the batches at the given indices, in their order.

        The loader logs every unusable cut once, and raises AudioError if there are more than `bad_audio` allows.

        Args:
            batch_indices: The (step, microbatch) of every batch; `microbatches` returns those of one rank.
            num_workers: Number of loader processes; the batches do not depend on it.
            pin_memory: Whether batches are copied to page-locked memory for a GPU.
        """
        return _CountingLoader(
            self,
            batch_size=None,
            sampler=batch_indices,
            num_workers=num_workers,
            collate_fn=_unchanged,
            worker_init_fn=_StartWorker(num_workers, nestguard.current().slot),
            pin_memory=pin_memory,
        )

    def _load(
        self,
        key: MicrobatchKey,
        position: int,
        corpus_index: int,
        out: Samples,
        bad_cuts: list[BadCut],
        on_cut: Callable[[str], None],
    ) -> Speech:
        """Decodes a cut, or a substitute from the same bucket if it cannot be used, into `out`.

        Args:
            key: The microbatch.
            position: Position of the cut in the microbatch.
            corpus_index: Index of the cut in the corpora.
            out: Receives the samples.
            bad_cuts: List to which unusable cuts are appended.
            on_cut: Called with the id of each cut before it is decoded.
        """
        for attempt in range(_MAX_SUBSTITUTES + 1):
            num_samples = self.corpus.num_samples_of(corpus_index)
            try:
                cut_id, samples = self.corpus.load(corpus_index, out=out[:num_samples], on_cut=on_cut)
            except AudioError as error:
                bad_cuts.append(BadCut.of(self.corpus.line(corpus_index)["id"], error))
                corpus_index = self.plan.substitute(key.step, key.microbatch, position, attempt)
                continue
            if num_samples < self.plan.min_samples:
                samples = out[: self.plan.min_samples]
                repeated = self.short_audio == "repeat"
                samples[num_samples:] = (
                    np.resize(samples[:num_samples], len(samples))[num_samples:] if repeated else 0.0
                )
            return Speech(corpus_index, cut_id, samples)
        tried = ", ".join(cut.cut_id for cut in bad_cuts[-_MAX_SUBSTITUTES - 1 :])
        raise AudioError(
            f"step {key.step}, microbatch {key.microbatch}: none of {_MAX_SUBSTITUTES + 1} cuts of similar length "
            f"could be used ({tried}); the last: {bad_cuts[-1].detail}"
        )

    def _augmented(self, cut: Speech, key: MicrobatchKey, position: int, audio: Samples, noisy: Samples) -> Speech:
        """Applies the transforms of speech to the noisy or to both signals, and returns the cut used for mixing."""
        changed = self._speech_chain(cut.samples, self.plan.config.seed, key.step, key.microbatch, position)
        noisy[: len(changed)] = changed
        if self.augment.speech_on == "both":
            audio[: len(changed)] = changed
        return cut._replace(samples=changed)

    def _mix(
        self,
        key: MicrobatchKey,
        position: int,
        speech: list[Speech],
        noise: Samples,
        noisy: Samples,
        on_cut: Callable[[str], None],
    ) -> Mix:
        """Writes the interference of one cut to `noise`, adds it to `noisy`, and returns its record."""
        seed, counters = self.plan.config.seed, (key.step, key.microbatch, position)

        def draw_noise(num_samples: int) -> NoiseSpan:
            span = self.noise.draw(num_samples, StatelessRng(seed, "noise", *counters), on_cut=on_cut)
            if not self._noise_chain:
                return span
            return replace(span, samples=self._noise_chain(span.samples, seed, *counters))

        mix = Mix(mode="none")
        if self.mixer is not None:
            mix = self.mixer(position, speech, StatelessRng(seed, "mix", *counters), draw_noise, noise)
        for start, number in mix.segments:
            noisy[start : start + number] += noise[start : start + number]
        if self._mixture_chain:
            number = len(speech[position].samples)
            noisy[:number] = self._mixture_chain(noisy[:number], seed, *counters)
        return mix


class _CountingLoader(DataLoader[AudioNoiseBatch]):
    """Counts unusable audio as batches arrive, that is in one process and in the order of training."""

    dataset: AudioNoiseDataset

    def __init__(self, dataset: AudioNoiseDataset, **options: Any) -> None:
        super().__init__(dataset, **options)
        limits = dataset.bad_audio
        self.bad_cuts = BadAudioCounter("speech", limits.max_share, limits.min_count)
        self.bad_noise = BadAudioCounter("noise", limits.max_noise_share, limits.min_count)

    def __iter__(self) -> Iterator[AudioNoiseBatch]:  # type: ignore[override]  # a generator is sufficient here
        for batch in super().__iter__():
            self.bad_cuts.add(len(batch.sample_id) + len(batch.bad_cuts), batch.bad_cuts)
            for mix in batch.mixes:
                self.bad_noise.add(mix.num_reads, mix.bad_noise)
            yield batch


class _StartWorker:
    """Initialises a loader worker: starts its heartbeat, and lets it survive a signal to the whole job for a while.

    After SIGTERM or SIGUSR1, the rank that owns the worker completes its step and still needs the batches for it.
    """

    def __init__(self, num_workers: int, slot: nestguard.HeartbeatSlot | None) -> None:
        self.num_workers = num_workers
        self.slot = slot

    def __call__(self, worker_id: int) -> None:
        nestguard.start_worker(worker_id, self.num_workers, self.slot)
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)
        # A forked worker inherits the handler of its rank; the default action ends the process.
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.signal(signal.SIGTERM, lambda *_: signal.alarm(_SECONDS_TO_FINISH))


def microbatches(
    plan: BatchPlan, *, rank: int = 0, world_size: int = 1, start_step: int = 0, num_steps: int
) -> list[BatchIndex]:
    """Returns the batch indices of one rank, in order, from any step on.

    Raises:
        ConfigError: The world size does not divide the plan's microbatches per step, or the rank does not exist.
    """
    share = plan.microbatches_of(rank, world_size)
    return [BatchIndex(step, microbatch) for step in range(start_step, start_step + num_steps) for microbatch in share]


def _unchanged(batch: Any) -> Any:
    return batch
