"""Recordings joined from real speech of the demo corpus, with known positions. Tests of the detector need its extra."""

from pathlib import Path
from typing import NamedTuple

import numpy as np

from tests.extras import needs
from tests.synthesis import Samples, hiss, read_audio

SPEECH = Path(__file__).parents[3] / "manifests/demo/speech"
RATE = 16000

needs_vad = needs("vad", "silero_vad")


class Recording(NamedTuple):
    samples: Samples
    utterances: list[tuple[float, float]]
    """Start and end of each utterance in seconds, without the silence at the ends of its file."""


def utterance(number: int) -> Samples:
    """Returns an utterance of the demo corpus: real speech of about 1 to 12 s, without silence at its ends."""
    samples = read_audio(sorted(SPEECH.glob("en_*.flac"))[number])
    loud = np.flatnonzero(np.abs(samples) > 0.02)
    return samples[loud[0] : loud[-1]]


def joined(pauses: list[float], *, noise: float = 1e-3) -> Recording:
    """Joins utterances, each after a pause of this many seconds, and adds noise of this level everywhere."""
    parts, spans, position = [], [], 0
    for number, seconds in enumerate(pauses):
        speech = utterance(number % 9)
        parts += [np.zeros(round(seconds * RATE), np.float32), speech]
        start = position + len(parts[-2])
        position = start + len(speech)
        spans.append((start / RATE, position / RATE))
    samples = np.concatenate([*parts, np.zeros(RATE, np.float32)])
    return Recording(samples + hiss(len(samples), 1, level=noise), spans)
