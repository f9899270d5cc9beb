"""Compares settings of the demo preset by the speech content that an encoder learns in the same time.

    python benchmarks/bench_demo_settings.py OUTPUT --train train.json --speech speech.json --noise noise.json \
        --group-by scene --minutes 6 --seeds 0,1

TRAIN are transcribed NeMo lines. Whole groups that have a fifth of the lines become the development side, on which
settings are compared; `--test` gives other lines instead. All runs have the settings of `SETTINGS`, the baseline no
others; each variant changes one thing. First the speed of all variants is measured, one after the other, and gives
the number of steps that fit into MINUTES of one core. Then encoders are pretrained for these steps on SPEECH and on
the rest of TRAIN without its texts, one on each core, in a drawn order: other work on the machine changes no figure
from here on. Last, content probes learn characters from the frozen layers and are scored. A run that was interrupted
goes on where it ended. `--quick` checks that everything runs.
"""

import argparse
import hashlib
import json
import os
import platform
import shlex
import shutil
import statistics
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from pathlib import Path
from queue import SimpleQueue

from bench_learning import SETTINGS, environment
from blind import draw_once
from kept_settings import keep_settings
from peer import run_peer
from transcribed import read_errors, read_manifest, variant_table, without_text, write_lines

from nestmodel.config import preset_path
from nestmodel.training.callbacks.curves import read_metrics

CONFIG = "--model.config"
NO_DROPOUT = " ".join(f"{CONFIG}.encoder.{name} 0.0" for name in ("dropout", "dropout_pre_encoder", "dropout_att"))
VARIANTS = {
    "baseline": "",
    "frames of 40 ms": f"{CONFIG}.encoder.subsampling_factor 4 {CONFIG}.encoder.subsampling_channels 32",
    "32 channels": f"{CONFIG}.encoder.subsampling_channels 32",
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
SPEED_ROUNDS = 3
DEVELOPMENT_SHARE = 0.2
QUICK_PROBE = "--max-epochs 2 --learning-rates 0.01 --probe-seeds 0"


def main() -> int:
    """Measures speeds, pretrains, scores, and writes the results."""
    arguments = _arguments()
    output = arguments.output.absolute()
    output.mkdir(parents=True, exist_ok=True)
    chosen = list(VARIANTS)[:2] if arguments.quick else arguments.variants.split(",")
    variants = {name: VARIANTS[name] for name in chosen}
    kept = {name: str(getattr(arguments, name)) for name in ("train", "test", "speech", "noise", "group_by", "minutes")}
    common = {"settings": json.dumps(SETTINGS), "preset": hashlib.sha256(preset_path("demo").read_bytes()).hexdigest()}
    keep_settings(output, {**kept, **common, "quick": arguments.quick, "probe_options": arguments.probe_options})
    prepare(arguments, output)
    speeds = measure_speeds(output, variants, 1 if arguments.quick else SPEED_ROUNDS)
    steps = {name: round(60 * arguments.minutes * statistics.median(speeds[name])) for name in variants}
    runs = [(name, seed) for name in variants for seed in arguments.seeds.split(",")]
    order = [tuple(run) for run in draw_once(output / f"order-{len(runs)}.json", runs)]
    cores: SimpleQueue[int] = SimpleQueue()
    for core in sorted(os.sched_getaffinity(0)):
        cores.put(core)

    def make(run: tuple[str, str]) -> None:
        core = cores.get()
        os.sched_setaffinity(0, {core})  # of this thread: the processes that it starts inherit it
        try:
            name, seed = run
            make_run(output, name, seed, 4 if arguments.quick else steps[name], arguments)
        finally:
            cores.put(core)

    with ThreadPoolExecutor(cores.qsize()) as pool:
        list(pool.map(make, order))
    arguments.results.write_text(report(arguments, output, speeds, steps, runs), encoding="utf-8")
    print(arguments.results)
    return 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", type=Path)
    parser.add_argument("--train", type=Path, required=True, help="NeMo lines with text")
    parser.add_argument("--test", type=Path, help="NeMo lines with text to score, instead of a part of TRAIN")
    parser.add_argument("--speech", type=Path, required=True, help="NeMo lines of further speech for pretraining")
    parser.add_argument("--noise", type=Path, required=True, help="NeMo lines of noise for pretraining")
    parser.add_argument("--group-by", required=True, help="field of the lines whose values stay on one side")
    parser.add_argument("--minutes", type=float, default=6.0, help="time of pretraining on one core")
    parser.add_argument("--seeds", default="0,1", help="seeds of pretraining")
    parser.add_argument("--variants", default=",".join(VARIANTS), help="names, separated by commas")
    parser.add_argument("--probe-options", default="--learning-rates 0.02,0.08", help="flags of `nestmodel probe`")
    parser.add_argument("--results", type=Path, default=Path("demo_settings.md"))
    parser.add_argument("--quick", action="store_true", help="two variants and a few steps, to check the script")
    arguments = parser.parse_args()
    unknown = [name for name in arguments.variants.split(",") if name not in VARIANTS]
    if unknown:
        parser.error(f"there is no variant {unknown[0]!r}. They are {', '.join(VARIANTS)}.")
    return arguments


def prepare(arguments: argparse.Namespace, output: Path) -> None:
    """Splits the transcribed lines by group unless there are test lines, and prepares the corpora of pretraining."""
    if (output / "pretrain.corpus").exists():
        return
    train = read_manifest(arguments.train)
    if arguments.test:
        test = read_manifest(arguments.test)
    else:
        groups = {str(line[arguments.group_by]) for line in train}
        in_order = sorted(groups, key=lambda name: hashlib.sha256(name.encode()).digest())
        development: set[str] = set()
        while sum(str(line[arguments.group_by]) in development for line in train) < DEVELOPMENT_SHARE * len(train):
            development.add(in_order[len(development)])
        test = [line for line in train if str(line[arguments.group_by]) in development]
        train = [line for line in train if str(line[arguments.group_by]) not in development]
    write_lines(output / "train.json", train)
    write_lines(output / "test.json", test)
    write_lines(output / "pretrain.json", [*read_manifest(arguments.speech), *without_text(train)])
    write_lines(output / "noise.json", read_manifest(arguments.noise))
    for command in (
        "nestdata prepare noise.json -o noise.corpus --pcm --overwrite",
        "nestdata prepare pretrain.json -o pretrain.corpus --max-seconds 30 --overwrite",
    ):
        run_peer(shlex.split(command), cwd=output, env=environment(), echo=True)


def measure_speeds(output: Path, variants: dict[str, str], num_rounds: int) -> dict[str, list[float]]:
    """Returns the steps per second of each variant on one core, round by round; those of an earlier call if any."""
    path = output / "speeds.json"
    speeds: dict[str, list[float]] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(cores)})
    for number in range(num_rounds):
        for name, flags in variants.items():
            if len(speeds.setdefault(name, [])) <= number:
                limit = f"--trainer.max_time 00:00:00:{SPEED_SECONDS} --trainer.log_every_n_steps 1"
                with tempfile.TemporaryDirectory(dir=output) as directory:
                    pretrain(output, Path(directory), f"{flags} {limit}", "0")
                    logged, _ = read_metrics(Path(directory) / "version_0")["train_loss"]
                speeds[name].append((logged[-1] + 1) / SPEED_SECONDS)
                path.write_text(json.dumps(speeds, indent=2) + "\n", encoding="utf-8")
                print(f"{name}: {speeds[name][-1]:.2f} steps per second", flush=True)
    os.sched_setaffinity(0, cores)
    return speeds


def pretrain(output: Path, directory: Path, flags: str, seed: str) -> Path:
    """Returns the last checkpoint of a run on one core."""
    settings = {name: value for name, value in SETTINGS.items() if "val_check" not in name}
    settings |= {"trainer.strategy": "auto", "trainer.devices": 1, "trainer.default_root_dir": directory}
    overrides = " ".join(f"--{name} {value}" for name, value in settings.items())
    command = "nestmodel fit --config demo --data.corpus pretrain.corpus --data.noise noise.corpus"
    run_peer(shlex.split(f"{command} {overrides} --seed_everything {seed} {flags}"), cwd=output, env=environment())
    return directory / "version_0" / "checkpoints" / "last.ckpt"


def make_run(output: Path, name: str, seed: str, steps: int, arguments: argparse.Namespace) -> None:
    """Pretrains and scores one encoder, unless an earlier call did."""
    probe, directory = probe_directory(output, name, seed), output / f"run-{_slug(name)}-{seed}"
    if (probe / "probe.json").exists():
        return
    shutil.rmtree(directory, ignore_errors=True)
    checkpoint = pretrain(output, directory, f"{VARIANTS[name]} --trainer.max_steps {steps}", seed)
    options = QUICK_PROBE if arguments.quick else arguments.probe_options
    task = f"--task ctc --baselines none --group-by {arguments.group_by} {options} --overwrite -o {probe}"
    command = f"nestmodel probe {checkpoint} train.json --test test.json {task}"
    run_peer(shlex.split(command), cwd=output, env=environment())
    print(f"{name}, seed {seed}: {steps} steps, scored", flush=True)


def probe_directory(output: Path, name: str, seed: str) -> Path:
    """Returns where the content probe of a run is written."""
    return output / f"probe-{_slug(name)}-{seed}"


def report(
    arguments: argparse.Namespace,
    output: Path,
    speeds: dict[str, list[float]],
    steps: dict[str, int],
    runs: list[tuple[str, str]],
) -> str:
    """Returns the results as Markdown."""
    errors = {run: read_errors(probe_directory(output, *run)) for run in runs}
    probes = {}
    for name, seed in runs:
        probes[name] = json.loads((probe_directory(output, name, seed) / "probe.json").read_text(encoding="utf-8"))
    rows = []
    for name, found in probes.items():
        speed = f"{statistics.median(speeds[name]):.2f} ({min(speeds[name]):.2f} to {max(speeds[name]):.2f})"
        labels = f"{found['config']['labels_per_frame']} of {1000 / found['frame_rate_hz']:.0f} ms"
        rows.append(f"| {name} | `{VARIANTS[name] or 'none'}` | {speed} | {steps[name]} | {labels} |")
    table = "\n".join(rows)
    first = next(iter(probes.values()))
    packages = ", ".join(f"{name} {version(name)}" for name in ("torch", "jiwer"))
    settings = " ".join(f"--{name} {value}" for name, value in SETTINGS.items() if "model" in name or "plan" in name)
    side = "the test lines" if arguments.test else f"groups with {DEVELOPMENT_SHARE:.0%} of the training lines"
    return f"""# Settings of the demo preset

Made by `benchmarks/bench_demo_settings.py`{" --quick" if arguments.quick else ""} on {os.cpu_count()} CPU cores \
({platform.machine()}), {packages}.

Each encoder was pretrained for the steps that fit into {arguments.minutes:g} minutes of one core at the measured speed,
with `{settings}` and the flags below. The warm-up of the learning rate is part of these steps. Then the content probe
(`nestmodel probe --task ctc {arguments.probe_options}`) was trained on {first["num_training"]} lines and scored on
{first["num_test"]} others: {side}. Neither pretraining nor heads have seen their audio.

Errors in % of the characters, added up over seeds of pretraining and of heads; differences in percentage points; 95 %
bootstrap intervals.

{variant_table(errors)}
| variant | flags | steps per second, median of {len(next(iter(speeds.values())))} | steps | labels per frame |
|---|---|---|---|---|
{table}
"""


def _slug(name: str) -> str:
    return name.replace(" ", "_")


if __name__ == "__main__":
    sys.exit(main())
