"""Measures how fast libraries decode short and long files of FLAC, MP3 and Opus, and whether their samples are equal.

    python -m benchmarks run decoders FOLDER [--rounds 5] [--quick]

FOLDER holds FLAC files of speech at 16 kHz, which are joined, and encoded again in files of equal length. Prints
Markdown. Every round measures each library once, on the same files, with one thread and a warm page cache. A ratio is
the CPU time of `soundfile.read` divided by that of the library, within a round; the median is printed. Libraries that
are not installed are left out; nothing but miniaudio is needed by the project.

    pip install av torchcodec spdl-io sphn pedalboard
"""

import importlib.util
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import soundfile
import torch
from numpy.typing import NDArray

from benchmarks.harness.arguments import benchmark_parser
from benchmarks.harness.report import Report, machine, versions
from nestdata.audio.decode import load_samples

QUICK = None
RATE = 16000
SECONDS_PER_ROW = 120.0
CODECS: dict[str, dict[str, Any]] = {
    "FLAC 0": {"format": "FLAC", "subtype": "PCM_16", "compression_level": 0.0},
    "FLAC 5": {"format": "FLAC", "subtype": "PCM_16", "compression_level": 0.625},
    "FLAC 8": {"format": "FLAC", "subtype": "PCM_16", "compression_level": 1.0},
    "MP3": {"format": "MP3"},
    "Opus": {"format": "OGG", "subtype": "OPUS"},
}
BASELINE = "soundfile"
PACKAGES = {
    "miniaudio": "miniaudio",
    "PyAV": "av",
    "torchcodec": "torchcodec",
    "SPDL": "spdl-io",
    "sphn": "sphn",
    "Pedalboard": "pedalboard",
}
Decoder = Callable[[str], NDArray[Any]]


def main() -> int:
    """Runs the measurements and prints them."""
    parser = benchmark_parser(__doc__, rounds=5, quick={"rounds": 1, "lengths": [3.5]})
    parser.add_argument("folder", type=Path)
    parser.add_argument("--lengths", type=float, nargs="+", default=[1.0, 3.5, 15.0, 60.0], help="of files, in seconds")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    speech = _speech(arguments.folder)
    decoders = _decoders()
    installed = versions(*(package for name, package in PACKAGES.items() if name in decoders))
    report = Report(
        "Decoders",
        __file__,
        f"medians of {arguments.rounds} rounds, {machine()}, soundfile {soundfile.__version__} "
        f"({soundfile.__libsndfile_version__}), {installed}.",
        results=arguments.results,
    )
    report.text("""Ratio: CPU time of `soundfile.read` divided by that of the library. An asterisk marks samples that
        differ from soundfile's by more than 2^-20, a dash a library that cannot decode the file.""")

    def row(codec: str, seconds: float) -> list[str]:
        with tempfile.TemporaryDirectory() as directory:
            paths = _write(speech, Path(directory), codec, seconds)
            return [codec, f"{seconds:g}", *_row(decoders, paths, arguments.rounds)]

    columns = ["codec", "s per file", "soundfile, µs per file", *list(decoders)[1:]]
    report.table(columns, (row(codec, seconds) for codec in CODECS for seconds in arguments.lengths))
    return 0


def _speech(folder: Path) -> NDArray[np.int16]:
    """Returns the speech of a folder, joined, as 16-bit samples at 16 kHz."""
    parts, num_samples = [], 0
    for path in sorted(folder.rglob("*.flac")):
        samples, rate = soundfile.read(path, dtype="int16")
        if rate == RATE and samples.ndim == 1:
            parts.append(samples)
            num_samples += len(samples)
        if num_samples >= SECONDS_PER_ROW * RATE:
            return np.concatenate(parts)
    raise SystemExit(f"{folder}: less than {SECONDS_PER_ROW:g} s of mono FLAC at {RATE} Hz.")


def _write(speech: NDArray[np.int16], directory: Path, codec: str, seconds: float) -> list[str]:
    """Writes files of equal length and returns their paths."""
    options, size, paths = CODECS[codec], round(seconds * RATE), []
    suffix = "opus" if codec == "Opus" else options["format"].lower()
    for start in range(0, round(SECONDS_PER_ROW * RATE) - size + 1, size):
        path = str(directory / f"{start}.{suffix}")
        soundfile.write(path, speech[start : start + size], RATE, **options)
        paths.append(path)
    return paths


def _row(decoders: dict[str, Decoder], paths: list[str], rounds: int) -> list[str]:
    """Returns the cells of a row: the microseconds of the baseline, and the ratio of every other decoder."""
    expected = decoders[BASELINE](paths[0])
    able = {}
    for name, decode in decoders.items():
        try:
            able[name] = decode, _equal(decode(paths[0]), expected)
        except Exception as error:  # each library has errors of its own
            print(f"{name}: {Path(paths[0]).suffix}: {type(error).__name__}: {str(error)[:200]}", file=sys.stderr)
    times: dict[str, list[float]] = {name: [] for name in able}
    for number in range(-1, rounds):  # the first round fills caches and is discarded
        for name, (decode, _) in able.items():
            started = time.process_time()
            for path in paths:
                decode(path)
            if number >= 0:
                times[name].append((time.process_time() - started) / len(paths))
    cells = [f"{1e6 * statistics.median(times[BASELINE]):.0f}"]
    for name in list(decoders)[1:]:
        if name in able:
            ratio = statistics.median(base / own for base, own in zip(times[BASELINE], times[name], strict=True))
            cells.append(f"{ratio:.2f}{'' if able[name][1] else '*'}")
        else:
            cells.append("-")
    return cells


def _equal(samples: NDArray[Any], expected: NDArray[np.float32]) -> bool:
    samples = samples.reshape(-1)
    if samples.dtype == np.int16:
        samples = samples / np.float32(32768)
    # libsndfile itself decodes an MP3 file to numbers that differ in the last bit from one call to the next.
    return len(samples) == len(expected) and float(np.abs(samples - expected).max()) < 2.0**-20


def _decoders() -> dict[str, Decoder]:
    """Returns the contestants that are installed, the baseline first."""
    decoders: dict[str, Decoder] = {
        BASELINE: lambda path: soundfile.read(path, dtype="float32")[0],
        "soundfile, int16": lambda path: soundfile.read(path, dtype="int16")[0],
        "ours": _ours,
    }
    optional: dict[str, Decoder] = {
        "miniaudio": _miniaudio,
        "PyAV": _pyav,
        "torchcodec": _torchcodec,
        "SPDL": _spdl,
        "sphn": _sphn,
        "Pedalboard": _pedalboard,
    }
    modules = {"PyAV": "av", "SPDL": "spdl"}
    return decoders | {
        name: decode for name, decode in optional.items() if importlib.util.find_spec(modules.get(name, name.lower()))
    }


def _cut(path: str) -> dict[str, Any]:
    """Returns a cut of a whole file, as a corpus holds it."""
    num_samples = _length(path)
    source = {"type": "file", "channels": [0], "source": path}
    recording = {"sources": [source], "sampling_rate": RATE, "duration": num_samples / RATE}
    return {"id": path, "start": 0.0, "duration": num_samples / RATE, "channel": 0, "recording": recording}


_lengths: dict[str, int] = {}


def _length(path: str) -> int:
    """Returns the number of samples of a file; read once, because a corpus knows it."""
    if path not in _lengths:
        _lengths[path] = soundfile.info(path).frames
    return _lengths[path]


def _ours(path: str) -> NDArray[np.float32]:
    return load_samples(_cut(path))


def _miniaudio(path: str) -> NDArray[Any]:
    """Decodes with the documented functions, which copy the samples."""
    import miniaudio

    content = Path(path).read_bytes()
    if path.endswith(".flac"):
        return np.frombuffer(miniaudio.flac_read_s16(content).samples, np.int16)
    return np.frombuffer(miniaudio.mp3_read_f32(content).samples, np.float32)


def _pyav(path: str) -> NDArray[Any]:
    import av

    with av.open(path) as file:
        stream = file.streams.audio[0]
        stream.thread_type = "NONE"
        samples = np.concatenate([frame.to_ndarray() for frame in file.decode(stream)], axis=1)
    return samples


def _torchcodec(path: str) -> NDArray[np.float32]:
    from torchcodec.decoders import AudioDecoder

    samples: NDArray[np.float32] = AudioDecoder(path).get_all_samples().data.numpy()
    return samples


def _spdl(path: str) -> NDArray[Any]:
    import spdl.io

    frames = spdl.io.decode_packets(spdl.io.demux_audio(path), filter_desc=None)
    return np.asarray(spdl.io.to_numpy(spdl.io.convert_frames(frames)))


def _sphn(path: str) -> NDArray[np.float32]:
    import sphn

    samples: NDArray[np.float32] = (sphn.read_opus if path.endswith(".opus") else sphn.read)(path)[0]
    return samples


def _pedalboard(path: str) -> NDArray[np.float32]:
    from pedalboard.io import AudioFile

    with AudioFile(path) as file:
        samples: NDArray[np.float32] = file.read(file.frames)
    return samples


if __name__ == "__main__":
    sys.exit(main())
