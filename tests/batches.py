"""Datasets with every feature that could make processes differ, and digests for comparing their batches."""

import hashlib
from pathlib import Path

import torch

from nestdata import (
    AudioNoiseBatch,
    AudioNoiseDataset,
    AugmentConfig,
    BadAudioConfig,
    BatchPlan,
    Corpora,
    Corpus,
    MicrobatchKey,
    MixConfig,
    MixtureStage,
    NoiseSampler,
    PlanConfig,
    SpeakerNoiseMixer,
)
from tests.synthesis import chirp, hiss

MICROBATCHES_PER_STEP = 4


def messy_dataset(speech: Path, noise: Path) -> AudioNoiseDataset:
    """Returns a dataset with four microbatches per step, repeated short audio, and added noise and speech."""
    corpus = Corpus.open(speech)
    config = PlanConfig(max_batch_seconds=8.0, microbatches_per_step=MICROBATCHES_PER_STEP, seed=3)
    mixer = SpeakerNoiseMixer(MixConfig(prob=0.8, num_segments=(1, 3), num_speakers=(1, 2), mix_rate=(0.3, 0.9)))
    plan = BatchPlan.of(corpus, config)
    return AudioNoiseDataset(corpus, plan, NoiseSampler(Corpus.open(noise)), mixer)


STEPS_WITH_ALL_SHAPES = 10
"""Number of the first steps of `full_dataset` in which each of its three shapes occurs."""


def full_dataset(speech: Path, windows: Path, banked: Path) -> AudioNoiseDataset:
    """Returns a dataset with all features: weights in stages, fixed shapes, a bank, transforms, damaged audio."""
    corpora = Corpora.open([speech, windows])
    config = PlanConfig(
        max_batch_seconds=12.0,
        microbatches_per_step=MICROBATCHES_PER_STEP,
        quadratic_seconds=20.0,
        max_cuts=5,
        num_shapes=3,
        weights=(1.0, 1.0),
        temperature=2.0,
        stages=(MixtureStage(from_step=2, weights=(1.0, 4.0)), MixtureStage(from_step=4, temperature=3.0)),
        seed=3,
    )
    mixer = SpeakerNoiseMixer(MixConfig(prob=0.8, num_segments=(1, 3), num_speakers=(1, 2), mix_rate=(0.3, 0.9)))
    augment = AugmentConfig(
        speech=[{"Gain": {"p": 0.7}}, "PolarityInversion"],
        noise=[{"HighPassFilter": {"p": 0.5}}],
        mixture=[{"OneOf": {"transforms": ["ClippingDistortion", {"AddGaussianNoise": {"p": 1.0}}], "p": 0.5}}],
    )
    bad_audio = BadAudioConfig(max_share=0.5)
    noise = NoiseSampler(Corpus.open(banked))
    return AudioNoiseDataset(corpora, BatchPlan.of(corpora, config), noise, mixer, augment=augment, bad_audio=bad_audio)


def digest(batch: AudioNoiseBatch) -> dict[str, str]:
    """Returns a hash of the bytes of every tensor, and which cuts they are of, as text."""
    hashes = {
        name: f"{tensor.dtype}{tuple(tensor.shape)} {hashlib.sha256(tensor.numpy().tobytes()).hexdigest()}"
        for name, tensor in batch.tensors().items()
    }
    rest = {name: str(getattr(batch, name)) for name in ("key", "sample_id", "mixes", "bad_cuts")}
    return {**hashes, **rest}


def batch(step: int = 0, microbatch: int = 0) -> AudioNoiseBatch:
    """Two utterances of 2 s and 1.5 s with noise; the second one is padded."""
    lens = torch.tensor([32000, 24000])
    is_valid = torch.arange(32000) < lens.unsqueeze(1)
    audio = torch.from_numpy(chirp(100, 3000, 2.0)) * is_valid
    noise = torch.from_numpy(hiss(32000, 1)) * is_valid
    return AudioNoiseBatch(
        audio=audio,
        audio_len=lens,
        noise=noise,
        noise_len=lens,
        noisy_audio=audio + noise,
        noisy_audio_len=lens,
        sample_id=["a", "b"],
        mixes=[],
        bad_cuts=[],
        key=MicrobatchKey(step, microbatch),
    )
