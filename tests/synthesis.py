"""Synthetic audio on disk, and corpora of it: the tests read only files that they or these functions write."""

import io
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import soundfile
from numpy.typing import NDArray

from nestdata import Corpus, PrepareConfig, prepare_corpus

Samples = NDArray[np.float32]


def tone(hz: float, seconds: float, rate: int = 16000, *, level: float = 0.3) -> Samples:
    time = np.arange(round(seconds * rate)) / rate
    return (level * np.sin(2 * np.pi * hz * time)).astype(np.float32)


def chirp(low_hz: float, high_hz: float, seconds: float, rate: int = 16000, *, level: float = 0.3) -> Samples:
    """Returns a sweep. No two parts of it are equal, so a shift by one sample is visible."""
    time = np.arange(round(seconds * rate)) / rate
    return (level * np.sin(2 * np.pi * (low_hz + (high_hz - low_hz) * time / (2 * seconds)) * time)).astype(np.float32)


def hiss(num_samples: int, seed: int, *, level: float = 0.1) -> Samples:
    return level * np.random.default_rng(seed).standard_normal(num_samples, dtype=np.float32)


def write_audio(path: Path, samples: Samples, rate: int = 16000, *, subtype: str | None = None) -> Path:
    """Writes samples, shape (samples,) or (samples, channels), in the format of the suffix."""
    path.parent.mkdir(parents=True, exist_ok=True)
    soundfile.write(path, samples, rate, subtype=subtype)
    return path


def read_audio(path: Path) -> Samples:
    samples: Samples = soundfile.read(path, dtype="float32")[0]
    return samples


def encoded(
    samples: Samples, form: str = "WAV", rate: int = 16000, subtype: str | None = None, **options: Any
) -> bytes:
    """Returns the bytes of a file of samples, in a format of libsndfile."""
    file = io.BytesIO()
    soundfile.write(file, samples, rate, format=form, subtype=subtype, **options)
    return file.getvalue()


def write_jsonl(path: Path, rows: Iterable[Mapping[str, Any]]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
    return path


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def folder_corpus(
    directory: Path, audio: Mapping[str, Samples | tuple[Samples, int]], config: PrepareConfig | None = None
) -> Corpus:
    """Writes a folder of audio and prepares a corpus of it beside the folder.

    Args:
        directory: The folder; the corpus is `directory.corpus`.
        audio: Samples by file name, at 16 kHz, or pairs of samples and sampling rate.
        config: Configuration of the preparation.
    """
    for name, content in audio.items():
        samples, rate = content if isinstance(content, tuple) else (content, 16000)
        write_audio(directory / name, samples, rate)
    output = directory.with_name(directory.name + ".corpus")
    prepare_corpus([directory], output, config)
    return Corpus.open(output)


def messy_speech(directory: Path) -> Corpus:
    """Prepares a corpus with all kinds of loading, 44 cuts of 0.2 to 3.1 s.

    It has sources at 8, 16, 44.1 and 48 kHz, FLAC, WAV and Ogg Vorbis, spans that start inside a file, the second
    channel of stereo files, and cuts shorter than one second.
    """
    rates = (44100, 8000, 16000, 48000)
    rows: list[dict[str, Any]] = []
    for i in range(36):
        rate = rates[i % 4]
        suffix = ("flac", "wav", "ogg")[i % 3]
        speech = chirp(100 + 20 * i, 900 + 50 * i, 0.2 + 0.083 * i, rate) + hiss(round((0.2 + 0.083 * i) * rate), i)
        write_audio(directory / f"speech-{i:02d}.{suffix}", speech, rate)
        rows.append({"audio_filepath": f"speech-{i:02d}.{suffix}", "text": f"cut {i}"})
    for i in range(32, 36):
        rows.append({"audio_filepath": rows[i]["audio_filepath"], "offset": 0.3125, "duration": 1.1 + i / 100})
    nemo = write_jsonl(directory / "speech.json", rows)
    lhotse = write_jsonl(directory / "stereo.jsonl", [_stereo_cut(directory, i) for i in range(4)])
    output = directory / "speech.corpus"
    prepare_corpus([nemo, lhotse], output)
    return Corpus.open(output)


def messy_noise(directory: Path) -> Corpus:
    """Prepares noise of several lengths and rates; some of it is silent, and one file is deleted afterwards."""
    audio = {f"hiss-{i}.wav": (hiss(3000 * (i + 1), 100 + i), (8000, 16000, 48000)[i % 3]) for i in range(9)}
    silent_half = np.concatenate([np.zeros(30000, np.float32), hiss(30000, 7)])
    corpus = folder_corpus(
        directory / "noise", {**audio, "half.wav": silent_half, "silent.wav": 0 * silent_half, "gone.wav": silent_half}
    )
    (directory / "noise" / "gone.wav").unlink()
    return corpus


def windowed_speech(directory: Path) -> Corpus:
    """Prepares long recordings in ten windows of 1.2 to 2 s; one recording is damaged afterwards."""
    for i in range(4):
        write_audio(directory / "long" / f"{i}.wav", chirp(150, 800 + 99 * i, 2.7 + 1.1 * i, (16000, 22050)[i % 2]))
    output = directory / "windows.corpus"
    prepare_corpus([directory / "long"], output, PrepareConfig(window_seconds=2.0))
    write_audio(directory / "long" / "2.wav", tone(300, 0.01))
    return Corpus.open(output)


def banked_noise(directory: Path) -> Corpus:
    """Prepares the noise of `messy_noise` as a sample bank."""
    output = directory / "banked.corpus"
    prepare_corpus([directory / "noise"], output, PrepareConfig(pcm=True))
    return Corpus.open(output)


def _stereo_cut(directory: Path, i: int) -> dict[str, Any]:
    """Returns a Lhotse cut of the second channel of a file whose first channel is much louder."""
    rate, seconds = (16000, 44100)[i % 2], 1.5 + 0.1 * i
    left = tone(440, seconds, rate, level=0.9)
    right = chirp(200, 2000, seconds, rate, level=0.1) + hiss(len(left), 60 + i, level=0.05)
    path = write_audio(directory / f"stereo-{i}.flac", np.stack([left, right], axis=1), rate)
    duration = len(left) / rate
    return {
        "id": f"stereo-{i}",
        "start": 0.25,
        "duration": duration - 0.25,
        "channel": 1,
        "recording": {
            "id": f"stereo-{i}",
            "sources": [{"type": "file", "channels": [0, 1], "source": str(path)}],
            "sampling_rate": rate,
            "num_samples": len(left),
            "duration": duration,
            "channel_ids": [0, 1],
        },
        "type": "MonoCut",
    }
