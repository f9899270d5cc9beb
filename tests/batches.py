"""A data set with all that can differ between processes switched on, and digests to compare its batches by."""

import hashlib
from pathlib import Path

from nestdata import (
    AudioNoiseBatch,
    AudioNoiseDataset,
    BatchPlan,
    Corpus,
    MixConfig,
    NoiseSampler,
    PlanConfig,
    SpeakerNoiseMixer,
)

MICROBATCHES_PER_STEP = 4


def messy_dataset(speech: Path, noise: Path) -> AudioNoiseDataset:
    """Four microbatches a step, short audio repeated, noise and speech mixed in."""
    corpus = Corpus.open(speech)
    config = PlanConfig(max_batch_seconds=8.0, microbatches_per_step=MICROBATCHES_PER_STEP, seed=3)
    mixer = SpeakerNoiseMixer(MixConfig(prob=0.8, num_segments=(1, 3), num_speakers=(1, 2), mix_rate=(0.3, 0.9)))
    plan = BatchPlan(corpus.num_samples, corpus.sampling_rate, config, content=corpus.fingerprint)
    return AudioNoiseDataset(corpus, plan, NoiseSampler(Corpus.open(noise)), mixer)


def digest(batch: AudioNoiseBatch) -> dict[str, str]:
    """Returns a hash of the bytes of every tensor, and everything else as text: equal for equal batches alone."""
    hashes = {
        name: f"{tensor.dtype}{tuple(tensor.shape)} {hashlib.sha256(tensor.numpy().tobytes()).hexdigest()}"
        for name, tensor in batch.tensors().items()
    }
    return {**hashes, "key": str(batch.key), "sample_id": str(batch.sample_id), "mixes": str(batch.mixes)}
