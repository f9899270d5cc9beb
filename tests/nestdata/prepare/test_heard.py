"""A law: what is heard in a file is a cut of the same length and samples, or a reject. FFmpeg is the judge."""

import json
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import numpy as np
import pytest
import soundfile

from nestdata import AudioError, Corpus, PrepareConfig, prepare_corpus
from nestdata.audio import torchcodec_audio
from tests.synthesis import Samples, chirp, hiss, read_jsonl

pytestmark = pytest.mark.skipif(
    bool(torchcodec_audio.problem()) or shutil.which("ffmpeg") is None,
    reason=f"{torchcodec_audio.problem() or 'the program ffmpeg is the judge'}",
)

RATE = 16000
# What one decoder may hear and the other not: the delay of an encoder, or a last block.
MARGIN_S = 0.08
# Decoders find more or less behind damage; FFmpeg says where it found some.
LEAST_SHARE_OF_DAMAGED = 0.9

# Containers that libsndfile writes, with their suffixes; the codecs are all that it writes into them.
SNDFILE = {
    "WAV": "wav", "WAVEX": "wav", "AIFF": "aiff", "AU": "au", "W64": "w64", "RF64": "wav", "CAF": "caf", "FLAC": "flac",
    "OGG": "ogg", "MP3": "mp3", "NIST": "sph",
}  # fmt: skip
# Codecs that FFmpeg does not decode in these containers, and ALAC, whose encoder in libsndfile corrupts memory.
NOT_WRITTEN = ("DPCM_", "DWVW_", "G721_", "G723_", "NMS_", "ALAC_")
# Containers and codecs that only FFmpeg writes: the suffix, and its arguments.
FFMPEG = {
    "m4a": "-c:a aac", "mp4": "-c:a aac -movflags frag_keyframe+empty_moov", "mov": "-c:a alac", "aac": "-c:a aac",
    "webm": "-c:a libopus", "mka": "-c:a pcm_s16le", "mkv": "-c:a libvorbis", "mp2": "-ar 48000 -c:a mp2",
    "ac3": "-ar 48000 -c:a ac3", "wma": "-ar 44100 -c:a wmav2", "avi": "-ar 44100 -c:a libmp3lame",
    "tta": "-c:a tta", "caf": "-c:a alac", "wv": "-c:a wavpack",
    "mp3": "-ar 24000 -c:a libmp3lame -write_xing 0", "flac": "-c:a flac",
}  # fmt: skip

Probe = Literal["all", "decode"]
Change = Callable[[bytes, np.random.Generator], bytes]
CHANGES: dict[str, Change] = {
    "nothing": lambda content, _: content,
    "a tag behind": lambda content, _: content + b"TAG" + bytes(125),
    "zeros behind": lambda content, rng: content + bytes(int(rng.integers(1, 9000))),
    "noise behind": lambda content, rng: content + rng.bytes(int(rng.integers(1, 9000))),
    "noise before": lambda content, rng: rng.bytes(int(rng.integers(1, 600))) + content,
    "noise inside": lambda content, rng: content[: len(content) // 2] + rng.bytes(700) + content[len(content) // 2 :],
    "without an end": lambda content, rng: content[: int(len(content) * rng.uniform(0.3, 0.99))],
    "without a start": lambda content, rng: content[int(rng.integers(1, max(2, len(content) // 4))) :],
    "with a hole": lambda content, rng: (
        content[: len(content) // 3] + content[int(len(content) * rng.uniform(0.34, 0.6)) :]
    ),
    "twice": lambda content, _: content + content,
}
# What decoders conceal differs.
DAMAGE_INSIDE = ("noise inside", "with a hole")
# A reject of these is a fault.
INTACT = ("nothing", "a tag behind", "zeros behind")


def write_signal(path: Path, rng: np.random.Generator) -> tuple[Samples, int]:
    """Writes a random signal as a WAV file, and returns its samples and its rate."""
    rate, seconds = int(rng.choice([8000, 16000, 22050, 44100, 48000])), float(rng.choice([0.4, 1.0, 3.3, 9.0]))
    num_samples = round(rate * seconds)
    samples = np.resize(chirp(100, 3000, seconds), num_samples) + hiss(num_samples, int(rng.integers(1 << 30)))
    if rng.random() < 0.3:  # at a variable bit rate, quiet frames are short
        samples[: num_samples // 2] *= 1e-3
    samples = np.stack([samples] * int(rng.choice([1, 1, 2])), axis=1).clip(-0.95, 0.95).astype(np.float32)
    soundfile.write(path, samples, rate, format="WAV")
    return samples, rate


def encode(folder: Path, number: int, rng: np.random.Generator) -> tuple[Path, str] | None:
    """Writes a random file, and returns it with how it was made; None if the encoder refuses what was drawn."""
    source = folder.parent / "signal.wav"
    samples, rate = write_signal(source, rng)
    if rng.random() < 0.5:
        form = str(rng.choice(sorted(SNDFILE)))
        codecs = sorted(codec for codec in soundfile.available_subtypes(form) if not codec.startswith(NOT_WRITTEN))
        codec = str(rng.choice(codecs))
        path = folder / f"{number}.{SNDFILE[form]}"
        try:
            soundfile.write(path, samples, rate, format=form, subtype=codec)
        except soundfile.LibsndfileError:
            path.unlink(missing_ok=True)
            return None
        return path, f"{form} {codec}, {rate} Hz, {samples.shape}"
    suffix = str(rng.choice(sorted(FFMPEG)))
    path = folder / f"{number}.{suffix}"
    command = ["ffmpeg", "-v", "error", "-i", str(source), *FFMPEG[suffix].split(), str(path)]
    if subprocess.run(command, capture_output=True, check=False).returncode:
        path.unlink(missing_ok=True)
        return None
    return path, f"{suffix} {FFMPEG[suffix]}, {rate} Hz, {samples.shape}"


def heard(path: Path) -> tuple[Samples, bool]:
    """Returns what FFmpeg decodes, in mono, and whether it says that something is wrong."""
    command = ["ffmpeg", "-v", "error", "-i", str(path), "-map", "0:a:0", *f"-f f32le -ac 1 -ar {RATE} -".split()]
    done = subprocess.run(command, capture_output=True, check=False)
    samples = np.frombuffer(done.stdout[: len(done.stdout) // 4 * 4], np.float32)
    return samples, bool(done.returncode or done.stderr.strip())


def correlation(samples: Samples, others: Samples) -> float:
    """Returns the largest correlation of two signals over shifts of up to `MARGIN_S`."""
    num_samples = min(len(samples), len(others))
    first, second = samples[:num_samples] - samples.mean(), others[:num_samples] - others.mean()
    if num_samples < RATE // 10 or not first.any() or not second.any():
        return 1.0
    size, shift = 2 * num_samples, round(MARGIN_S * RATE)
    products = np.fft.irfft(np.fft.rfft(first, size) * np.fft.rfft(second, size).conj(), size)
    return float(max(products[:shift].max(), products[-shift:].max()) / np.sqrt((first**2).sum() * (second**2).sum()))


def check_files(tmp_path: Path, seed: int, num_files: int, probe: Probe) -> None:
    """Makes random files, prepares them as a folder, and compares each with what FFmpeg hears in it."""
    rng = np.random.default_rng(seed)
    folder = tmp_path / "audio"
    folder.mkdir()
    recipes: dict[str, tuple[str, str]] = {}
    while len(recipes) < num_files:
        if (made := encode(folder, len(recipes), rng)) is not None:
            path, recipe = made
            change = str(rng.choice(sorted(CHANGES)))
            path.write_bytes(CHANGES[change](path.read_bytes(), rng))
            recipes[path.name] = (recipe, change)
    report = prepare_corpus(folder, tmp_path / "all.corpus", PrepareConfig(probe=probe))
    corpus = Corpus.open(report.path)
    rejects = read_jsonl(report.path / "rejected.jsonl")
    places = {Path(corpus.line(i)["recording"]["sources"][0]["source"]).name: i for i in range(len(corpus))}
    faults = []
    for name, (recipe, change) in recipes.items():
        expected, is_damaged = heard(folder / name)
        if name in places:
            try:  # only `probe="decode"` finds damage inside FLAC, and numbers that are none
                found = corpus.load(places[name])[1]
            except AudioError as error:
                is_found_late = name.endswith(".flac") or "FLOAT" in recipe or "DOUBLE" in recipe
                if probe == "decode" or change in INTACT or not is_found_late:
                    faults.append(f"{name}: {error} ({recipe}; {change})")
                continue
            # FFmpeg reads only the first of some joined files, and may leave out what is near noise.
            most = np.inf if is_damaged or change not in INTACT else len(expected) + MARGIN_S * RATE
            least = len(expected) * LEAST_SHARE_OF_DAMAGED if is_damaged else len(expected) - MARGIN_S * RATE
            if change in DAMAGE_INSIDE:  # what is before the damage may be all
                least, most, is_damaged = 1, np.inf, True
            if not least <= len(found) <= most:
                faults.append(f"{name}: {len(found) / RATE:.2f} of {len(expected) / RATE:.2f} s ({recipe}; {change})")
            elif not is_damaged and correlation(found, expected[: len(expected) // (1 + (change == "twice"))]) < 0.8:
                faults.append(f"{name}: other samples ({recipe}; {change})")
        elif change in INTACT and not is_damaged and len(expected) > 0.2 * RATE:
            reject = [row for row in rejects if name in json.dumps(row)]
            faults.append(f"{name}: {reject} ({recipe}; {change})")
    assert not faults, "\n".join([f"seed {seed}", *faults])


@pytest.mark.parametrize(("seed", "probe"), [(0, "all"), (1, "decode")])
def test_what_is_heard_in_a_file_is_a_cut_or_a_reject(tmp_path: Path, seed: int, probe: Probe) -> None:
    check_files(tmp_path, seed, 30, probe)


@pytest.mark.slow
def test_what_is_heard_in_many_more_files_is_a_cut_or_a_reject(tmp_path: Path) -> None:
    for seed in np.random.default_rng().integers(1 << 32, size=10).tolist():
        (tmp_path / str(seed)).mkdir()
        check_files(tmp_path / str(seed), seed, 60, "decode" if seed % 2 else "all")
