"""Turns a folder of audio into a corpus, and the corpus into batches of noisy speech."""

import sys
import tempfile
from pathlib import Path

import numpy as np
import soundfile

from nestdata import (
    AudioNoiseBatch,
    AudioNoiseDataset,
    BatchPlan,
    Corpus,
    MixConfig,
    NoiseSampler,
    PlanConfig,
    PrepareConfig,
    SpeakerNoiseMixer,
    prepare_corpus,
)

RATE = 16000


def write_recordings(folder: Path) -> None:
    """Writes placeholders for your recordings: tones of one to four seconds, in subfolders."""
    for number in range(12):
        seconds = 1.0 + number / 4
        time = np.arange(int(seconds * RATE)) / RATE
        path = folder / f"speaker-{number % 3}" / f"{number:02d}.flac"
        path.parent.mkdir(parents=True, exist_ok=True)
        soundfile.write(path, 0.3 * np.sin(2 * np.pi * (200 + 30 * number) * time), RATE)


def write_noise(folder: Path) -> None:
    """Writes a placeholder for your noise: ten seconds of white noise."""
    folder.mkdir()
    noise = 0.05 * np.random.default_rng(0).standard_normal(10 * RATE)
    soundfile.write(folder / "white.wav", noise, RATE)


def main() -> AudioNoiseBatch:
    """Prepares both corpora, prints the batch shape of every step of an epoch, and returns the first batch."""
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        write_recordings(directory / "audio")
        write_noise(directory / "noise")
        report = prepare_corpus([directory / "audio"], directory / "speech.corpus")
        prepare_corpus([directory / "noise"], directory / "noise.corpus", PrepareConfig(pcm=True))
        sys.stdout.write(f"{report.num_cuts} cuts, {report.hours * 3600:.1f} s, rejected: {report.rejected}\n")

        speech = Corpus.open(directory / "speech.corpus")
        plan = BatchPlan.of(speech, PlanConfig(max_batch_seconds=8.0, microbatches_per_step=2, seed=1))
        noise = NoiseSampler(directory / "noise.corpus")
        dataset = AudioNoiseDataset(speech, plan, noise, SpeakerNoiseMixer(MixConfig(prob=1.0, noise_ratio=1.0)))
        for step in range(plan.steps_per_epoch):
            shape = tuple(dataset[step, 0].audio.shape)
            sys.stdout.write(f"step {step}: two microbatches of (cuts, samples) {shape}\n")
        batch = dataset[0, 0]
    for cut_id, mix in zip(batch.sample_id, batch.mixes, strict=True):
        sys.stdout.write(f"{cut_id}: {mix.mode} from {', '.join(mix.sources)} at {mix.snr_db:.1f} dB\n")
    return batch


if __name__ == "__main__":
    main()
