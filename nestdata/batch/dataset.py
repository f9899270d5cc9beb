"""`AudioNoiseDataset`: the microbatch of any (step, microbatch), as a pure function of its key; and a loader for it."""

import signal
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import DataLoader, Dataset

import nestguard
from nestdata.batch.augment import AugmentConfig, Chain
from nestdata.batch.bad_audio import BadAudioConfig, BadAudioCounter, BadCut
from nestdata.batch.batch import AudioNoiseBatch, MicrobatchKey
from nestdata.batch.mix import Mix, SpeakerNoiseMixer, Speech
from nestdata.batch.noise import NoiseSampler, NoiseSpan
from nestdata.corpus.corpora import Corpora
from nestdata.corpus.corpus import Corpus
from nestdata.errors import AudioError
from nestdata.plan.batch_plan import BatchPlan
from nestdata.stateless_rng import StatelessRng

ShortAudio = Literal["repeat", "pad"]
Samples = NDArray[np.float32]

# After SIGTERM a loader worker goes on for so long, then its alarm ends it.
_SECONDS_TO_FINISH = 60

# Cuts of the same bucket that are tried for one that cannot be used.
_MAX_SUBSTITUTES = 20


class AudioNoiseDataset(Dataset[AudioNoiseBatch]):
    """Clean and noisy speech by (step, microbatch).

    Every draw is keyed by (seed, purpose, step, microbatch, place in it), so that a batch depends on neither who asks
    for it nor when.

    Args:
        corpus: The speech; of several corpora, `Corpora`.
        plan: Made from the same corpus.
        noise: Where noise comes from; none by default.
        mixer: What is done with it; without one, the noisy audio is the clean audio.
        short_audio: How cuts shorter than the plan's `min_audio_seconds` are lengthened to it: by repeating them, or by
            zeros at the end.
        augment: Chains of audiomentations transforms; none by default.
        bad_audio: How much unusable audio a loader puts up with.

    Raises:
        ConfigError: The noise corpus has another sampling rate than the speech, or a transform cannot be used.
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

    def __getitem__(self, place: tuple[int, int]) -> AudioNoiseBatch:
        """Returns the batch of (step, microbatch); steps go on past the epoch.

        Raises:
            AudioError: The audio of one of its cuts cannot be used, nor that of any that was tried in its place.
        """
        step, microbatch = place
        key = MicrobatchKey(self.plan.epoch(step), step, microbatch)
        rows = self.plan.indices(step, microbatch)
        shape = (len(rows), self.plan.padded_samples(step))
        audio, noise, noisy = np.empty(shape, np.float32), np.zeros(shape, np.float32), np.empty(shape, np.float32)
        bad_cuts: list[BadCut] = []
        speech = []
        for i, row in enumerate(rows):
            # Samples are decoded to where they stay, and copied while they are still in the processor's cache.
            cut = self._load(key, i, int(row), audio[i], bad_cuts)
            audio[i, len(cut.samples) :] = 0.0
            noisy[i] = audio[i]
            speech.append(self._augmented(cut, key, i, audio[i], noisy[i]) if self._speech_chain else cut)
        mixes = [self._mix(key, i, speech, noise[i], noisy[i]) for i in range(len(speech))]
        nestguard.current().note_cuts(())  # nothing is being loaded any more
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
        self, places: Iterable[tuple[int, int]], *, num_workers: int = 0, pin_memory: bool = False
    ) -> "DataLoader[AudioNoiseBatch]":
        """Returns a loader of the batches at given places, in their order.

        It logs every cut that could not be used, once, and raises AudioError when there are more than `bad_audio`
        puts up with.

        Args:
            places: The (step, microbatch) of every batch; `microbatches` gives those of one rank.
            num_workers: Loader processes; the batches are the same for any number.
            pin_memory: Whether batches are put into page-locked memory for a GPU.
        """
        return _CountingLoader(
            self,
            batch_size=None,
            sampler=places,
            num_workers=num_workers,
            collate_fn=_as_it_is,
            worker_init_fn=_StartWorker(num_workers, nestguard.current().slot),
            pin_memory=pin_memory,
        )

    def _load(self, key: MicrobatchKey, index: int, row: int, out: Samples, bad_cuts: list[BadCut]) -> Speech:
        """Decodes a cut into its place, or another cut of its bucket where it cannot be used."""
        for attempt in range(_MAX_SUBSTITUTES + 1):
            num_samples = self.corpus.num_samples_of(row)
            try:
                cut_id, samples = self.corpus.load(row, out=out[:num_samples])
            except AudioError as error:
                bad_cuts.append(BadCut.of(self.corpus.line(row)["id"], error))
                row = self.plan.substitute(key.step, key.microbatch, index, attempt)
                continue
            if num_samples < self.plan.min_samples:
                samples = out[: self.plan.min_samples]
                repeated = self.short_audio == "repeat"
                samples[num_samples:] = (
                    np.resize(samples[:num_samples], len(samples))[num_samples:] if repeated else 0.0
                )
            return Speech(row, cut_id, samples)
        tried = ", ".join(cut.cut_id for cut in bad_cuts[-_MAX_SUBSTITUTES - 1 :])
        raise AudioError(
            f"step {key.step}, microbatch {key.microbatch}: none of {_MAX_SUBSTITUTES + 1} cuts of one length could be "
            f"used ({tried}); the last: {bad_cuts[-1].detail}"
        )

    def _augmented(self, cut: Speech, key: MicrobatchKey, index: int, audio: Samples, noisy: Samples) -> Speech:
        """Applies the transforms of speech; returns it as it will be mixed."""
        changed = self._speech_chain(cut.samples, self.plan.config.seed, key.step, key.microbatch, index)
        noisy[: len(changed)] = changed
        if self.augment.speech_on == "both":
            audio[: len(changed)] = changed
        return cut._replace(samples=changed)

    def _mix(self, key: MicrobatchKey, index: int, speech: list[Speech], noise: Samples, noisy: Samples) -> Mix:
        seed, place = self.plan.config.seed, (key.step, key.microbatch, index)

        def draw_noise(num_samples: int) -> NoiseSpan:
            span = self.noise.draw(num_samples, StatelessRng(seed, "noise", *place))
            if not self._noise_chain:
                return span
            return replace(span, samples=self._noise_chain(span.samples, seed, *place))

        mix = Mix(mode="none")
        if self.mixer is not None:
            mix = self.mixer(index, speech, StatelessRng(seed, "mix", *place), draw_noise, noise)
        for start, number in mix.segments:
            noisy[start : start + number] += noise[start : start + number]
        if self._mixture_chain:
            number = len(speech[index].samples)
            noisy[:number] = self._mixture_chain(noisy[:number], seed, *place)
        return mix


class _CountingLoader(DataLoader[AudioNoiseBatch]):
    """Counts bad audio where the batches arrive: in one process, and in the order of training."""

    dataset: AudioNoiseDataset

    def __init__(self, dataset: AudioNoiseDataset, **options: Any) -> None:
        super().__init__(dataset, **options)
        limits = dataset.bad_audio
        self.bad_cuts = BadAudioCounter("speech", limits.max_share, limits.min_count)
        self.bad_noise = BadAudioCounter("noise", limits.max_noise_share, limits.min_count)

    def __iter__(self) -> Iterator[AudioNoiseBatch]:  # type: ignore[override]  # a generator is all that is needed
        for batch in super().__iter__():
            self.bad_cuts.add(len(batch.sample_id) + len(batch.bad_cuts), batch.bad_cuts)
            for mix in batch.mixes:
                self.bad_noise.add(mix.num_reads, mix.bad_noise)
            yield batch


class _StartWorker:
    """Has a loader worker say what it is doing, and outlive a signal that is sent to the whole job.

    The rank that it works for finishes its step after SIGTERM or SIGUSR1, and needs its batches for it.
    """

    def __init__(self, num_workers: int, place: nestguard.HeartbeatSlot | None) -> None:
        self.num_workers = num_workers
        self.place = place

    def __call__(self, worker_id: int) -> None:
        nestguard.start_worker(worker_id, self.num_workers, self.place)
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, lambda *_: signal.alarm(_SECONDS_TO_FINISH))


def microbatches(
    plan: BatchPlan, *, rank: int = 0, world_size: int = 1, start_step: int = 0, num_steps: int
) -> list[tuple[int, int]]:
    """Returns the (step, microbatch) pairs of one rank, in order, from any step on.

    Raises:
        ConfigError: The world size does not divide the plan's microbatches per step.
    """
    share = plan.microbatches_of(rank, world_size)
    return [(step, microbatch) for step in range(start_step, start_step + num_steps) for microbatch in share]


def _as_it_is(batch: Any) -> Any:
    return batch
