"""Measures how much noisy audio one core delivers from FLAC, PCM and Opus, with ours, Lhotse and NeMo.

    python benchmarks/bench_feeding.py SPEECH.json NOISE.json [--nemo-python PATH] [--rounds 5] [--quick]

Prints the tables of docs/feeding.md: audio-seconds in a second of one core, what each preset demands of each GPU
(counted by count_operations.py), and the cores and MB/s that follow. Every contestant is measured in every round, in
one process with one thread and no workers, by CPU time, and files are in the page cache; so the cost of handing
batches over from workers is not included. NeMo needs an environment of its own with `nemo_toolkit[asr]==3.0.0`.

All contestants load the same utterances of 1 to 60 s. PCM is the sample bank of `nestdata prepare --pcm` for ours, and
WAV files for the others. Noise is mixed into a quarter of the cuts and other speech into another quarter by ours and
NeMo, which both return clean and noisy audio; Lhotse mixes noise into a quarter of the cuts and returns the sum alone.
"""

import argparse
import json
import math
import platform
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import soundfile
import torch
from count_operations import DENSE_BF16_TFLOPS, PRESETS, UTILISATIONS, Demand, count, print_demands
from peer import run_peer

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

FORMATS = ("FLAC", "PCM", "Opus")
RATE = 16000
LIMITS_S = (1.0, 60.0)
BATCH_S = 240.0
SNR_DB = (-5, 20)
NOISE_SHARE = 0.25

Rates = dict[str, float]
"""Audio-seconds in a second of one core, by contestant such as `ours, FLAC`."""


def main() -> int:
    """Runs the measurements and prints them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("speech", type=Path, help="NeMo manifest of FLAC files")
    parser.add_argument("noise", type=Path)
    parser.add_argument("--nemo-python", help="Python of an environment with NeMo; without it, NeMo is not measured")
    parser.add_argument("--seconds", type=float, default=3.0, help="time of each measurement")
    parser.add_argument("--max-hours", type=float, default=2.0, help="hours of speech that are used")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="one round of one second")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.rounds, arguments.seconds = 1, 1.0
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as directory:
        contestants, nemo, bytes_per_s = _contestants(arguments, Path(directory))
        rounds = []
        for number in range(-1, arguments.rounds):  # the first round fills caches and is discarded
            measured = {name: measure() for name, measure in contestants.items()} | nemo()
            print(f"round {number}: {measured}", file=sys.stderr)
            rounds.append(measured)
    rounds = rounds[1:]
    _print_rates(rounds, bytes_per_s)
    print("\n## Demand of a GPU, audio-seconds a second\n")
    demands = [count(preset) for preset in PRESETS]
    print_demands(demands)
    rates = {name: statistics.median(measured[name] for measured in rounds) for name in rounds[0]}
    for gpu in DENSE_BF16_TFLOPS:
        _print_needs(gpu, demands, rates, bytes_per_s)
    return 0


def _contestants(
    arguments: argparse.Namespace, directory: Path
) -> tuple[dict[str, Callable[[], float]], Callable[[], Rates], dict[str, float]]:
    """Returns the contestants, the measurement of NeMo, and the bytes of a second of audio in each format."""
    manifests, bytes_per_s = _write_formats(arguments.speech, directory, arguments.max_hours)
    prepare_corpus([arguments.noise], directory / "noise.corpus", PrepareConfig(pcm=True))
    noise = Corpus.open(directory / "noise.corpus")
    contestants: dict[str, Callable[[], float]] = {}
    for name in FORMATS:
        dataset = _our_dataset(manifests["FLAC" if name == "PCM" else name], noise, directory, is_pcm=name == "PCM")
        contestants[f"ours, {name}"] = lambda dataset=dataset: _rate(_our_batches(dataset), arguments.seconds)
    for name in FORMATS:
        loader = _LhotseLoader(manifests[name], noise)
        contestants[f"Lhotse, {name}"] = lambda loader=loader: _rate(loader.batches(), arguments.seconds)
    return contestants, lambda: _nemo_rates(arguments, manifests), bytes_per_s


def _write_formats(speech: Path, directory: Path, max_hours: float) -> tuple[dict[str, Path], dict[str, float]]:
    """Writes WAV and Opus copies of the speech, and returns a NeMo manifest and the bytes a second of each format."""
    lines: dict[str, list[str]] = {name: [] for name in FORMATS}
    sizes, total_s = dict.fromkeys(FORMATS, 0), 0.0
    for row in map(json.loads, speech.read_text().splitlines()):
        if not LIMITS_S[0] <= row["duration"] <= LIMITS_S[1]:
            continue
        if total_s > 3600 * max_hours:
            break
        source = speech.parent / row["audio_filepath"]
        samples, rate = soundfile.read(source, dtype="int16")
        if rate != RATE:
            continue
        paths = {"FLAC": source, **{n: directory / n / f"{len(lines[n])}" for n in ("PCM", "Opus")}}
        for name, subtype, kind in (("PCM", "PCM_16", "WAV"), ("Opus", "OPUS", "OGG")):
            paths[name] = paths[name].with_suffix(".wav" if name == "PCM" else ".opus")
            paths[name].parent.mkdir(exist_ok=True)
            soundfile.write(paths[name], samples, RATE, subtype=subtype, format=kind)
        for name, path in paths.items():
            sizes[name] += path.stat().st_size
            lines[name].append(json.dumps({**row, "audio_filepath": str(path.resolve())}))
        total_s += row["duration"]
    manifests = {name: directory / f"{name}.json" for name in FORMATS}
    for name, path in manifests.items():
        path.write_text("\n".join(lines[name]) + "\n")
    return manifests, {name: size / total_s for name, size in sizes.items()}


def _our_dataset(manifest: Path, noise: Corpus, directory: Path, *, is_pcm: bool) -> AudioNoiseDataset:
    path = directory / f"{manifest.stem}{'-pcm' if is_pcm else ''}.corpus"
    prepare_corpus([manifest], path, PrepareConfig(pcm=is_pcm))
    corpus = Corpus.open(path)
    plan = BatchPlan.of(corpus, PlanConfig(max_batch_seconds=BATCH_S, microbatches_per_step=1))
    return AudioNoiseDataset(corpus, plan, NoiseSampler(noise), SpeakerNoiseMixer())


def _our_batches(dataset: AudioNoiseDataset) -> Iterator[float]:
    """Yields the audio-seconds of each batch, as the other iterators do."""
    step = 0
    while True:
        yield float(dataset[step, 0].audio_len.sum()) / RATE
        step += 1


class _LhotseLoader:
    """Lhotse's bucketing sampler and its data set of waveforms, on the same files and noise."""

    def __init__(self, manifest: Path, noise: Corpus) -> None:
        from lhotse import CutSet, Recording

        rows = [json.loads(line) for line in manifest.read_text().splitlines()]
        recordings = [Recording.from_file(row["audio_filepath"], recording_id=str(i)) for i, row in enumerate(rows)]
        self._cuts = CutSet.from_cuts(recording.to_cut() for recording in recordings)
        self._noise = CutSet.from_cuts(noise[index] for index in range(len(noise)))

    def batches(self) -> Iterator[float]:
        from lhotse.dataset import DynamicBucketingSampler
        from lhotse.dataset.cut_transforms import CutMix
        from lhotse.dataset.unsupervised import UnsupervisedWaveformDataset

        mix = CutMix(self._noise, snr=SNR_DB, p=NOISE_SHARE, preserve_id=True)
        dataset = UnsupervisedWaveformDataset(collate=True)
        for epoch in range(1 << 20):
            sampler = DynamicBucketingSampler(
                self._cuts, max_duration=BATCH_S, shuffle=True, num_buckets=10, drop_last=False, seed=epoch
            )
            for cuts in sampler:
                yield float(dataset[mix(cuts)]["audio_lens"].sum()) / RATE


def _nemo_rates(arguments: argparse.Namespace, manifests: dict[str, Path]) -> Rates:
    if not arguments.nemo_python:
        return {}
    script = Path(__file__).parent / "peers" / "nemo_loading.py"
    paths = [str(manifests[name]) for name in FORMATS]
    # The first manifest is measured twice: the first time includes the imports of NeMo's data set.
    command = [arguments.nemo_python, str(script), paths[0], str(arguments.noise), "--more-speech", *paths]
    lines = run_peer([*command, "--seconds", str(arguments.seconds)]).splitlines()
    found = [json.loads(line)["audio_s_per_core_s"] for line in lines if line.startswith("{")][1:]
    return {f"NeMo, {name}": rate for name, rate in zip(FORMATS, found, strict=True)}


def _rate(batches: Iterator[float], seconds: float) -> float:
    """Returns the audio-seconds that arrive in a second of CPU time, after the first batch."""
    next(batches)
    started, audio_s = time.process_time(), 0.0
    while time.process_time() - started < seconds:
        audio_s += next(batches)
    return audio_s / (time.process_time() - started)


def _print_rates(rounds: list[Rates], bytes_per_s: dict[str, float]) -> None:
    print(f"# Feeding\n\nMade by `benchmarks/bench_feeding.py`, {len(rounds)} rounds, soundfile ", end="")
    print(f"{soundfile.__version__} with libsndfile {soundfile.__libsndfile_version__}, {platform.machine()}.\n")
    print("## Audio-seconds in a second of one core\n")
    print("| contestant | median | minimum | maximum | ours over it, median | kB per audio-s |")
    print("|---|---|---|---|---|---|")
    for name in rounds[0]:
        values, kind = [measured[name] for measured in rounds], name.split(", ")[1]
        ratio = statistics.median(measured[f"ours, {kind}"] / measured[name] for measured in rounds)
        cells = " | ".join(f"{value:,.0f}" for value in (statistics.median(values), min(values), max(values)))
        print(f"| {name} | {cells} | {ratio:.2f} | {bytes_per_s[kind] / 1000:.1f} |")


def _print_needs(gpu: str, demands: list[Demand], rates: Rates, bytes_per_s: dict[str, float]) -> None:
    share = UTILISATIONS[0]
    needed = [demand.audio_s_per_s(gpu, share) for demand in demands]
    print(f"\n### One {gpu} at {100 * share:.0f} %\n")
    print("| | " + " | ".join(demand.preset for demand in demands) + " |")
    print("|---|" + "---|" * len(demands))
    for name, rate in rates.items():
        print(f"| cores, {name} | " + " | ".join(f"{math.ceil(each / rate):,}" for each in needed) + " |")
    for name in FORMATS:
        print(f"| MB/s, {name} | " + " | ".join(f"{each * bytes_per_s[name] / 1e6:,.0f}" for each in needed) + " |")


if __name__ == "__main__":
    sys.exit(main())
