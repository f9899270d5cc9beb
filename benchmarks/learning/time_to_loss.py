"""Time until the loss on held-out speakers falls to given levels below the entropy, compared with NeMo 3.0.0.

    python -m benchmarks run time_to_loss REAL_SPEECH OUTPUT --nemo-python PATH [--minutes-ours 12]
        [--minutes-nemo 30] [--seeds 1] [--levels 0.05 0.10 0.15] [--quick] [--results benchmarks/results/NAME]

REAL_SPEECH contains speech.json and noise.json (NeMo lines with `speaker`). Both sides train the demo preset on the
same manifests, from the same weights, with the same schedule of fused AdamW, the same masks, the same numbers in the
settings of the noise, and the same seconds of audio per step. Each has its own loader and trainer on the same cores,
one after the other. For NeMo, a short calibration chooses the fastest of its loaders, ranks and threads. Both sides
save their weights at fixed intervals. Our evaluator then scores all of them on the same held-out speech with the same
masks: with our noise, with NeMo's noise, which NeMo's own code mixes, and clean. Finished parts are kept, so the same
command continues. The script prints Markdown, and writes it and a plot to --results.
"""

import argparse
import hashlib
import json
import os
import shutil
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np
import soundfile
import torch
import yaml
from numpy.typing import NDArray

from benchmarks.harness.arguments import benchmark_parser
from benchmarks.harness.children import PEERS, command_environment, run_peer
from benchmarks.harness.kept_settings import keep_settings
from benchmarks.harness.report import machine, table_text, versions
from benchmarks.harness.repository import commit_line
from benchmarks.learning.parts.curves import SINCE, Curve, below_at, draw, encoded_seconds, speed_row, time_cells
from benchmarks.learning.parts.held_out import held_out_batches, held_out_metrics
from benchmarks.learning.parts.manifests import HELD_OUT, Line, by_speaker, read_lines, write_lines
from nestdata import Corpus
from nestmodel import NestConfig, NestNetwork
from nestmodel.formats.nemo_config import config_to_nemo

QUICK = None
FEW = {"minutes_ours": 1.0, "minutes_nemo": 1.0, "levels": [-1.0, -0.5, -0.25], "saves": 4}


@dataclass(frozen=True)
class Setup:
    """How NeMo is run: its loader, the number of ranks, and the loader processes and threads of each rank."""

    loader: str
    ranks: int
    workers: int
    threads: int

    @property
    def name(self) -> str:
        """Name in the report."""
        ranks = f"{self.ranks} rank{'s' * (self.ranks > 1)}"
        return f"{self.loader}, {ranks}, {self.workers} workers, {self.threads} thread{'s' * (self.threads > 1)}"


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
LIMITS = (1.0, 16.0)
"""Shortest and longest utterance in seconds. NEST's YAML files of NeMo leave out those below 1 s."""

STEP_SECONDS = 64.0
"""Audio of an optimizer step over all ranks, padding included."""

SAMPLING_RATE = 16_000
LR, WARMUP_STEPS = 0.3, 300
CALIBRATION_SECONDS = 30.0
SIDES = ("ours", "NeMo")
SETS = ("our noise", "NeMo's noise", "clean")
"""How the held-out speech is made noisy for scoring."""

SETUPS = (
    *(Setup("Lhotse buckets", *numbers) for numbers in ((2, 0, 1), (1, 0, 2), (1, 1, 1), (1, 1, 2))),
    *(Setup("AudioNoiseDataset", *numbers) for numbers in ((2, 0, 1), (1, 1, 1))),
)


def main() -> int:
    """Trains and scores what is not finished, and writes the report."""
    parser = benchmark_parser(__doc__, quick=FEW)
    parser.set_defaults(results=Path("time_to_loss"))  # NAME.md and NAME.png
    add = parser.add_argument
    add("real_speech", type=Path)
    add("output", type=Path)
    add("--nemo-python", required=True, help="Python of an environment with NeMo")
    add("--minutes-ours", type=float, default=12.0)
    add("--minutes-nemo", type=float, default=30.0)
    add("--seeds", type=int, default=1)
    add("--levels", type=float, nargs="+", default=[0.05, 0.10, 0.15], help="nats below the entropy")
    add("--saves", type=int, default=30, help="saved weights of each run, all of which are scored")
    arguments = parser.parse_args()
    output = arguments.output.absolute()
    output.mkdir(parents=True, exist_ok=True)
    names = ("real_speech", "minutes_ours", "minutes_nemo", "saves", "quick")
    keep_settings(output, {name: str(getattr(arguments, name)) for name in names})
    prepared = once(output / "prepared.json", prepare, arguments.real_speech.absolute(), output)
    setups = SETUPS[:1] if arguments.quick else SETUPS
    if not (output / "batches.pt").exists():
        write_batches(output, arguments, 8 if arguments.quick else None)
    speeds = once(output / "calibration.json", calibrate, output, arguments, setups)
    best = max(setups, key=lambda setup: speeds[setup.name])
    curves: dict[tuple[str, int], Curve] = {}
    for seed in range(arguments.seeds):
        for side in SIDES:
            run = output / f"{side.lower()}-{seed}"
            started = once(run / "run.json", train, output, run, side, seed, arguments, best)
            curves[side, seed] = once(run / "curve.json", score, output, run, seed) | started
    text = report(arguments, prepared, speeds, best, curves)
    arguments.results.with_suffix(".md").write_text(text)
    draw(curves, arguments.levels, arguments.results.with_suffix(".png"))
    print(text)
    return 0


def once(path: Path, make: Callable[..., dict[str, Any]], *arguments: Any) -> dict[str, Any]:
    """Returns the JSON in a file; if it does not exist, calls `make` and writes its result."""
    if not path.exists():
        made = make(*arguments)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(made))
    found: dict[str, Any] = json.loads(path.read_text())
    return found


def config_of(seed: int) -> NestConfig:
    """Returns the model and schedule of both sides."""
    demo = NestConfig.preset("demo")
    return replace(demo, seed=seed, optimizer=replace(demo.optimizer, lr=LR, warmup_steps=WARMUP_STEPS))


def prepare(real: Path, output: Path) -> dict[str, Any]:
    """Writes the manifests that both sides read, and prepares our corpora.

    Returns:
        Seconds that `nestdata prepare` took, and mean duration of the training utterances.
    """
    sides = {
        name: [line for line in lines if name == "noise" or LIMITS[0] <= line["duration"] <= LIMITS[1]]
        for name, lines in by_speaker(real).items()
    }
    sides["noise"] = [
        line for line in sides["noise"] if suits_nemo(soundfile.read(line["audio_filepath"], dtype="int16")[0])
    ]
    seconds = {}
    for name, rows in sides.items():
        assert all("duration" in row for row in rows), "without durations, NeMo reads whole files of noise"
        write_lines(output / f"{name}.json", rows)
        started = time.time()
        command = ["nestdata", "prepare", f"{name}.json", "-o", f"{name}.corpus", "--overwrite"]
        run_peer([*command, *(["--pcm"] if name == "noise" else [])], cwd=output, env=environment(1))
        seconds[name] = time.time() - started
    durations = [row["duration"] for row in sides["train"]]
    return {"seconds": seconds["train"] + seconds["noise"], "mean_duration": sum(durations) / len(durations)}


def suits_nemo(noise: NDArray[np.int16]) -> bool:
    """Returns whether NeMo seldom reads crops of this noise again, whose samples are 16-bit integers.

    Unless the sum of the samples is positive, NeMo takes a crop for empty, and reads another one, up to 100 times. The
    sum is positive for half of the crops of most noise, but never for a recording with a negative offset.
    """
    length = 4 * SAMPLING_RATE
    sums = noise[: len(noise) // length * length].reshape(-1, length).sum(axis=1, dtype=np.int64)
    return len(sums) == 0 or float((sums > 0).mean()) >= 0.3


def calibrate(output: Path, arguments: argparse.Namespace, setups: tuple[Setup, ...]) -> dict[str, float]:
    """Returns the seconds of audio that NeMo trains on per second, by setup."""
    speeds = {}
    for number, setup in enumerate(setups):
        run = output / f"calibration-{number}"
        shutil.rmtree(run, ignore_errors=True)
        train_nemo(output, run, 0, CALIBRATION_SECONDS, 2.0, arguments, setup)
        lines = saved(run)
        took = lines[-1]["time"] - lines[0]["time"] - lines[-1]["saving_s"]
        speeds[setup.name] = setup.ranks * (lines[-1]["audio_s"] - lines[0]["audio_s"]) / took
        print(f"{setup.name}: {speeds[setup.name]:.1f} s of audio per second", file=sys.stderr, flush=True)
    return speeds


def train(
    output: Path, run: Path, side: str, seed: int, arguments: argparse.Namespace, setup: Setup
) -> dict[str, float]:
    """Trains one side, and returns the time at which its process was started."""
    minutes = arguments.minutes_ours if side == "ours" else arguments.minutes_nemo
    print(f"{side}, seed {seed}: {minutes:g} minutes", file=sys.stderr, flush=True)
    shutil.rmtree(run, ignore_errors=True)  # of an interrupted run
    started, interval_s = time.time(), 60 * minutes / arguments.saves
    if side == "ours":
        train_ours(output, run, seed, 60 * minutes, interval_s)
    else:
        train_nemo(output, run, seed, 60 * minutes, interval_s, arguments, setup)
    return {"started": started}


def train_ours(output: Path, run: Path, seed: int, seconds: float, interval_s: float) -> None:
    """Runs `nestmodel fit` with two ranks of one thread, as in held_out_loss.py."""
    settings = {
        "seed": seed,
        "output": str(run),
        "data": {
            "noise": str(output / "noise.corpus"),
            "plan": {"max_batch_seconds": STEP_SECONDS / 2, "microbatches_per_step": 2},
        },
        "model": {"config": {"optimizer": {"lr": LR, "warmup_steps": WARMUP_STEPS}}},
        "trainer": {
            "accelerator": "cpu",
            "strategy": "ddp",
            "devices": 2,
            "max_steps": 10**6,
            "max_time": f"{int(seconds)}s",
            "log_every_n_steps": 10,
            "callbacks": [
                {
                    "class_path": "timed_weights.TimedWeights",
                    "init_args": {"directory": str(run / "weights"), "interval_s": interval_s},
                }
            ],
        },
    }
    (output / "ours.yaml").write_text(yaml.safe_dump(settings), encoding="utf-8")
    command: list[str | Path] = ["nestmodel", "fit", output / "train.corpus"]
    command += ["--config", "demo", "--config", output / "ours.yaml"]
    run_peer(command, cwd=output, env=environment(1), echo=True)


def train_nemo(
    output: Path,
    run: Path,
    seed: int,
    seconds: float,
    interval_s: float,
    arguments: argparse.Namespace,
    setup: Setup,
) -> None:
    """Runs NeMo's training from the weights that our side starts from."""
    run.mkdir(parents=True, exist_ok=True)
    mean = json.loads((output / "prepared.json").read_text())["mean_duration"]
    config = config_of(seed)
    section = config_to_nemo(config) | {"train_ds": train_ds(output, setup, mean, seed)}
    section["optim"]["fused"] = True  # as ours; NeMo passes it on to torch
    (run / "section.json").write_text(json.dumps(section))
    torch.save(NestNetwork(config).state_dict(), run / "initial.pt")
    command = [arguments.nemo_python, PEERS / "nemo_fit.py", run / "section.json", run / "initial.pt", run / "weights"]
    command += ["--ranks", setup.ranks, "--seconds", seconds, "--interval-s", interval_s, "--seed", seed]
    run_peer([str(part) for part in command], env=environment(setup.threads))


def train_ds(output: Path, setup: Setup, mean_duration: float, seed: int) -> dict[str, Any]:
    """Returns the `train_ds` section of NEST's YAML file, with as much audio per step as on our side."""
    rank_seconds = STEP_SECONDS / setup.ranks
    section: dict[str, Any] = {
        "manifest_filepath": str(output / "train.json"),
        "noise_manifest": str(output / "noise.json"),
        "sample_rate": SAMPLING_RATE,
        "shuffle": True,
        "num_workers": setup.workers,
        "pin_memory": False,
        "use_start_end_token": False,
        "trim_silence": False,
        "min_duration": LIMITS[0],
        "max_duration": LIMITS[1],
        "drop_last": True,
        "batch_augmentor": AUGMENTATION,
    }
    if setup.loader == "Lhotse buckets":
        section |= {"use_lhotse": True, "use_bucketing": True, "num_buckets": 30, "batch_duration": rank_seconds}
        # By default, a thread fills a buffer of 20,000 cuts while NeMo trains.
        section |= {"concurrent_bucketing": False, "bucket_buffer_size": 1000, "shuffle_buffer_size": 1000}
        return section | {"seed": seed, "shard_seed": seed}
    return section | {"batch_size": max(1, round(rank_seconds / mean_duration)), "labels": None}


def saved(run: Path) -> list[Line]:
    """Returns the lines that `TimedWeights` wrote."""
    return read_lines(run / "weights" / "saved.jsonl")


def write_batches(output: Path, arguments: argparse.Namespace, num_batches: int | None) -> None:
    """Writes the held-out batches of all sets to `batches.pt`.

    The lengths of NeMo's noisy audio are not used: all of an utterance is scored.
    """
    held_out, noise = (Corpus.open(output / f"{name}.corpus") for name in ("held_out", "noise"))
    ours = held_out_batches(held_out, noise, num_batches)
    torch.save([(batch.audio, batch.audio_len) for batch in ours], output / "clean.pt")
    paths = [str(output / name) for name in ("clean.pt", "noise.json", "nemo_noise.pt")]
    command = [arguments.nemo_python, str(PEERS / "nemo_noise.py"), *paths[:2], json.dumps(AUGMENTATION), paths[2]]
    run_peer(command, env=environment(1))
    mixed = torch.load(output / "nemo_noise.pt")
    nemo = [replace(batch, noisy_audio=noisy) for batch, (noisy, _) in zip(ours, mixed, strict=True)]
    clean = [replace(batch, noisy_audio=batch.audio) for batch in ours]
    sets = dict(zip(SETS, (ours, nemo, clean), strict=True))
    torch.save(sets, output / "batches.pt")


def score(output: Path, run: Path, seed: int) -> dict[str, Any]:
    """Scores all saved weights of a run on all sets of held-out speech."""
    torch.set_num_threads(os.cpu_count() or 1)
    sets = torch.load(output / "batches.pt", weights_only=False)
    network = NestNetwork(config_of(seed)).eval()
    points = []
    for line in saved(run):
        state = torch.load(run / "weights" / f"step_{line['step']}.pt")
        network.load_state_dict(state)
        metrics = {name: held_out_metrics(network, batches) for name, batches in sets.items()}
        losses = {name: found["loss"] for name, found in metrics.items()}
        # Tokens are computed from the clean audio, and masks are equal, so all sets have the same entropy.
        points.append(line | {"losses": losses, "token_entropy": metrics[SETS[-1]]["token_entropy"]})
        print(f"{run.name}: step {line['step']}, {losses}", file=sys.stderr, flush=True)
    targets = b"".join(value.numpy().tobytes() for value in network.quantizer.state_dict().values())
    return {"points": points, "quantizer": hashlib.sha256(targets).hexdigest()}


def report(
    arguments: argparse.Namespace,
    prepared: dict[str, Any],
    speeds: dict[str, float],
    best: Setup,
    curves: dict[tuple[str, int], Curve],
) -> str:
    """Returns the result as Markdown."""
    seeds = range(arguments.seeds)
    for seed in seeds:
        assert curves["ours", seed]["quantizer"] == curves["NeMo", seed]["quantizer"], "the targets differ"
    ranks = {"ours": 2, "NeMo": best.ranks}
    entropy = curves["ours", 0]["points"][-1]["token_entropy"]
    step = min(curve["points"][-1]["step"] for curve in curves.values())
    equal = []
    for side in SIDES:
        losses = [" / ".join(f"{below_at(curves[side, seed], step, name):.3f}" for seed in seeds) for name in SETS]
        encoded = mean(encoded_seconds(curves[side, seed], ranks[side]) for seed in seeds)
        equal.append([side, f"{encoded:.1f}", *losses])
    times = (
        time_cells(curves["ours", seed], curves["NeMo", seed], seed, level, since)
        for seed in seeds
        for level in arguments.levels
        for since in SINCE
    )
    times_columns = ["ours, s", "NeMo, s", "NeMo / ours", "steps, ours", "steps, NeMo"]
    speed_columns = ["steps per second", "seconds of audio per second", "best, nats below the entropy"]
    speed_cells = (speed_row(side, seed, curves[side, seed], ranks[side]) for seed in seeds for side in SIDES)
    return f"""# Time to a loss, compared with NeMo 3.0.0

Made by `benchmarks/learning/time_to_loss.py` on {machine("CPU cores")}, \
{versions("torch", "lhotse", "pytorch-lightning")}, NeMo 3.0.0.
{commit_line()}

Both sides train the demo preset (lr {LR}, warm-up {WARMUP_STEPS} steps) on the same utterances of {LIMITS[0]:g} to
{LIMITS[1]:g} s, {STEP_SECONDS:g} s per step, from the same weights, without validation. Ours ran for
{arguments.minutes_ours:g} minutes as two ranks of one thread, and NeMo for {arguments.minutes_nemo:g}. One evaluator
scores the weights of both on all utterances of the held-out speakers ({", ".join(HELD_OUT)}), with the same masks. Both
have torch's fused AdamW. Noise of which NeMo would read crops again, up to 100 times, is left out for both.

**The two sides do not train on the same noise**, although the numbers in their settings are equal: a half of the
utterances gets interference over a half of its length, with noise at -5 to 20 dB or other speech at -5 to 5 dB. In
NeMo, the other half keeps a crop of noise, unscaled, over its full length, and is cut to the length of this crop if
that is shorter. In the selected half, the level of the interference is computed over the whole utterance, its silent
half included, so that it is 3 dB louder.

## After equally many steps

Nats below the entropy of the held-out tokens ({entropy:.3f} with seed 0) after {step} steps, for the seeds
{" / ".join(map(str, seeds))}; negative values are above it.

{table_text(["side", "encoded seconds of a step", *SETS], equal)}

## Over time

Scored with our noise. The levels were chosen before the run. The times exclude the saving of weights on both sides.
Ours excludes `nestdata prepare`, which ran once and took {prepared["seconds"]:.0f} s.

{table_text(["seed", "nats below the entropy", "time since", *times_columns], times)}

{table_text(["side and seed", *speed_columns], speed_cells)}

NeMo ran as "{best.name}", the fastest in a calibration of {CALIBRATION_SECONDS:g} s each; every line of its manifests,
noise included, has a duration:

{table_text(["NeMo's loader", speed_columns[1]], ([name, f"{speed:.1f}"] for name, speed in speeds.items()))}

The curves are next to this file.
"""


def environment(threads: int) -> dict[str, str]:
    """Returns an environment in which the commands of this Python and the callback of the peers are found."""
    return {**command_environment(threads), "PYTHONPATH": str(PEERS)}


if __name__ == "__main__":
    sys.exit(main())
