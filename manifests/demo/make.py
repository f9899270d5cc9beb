"""Writes the demo corpus in the folder of this file: synthetic speech, noises and their manifests.

The corpus is committed; this script documents how it was made, and can make it again. It needs espeak-ng on PATH,
numpy, and soundfile 0.13 or later. The same versions of these give the same samples. Other files in the folder are not
changed.

Licence: Apache-2.0. All audio is synthetic. The sentences in texts.tsv were written for this project; the noises are
computed here; the licence of espeak-ng does not restrict the audio that it generates.
"""

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import soundfile as sf
from numpy.typing import NDArray

Audio = NDArray[np.float64]
Line = dict[str, str | float]

HERE = Path(__file__).resolve().parent
SAMPLING_RATE = 16_000
MARGIN = 960
"""Samples of silence kept before and after the speech: 60 ms."""


class Voice(NamedTuple):
    """An espeak-ng voice: name with variant, speed in words per minute, pitch from 0 to 99."""

    name: str
    speed: int
    pitch: int


TRAIN_VOICES = {
    "en_f3": Voice("en-us+f3", 170, 55),
    "en_m5": Voice("en-gb+m5", 160, 40),
    "de_f2": Voice("de+f2", 165, 50),
    "de_m3": Voice("de+m3", 175, 45),
    "es_f4": Voice("es+f4", 165, 60),
    "fr_m7": Voice("fr+m7", 160, 35),
    "fr_f2": Voice("fr+f2", 175, 65),
    "it_m2": Voice("it+m2", 165, 50),
    "nl_f1": Voice("nl+f1", 160, 55),
    "pt_m4": Voice("pt-br+m4", 160, 30),
}
VAL_VOICES = {"en_f5": Voice("en-gb-scotland+f5", 155, 70), "es_m6": Voice("es-419+m6", 160, 40)}
BABBLE_VOICES = {  # by the speaker whose sentences the voice reads; no speaker of the corpus has these variants
    "en_f3": Voice("en-us+m1", 170, 40),
    "en_m5": Voice("en-gb+Annie", 180, 60),
    "de_f2": Voice("de+m8", 165, 50),
    "fr_m7": Voice("fr+Andrea", 175, 55),
    "es_f4": Voice("es+Michael", 160, 45),
    "it_m2": Voice("it+linda", 170, 65),
}

MISSING: Line = {
    "audio_filepath": "speech/missing_on_purpose.flac",
    "duration": 2.5,
    "text": "This file does not exist.",
    "lang": "en",
    "speaker": "en_f3",
}
"""A line of speech.json that every reader must reject."""


def speak(text: str, voice: Voice) -> Audio:
    """Returns a sentence as speech at the corpus rate, trimmed so that `MARGIN` samples precede and follow it."""
    command = ["espeak-ng", "-b", "1", "-v", voice.name, "-s", str(voice.speed), "-p", str(voice.pitch), "--stdin"]
    with tempfile.TemporaryDirectory() as folder:
        wav = Path(folder, "speech.wav")  # written to a pipe, its header would not give the length
        subprocess.run([*command, "-w", str(wav)], input=text.encode(), check=True)
        audio, rate = sf.read(wav)
    audio = resample(audio, rate)
    loud = np.flatnonzero(np.abs(audio) > 0.002 * np.abs(audio).max())
    return np.pad(audio[loud[0] : loud[-1] + 1], MARGIN)


def resample(audio: Audio, rate: int) -> Audio:
    """Reduces audio of a higher rate to the corpus rate by truncating its spectrum."""
    num_samples = round(len(audio) * SAMPLING_RATE / rate)
    spectrum = np.fft.rfft(audio)[: num_samples // 2 + 1]
    return np.fft.irfft(spectrum, num_samples) * (num_samples / len(audio))


def coloured(rng: np.random.Generator, seconds: float, slope: float) -> Audio:
    """Returns noise whose amplitude is proportional to frequency ** -slope: 0 is white, 0.5 pink, 1 brown."""
    num_samples = round(seconds * SAMPLING_RATE)
    freqs = np.fft.rfftfreq(num_samples, 1 / SAMPLING_RATE)
    shape = np.where(freqs > 20, np.maximum(freqs, 20.0) ** -slope, 0.0)
    return np.fft.irfft(np.fft.rfft(rng.standard_normal(num_samples)) * shape, num_samples)


def hum(seconds: float) -> Audio:
    """Returns mains hum: 50 Hz and its harmonics, with weaker even harmonics and a slow variation in level."""
    time = np.arange(round(seconds * SAMPLING_RATE)) / SAMPLING_RATE
    audio = np.zeros(len(time))
    for k in range(1, 25):
        audio += (0.4 if k % 2 == 0 else 1.0) / k * np.sin(2 * np.pi * 50 * k * time + k * k)
    return audio * (1 + 0.2 * np.sin(2 * np.pi * 0.4 * time))


def music(seconds: float) -> Audio:
    """Returns a plucked arpeggio over four chords of eight notes each."""
    chords = ((57, 60, 64, 69), (53, 57, 60, 65), (48, 52, 55, 60), (55, 59, 62, 67))  # MIDI: Am F C G
    pattern = (0, 1, 2, 3, 2, 1, 2, 1)
    audio = np.zeros(round(seconds * SAMPLING_RATE))
    for i in range(32):
        start = i * (len(audio) // 32)
        freq = 440.0 * 2 ** ((chords[i // 8][pattern[i % 8]] - 69) / 12)
        time = np.arange(min(SAMPLING_RATE, len(audio) - start)) / SAMPLING_RATE
        for k in range(1, 7):
            audio[start : start + len(time)] += np.sin(2 * np.pi * freq * k * time) * np.exp(-3 * k * time) / k
    return audio


def typing(rng: np.random.Generator, seconds: float) -> Audio:
    """Returns keystrokes: short decaying bursts of different levels at irregular intervals."""
    audio = np.zeros(round(seconds * SAMPLING_RATE))
    click = np.exp(-np.arange(640) / 90)
    start = 800
    while start + len(click) < len(audio):
        audio[start : start + len(click)] += rng.uniform(0.4, 1.0) * click * rng.standard_normal(len(click))
        start += int(rng.uniform(0.09, 0.28) * SAMPLING_RATE)
    return audio


def babble(texts: Mapping[str, Sequence[str]], seconds: float) -> Audio:
    """Returns several voices speaking at once; each reads all sentences of one speaker."""
    mix = np.zeros(round(seconds * SAMPLING_RATE))
    for speaker, voice in BABBLE_VOICES.items():
        audio = speak(" ".join(reversed(texts[speaker])), voice)[MARGIN:-MARGIN]
        mix += np.resize(audio / audio.std(), len(mix))
    return mix


def write(path: Path, audio: Audio, peak: float) -> float:
    """Writes FLAC with the given peak amplitude, and returns the duration in seconds."""
    audio = audio[: len(audio) // 8 * 8]  # a multiple of 8 samples has an exact duration with four decimals
    audio = audio * (peak / (np.abs(audio).max() or 1.0))  # 1.0 avoids a division by zero for silence
    # 12 significant bits make FLAC files 40 % smaller, with quantisation noise about 50 dB below the speech.
    samples = (np.round(audio * 2048) * 16).astype(np.int16)
    sf.write(path, samples, SAMPLING_RATE, subtype="PCM_16", compression_level=1.0)
    return len(samples) / SAMPLING_RATE


def write_speech(out: Path, texts: Mapping[str, Sequence[str]], voices: Mapping[str, Voice]) -> list[Line]:
    """Writes every sentence of these speakers, and returns their manifest lines."""
    lines: list[Line] = []
    for speaker, voice in voices.items():
        for i, text in enumerate(texts[speaker], start=1):
            name = f"speech/{speaker}_{i:02d}.flac"
            duration = write(out / name, speak(text, voice), peak=0.5)
            lang = speaker.split("_")[0]
            lines.append({"audio_filepath": name, "duration": duration, "text": text, "lang": lang, "speaker": speaker})
    return lines


def write_noise(out: Path, texts: Mapping[str, Sequence[str]]) -> list[Line]:
    """Writes the noises, and returns their manifest lines."""
    rng = np.random.default_rng(0)
    noises = {  # audio and peak amplitude; noises that FLAC compresses badly are short and quiet
        "pink": (coloured(rng, 3.0, 0.5), 0.06),
        "brown": (coloured(rng, 3.0, 1.0), 0.1),
        "hum": (hum(5.0), 0.2),
        "babble": (babble(texts, 8.0), 0.2),
        "music": (music(12.0), 0.3),
        "typing": (typing(rng, 6.0), 0.3),
        "silence": (np.zeros(3 * SAMPLING_RATE), 0.5),
        "short_white": (coloured(rng, 0.7, 0.0), 0.06),
    }
    names = {label: f"noise/{label}.flac" for label in noises}
    return [
        {"audio_filepath": names[label], "duration": write(out / names[label], audio, peak), "label": label}
        for label, (audio, peak) in noises.items()
    ]


def write_manifest(path: Path, lines: Sequence[Line]) -> None:
    """Writes one JSON object per line."""
    path.write_text("".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines), encoding="utf-8")


def main() -> int:
    """Writes the corpus, and returns the exit status."""
    parser = argparse.ArgumentParser(description="Make the demo corpus with espeak-ng.")
    parser.add_argument("--out", type=Path, default=HERE, help="folder to write to (default: that of this script)")
    out: Path = parser.parse_args().out
    if shutil.which("espeak-ng") is None:
        print("error: espeak-ng is not on PATH: install it (apt install espeak-ng) and try again.", file=sys.stderr)
        return 1
    texts: dict[str, list[str]] = {}
    for row in (HERE / "texts.tsv").read_text(encoding="utf-8").splitlines()[1:]:
        speaker, text = row.split("\t")
        texts.setdefault(speaker, []).append(text)
    for folder in ("speech", "noise"):
        (out / folder).mkdir(parents=True, exist_ok=True)
    train = write_speech(out, texts, TRAIN_VOICES)
    train.insert(len(train) // 2, MISSING)
    write_manifest(out / "speech.json", train)
    write_manifest(out / "speech_val.json", write_speech(out, texts, VAL_VOICES))
    write_manifest(out / "noise.json", write_noise(out, texts))
    return 0


if __name__ == "__main__":
    sys.exit(main())
