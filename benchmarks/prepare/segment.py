"""Compares cutting at pauses with windows of one length and with Silero VAD's own segments, on joined recordings.

    python -m benchmarks run segment --speech SPEECH.json ... --noise NOISE.json ... [--recordings 18] [--quick]

Prints Markdown. The manifests are NeMo's. Each recording is joined from utterances in random order. Between them are
pauses of 0.2 to 1 s, or noise, or music; all of it has a background of noise. Lines of the noise manifest that are
longer than a minute count as music. The truth is known from the joining: where each utterance begins and ends (without
the silence at the ends of its file), and which frames of it are audible.

Intervals are percentiles of a bootstrap over recordings, 95 %. Speed is by CPU time.
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path

import numpy as np
import soundfile
import torch
from numpy.typing import NDArray

from benchmarks.harness.arguments import benchmark_parser
from benchmarks.harness.report import Report, machine, versions
from benchmarks.harness.rounds import ratios, run_rounds
from nestdata import Corpus, PrepareConfig, SegmentConfig, prepare_corpus

QUICK = None
RATE = 16000
FRAME_SAMPLES = 512
WINDOWS_S = (15.0, 30.0)
SNRS_DB = (30.0, 20.0, 10.0)
# What stands between two utterances: probability, shortest and longest duration in seconds, source.
GAPS = ((0.70, 0.2, 1.0, "pause"), (0.15, 1.5, 8.0, "noise"), (0.15, 4.0, 20.0, "music"))
# Level of noise and music between utterances, in dB relative to speech.
GAP_LEVEL_DB = (-15.0, 0.0)
# Frames of an utterance within this range of its loudest ones are audible.
AUDIBLE_DB = 30.0
AUDIBLE_FRAME = RATE // 50
# An edge this near to the end of an utterance is not inside it.
EDGE_S = 0.1
NUM_RESAMPLES = 2000
Audio = NDArray[np.float32]
Spans = NDArray[np.float64]


@dataclass(frozen=True)
class Recording:
    """A recording with its truth."""

    path: Path
    seconds: float
    utterances: Spans
    """Start and end of each utterance in seconds, shape (num_utterances, 2)."""

    is_audible: NDArray[np.bool_]
    """Whether speech is audible in each frame of 20 ms."""


@dataclass(frozen=True)
class Score:
    """Counts of one method on one recording."""

    edges: int
    edges_in_utterance: int
    edges_in_audible_speech: int
    speech_s: float
    speech_lost_s: float
    other_s: float
    other_kept_s: float
    lengths_s: tuple[float, ...]


def main() -> int:
    """Runs the measurements and prints them."""
    parser = benchmark_parser(__doc__, rounds=5, quick={"recordings": 3, "minutes": 2.0})
    parser.add_argument("--speech", type=Path, nargs="+", required=True, help="NeMo manifests of utterances")
    parser.add_argument("--noise", type=Path, nargs="+", required=True, help="NeMo manifests of noise and music")
    parser.add_argument("--recordings", type=int, default=18, help="number of recordings [18]")
    parser.add_argument("--minutes", type=float, default=4.0, help="length of each one [4]")
    # The defaults of `--segment` were chosen on the recordings of seed 0.
    parser.add_argument("--seed", type=int, default=1, help="seed of the recordings [1]")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    report = Report(
        "Cuts at pauses against windows of one length",
        __file__,
        f"{versions('torch', 'silero-vad')}, {arguments.recordings} recordings of {arguments.minutes:g} minutes, one "
        f"thread, {machine()}. Speed: medians of {arguments.rounds} rounds; `prepare` runs once.",
        results=arguments.results,
    )
    with tempfile.TemporaryDirectory() as temporary:
        recordings = _recordings(arguments, Path(temporary) / "talks")
        cuts, cpu_s = _cuts(Path(temporary), recordings)
        _print_scores(report, recordings, cuts)
        _print_speed(report, recordings, cpu_s, arguments.rounds)
    return 0


def _recordings(arguments: argparse.Namespace, folder: Path) -> list[Recording]:
    folder.mkdir()
    random = np.random.default_rng(arguments.seed)
    speech = _files(arguments.speech)
    noise = [(path, soundfile.info(path).duration) for path in _files(arguments.noise)]
    gaps = {
        "music": [path for path, seconds in noise if seconds > 60],
        "noise": [path for path, seconds in noise if 1.0 <= seconds <= 60],
    }
    if not all(gaps.values()):
        sys.exit("--noise needs recordings of 1 to 60 s (noise) and of more than a minute (music)")
    seconds = 60 * arguments.minutes
    return [
        _recording(folder / f"{number:03d}.flac", speech, gaps, seconds, SNRS_DB[number % len(SNRS_DB)], random)
        for number in range(arguments.recordings)
    ]


def _files(manifests: list[Path]) -> list[Path]:
    return [
        manifest.parent / json.loads(line)["audio_filepath"]
        for manifest in manifests
        for line in manifest.read_text().splitlines()
        if line
    ]


def _recording(
    path: Path,
    speech: list[Path],
    gaps: dict[str, list[Path]],
    seconds: float,
    snr_db: float,
    random: np.random.Generator,
) -> Recording:
    parts: list[Audio] = []
    spans: list[tuple[int, int]] = []
    audible: list[NDArray[np.bool_]] = []
    position, level = 0, 0.05
    while position < seconds * RATE:
        gap = _gap(gaps, level, random)
        utterance = _utterance(speech, level, random)
        # Whole frames, so that audible frames need no shift.
        gap = gap[: len(gap) // AUDIBLE_FRAME * AUDIBLE_FRAME]
        frames = utterance[: len(utterance) // AUDIBLE_FRAME * AUDIBLE_FRAME].reshape(-1, AUDIBLE_FRAME)
        utterance = frames.reshape(-1)
        parts += [gap, utterance]
        spans.append((position + len(gap), position + len(gap) + len(utterance)))
        decibels = 10 * np.log10(np.square(frames).mean(axis=1) + 1e-12)
        audible += [np.zeros(len(gap) // AUDIBLE_FRAME, bool), decibels > np.percentile(decibels, 95) - AUDIBLE_DB]
        position = spans[-1][1]
    samples = np.concatenate(parts)
    background = _looped(_drawn(gaps["noise"], random), len(samples), random)
    samples = samples + _at_level(background, level * 10 ** (-snr_db / 20))
    soundfile.write(path, samples / max(1.0, float(np.abs(samples).max())), RATE)
    return Recording(path, len(samples) / RATE, np.array(spans) / RATE, np.concatenate(audible))


def _gap(gaps: dict[str, list[Path]], level: float, random: np.random.Generator) -> Audio:
    kind = random.choice(len(GAPS), p=[gap[0] for gap in GAPS])
    _, shortest, longest, name = GAPS[kind]
    num_samples = round(RATE * random.uniform(shortest, longest))
    if name == "pause":
        return np.zeros(num_samples, np.float32)
    audio = _looped(_drawn(gaps[name], random), num_samples, random)
    return _at_level(audio, level * 10 ** (random.uniform(*GAP_LEVEL_DB) / 20))


def _utterance(speech: list[Path], level: float, random: np.random.Generator) -> Audio:
    """Returns an utterance of at least half a second, without the silence at its ends."""
    while True:
        samples = _drawn(speech, random)
        frames = samples[: len(samples) // AUDIBLE_FRAME * AUDIBLE_FRAME].reshape(-1, AUDIBLE_FRAME)
        powers = np.square(frames).mean(axis=1)
        level_of_speech = np.percentile(powers, 95) if len(powers) else 0.0
        audible = np.flatnonzero(powers > level_of_speech * 10 ** (-AUDIBLE_DB / 10))
        if len(audible) and audible[-1] - audible[0] >= 25:
            return _at_level(frames[audible[0] : audible[-1] + 1].reshape(-1), level)


def _drawn(paths: list[Path], random: np.random.Generator) -> Audio:
    samples, rate = soundfile.read(paths[random.integers(len(paths))], dtype="float32", always_2d=True)
    if rate != RATE:
        sys.exit(f"the audio must have a rate of {RATE} Hz, not {rate}")
    return np.ascontiguousarray(samples[:, 0])


def _looped(samples: Audio, num_samples: int, random: np.random.Generator) -> Audio:
    return np.resize(np.roll(samples, -int(random.integers(len(samples)))), num_samples)


def _at_level(samples: Audio, level: float) -> Audio:
    return (samples * (level / max(1e-6, float(np.sqrt(np.square(samples).mean()))))).astype(np.float32)


def _cuts(directory: Path, recordings: list[Recording]) -> tuple[dict[str, list[Spans]], dict[str, float]]:
    """Returns the cuts of each method, by recording, and the CPU time of each method in seconds."""
    configs = {f"windows of up to {seconds:g} s": PrepareConfig(window_seconds=seconds) for seconds in WINDOWS_S}
    configs["`--segment vad`"] = PrepareConfig(segment=SegmentConfig())
    cuts, cpu_s = dict[str, list[Spans]](), dict[str, float]()
    for number, (name, config) in enumerate(configs.items()):
        before = time.process_time()
        report = prepare_corpus([directory / "talks"], directory / f"{number}.corpus", config)
        cpu_s[name] = time.process_time() - before
        cuts[name] = _spans_of(Corpus.open(report.path), recordings)
    cuts["`get_speech_timestamps_sequence` of silero-vad"] = [_own_segments(recording) for recording in recordings]
    return cuts, cpu_s


def _spans_of(corpus: Corpus, recordings: list[Recording]) -> list[Spans]:
    spans: dict[str, list[tuple[float, float]]] = {str(recording.path): [] for recording in recordings}
    for index in range(len(corpus)):
        line = corpus.line(index)
        spans[line["recording"]["sources"][0]["source"]].append((line["start"], line["start"] + line["duration"]))
    return [np.array(sorted(each)).reshape(-1, 2) for each in spans.values()]


def _own_segments(recording: Recording) -> Spans:
    from silero_vad import get_speech_timestamps_sequence, load_silero_vad

    samples = soundfile.read(recording.path, dtype="float32")[0]
    found = get_speech_timestamps_sequence(samples, load_silero_vad(sequence=True), max_speech_duration_s=30.0)
    return np.array([(each["start"] / RATE, each["end"] / RATE) for each in found]).reshape(-1, 2)


def _score(recording: Recording, cuts: Spans) -> Score:
    inner = recording.utterances + np.array([EDGE_S, -EDGE_S])
    edges = cuts.reshape(-1)
    is_inside = [bool(((inner[:, 0] < edge) & (edge < inner[:, 1])).any()) for edge in edges]
    frame_s = AUDIBLE_FRAME / RATE
    last = len(recording.is_audible) - 1
    audible = [
        inside and recording.is_audible[min(last, int(edge / frame_s))]
        for inside, edge in zip(is_inside, edges, strict=True)
    ]
    middles = (np.arange(last + 1, dtype=np.float64) + 0.5) * frame_s
    in_cut, in_utterance = _is_in(middles, cuts), _is_in(middles, recording.utterances)
    return Score(
        edges=len(edges),
        edges_in_utterance=sum(is_inside),
        edges_in_audible_speech=sum(map(bool, audible)),
        speech_s=frame_s * int(recording.is_audible.sum()),
        speech_lost_s=frame_s * int((recording.is_audible & ~in_cut).sum()),
        other_s=frame_s * int((~in_utterance).sum()),
        other_kept_s=frame_s * int((~in_utterance & in_cut).sum()),
        lengths_s=tuple((cuts[:, 1] - cuts[:, 0]).tolist()),
    )


def _is_in(times: NDArray[np.float64], spans: Spans) -> NDArray[np.bool_]:
    """Returns whether each time is inside a span; the spans are ordered and disjoint."""
    after = np.searchsorted(spans[:, 0], times, "right")
    before_end = times < np.append(-np.inf, spans[:, 1])[after]
    return np.asarray((after > 0) & before_end)


def _print_scores(report: Report, recordings: list[Recording], cuts: dict[str, list[Spans]]) -> None:
    hours = sum(recording.seconds for recording in recordings) / 3600
    speech = sum(float(np.diff(recording.utterances).sum()) for recording in recordings) / 3600
    num_utterances = sum(len(recording.utterances) for recording in recordings)
    report.text(f"{num_utterances} utterances, {speech:.2f} of {hours:.2f} h. Shares in %, with 95 % intervals.")
    columns = ["edges inside an utterance", "edges in audible speech", "audible speech lost", "non-speech kept"]
    columns += ["cuts", "median length, s", "cuts of 5 to 30 s"]
    scores = {name: [_score(*each) for each in zip(recordings, spans, strict=True)] for name, spans in cuts.items()}
    report.table(["cuts", *columns], (_row(name, found) for name, found in scores.items()))
    report.text("The same for `--segment vad`, by signal-to-noise ratio of the background:")
    by_snr = {snr_db: scores["`--segment vad`"][number :: len(SNRS_DB)] for number, snr_db in enumerate(SNRS_DB)}
    report.table(["background, dB", *columns], (_row(f"{snr_db:g}", some) for snr_db, some in by_snr.items() if some))


def _row(name: str, scores: list[Score]) -> list[str]:
    lengths = [length for score in scores for length in score.lengths_s]
    return [
        name,
        _share(scores, lambda score: score.edges_in_utterance, lambda score: score.edges),
        _share(scores, lambda score: score.edges_in_audible_speech, lambda score: score.edges),
        _share(scores, lambda score: score.speech_lost_s, lambda score: score.speech_s),
        _share(scores, lambda score: score.other_kept_s, lambda score: score.other_s),
        str(len(lengths)),
        f"{statistics.median(lengths):.1f}",
        f"{100 * sum(5 <= round(length, 3) <= 30 for length in lengths) / len(lengths):.0f}",
    ]


def _share(scores: list[Score], part: Callable[[Score], float], whole: Callable[[Score], float]) -> str:
    parts, wholes = np.array([part(score) for score in scores]), np.array([whole(score) for score in scores])
    drawn = np.random.default_rng(1).integers(len(scores), size=(NUM_RESAMPLES, len(scores)))
    low, high = np.percentile(parts[drawn].sum(axis=1) / wholes[drawn].sum(axis=1), [2.5, 97.5])
    return f"{100 * parts.sum() / wholes.sum():.1f} ({100 * low:.1f} to {100 * high:.1f})"


def _print_speed(report: Report, recordings: list[Recording], cpu_s: dict[str, float], num_rounds: int) -> None:
    total = sum(recording.seconds for recording in recordings)
    report.section("Speed")
    report.text("Seconds of audio for each second of one core. The detectors read the same three minutes in memory.")
    samples = np.concatenate([soundfile.read(each.path, dtype="float32")[0] for each in recordings[:2]])[: 180 * RATE]
    samples = samples[: len(samples) // FRAME_SAMPLES * FRAME_SAMPLES]
    detectors = _detectors()
    contestants = {name: partial(_speed, detector, samples) for name, detector in detectors.items()}
    rounds = run_rounds(contestants, num_rounds)
    package = next(iter(detectors))
    rows = []
    for name in detectors:
        speeds = [each[name] for each in rounds]
        spread = f"{min(speeds):,.0f} to {max(speeds):,.0f}"
        times = f"{statistics.median(ratios(rounds, name, package)):.1f}"
        rows.append([name, f"{statistics.median(speeds):,.0f}", spread, times])
    rows += [[f"`prepare` of FLAC, {name} (once)", f"{total / used_s:,.0f}", "", ""] for name, used_s in cpu_s.items()]
    report.table(["work", "median", "lowest to highest", "times the speed of the first"], rows)
    outputs = [detector(samples) for detector in detectors.values()]
    errors = [float(np.abs(first - second).max()) for first, second in pairwise(outputs)]
    report.text(f"Largest difference between the probabilities of two detectors in this order: {max(errors):.1e}.")


def _detectors() -> dict[str, Callable[[Audio], Audio]]:
    """Returns the detectors of the package; each computes the probabilities of all frames."""
    from silero_vad import load_silero_vad

    single, sequence = load_silero_vad(onnx=True), load_silero_vad(sequence=True)

    def frame_by_frame(samples: Audio) -> Audio:
        single.reset_states()
        blocks = torch.from_numpy(samples).split(FRAME_SAMPLES)
        return np.array([single(block[None], RATE).item() for block in blocks], np.float32)

    return {
        "silero-vad, ONNX, frame by frame": frame_by_frame,
        "silero-vad, ONNX, sequences (used here)": lambda samples: sequence.audio_forward(samples),
    }


def _speed(detector: Callable[[Audio], Audio], samples: Audio) -> float:
    before = time.process_time()
    detector(samples)
    return len(samples) / RATE / (time.process_time() - before)


if __name__ == "__main__":
    sys.exit(main())
