"""Pretrains on recorded speech, then scores the encoder with linear probes for language and for speaker.

    python -m benchmarks run probe REAL_SPEECH OUTPUT [--minutes 30] [--results FILE.md]

REAL_SPEECH contains speech.json and noise.json (NeMo lines with `lang` and `speaker`). A hash of the audio path selects
one utterance in five for the held-out side. Encoder and probe are trained on the other utterances, and scored on the
held-out side. The commands are as a user types them. If OUTPUT already contains a run, the script probes it without
training again.
"""

import hashlib
import json
import shlex
import sys
from pathlib import Path
from typing import Any

import numpy as np
import soundfile

from benchmarks.harness.arguments import benchmark_parser
from benchmarks.harness.children import run_command
from benchmarks.harness.report import Report, machine, versions
from benchmarks.learning.pretraining import fit_command, read_lines, write_lines
from nestdata import Corpus
from nestmodel import Estimate
from nestmodel.evaluate.error_rates import percent

FEW = "10 training utterances per class"
RANDOMISED = "random level and frequency response"
PROBES = {
    "language": ("probe.json", "--label language"),
    f"language, {FEW}": ("probe.json", "--label language --train-per-class 10"),
    f"language, {RANDOMISED}": ("randomised.json", "--label language"),
    "speaker": ("probe.json", "--label speaker"),
    f"speaker, {FEW}": ("probe.json", "--label speaker --train-per-class 10"),
    f"speaker, {RANDOMISED}": ("randomised.json", "--label speaker"),
}
QUICK = None


def main() -> int:
    """Trains unless there is a run, probes it, and writes the results."""
    parser = benchmark_parser(__doc__)
    parser.add_argument("real_speech", type=Path)
    parser.add_argument("output", type=Path)
    parser.add_argument("--minutes", type=int, default=30)
    arguments = parser.parse_args()
    real, output = arguments.real_speech.absolute(), arguments.output.absolute()
    output.mkdir(parents=True, exist_ok=True)
    if not (output / "run").exists():
        _split(real)
        for command in _commands(real, arguments.minutes):
            run_command(command, output, echo=True)
    if not (real / "randomised.json").exists():
        _randomise(real)
    found = {name: _probe(real, output, number, *probe) for number, (name, probe) in enumerate(PROBES.items())}
    _print(arguments.results, real, output, arguments.minutes, found)
    return 0


def _split(real: Path) -> None:
    """Writes the manifest for pretraining, and the manifest for probes: all lines with their side of the split."""
    lines = read_lines(real / "speech.json")
    for line in lines:
        digest = hashlib.blake2b(line["audio_filepath"].encode(), digest_size=4).digest()
        line["split"] = "held out" if int.from_bytes(digest, "little") % 5 == 0 else "pretrain"
    write_lines(real / "pretrain.json", [line for line in lines if line["split"] == "pretrain"])
    write_lines(real / "probe.json", lines)


def _randomise(real: Path) -> None:
    """Writes every utterance with a random level and a random, smooth frequency response of its own."""
    rows = read_lines(real / "probe.json")
    (real / "randomised").mkdir(exist_ok=True)
    for row in rows:
        rng = np.random.default_rng(list(row["audio_filepath"].encode()))
        samples, rate = soundfile.read(real / row["audio_filepath"], dtype="float32", always_2d=True)
        spectrum = np.fft.rfft(samples[:, 0])
        frequencies = np.geomspace(60, rate / 2, 10)
        gain_db = np.interp(np.linspace(0, rate / 2, len(spectrum)), frequencies, rng.normal(0, 4, len(frequencies)))
        filtered = np.fft.irfft(spectrum * 10 ** ((gain_db + rng.uniform(-10, 10)) / 20), len(samples))
        row["audio_filepath"] = f"randomised/{row['audio_filepath'].replace('/', '-')}"
        peak = max(1.0, float(np.abs(filtered).max()) / 0.99)
        soundfile.write(real / row["audio_filepath"], filtered / peak, rate, format="FLAC")
    write_lines(real / "randomised.json", rows)


def _commands(real: Path, minutes: int) -> list[str]:
    return [
        f"nestdata prepare {shlex.quote(str(real / 'pretrain.json'))} -o pretrain.corpus --max-seconds 30 --overwrite",
        f"nestdata prepare {shlex.quote(str(real / 'noise.json'))} -o noise.corpus --pcm --overwrite",
        fit_command("pretrain.corpus", minutes),
    ]


def _probe(real: Path, output: Path, number: int, manifest: str, options: str) -> dict[str, Any]:
    run_command(
        f"nestmodel probe label run/version_0/checkpoints/last.ckpt {shlex.quote(str(real / manifest))} {options} "
        f"--held-out-where 'split=held out' -o probe-{number} --overwrite",
        output,
        echo=True,
    )
    found: dict[str, Any] = json.loads((output / f"probe-{number}" / "probe.json").read_text(encoding="utf-8"))
    return found


def _print(results: Path | None, real: Path, output: Path, minutes: int, found: dict[str, dict[str, Any]]) -> None:
    pretrain = Corpus.open(output / "pretrain.corpus")
    report = Report(
        f"What an encoder knows after {minutes} minutes",
        __file__,
        f"one run, {machine()}, {versions('torch', 'pytorch-lightning', 'scikit-learn')}.",
        results=results,
    )
    report.text(f"""Encoder and probe were trained on {len(pretrain)} utterances, {pretrain.hours:.2f} h (the probe on
        those that have the label). They are scored on one utterance in five, which neither has seen. Accuracy in %,
        with the 95 % interval in brackets. Pooling and classifier are the same for all features: mean and standard
        deviation over an utterance, logistic regression. The batch norm of the untrained encoder is calibrated on the
        training utterances.""")
    report.markdown("".join(f"    {command}\n" for command in _commands(Path(real.name), minutes)))
    columns = ("probe", "classes, chance", "training, held out", "trained", "untrained", "log mel")
    report.table(columns, (_row(name, probe) for name, probe in found.items()))
    report.text("""For encoders, all layers are used together. The log-mel statistics contain the level and the
        frequency response of a recording, which are normalised away before the encoder, and most speakers and languages
        here were recorded in a place of their own. With a random level (within 10 dB) and a random, smooth frequency
        response (4 dB) for each utterance, the recording conditions carry no information about the label.""")


def _row(name: str, probe: dict[str, Any]) -> list[str]:
    return [
        name,
        f"{len(probe['classes'])}, {100 * probe['chance']['accuracy']:.1f}",
        f"{probe['num_train']}, {probe['num_held_out']}",
        *(
            percent(Estimate(score["accuracy"], score["low"], score["high"]))
            for score in (probe["trained"], probe["untrained"], probe["log_mel"])
        ),
    ]


if __name__ == "__main__":
    sys.exit(main())
