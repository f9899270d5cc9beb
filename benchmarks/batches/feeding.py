"""Measures how much noisy audio one core delivers from FLAC, PCM and Opus, with this project, Lhotse and NeMo.

    python -m benchmarks run feeding SPEECH.json NOISE.json [--nemo-python PATH] [--window-s 30] [--quick]

Prints audio-seconds in a second of one core, which README.md cites. Every contestant is measured in every round,
in one process with one thread and no workers, by CPU time, and files are in the page cache; the cost of handing batches
over from workers is not included. NeMo needs an environment of its own with `nemo_toolkit[asr]==3.0.0`. Both of its
loaders are measured: the one with Lhotse's buckets, and AudioNoiseDataset.

All contestants load the same utterances of 1 to 60 s in batches of as much audio; `--window-s` joins the utterances and
cuts them into windows of one length. PCM is the sample bank of `nestdata prepare --pcm` for ours, and WAV files for the
others. Noise is PCM as well, except in a case of its own. Noise is mixed into a quarter of the cuts and other speech
into another quarter by ours and NeMo, which both return clean and noisy audio; NeMo reads noise for every cut. Lhotse
mixes noise into a quarter of the cuts and returns the sum alone.
"""

import argparse
import json
import math
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import lhotse
import numpy as np
import soundfile
import torch
from lhotse import CutSet, Recording
from lhotse.dataset import DynamicBucketingSampler
from lhotse.dataset.cut_transforms import CutMix
from lhotse.dataset.unsupervised import UnsupervisedWaveformDataset
from numpy.typing import NDArray

from benchmarks.harness.arguments import benchmark_parser
from benchmarks.harness.children import PEERS, json_of
from benchmarks.harness.report import Report, machine
from benchmarks.harness.rounds import ratios, run_rounds, spread_cells
from nestdata import (
    AudioNoiseDataset,
    BatchPlan,
    Corpus,
    NoiseSampler,
    PlanConfig,
    PrepareConfig,
    SpeakerNoiseMixer,
    prepare_corpus,
)

FORMATS = {"FLAC": ("FLAC", "PCM_16", ".flac"), "PCM": ("WAV", "PCM_16", ".wav"), "Opus": ("OGG", "OPUS", ".opus")}
"""Format, subtype and extension of soundfile."""

RATE = 16000
LIMITS_S = (1.0, 60.0)
BATCH_S = 240.0
NUM_BUCKETS = 30
SNR_DB = (-5, 20)
NOISE_SHARE = 0.25
QUICK = ["{speech}", "{noise}", "--quick"]
AUGMENTATION = {
    "_target_": "nemo.collections.asr.modules.ssl_modules.MultiSpeakerNoiseAugmentation",
    "prob": 0.5,
    "noise_ratio": 0.5,
    "min_r_speech": -5.0,
    "max_r_speech": 5.0,
    "min_r_noise": -5.0,
    "max_r_noise": 20.0,
    "min_mix_rate": 0.5,
    "max_mix_rate": 0.5,
    "min_num_segments": 1,
    "max_num_segments": 1,
    "min_num_speakers": 1,
    "max_num_speakers": 1,
}


class Case(NamedTuple):
    """The formats in which speech and noise are read."""

    speech: str
    noise: str

    def __str__(self) -> str:
        return self.speech if self.noise == "PCM" else f"{self.speech}, noise {self.noise}"


CASES = (Case("FLAC", "PCM"), Case("PCM", "PCM"), Case("Opus", "PCM"), Case("FLAC", "FLAC"))

Rates = dict[tuple[str, Case], float]
"""Audio-seconds in a second of one core, by contestant and case."""


class Files(NamedTuple):
    """The same speech and noise in all formats."""

    speech: dict[str, Path]
    noise: dict[str, Path]
    num_noises: int
    num_cuts: int
    total_s: float
    bytes_per_s: dict[str, float]


def main() -> int:
    """Runs the measurements and prints them."""
    parser = benchmark_parser(__doc__, rounds=5, quick={"rounds": 1, "seconds": 1.0, "nemo_seconds": 1.0})
    parser.add_argument("speech", type=Path, help="NeMo manifest")
    parser.add_argument("noise", type=Path)
    parser.add_argument("--nemo-python", help="Python of an environment with NeMo; without it, NeMo is not measured")
    parser.add_argument("--seconds", type=float, default=3.0, help="CPU time of each measurement of ours and Lhotse")
    parser.add_argument("--nemo-seconds", type=float, default=10.0, help="CPU time of each measurement of NeMo")
    parser.add_argument("--max-hours", type=float, default=1.0, help="hours of speech that are used")
    parser.add_argument("--window-s", type=float, help="joins the speech and cuts it into windows of this length")
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as directory:
        files = _write(arguments, Path(directory))
        contestants = _contestants(files, Path(directory))
        for make in contestants.values():
            _rate(make(), 0.5)  # fills caches

        def measure() -> Rates:
            ours = {key: _rate(make(), arguments.seconds) for key, make in contestants.items()}
            return ours | _nemo_rates(arguments, files)

        rounds = [found["all"] for found in run_rounds({"all": measure}, arguments.rounds, warm_up=0)]
    _print_rates(arguments, rounds, files)
    return 0


def _write(arguments: argparse.Namespace, directory: Path) -> Files:
    """Writes speech and noise in all formats, each with a NeMo manifest."""
    speech = _utterances(arguments.speech, LIMITS_S, 3600 * arguments.max_hours)
    if arguments.window_s:
        joined = np.concatenate(list(speech))
        length = int(RATE * arguments.window_s)
        speech = iter(joined[: len(joined) // length * length].reshape(-1, length))
    kept = list(speech)
    noise = [samples for samples in _utterances(arguments.noise, (0.0, math.inf), math.inf) if suits_nemo(samples)]
    total_s = sum(map(len, kept)) / RATE
    manifests, bytes_per_s = {}, {}
    for name in FORMATS:
        manifests[name], num_bytes = _write_format(name, kept, directory / f"speech-{name}")
        bytes_per_s[name] = num_bytes / total_s
    noises = {name: _write_format(name, noise, directory / f"noise-{name}")[0] for name in ("FLAC", "PCM")}
    return Files(manifests, noises, len(noise), len(kept), total_s, bytes_per_s)


def _utterances(manifest: Path, limits_s: tuple[float, float], max_s: float) -> Iterator[NDArray[np.int16]]:
    total_s = 0.0
    for row in map(json.loads, manifest.read_text().splitlines()):
        if total_s < max_s and limits_s[0] <= row["duration"] <= limits_s[1]:
            samples, rate = soundfile.read(manifest.parent / row["audio_filepath"], dtype="int16")
            assert rate == RATE, f"{row['audio_filepath']} has {rate} Hz, so that contestants would resample it"
            total_s += len(samples) / RATE
            yield samples


def suits_nemo(noise: NDArray[np.int16]) -> bool:
    """Returns whether NeMo seldom reads crops of this noise again, whose samples are 16-bit integers.

    Unless the sum of the samples is positive, NeMo takes a crop for empty, and reads another one, up to 100 times. The
    sum is positive for half of the crops of most noise, but never for a recording with a negative offset.
    """
    length = 4 * RATE
    sums = noise[: len(noise) // length * length].reshape(-1, length).sum(axis=1, dtype=np.int64)
    return len(sums) == 0 or float((sums > 0).mean()) >= 0.3


def _write_format(name: str, utterances: Iterable[NDArray[np.int16]], directory: Path) -> tuple[Path, int]:
    """Returns a manifest, and the bytes of its files."""
    directory.mkdir()
    kind, subtype, extension = FORMATS[name]
    lines, num_bytes = [], 0
    for number, samples in enumerate(utterances):
        path = directory / f"{number}{extension}"
        soundfile.write(path, samples, RATE, subtype=subtype, format=kind)
        num_bytes += path.stat().st_size
        # With `duration`, NeMo reads crops of noise instead of files; with `sampling_rate`, it reads no headers.
        line = {"audio_filepath": str(path), "duration": len(samples) / RATE, "sampling_rate": RATE}
        lines.append(json.dumps(line) + "\n")
    manifest = directory / "manifest.json"
    manifest.write_text("".join(lines))
    return manifest, num_bytes


def _contestants(files: Files, directory: Path) -> dict[tuple[str, Case], Callable[[], Iterator[float]]]:
    """Returns functions that start endless iterators over the audio-seconds of batches."""
    contestants: dict[tuple[str, Case], Callable[[], Iterator[float]]] = {}
    for case in CASES:
        corpora = []
        for kind, form, manifest in (
            ("speech", case.speech, files.speech[case.speech]),
            ("noise", case.noise, files.noise[case.noise]),
        ):
            path = directory / f"{kind}-{form}.corpus"
            if not path.exists():
                prepare_corpus([manifest], path, PrepareConfig(pcm=form == "PCM"))
            corpora.append(Corpus.open(path))
        speech, noise = corpora
        plan = BatchPlan.of(speech, PlanConfig(max_batch_seconds=BATCH_S, microbatches_per_step=1))
        dataset = AudioNoiseDataset(speech, plan, NoiseSampler(noise), SpeakerNoiseMixer())
        contestants["ours", case] = partial(_our_batches, dataset)
        cuts = [_lhotse_cuts(manifest) for manifest in (files.speech[case.speech], files.noise[case.noise])]
        contestants["Lhotse", case] = partial(_lhotse_batches, *cuts)
    return contestants


def _our_batches(dataset: AudioNoiseDataset) -> Iterator[float]:
    step = 0
    while True:
        yield float(dataset[step, 0].audio_len.sum()) / RATE
        step += 1


def _lhotse_cuts(manifest: Path) -> CutSet:
    rows = [json.loads(line) for line in manifest.read_text().splitlines()]
    recordings = [Recording.from_file(row["audio_filepath"], recording_id=str(i)) for i, row in enumerate(rows)]
    return CutSet.from_cuts(recording.to_cut() for recording in recordings)


def _lhotse_batches(speech: CutSet, noise: CutSet) -> Iterator[float]:
    """Runs Lhotse's bucketing sampler and its data set of waveforms."""
    mix = CutMix(noise, snr=SNR_DB, p=NOISE_SHARE, preserve_id=True)
    dataset = UnsupervisedWaveformDataset(collate=True)
    for epoch in range(1 << 20):
        sampler = DynamicBucketingSampler(
            speech, max_duration=BATCH_S, shuffle=True, num_buckets=NUM_BUCKETS, drop_last=False, seed=epoch
        )
        for cuts in sampler:
            yield float(dataset[mix(cuts)]["audio_lens"].sum()) / RATE


def _nemo_rates(arguments: argparse.Namespace, files: Files) -> Rates:
    if not arguments.nemo_python:
        return {}
    lhotse_loader: dict[str, Any] = {
        "use_lhotse": True,
        "use_bucketing": True,
        "num_buckets": NUM_BUCKETS,
        "batch_duration": BATCH_S,
        # By default, a thread fills a buffer of 20,000 cuts while it is measured. This one is filled before.
        "concurrent_bucketing": False,
        "bucket_buffer_size": 1000,
        "shuffle_buffer_size": 1000,
    }
    own_loader: dict[str, Any] = {"labels": None, "batch_size": round(BATCH_S * files.num_cuts / files.total_s)}
    loaders = {"NeMo, Lhotse loader": lhotse_loader, "NeMo, AudioNoiseDataset": own_loader}
    sections = {(name, case): _section(files, case) | loaders[name] for case in CASES for name in loaders}
    command = [arguments.nemo_python, PEERS / "nemo_loading.py", json.dumps(list(sections.values()))]
    command += ["--seconds", str(arguments.nemo_seconds)]
    return dict(zip(sections, json_of(command, OMP_NUM_THREADS="1"), strict=True))


def _section(files: Files, case: Case) -> dict[str, Any]:
    """Returns the fields of the section `train_ds` of NEST's YAML file that both loaders need."""
    return {
        "manifest_filepath": str(files.speech[case.speech]),
        "noise_manifest": str(files.noise[case.noise]),
        "sample_rate": RATE,
        "shuffle": True,
        "num_workers": 0,
        "min_duration": LIMITS_S[0],
        "max_duration": LIMITS_S[1],
        "batch_augmentor": AUGMENTATION,
    }


def _rate(batches: Iterator[float], seconds: float) -> float:
    """Returns the audio-seconds that arrive in a second of CPU time, after the first batch."""
    next(batches)
    started, audio_s = time.process_time(), 0.0
    while time.process_time() - started < seconds:
        audio_s += next(batches)
    return audio_s / (time.process_time() - started)


def _print_rates(arguments: argparse.Namespace, rounds: list[Rates], files: Files) -> None:
    what = f"windows of {arguments.window_s:g} s" if arguments.window_s else "recorded prompts"
    versions = f"libsndfile {soundfile.__libsndfile_version__}, Lhotse {lhotse.__version__} and NeMo 3.0.0"
    report = Report(
        "Feeding",
        __file__,
        f"{len(rounds)} rounds, {machine()}, {versions}.",
        results=arguments.results,
    )
    report.text(f"""{files.num_cuts:,} {what}, {files.total_s / files.num_cuts:.1f} s on average, and
        {files.num_noises} recordings of real noise, all with 16 bits, in the page cache. One process with one thread
        and no workers for each contestant. In each round, after a first batch, NeMo takes {arguments.nemo_seconds:g} s
        of CPU time, the others take {arguments.seconds:g} s. Ratios within a round.""")
    report.text(f"""Batches have at most {BATCH_S:g} s of audio, with {NUM_BUCKETS} buckets for Lhotse's samplers.
        AudioNoiseDataset has no buckets; its batches have as many utterances as {BATCH_S:g} s have on average. Noise is
        PCM, if nothing else is said: a sample bank for ours, WAV files for the others. NeMo's manifests have durations
        and sampling rates, so that it reads crops of noise and no headers. Noise is left out for all if NeMo would
        often read its crops again, which it does, up to 100 times, unless the sum of the samples is positive.""")
    sizes = ", ".join(f"{name} {size / 1000:.1f} kB" for name, size in files.bytes_per_s.items())
    report.text(f"A second of speech takes: {sizes}.")
    report.section("Audio-seconds in a second of one core")
    rows = []
    for contestant, case in sorted(rounds[0], key=lambda key: CASES.index(key[1])):
        rates = spread_cells([measured[contestant, case] for measured in rounds], ",.0f")
        rows.append([case, contestant, *rates, *spread_cells(ratios(rounds, ("ours", case), (contestant, case)))])
    report.table(
        ["case", "contestant", "median", "minimum", "maximum", "ours over it", "minimum", "maximum"],
        rows,
    )


if __name__ == "__main__":
    sys.exit(main())
