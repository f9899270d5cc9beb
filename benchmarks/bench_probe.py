"""Pretrains on recorded speech, then asks what the encoder learned: a linear probe for language and for voice.

    python benchmarks/bench_probe.py REAL_SPEECH OUTPUT [--minutes 30] [--results benchmarks/results/NAME]

REAL_SPEECH holds speech.json and noise.json (NeMo lines with `lang` and `speaker`). A hash of its path puts one of five
utterances aside; encoder and probe are trained on the others alone, and scored on those put aside. The commands are the
ones a user types. A run that is already in OUTPUT is only probed.
"""

import argparse
import hashlib
import json
import os
import platform
import shlex
import shutil
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import soundfile
from bench_learning import SETTINGS, environment

from nestdata import Corpus

FEW = "10 utterances of each to learn from"
DRAWN = "level and colour drawn"
PROBES = {
    "language": ("probe.json", "--label language"),
    f"language, {FEW}": ("probe.json", "--label language --train-per-class 10"),
    f"language, {DRAWN}": ("recoloured.json", "--label language"),
    "voice": ("probe.json", "--label speaker"),
    f"voice, {FEW}": ("probe.json", "--label speaker --train-per-class 10"),
    f"voice, {DRAWN}": ("recoloured.json", "--label speaker"),
}
PICTURES = {FEW: "-few", DRAWN: "-drawn"}


def main() -> int:
    """Runs what is missing, then reports."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("real_speech", type=Path)
    parser.add_argument("output", type=Path)
    parser.add_argument("--minutes", type=int, default=30)
    parser.add_argument("--results", type=Path, default=Path("probe"), help="where NAME.md and NAME-*.png go")
    arguments = parser.parse_args()
    real, output = arguments.real_speech.absolute(), arguments.output.absolute()
    output.mkdir(parents=True, exist_ok=True)
    if not (output / "run").exists():
        _split(real)
        for command in _commands(real, arguments.minutes):
            print("$", command, flush=True)
            subprocess.run(shlex.split(command), cwd=output, check=True, env=environment())
    if not (real / "recoloured.json").exists():
        _recolour(real)
    found = {name: _probe(real, output, number, *probe) for number, (name, probe) in enumerate(PROBES.items())}
    arguments.results.with_suffix(".md").write_text(_report(real, output, arguments.minutes, found))
    for number, name in enumerate(PROBES):
        what, _, how = name.partition(", ")
        picture = f"{arguments.results.name}-{what}{PICTURES.get(how, '')}.png"
        shutil.copy(output / f"probe-{number}" / "probe.png", arguments.results.with_name(picture))
    return 0


def _split(real: Path) -> None:
    """Writes the lines to pretrain on, and all lines with the side they are on, for the probe."""
    lines = [json.loads(line) for line in (real / "speech.json").read_text().splitlines()]
    for line in lines:
        digest = hashlib.blake2b(line["audio_filepath"].encode(), digest_size=4).digest()
        line["split"] = "held out" if int.from_bytes(digest, "little") % 5 == 0 else "pretrain"
    sides = {"pretrain": [line for line in lines if line["split"] == "pretrain"], "probe": lines}
    for name, rows in sides.items():
        (real / f"{name}.json").write_text("".join(json.dumps(row) + "\n" for row in rows))


def _recolour(real: Path) -> None:
    """Writes every utterance with a level and a slowly varying frequency response drawn for it alone."""
    rows = [json.loads(line) for line in (real / "probe.json").read_text().splitlines()]
    (real / "recoloured").mkdir(exist_ok=True)
    for row in rows:
        draws = np.random.default_rng(list(row["audio_filepath"].encode()))
        samples, rate = soundfile.read(real / row["audio_filepath"], dtype="float32", always_2d=True)
        spectrum = np.fft.rfft(samples[:, 0])
        places = np.geomspace(60, rate / 2, 10)
        gain_db = np.interp(np.linspace(0, rate / 2, len(spectrum)), places, draws.normal(0, 4, len(places)))
        coloured = np.fft.irfft(spectrum * 10 ** ((gain_db + draws.uniform(-10, 10)) / 20), len(samples))
        row["audio_filepath"] = f"recoloured/{row['audio_filepath'].replace('/', '-')}"
        peak = max(1.0, float(np.abs(coloured).max()) / 0.99)
        soundfile.write(real / row["audio_filepath"], coloured / peak, rate, format="FLAC")
    (real / "recoloured.json").write_text("".join(json.dumps(row) + "\n" for row in rows))


def _commands(real: Path, minutes: int) -> list[str]:
    overrides = " ".join(f"--{name} {value}" for name, value in SETTINGS.items() if "val_check" not in name)
    return [
        f"nestdata prepare {shlex.quote(str(real / 'pretrain.json'))} -o pretrain.corpus --max-seconds 30 --overwrite",
        f"nestdata prepare {shlex.quote(str(real / 'noise.json'))} -o noise.corpus --pcm --overwrite",
        "nestmodel fit --config demo --data.corpus pretrain.corpus --data.noise noise.corpus "
        f"--trainer.default_root_dir run --trainer.max_time 00:{minutes // 60:02d}:{minutes % 60:02d}:00 {overrides}",
    ]


def _probe(real: Path, output: Path, number: int, manifest: str, options: str) -> dict[str, Any]:
    checkpoint = output / "run" / "version_0" / "checkpoints" / "last.ckpt"
    command = ["nestmodel", "probe", str(checkpoint), str(real / manifest), *options.split()]
    subprocess.run(
        [*command, "--held-out-where", "split=held out", "-o", f"probe-{number}", "--overwrite"],
        cwd=output,
        check=True,
        env=environment(),
    )
    found: dict[str, Any] = json.loads((output / f"probe-{number}" / "probe.json").read_text())
    return found


def _report(real: Path, output: Path, minutes: int, found: dict[str, dict[str, Any]]) -> str:
    pretrain = Corpus.open(output / "pretrain.corpus")
    packages = ", ".join(f"{name} {version(name)}" for name in ("torch", "pytorch-lightning", "scikit-learn"))
    typed = "\n".join(f"    {command}" for command in _commands(Path(real.name), minutes))
    rows = "\n".join(_row(name, probe) for name, probe in found.items())
    return f"""# What an encoder learned in {minutes} minutes

Made by `benchmarks/bench_probe.py` on {os.cpu_count()} CPU cores ({platform.machine()}), {packages}. Encoder and
probe learned from {len(pretrain)} utterances, {pretrain.hours:.2f} h (the probe from those that have the label), and
are scored on others, one of five, which neither has seen. Accuracy in %, in brackets the 95 % interval. All contestants
are pooled and classified alike: mean and deviation over an utterance, logistic regression.

{typed}

| probe | classes, chance | to learn from, held out | trained, all | trained, best layer | untrained, all | log mel |
|---|---|---|---|---|---|---|
{rows}

"All" are the layers side by side. The log-mel statistics see level and colour of a recording, which are normalised away
before the encoder reads anything, and most voices and languages here were recorded in a place of their own. Where level
(within 10 dB) and frequency response (4 dB, slowly varying) are drawn anew for each utterance, they tell nothing.
"""


def _row(name: str, probe: dict[str, Any]) -> str:
    def shown(score: dict[str, float]) -> str:
        return f"{100 * score['accuracy']:.1f} ({100 * score['low']:.1f} to {100 * score['high']:.1f})"

    best = max(range(len(probe["trained"])), key=lambda layer: probe["trained"][layer]["accuracy"])
    cells = [
        name,
        f"{len(probe['classes'])}, {100 * probe['chance']['accuracy']:.1f}",
        f"{probe['num_train']}, {probe['num_held_out']}",
        shown(probe["trained_together"]),
        f"{shown(probe['trained'][best])}, layer {best}",
        shown(probe["untrained_together"]),
        shown(probe["log_mel"]),
    ]
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    sys.exit(main())
