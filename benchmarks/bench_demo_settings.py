"""Compares settings of the demo preset by the speech content that an encoder learns in the same time.

    python benchmarks/bench_demo_settings.py OUTPUT --train train.json --speech speech.json --noise noise.json \
        --group-by scene --minutes 6 --seeds 0,1

TRAIN are transcribed NeMo lines. A fifth of its groups becomes the development side, on which settings are compared;
the test lines of other benchmarks are not touched. Each variant changes one setting of the preset. First the speed of
every variant is measured, one after the other, and gives the number of steps that fit into MINUTES of one core. Then
encoders are pretrained for these steps on SPEECH and on the rest of TRAIN without its texts, one on each core, in a
drawn order: other work on the machine changes no figure from here on. Last, heads of the content probe learn characters
from the frozen layers and are scored on the development side. A run that was interrupted goes on where it ended.
`--quick` checks that everything runs.
"""

import argparse
import hashlib
import json
import os
import platform
import shlex
import shutil
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from functools import reduce
from importlib.metadata import version
from operator import add
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import numpy as np
import torch
from bench_content import write_manifest
from bench_learning import SETTINGS, environment
from blind import draw_once
from kept_settings import keep_settings
from peer import run_peer

from nestdata import Corpus
from nestmodel import load_network
from nestmodel.evaluate.contestants import contestant_reader
from nestmodel.evaluate.ctc_head import StoppingRule, TrainedHead, default_labels_per_frame, fit_head, fits, transcribe
from nestmodel.evaluate.encode import frame_rate_hz
from nestmodel.evaluate.error_rates import ErrorCounts, count_errors, error_difference, error_rate, percent
from nestmodel.evaluate.feature_cache import FeatureCache
from nestmodel.evaluate.sides import open_sides
from nestmodel.evaluate.text import Alphabet
from nestmodel.evaluate.transcripts import split_training
from nestmodel.training.callbacks.curves import read_metrics

CONFIG = "--model.config"
NO_DROPOUT = " ".join(f"{CONFIG}.encoder.{name} 0.0" for name in ("dropout", "dropout_pre_encoder", "dropout_att"))
VARIANTS = {
    "preset": "",
    "80 ms frames": f"{CONFIG}.encoder.subsampling_factor 8",
    "80 ms frames, 64 channels (the preset before)": (
        f"{CONFIG}.encoder.subsampling_factor 8 {CONFIG}.encoder.subsampling_channels 64"
    ),
    "no dropout": NO_DROPOUT,
    "d_model 192": f"{CONFIG}.encoder.d_model 192",
    "6 layers": f"{CONFIG}.encoder.num_layers 6",
    "blocks of 24 frames": f"{CONFIG}.masking.block_size 24 {CONFIG}.masking.prob 0.02",
    "4 codebooks": f"{CONFIG}.quantizer.num_codebooks 4",
    "45 s in a step": "--data.plan.microbatches_per_step 1",
    "twice the learning rate": f"{CONFIG}.optimizer.lr 0.6",
    "clean input": "--data.mix.prob 0.0",
}
SPEED_SECONDS = 20
LEARNING_RATES = (0.02, 0.05)
HEAD_SEEDS = (0, 1, 2)
RULE = StoppingRule(max_epochs=30, patience=30)
DEVELOPMENT_SHARE = 0.2


def main() -> int:
    """Measures speeds, pretrains, scores, and writes the results."""
    arguments = _arguments()
    if arguments.score:
        print(json.dumps(score(arguments.score, arguments.output, arguments.group_by)))
        return 0
    output = arguments.output.absolute()
    output.mkdir(parents=True, exist_ok=True)
    kept = ("train", "speech", "noise", "group_by", "minutes", "seeds", "quick")
    keep_settings(output, {name: str(getattr(arguments, name)) for name in kept})
    prepare(arguments, output)
    variants = list(VARIANTS)[:2] if arguments.quick else list(VARIANTS)
    speeds = {name: measure_speed(output, name) for name in variants}
    seeds = [int(seed) for seed in arguments.seeds.split(",")]
    runs = draw_once(output / "order.json", [(name, seed) for name in variants for seed in seeds])
    cores: SimpleQueue[int] = SimpleQueue()
    for core in sorted(os.sched_getaffinity(0)):
        cores.put(core)

    def make(number: int) -> None:
        core = cores.get()
        os.sched_setaffinity(0, {core})  # of this thread: the processes that it starts inherit it
        try:
            name, seed = runs[number]
            steps = 4 if arguments.quick else round(60 * arguments.minutes * speeds[name])
            make_run(output, number, VARIANTS[name], seed, steps, arguments.group_by)
        finally:
            cores.put(core)

    with ThreadPoolExecutor(cores.qsize()) as pool:
        list(pool.map(make, range(len(runs))))
    results = {
        (name, seed): json.loads((output / f"run-{number}.json").read_text(encoding="utf-8"))
        for number, (name, seed) in enumerate(runs)
    }
    arguments.results.write_text(report(arguments, speeds, results), encoding="utf-8")
    print(arguments.results)
    return 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", type=Path)
    parser.add_argument("--train", type=Path, help="NeMo lines with text")
    parser.add_argument("--speech", type=Path, help="NeMo lines of further speech for pretraining")
    parser.add_argument("--noise", type=Path, help="NeMo lines of noise for pretraining")
    parser.add_argument("--group-by", required=True, help="field of the lines whose values stay on one side")
    parser.add_argument("--minutes", type=float, default=6.0, help="time of pretraining on one core")
    parser.add_argument("--seeds", default="0,1", help="seeds of pretraining")
    parser.add_argument("--results", type=Path, default=Path("demo_settings.md"))
    parser.add_argument("--quick", action="store_true", help="two variants and a few steps, to check the script")
    parser.add_argument("--score", type=Path, metavar="CHECKPOINT", help="internal: score a checkpoint, print JSON")
    arguments = parser.parse_args()
    if not arguments.score and not (arguments.train and arguments.speech and arguments.noise):
        parser.error("give --train, --speech and --noise")
    return arguments


def prepare(arguments: argparse.Namespace, output: Path) -> None:
    """Splits the transcribed lines by group, and prepares all corpora."""
    if (output / "pretrain.corpus").exists():
        return
    write_manifest(arguments.train, output / "all.json")
    rows = [json.loads(line) for line in (output / "all.json").read_text(encoding="utf-8").splitlines()]
    groups = sorted({row[arguments.group_by] for row in rows}, key=lambda one: hashlib.sha256(one.encode()).digest())
    development: set[str] = set()
    while sum(row[arguments.group_by] in development for row in rows) < DEVELOPMENT_SHARE * len(rows):
        development.add(groups[len(development)])
    sides = {
        "development": [row for row in rows if row[arguments.group_by] in development],
        "train": [row for row in rows if row[arguments.group_by] not in development],
    }
    sides["audio_only"] = [{key: row[key] for key in row if key != "text"} for row in sides["train"]]
    for name, lines in sides.items():
        content = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)
        (output / f"{name}.json").write_text(content, encoding="utf-8")
    for name in ("speech", "noise"):
        write_manifest(getattr(arguments, name), output / f"{name}.json")
    for command in (
        "nestdata prepare noise.json -o noise.corpus --pcm",
        "nestdata prepare development.json -o development.corpus",
        "nestdata prepare train.json -o train.corpus",
        "nestdata prepare speech.json audio_only.json -o pretrain.corpus --max-seconds 30",
    ):
        run_peer(shlex.split(command), cwd=output, env=environment(), echo=True)


def measure_speed(output: Path, name: str) -> float:
    """Returns the steps per second of one variant on one core, from an earlier call if there was one."""
    path = output / "speeds.json"
    speeds: dict[str, float] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    if name not in speeds:
        cores = os.sched_getaffinity(0)
        os.sched_setaffinity(0, {min(cores)})
        with tempfile.TemporaryDirectory(dir=output) as directory:
            limit = f"--trainer.max_time 00:00:00:{SPEED_SECONDS} --trainer.log_every_n_steps 1"
            pretrain(output, Path(directory), f"{VARIANTS[name]} {limit}", seed=0)
            steps, _ = read_metrics(Path(directory) / "version_0")["train_loss"]
        os.sched_setaffinity(0, cores)
        speeds[name] = (steps[-1] + 1) / SPEED_SECONDS
        path.write_text(json.dumps(speeds, indent=2) + "\n", encoding="utf-8")
        print(f"{name}: {speeds[name]:.2f} steps per second", flush=True)
    return speeds[name]


def pretrain(output: Path, directory: Path, flags: str, seed: int) -> Path:
    """Returns the last checkpoint of a run on one core."""
    settings = {name: value for name, value in SETTINGS.items() if "val_check" not in name}
    settings |= {"trainer.strategy": "auto", "trainer.devices": 1, "trainer.default_root_dir": directory}
    overrides = " ".join(f"--{name} {value}" for name, value in settings.items())
    command = "nestmodel fit --config demo --data.corpus pretrain.corpus --data.noise noise.corpus"
    run_peer(shlex.split(f"{command} {overrides} --seed_everything {seed} {flags}"), cwd=output, env=environment())
    return directory / "version_0" / "checkpoints" / "last.ckpt"


def make_run(output: Path, number: int, flags: str, seed: int, steps: int, group_by: str) -> None:
    """Pretrains and scores one encoder, unless an earlier call did."""
    path, directory = output / f"run-{number}.json", output / f"run-{number}"
    if path.exists():
        return
    shutil.rmtree(directory, ignore_errors=True)
    checkpoint = pretrain(output, directory, f"{flags} --trainer.max_steps {steps}", seed)
    command: list[str | Path] = [sys.executable, Path(__file__).absolute(), output]
    command += ["--group-by", group_by, "--score", checkpoint]
    path.write_text(run_peer(command, cwd=output, env=environment()), encoding="utf-8")
    print(f"run {number}: done", flush=True)


def score(checkpoint: Path, output: Path, group_by: str) -> dict[str, Any]:
    """Returns the errors of heads on the development side by utterance, and how the heads were trained."""
    torch.set_num_threads(1)
    model = load_network(checkpoint)
    labels_per_frame = default_labels_per_frame(frame_rate_hz(model))
    with tempfile.TemporaryDirectory(dir=output) as name:
        directory = Path(name)
        corpus, other = (Corpus.open(output / f"{side}.corpus") for side in ("train", "development"))
        rate = model.config.features.sampling_rate
        with open_sides(corpus, other, rate, directory, needs_text=True, group_by=group_by) as sides:
            read = contestant_reader("trained", model, seed=0, max_batch_seconds=120.0, device="cpu")
            train, development = (
                FeatureCache.write(
                    directory / f"features-{number}",
                    read(side.corpus, [one.row for one in side.utterances], side.rejects.add),
                )
                for number, side in enumerate(sides)
            )
            usable = [
                one for one in sides[0].utterances if fits(one.text, train.num_frames(one.row) * labels_per_frame)
            ]
            texts = {one.row: one.text for one in usable}
            alphabet = Alphabet.of_texts(texts.values())
            rows = split_training(usable, 0.1, 0)

            def fit(learning_rate: float, seed: int) -> TrainedHead:
                return fit_head(
                    train,
                    texts,
                    alphabet,
                    *rows,
                    labels_per_frame=labels_per_frame,
                    learning_rate=learning_rate,
                    rule=RULE,
                    seed=seed,
                )

            candidates = [fit(one, HEAD_SEEDS[0]) for one in LEARNING_RATES]
            best = min(candidates, key=lambda one: one.error_rate)
            heads = [best, *(fit(best.learning_rate, seed) for seed in HEAD_SEEDS[1:])]
            references = [one.text for one in sides[1].utterances]
            test_rows = [one.row for one in sides[1].utterances]
            counts = [
                count_errors(references, transcribe(one.head, development, alphabet, test_rows), "characters")
                for one in heads
            ]
    return {
        "counts": {name: values.tolist() for name, values in asdict(reduce(add, counts)).items()},
        "learning_rate": best.learning_rate,
        "layer_weights": best.head.layer_weights.tolist(),
        "num_parameters": sum(values.numel() for values in model.encoder.parameters()),
    }


def report(
    arguments: argparse.Namespace, speeds: dict[str, float], results: dict[tuple[str, int], dict[str, Any]]
) -> str:
    """Returns the results as Markdown."""
    counts = {run: _counts(result) for run, result in results.items()}
    totals = {name: reduce(add, (one for run, one in counts.items() if run[0] == name)) for name in speeds}
    first = next(iter(speeds))
    lines = []
    for name, speed in speeds.items():
        seeds = ", ".join(f"{100 * error_rate(one).rate:.1f}" for run, one in counts.items() if run[0] == name)
        mine = [result for run, result in results.items() if run[0] == name]
        difference = "" if name == first else percent(error_difference(totals[name], totals[first]))
        cells = (
            f"{mine[0]['num_parameters'] / 1e6:.1f}",
            f"{60 * arguments.minutes * speed:.0f}",
            percent(error_rate(totals[name])),
            seeds,
            difference,
        )
        lines.append(f"| {name} | {' | '.join(cells)} |")
    table = "\n".join(lines)
    packages = ", ".join(f"{name} {version(name)}" for name in ("torch", "jiwer"))
    settings = " ".join(f"--{name} {value}" for name, value in SETTINGS.items() if "model" in name or "plan" in name)
    return f"""# Settings of the demo preset

Made by `benchmarks/bench_demo_settings.py`{" --quick" if arguments.quick else ""} on {os.cpu_count()} CPU cores \
({platform.machine()}), {packages}.

Each encoder was pretrained for the steps that fit into {arguments.minutes:g} minutes of one core of an idle machine,
with `{settings}`. Seeds of pretraining: {arguments.seeds}; each has heads with {len(HEAD_SEEDS)} seeds, and its own
learning rate of {" and ".join(map(str, LEARNING_RATES))}. Errors in % of the characters of
{len(totals[first].num_reference)} lines of scenes that neither pretraining nor heads have seen; differences in
percentage points, with 95 % bootstrap intervals over these lines.

| one setting changed | parameters of the encoder, millions | steps | CER | by seed | minus the preset |
|---|---|---|---|---|---|
{table}
"""


def _counts(result: dict[str, Any]) -> ErrorCounts:
    return ErrorCounts(**{name: np.array(values) for name, values in result["counts"].items()})


if __name__ == "__main__":
    sys.exit(main())
