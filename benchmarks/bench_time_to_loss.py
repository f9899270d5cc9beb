"""Time until the loss on held-out speakers falls to given levels below the entropy, compared with NeMo 3.0.0.

    python benchmarks/bench_time_to_loss.py REAL_SPEECH OUTPUT --nemo-python PATH [--minutes-ours 12]
        [--minutes-nemo 30] [--seeds 1] [--levels 0.05 0.10 0.15] [--quick] [--results benchmarks/results/NAME]

REAL_SPEECH contains speech.json and noise.json (NeMo lines with `speaker`). Both sides train the demo preset on the
same manifests, from the same weights, with the same optimizer and schedule, masks, noise settings and seconds of audio
per step, each with its own loader and trainer on the same cores, one after the other. For NeMo, a short calibration
chooses the faster of its loaders, and one or two ranks. Both sides save their weights at fixed intervals. One
evaluator, ours, then scores all of them on the same held-out speech with the same noise and masks. What is finished is
kept, so the same command continues. The script prints Markdown, and writes it and a plot to --results.
"""

import argparse
import hashlib
import json
import math
import os
import platform
import shutil
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from bench_learning import BIN, HELD_OUT
from peer import run_peer

from nestdata import AudioNoiseDataset, BatchPlan, Corpus, NoiseSampler, PlanConfig, SpeakerNoiseMixer
from nestmodel import LossStats, NestConfig, NestNetwork, loss_stats
from nestmodel.figures import BLUE, ORANGE, finish_axes, new_figure
from nestmodel.formats.nemo_config import config_to_nemo

PEERS = Path(__file__).parent / "peers"
LIMITS = (1.0, 16.0)
"""Shortest and longest utterance in seconds. NEST's YAML files of NeMo leave out those below 1 s."""

STEP_SECONDS = 64.0
"""Audio of an optimizer step over all ranks, padding included."""

LR, WARMUP_STEPS = 0.3, 300
SIDES = ("ours", "NeMo")
CALIBRATION_SECONDS = 45.0
SINCE = {"start": "start of the process", "step": "first step"}


@dataclass(frozen=True)
class Setup:
    """How NeMo is run: its loader, the number of ranks, and the loader processes of each rank."""

    loader: str
    ranks: int
    workers: int

    @property
    def name(self) -> str:
        """Name in the report."""
        return f"{self.loader}, {self.ranks} rank{'s' * (self.ranks > 1)}, {self.workers} workers"


SETUPS = (
    *(Setup(loader, ranks, 0) for loader in ("Lhotse buckets", "AudioNoiseDataset") for ranks in (1, 2)),
    *(Setup(loader, 1, 1) for loader in ("Lhotse buckets", "AudioNoiseDataset")),
)


def main() -> int:
    """Trains and scores what is not finished, and writes the report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("real_speech", type=Path)
    parser.add_argument("output", type=Path)
    parser.add_argument("--nemo-python", required=True, help="Python of an environment with NeMo")
    parser.add_argument("--minutes-ours", type=float, default=12.0)
    parser.add_argument("--minutes-nemo", type=float, default=30.0)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--levels", type=float, nargs="+", default=[0.05, 0.10, 0.15], help="nats below the entropy")
    parser.add_argument("--saves", type=int, default=30, help="saved weights of each run, all of which are scored")
    parser.add_argument("--quick", action="store_true", help="a minute for each side, with levels above the entropy")
    parser.add_argument("--results", type=Path, default=Path("time_to_loss"), help="path: NAME.md and NAME.png")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.minutes_ours = arguments.minutes_nemo = 1.0
        arguments.levels, arguments.saves = [-1.0, -0.5, -0.25], 4
    output = arguments.output.absolute()
    prepared = once(output / "prepared.json", prepare, arguments.real_speech.absolute(), output)
    setups = SETUPS[:4:2] if arguments.quick else SETUPS
    speeds = once(output / "calibration.json", calibrate, output, arguments, setups)
    best = max(setups, key=lambda setup: speeds[setup.name])
    curves: dict[tuple[str, int], dict[str, Any]] = {}
    for seed in range(arguments.seeds):
        for side in SIDES:
            minutes = arguments.minutes_ours if side == "ours" else arguments.minutes_nemo
            run = output / f"{side.lower()}-{seed}"
            started = once(run / "run.json", train, output, run, side, seed, minutes, arguments, best)
            curves[side, seed] = (
                once(run / "curve.json", score, output, run, seed, 8 if arguments.quick else None) | started
            )
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
    output.mkdir(parents=True, exist_ok=True)
    lines = [json.loads(line) for line in (real / "speech.json").read_text().splitlines()]
    lines = [line for line in lines if LIMITS[0] <= line["duration"] <= LIMITS[1]]
    sides = {
        "train": [line for line in lines if line.get("speaker") not in HELD_OUT],
        "held_out": [line for line in lines if line.get("speaker") in HELD_OUT],
        "noise": [json.loads(line) for line in (real / "noise.json").read_text().splitlines()],
    }
    seconds = {}
    for name, rows in sides.items():
        # pathlib keeps an absolute path as it is.
        rows = [{**row, "audio_filepath": str(real / row["audio_filepath"])} for row in rows]
        (output / f"{name}.json").write_text("".join(json.dumps(row) + "\n" for row in rows))
        started = time.time()
        command = ["nestdata", "prepare", f"{name}.json", "-o", f"{name}.corpus", "--overwrite"]
        run_peer([*command, *(["--pcm"] if name == "noise" else [])], cwd=output, env=environment(1))
        seconds[name] = time.time() - started
    durations = [row["duration"] for row in sides["train"]]
    return {"seconds": seconds["train"] + seconds["noise"], "mean_duration": sum(durations) / len(durations)}


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
    output: Path, run: Path, side: str, seed: int, minutes: float, arguments: argparse.Namespace, setup: Setup
) -> dict[str, float]:
    """Trains one side, and returns the time at which its process was started."""
    print(f"{side}, seed {seed}: {minutes:g} minutes", file=sys.stderr, flush=True)
    shutil.rmtree(run, ignore_errors=True)  # of an interrupted run
    started, interval_s = time.time(), 60 * minutes / arguments.saves
    if side == "ours":
        train_ours(output, run, seed, 60 * minutes, interval_s)
    else:
        train_nemo(output, run, seed, 60 * minutes, interval_s, arguments, setup)
    return {"started": started}


def train_ours(output: Path, run: Path, seed: int, seconds: float, interval_s: float) -> None:
    """Runs `nestmodel fit` with two ranks of one thread, as in bench_learning.py."""
    settings = {
        "seed_everything": seed,
        "data.corpus": output / "train.corpus",
        "data.noise": output / "noise.corpus",
        "data.plan.max_batch_seconds": STEP_SECONDS / 2,
        "data.plan.microbatches_per_step": 2,
        "trainer.default_root_dir": run,
        "trainer.accelerator": "cpu",
        "trainer.strategy": "ddp",
        "trainer.devices": 2,
        "trainer.max_steps": 10**6,
        "trainer.max_time": f"00:{int(seconds) // 3600:02d}:{int(seconds) // 60 % 60:02d}:{int(seconds) % 60:02d}",
        "trainer.log_every_n_steps": 10,
        "model.config.optimizer.lr": LR,
        "model.config.optimizer.warmup_steps": WARMUP_STEPS,
        "trainer.callbacks+": "timed_weights.TimedWeights",
        "trainer.callbacks.directory": run / "weights",
        "trainer.callbacks.interval_s": interval_s,
    }
    options = [f"--{name}={value}" for name, value in settings.items()]
    run_peer(["nestmodel", "fit", "--config", "demo", *options], cwd=output, env=environment(1), echo=True)


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
    (run / "section.json").write_text(json.dumps(section))
    torch.save(NestNetwork(config).state_dict(), run / "initial.pt")
    command = [arguments.nemo_python, PEERS / "nemo_fit.py", run / "section.json", run / "initial.pt", run / "weights"]
    command += ["--ranks", setup.ranks, "--seconds", seconds, "--interval-s", interval_s, "--seed", seed]
    run_peer([str(part) for part in command], env=environment(2 // setup.ranks))


def train_ds(output: Path, setup: Setup, mean_duration: float, seed: int) -> dict[str, Any]:
    """Returns the `train_ds` section of NEST's YAML file, with as much audio per step as on our side."""
    rank_seconds = STEP_SECONDS / setup.ranks
    section: dict[str, Any] = {
        "manifest_filepath": str(output / "train.json"),
        "noise_manifest": str(output / "noise.json"),
        "sample_rate": 16000,
        "shuffle": True,
        "num_workers": setup.workers,
        "pin_memory": False,
        "use_start_end_token": False,
        "trim_silence": False,
        "min_duration": LIMITS[0],
        "max_duration": LIMITS[1],
        "drop_last": True,
        "batch_augmentor": {
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
        },
    }
    if setup.loader == "Lhotse buckets":
        section |= {"use_lhotse": True, "use_bucketing": True, "num_buckets": 30, "batch_duration": rank_seconds}
        return section | {"seed": seed, "shard_seed": seed}
    return section | {"batch_size": max(1, round(rank_seconds / mean_duration)), "labels": None}


def saved(run: Path) -> list[dict[str, Any]]:
    """Returns the lines that `TimedWeights` wrote."""
    return [json.loads(line) for line in (run / "weights" / "saved.jsonl").read_text().splitlines()]


def score(output: Path, run: Path, seed: int, num_batches: int | None) -> dict[str, Any]:
    """Scores all saved weights of a run on the held-out speech, or on the first batches of it."""
    torch.set_num_threads(os.cpu_count() or 1)
    held_out, noise = (Corpus.open(output / f"{name}.corpus") for name in ("held_out", "noise"))
    plan = BatchPlan.of(held_out, PlanConfig(max_batch_seconds=32.0, microbatches_per_step=1))
    dataset = AudioNoiseDataset(held_out, plan, NoiseSampler(noise), SpeakerNoiseMixer())
    batches = [dataset[step, 0] for step in range(plan.steps_per_epoch)[:num_batches]]
    network = NestNetwork(config_of(seed)).eval()
    points = []
    for line in saved(run):
        state = torch.load(run / "weights" / f"step_{line['step']}.pt")
        network.load_state_dict(state)
        with torch.no_grad():
            values = sum(loss_stats(network(batch, mask_purpose="validation mask")).flatten() for batch in batches)
        stats = LossStats.unflatten(values, network.config.quantizer.num_codebooks)
        metrics = stats.metrics(torch.stack([stats.token_counts, stats.predicted_counts]))
        points.append(line | {name: float(metrics[name]) for name in ("loss", "token_entropy", "accuracy")})
        print(f"{run.name}: step {line['step']}, loss {points[-1]['loss']:.3f}", file=sys.stderr, flush=True)
    targets = b"".join(value.numpy().tobytes() for value in network.quantizer.state_dict().values())
    return {"points": points, "quantizer": hashlib.sha256(targets).hexdigest()}


def seconds_to(curve: Mapping[str, Any], level: float, since: str) -> tuple[float, float] | None:
    """Returns the seconds and steps until the loss is first `level` below the entropy, or None.

    Values between two saved weights are interpolated. The time that saving weights took is excluded.

    Args:
        curve: A run.
        level: Nats below the entropy of the held-out tokens.
        since: "start" counts from the start of the process, "step" from the end of the first step.
    """
    points = curve["points"]
    start = curve["started"] if since == "start" else points[0]["time"]
    before = None
    for point in points:
        above = point["loss"] - (point["token_entropy"] - level)
        now = (point["time"] - point["saving_s"] - start, point["step"], above)
        if above <= 0:
            if before is None:
                return now[0], now[1]
            share = before[2] / (before[2] - above)
            return before[0] + share * (now[0] - before[0]), before[1] + share * (now[1] - before[1])
        before = now
    return None


def report(
    arguments: argparse.Namespace,
    prepared: Mapping[str, Any],
    speeds: Mapping[str, float],
    best: Setup,
    curves: Mapping[tuple[str, int], Mapping[str, Any]],
) -> str:
    """Returns the result as Markdown."""
    packages = ", ".join(f"{name} {version(name)}" for name in ("torch", "lhotse", "pytorch-lightning"))
    for seed in range(arguments.seeds):
        assert curves["ours", seed]["quantizer"] == curves["NeMo", seed]["quantizer"], "the targets differ"
    entropy = curves["ours", 0]["points"][-1]["token_entropy"]
    rows = []
    for seed in range(arguments.seeds):
        for level in arguments.levels:
            for since in SINCE:
                rows.append(row(curves["ours", seed], curves["NeMo", seed], seed, level, since))
    best_of_nemo = []
    for seed in range(arguments.seeds):
        points = curves["NeMo", seed]["points"]
        level = math.floor(1000 * max(point["token_entropy"] - point["loss"] for point in points)) / 1000
        best_of_nemo += [row(curves["ours", seed], curves["NeMo", seed], seed, level, since) for since in SINCE]
    calibration = "\n".join(f"| {name} | {speed:.1f} |" for name, speed in speeds.items())
    return f"""# Time to a loss, compared with NeMo 3.0.0

Made by `benchmarks/bench_time_to_loss.py` on {os.cpu_count()} CPU cores ({platform.machine()}), {packages}, NeMo 3.0.0.

Both sides train the demo preset (lr {LR}, warm-up {WARMUP_STEPS} steps) on the same utterances of {LIMITS[0]:g} to
{LIMITS[1]:g} s, {STEP_SECONDS:g} s per step, from the same weights, without validation. One evaluator scores the
weights of both on all utterances of the held-out speakers ({", ".join(HELD_OUT)}), with the same noise and masks. The
levels are {", ".join(f"{level:g}" for level in arguments.levels)} nats below the entropy of the held-out tokens, which
is {entropy:.3f} nats with seed 0. They were chosen before the run. Ours ran for {arguments.minutes_ours:g} minutes, and
NeMo for {arguments.minutes_nemo:g}. The times exclude the saving of weights on both sides. Ours excludes
`nestdata prepare`, which ran once and took {prepared["seconds"]:.0f} s.

| seed | nats below the entropy | time since | ours, s | NeMo, s | NeMo / ours | steps, ours | steps, NeMo |
|---|---|---|---|---|---|---|---|
{chr(10).join(rows)}

The same for the lowest loss that NeMo reached, a level that is known only after the run:

| seed | nats below the entropy | time since | ours, s | NeMo, s | NeMo / ours | steps, ours | steps, NeMo |
|---|---|---|---|---|---|---|---|
{chr(10).join(best_of_nemo)}

| side and seed | steps per second | seconds of audio per second | best, nats below the entropy |
|---|---|---|---|
{chr(10).join(summary(side, seed, curve, best) for (side, seed), curve in curves.items())}

NeMo ran as "{best.name}", the fastest in a calibration of {CALIBRATION_SECONDS:g} s each:

| NeMo's loader | seconds of audio per second |
|---|---|
{calibration}

The curves are next to this file.
"""


def row(ours: Mapping[str, Any], nemo: Mapping[str, Any], seed: int, level: float, since: str) -> str:
    """Returns the row of one level."""
    a, b = seconds_to(ours, level, since), seconds_to(nemo, level, since)
    ratio = "-"
    if a and b:
        ratio = f"{b[0] / a[0]:.2f}"
    elif a:
        ratio = f"> {(nemo['points'][-1]['time'] - nemo['started']) / a[0]:.2f}"
    times = [f"{found[0]:.0f}" if found else "not reached" for found in (a, b)]
    steps = [f"{found[1]:.0f}" if found else "-" for found in (a, b)]
    return f"| {seed} | {level:g} | {SINCE[since]} | {times[0]} | {times[1]} | {ratio} | {steps[0]} | {steps[1]} |"


def summary(side: str, seed: int, curve: Mapping[str, Any], best: Setup) -> str:
    """Returns speed and best loss of a run."""
    first, last = curve["points"][0], curve["points"][-1]
    took = last["time"] - last["saving_s"] - first["time"]
    audio = (2 if side == "ours" else best.ranks) * (last["audio_s"] - first["audio_s"])
    below = max(point["token_entropy"] - point["loss"] for point in curve["points"])
    steps = last["step"] - first["step"]
    return f"| {side}, {seed} | {steps / took:.2f} | {audio / took:.1f} | {below:.3f} |"


def draw(curves: Mapping[tuple[str, int], Mapping[str, Any]], levels: list[float], path: Path) -> None:
    """Draws loss minus entropy over the minutes since the start of the process."""
    figure = new_figure(7.0, 4.0)
    axes = figure.subplots()
    for (side, seed), curve in curves.items():
        minutes = [(point["time"] - point["saving_s"] - curve["started"]) / 60 for point in curve["points"]]
        above = [point["loss"] - point["token_entropy"] for point in curve["points"]]
        colour = BLUE if side == "ours" else ORANGE
        axes.plot(minutes, above, color=colour, marker=".", label=side if seed == 0 else None)
    for level in levels:
        axes.axhline(-level, color="grey", linewidth=0.6, linestyle="--")
    axes.set_ylim(top=0.5)
    axes.set_xlabel("minutes since the start of the process")
    finish_axes(axes, "held-out loss minus entropy of the tokens, nats", has_legend=True)
    figure.savefig(path, dpi=80)


def environment(threads: int) -> dict[str, str]:
    """Returns an environment in which the commands of this Python and the callback of the peers are found."""
    paths = {"PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}", "PYTHONPATH": str(PEERS)}
    return {**os.environ, **paths, "OMP_NUM_THREADS": str(threads)}


if __name__ == "__main__":
    sys.exit(main())
