"""Compares settings of the demo preset by the speech content that an encoder learns in the same time.

    python -m benchmarks run demo_settings OUTPUT --train train.json --speech speech.json --noise noise.json \
        --group-by scene --purpose choices --minutes 6,12 --seeds 0,1

TRAIN are transcribed NeMo lines. Groups with a fifth of the lines are held out as the development set, on which
settings are compared; `--test` gives other lines instead. All runs use `SETTINGS`; the baseline adds nothing. First the
speed of all variants is measured on this machine, one after the other, and gives the number of steps that fit into
MINUTES of one core. Then encoders are pretrained for these steps on SPEECH and on the rest of TRAIN without its texts,
in a drawn order: other work on the machine changes no figure from here on. A checkpoint is kept at each of several
MINUTES. This equals separate runs, because the learning rate depends on the step alone. Last, content probes learn
characters from the frozen layers and are scored, in another drawn order.

Variants with other targets or losses are run by `parts/fit_targets.py`. A second round learns tokens of an encoder that
was pretrained in the first half of its time, and goes on with its weights. `--also` names another language to score.

A call that was interrupted goes on where it ended; a later call may have more seeds, variants, and longer times. With
`--accelerator gpu`, encoders make as many steps on a GPU, with one microbatch of 90 s instead of two of 45 s. If the
GPU is in another machine, copy OUTPUT there and back: `--only pretrain` ends before the probes. `--quick` checks that
everything runs.
"""

import argparse
import hashlib
import json
import os
import shlex
import shutil
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue
from typing import Any, NamedTuple

from benchmarks.harness.children import own_command, run_command
from benchmarks.harness.kept_settings import keep_settings
from benchmarks.harness.report import machine, table_text, versions
from benchmarks.harness.rounds import spread
from benchmarks.learning.parts import fit_targets
from benchmarks.learning.parts.blind import draw_once
from benchmarks.learning.parts.manifests import PURPOSES, add_languages, read_manifest, without_text, write_lines
from benchmarks.learning.parts.pretraining import SETTINGS, prepare
from benchmarks.learning.parts.probes import probes_parser, read_errors, read_probe, run_probe, variant_table
from nestdata import Corpus
from nestmodel import NestConfig, error_rate
from nestmodel.config import LIVE_PRESETS, preset_path
from nestmodel.training.callbacks.curves import read_metrics

QUICK = None
CONFIG = "--model.config"
NO_DROPOUT = " ".join(f"{CONFIG}.encoder.{name} 0.0" for name in ("dropout", "dropout_pre_encoder", "dropout_att"))
FITTED = "--model.init_from fitted.safetensors"
CHANGED = "changed:"
FIRST_ROUND = f"{CONFIG}.optimizer.warmup_steps 200"
TEACHER_LAYER = 1
NO_LOOK_AHEAD = f"{CONFIG}.encoder.att_context_size 70 0"
VARIANTS = {
    "baseline": "",
    "frames of 80 ms": f"{CONFIG}.encoder.subsampling_factor 8 {CONFIG}.encoder.subsampling_channels 64",
    "64 channels": f"{CONFIG}.encoder.subsampling_channels 64",
    "no dropout": NO_DROPOUT,
    "d_model 192": f"{CONFIG}.encoder.d_model 192",
    "6 layers": f"{CONFIG}.encoder.num_layers 6",
    "blocks of 24 frames": f"{CONFIG}.masking.block_size 24 {CONFIG}.masking.prob 0.02",
    "4 codebooks": f"{CONFIG}.quantizer.num_codebooks 4",
    "45 s in a step": "--data.plan.microbatches_per_step 1",
    "twice the learning rate": f"{CONFIG}.optimizer.lr 0.6",
    "clean input": "--data.mix.prob 0.0",
    "PCA and k-means": FITTED,
    "all frames": f"{CHANGED}all",
    "PCA and k-means + all frames": f"{CHANGED}all {FITTED}",
    "two layers": f"{CHANGED}inner",
    "PCA and k-means + two layers": f"{CHANGED}inner {FITTED}",
    "6 codebooks": f"{CONFIG}.quantizer.num_codebooks 6",
    "v2 of NEST": f"{CHANGED}norm {CONFIG}.features.num_mels 128 {CONFIG}.encoder.no-use-bias "
    "--data.mix.speech_snr_db 10 20",
    "second round": f"{CHANGED}second {CONFIG}.optimizer.warmup_steps 200",
    "second round + all frames": f"{CHANGED}second+all {CONFIG}.optimizer.warmup_steps 200",
    **{preset: f"--config {preset}" for preset in LIVE_PRESETS},
    "no look-ahead": f"--config streaming {NO_LOOK_AHEAD}",
    "soft tokens": f"{CHANGED}soft",
    "6 codebooks + soft tokens": f"{CHANGED}soft {CONFIG}.quantizer.num_codebooks 6",
    "next token": f"{CHANGED}next --config streaming {NO_LOOK_AHEAD}",
}
"""Flags of `nestmodel fit`, after changes that `parts/fit_targets.py` makes."""

ON_A_GPU = "--data.plan.microbatches_per_step 1 --data.plan.max_batch_seconds 90 --data.num_workers 2"
"""A GPU takes the audio of a step at once: launching the operations takes longer than computing them. Variants of the
microbatches are for a CPU."""

SPEED_SECONDS = 20
DEVELOPMENT_SHARE = 0.2
FEW = {
    "variants": ",".join(list(VARIANTS)[:2]),
    "minutes": [1, 2],
    "probe_options": "--max-epochs 2 --learning-rates 0.01 --probe-seeds 0",
}


class Run(NamedTuple):
    """One encoder that is pretrained."""

    variant: str
    seed: str

    @property
    def slug(self) -> str:
        """Name for files."""
        return f"{self.variant.replace(' ', '_')}-{self.seed}"


class Point(NamedTuple):
    """An encoder after a time of pretraining."""

    run: Run
    minutes: int

    @property
    def slug(self) -> str:
        """Name for files."""
        return f"{self.run.slug}-{self.minutes}"


def main() -> int:
    """Measures speeds, pretrains, scores, and writes the results."""
    arguments = _arguments()
    output = arguments.output.absolute()
    output.mkdir(parents=True, exist_ok=True)
    variants = {name: VARIANTS[name] for name in arguments.variants.split(",")}
    kept = {name: str(getattr(arguments, name)) for name in ("train", "test", "speech", "noise", "group_by")}
    common = {"settings": json.dumps(SETTINGS), "preset": hashlib.sha256(preset_path("demo").read_bytes()).hexdigest()}
    kept |= {**common, "accelerator": arguments.accelerator, "probe_options": arguments.probe_options}
    keep_settings(output, {**kept, "also": json.dumps(arguments.also), "quick": arguments.quick})
    if not (output / "pretrain.corpus").exists():
        prepare_corpora(arguments, output)
    speeds = measure_speeds(output, variants, 1 if arguments.quick else arguments.speed_rounds)
    a_minute = {name: 4 if arguments.quick else round(60 * statistics.median(speeds[name])) for name in variants}
    runs = [Run(name, seed) for name in variants for seed in arguments.seeds.split(",")]
    steps = {Point(run, time): a_minute[run.variant] * time for run in runs for time in arguments.minutes}
    steps = {point: count // 2 if is_second_round(point.run.variant) else count for point, count in steps.items()}
    accelerator = f"--trainer.accelerator {arguments.accelerator} {ON_A_GPU if arguments.accelerator == 'gpu' else ''}"

    def pretrain_run(run: Run) -> None:
        for point in (Point(run, time) for time in arguments.minutes):
            if not (output / f"{point.slug}.ckpt").exists():
                if is_second_round(run.variant):
                    first_steps = a_minute["baseline"] * point.minutes // 2
                    checkpoint = pretrain_twice(output, point, first_steps, steps[point])
                else:
                    flags = f"{VARIANTS[run.variant]} --trainer.max_steps {steps[point]} {accelerator}"
                    checkpoint = pretrain(output, output / f"run-{run.slug}", flags, run.seed)
                if checkpoint.resolve().stem != f"step_{steps[point]:08d}":
                    raise SystemExit(f"{point.slug}: the run has passed step {steps[point]}. Give another OUTPUT.")
                partial = shutil.copy(checkpoint, output / f"{point.slug}.partial")
                Path(partial).replace(output / f"{point.slug}.ckpt")
                print(f"{point.slug}: {steps[point]} steps", flush=True)

    def score(point: Point) -> None:
        heads = f"--baselines --group-by {arguments.group_by} {arguments.probe_options}"
        for name, train, test in [("", "train.json", "test.json"), *arguments.also]:
            run_probe(output, probe_name(point, name), f"{point.slug}.ckpt {train} --test {test} {heads}")

    in_parallel(pretrain_run, drawn(output / "order", runs), arguments.at_once)
    if arguments.only == "pretrain":
        return 0
    in_parallel(score, drawn(output / "order-of-probes", list(steps)), arguments.at_once)
    arguments.results.write_text(report(arguments, output, speeds, steps), encoding="utf-8")
    print(arguments.results)
    return 0


def _arguments() -> argparse.Namespace:
    parser = probes_parser(__doc__, results="demo_settings.md", probe_options="--learning-rates 0.02,0.08", quick=FEW)
    add = parser.add_argument
    add("--train", type=Path, required=True, help="NeMo lines with text")
    add("--test", type=Path, help="NeMo lines with text to score, instead of a part of TRAIN")
    add_languages(parser, "--also")
    add("--name", default="Characters", help="name of the language of TRAIN")
    add("--speech", type=Path, required=True, help="NeMo lines of further speech for pretraining")
    add("--noise", type=Path, required=True, help="NeMo lines of noise for pretraining")
    add("--group-by", required=True, help="field of the lines whose values stay on one side")
    add("--minutes", type=whole_minutes, default="6", help="times of pretraining on one core, separated by commas")
    add("--seeds", default="0,1", help="seeds of pretraining")
    add("--variants", default=",".join(VARIANTS), help="names, separated by commas")
    add("--speed-rounds", type=int, default=3, help="measurements of the speed of each variant [3]")
    add("--accelerator", choices=("cpu", "gpu"), default="cpu", help="device of pretraining [cpu]")
    add("--at-once", type=int, default=os.cpu_count(), help="runs at the same time; they share the cores")
    add("--only", choices=("pretrain",), help="end after this part")
    arguments = parser.parse_args()
    unknown = [name for name in arguments.variants.split(",") if name not in VARIANTS]
    if unknown:
        parser.error(f"there is no variant {unknown[0]!r}. They are {', '.join(VARIANTS)}.")
    of_batches = [name for name in arguments.variants.split(",") if "--data.plan" in VARIANTS[name]]
    if of_batches and arguments.accelerator == "gpu":
        parser.error(f"the variant {of_batches[0]!r} is for a CPU: on a GPU, all runs have the same batches.")
    return arguments


def is_second_round(variant: str) -> bool:
    """Returns whether a variant learns from an encoder that was trained in the first half of its time."""
    return VARIANTS[variant].startswith(f"{CHANGED}second")


def whole_minutes(text: str) -> list[int]:
    """Returns the numbers of a list with commas, in rising order."""
    return sorted(int(one) for one in text.split(","))


def drawn(path: Path, items: Sequence[Run] | Sequence[Point]) -> list[Any]:
    """Returns items in a random order that is drawn once for a set of items, and kept in a file."""
    by_slug = {item.slug: item for item in items}
    digest = hashlib.sha256(" ".join(sorted(by_slug)).encode()).hexdigest()[:8]
    return [by_slug[slug] for slug in draw_once(path.with_name(f"{path.name}-{digest}.json"), list(by_slug))]


def in_parallel(work: Callable[[Any], Any], items: Sequence[Any], at_once: int) -> list[Any]:
    """Calls `work` for all items, several at once, each on its own share of the cores; returns what it returned."""
    cores = sorted(os.sched_getaffinity(0))
    shares: SimpleQueue[list[int]] = SimpleQueue()
    for first in range(at_once):
        shares.put(cores[first::at_once] or [cores[first % len(cores)]])

    def work_on_share(item: Any) -> Any:
        share = shares.get()
        os.sched_setaffinity(0, share)  # of this thread: the processes that it starts inherit it
        try:
            return work(item)
        finally:
            shares.put(share)

    with ThreadPoolExecutor(at_once) as pool:
        return list(pool.map(work_on_share, items))


def prepare_corpora(arguments: argparse.Namespace, output: Path) -> None:
    """Splits the transcribed lines by group unless there are test lines, and prepares the corpora of pretraining."""
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
    prepare("noise.json", output, "--pcm")
    prepare("pretrain.json", output)
    config = NestConfig.preset("demo")
    fit_targets.fit_quantizer(Corpus.open(output / "pretrain.corpus"), config, output / "fitted.safetensors")


def measure_speeds(output: Path, variants: dict[str, str], num_rounds: int) -> dict[str, list[float]]:
    """Returns the steps per second of each variant on one core, round by round; those of an earlier call if any.

    A variant runs on every core at the same time, because a core is faster while the others are idle.
    """
    path = output / "speeds.json"
    speeds: dict[str, list[float]] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    num_cores = len(os.sched_getaffinity(0))

    def count_steps(flags: str) -> int:
        limit = f"--trainer.max_time 00:00:00:{SPEED_SECONDS} --trainer.log_every_n_steps 1"
        with tempfile.TemporaryDirectory(dir=output) as directory:
            teacher = None
            if flags.startswith(f"{CHANGED}second"):
                teacher = teach(output, Path(directory) / "first", FIRST_ROUND, 2, "0")
            pretrain(output, Path(directory), f"{flags} {limit}", "0", teacher)
            logged, _ = read_metrics(Path(directory) / "version_0")["train_loss"]
        return logged[-1] + 1

    for number in range(num_rounds):
        for name, flags in variants.items():
            if len(speeds.setdefault(name, [])) <= number:
                counts = in_parallel(count_steps, [flags] * num_cores, num_cores)
                speeds[name].append(statistics.mean(counts) / SPEED_SECONDS)
                path.write_text(json.dumps(speeds, indent=2) + "\n", encoding="utf-8")
                print(f"{name}: {speeds[name][-1]:.2f} steps per second", flush=True)
    return speeds


def pretrain(output: Path, directory: Path, flags: str, seed: str, teacher: Path | None = None) -> Path:
    """Returns the last checkpoint of a run of one process; goes on with the run that is in the directory."""
    settings = {name: value for name, value in SETTINGS.items() if "val_check" not in name}
    settings |= {"trainer.strategy": "auto", "trainer.devices": 1, "output": directory}
    overrides = " ".join(f"--{name} {value}" for name, value in settings.items())
    program = "nestmodel"
    if flags.startswith(CHANGED):
        changes, _, flags = flags.removeprefix(CHANGED).partition(" ")
        program = shlex.join(own_command(fit_targets.__file__, changes))
    command = f"{program} fit pretrain.corpus --config demo --noise noise.corpus --ckpt-path last"
    variables = {} if teacher is None else {fit_targets.TEACHER: str(teacher)}
    run_command(f"{command} {overrides} --seed {seed} {flags}", output, echo=False, **variables)
    return max(directory.glob("version_*/checkpoints/last.ckpt"), key=lambda path: path.resolve().name)


def teach(output: Path, directory: Path, flags: str, num_steps: int, seed: str) -> Path:
    """Pretrains a teacher and clusters its frames; returns its folder."""
    checkpoint = pretrain(output, directory, f"{flags} --trainer.max_steps {num_steps}", seed)
    corpus = Corpus.open(output / "pretrain.corpus")
    num_classes = NestConfig.preset("demo").quantizer.num_classes
    fit_targets.fit_teacher(corpus, checkpoint, TEACHER_LAYER, directory, num_classes)
    return directory


def pretrain_twice(output: Path, point: Point, first_steps: int, num_steps: int) -> Path:
    """Returns the last checkpoint of a second round, which goes on with the encoder of the first one."""
    directory = output / f"run-{point.slug}"
    teacher = teach(output, directory / "first", FIRST_ROUND, first_steps, point.run.seed)
    start = f"--model.init_from {teacher / 'teacher.ckpt'} --model.init_parts encoder"
    flags = f"{VARIANTS[point.run.variant]} {start} --trainer.max_steps {num_steps}"
    return pretrain(output, directory, flags, point.run.seed, teacher)


def probe_name(point: Point, lines: str = "") -> str:
    """Returns the folder of the content probe of an encoder on lines with a name, or on TRAIN and its test lines."""
    return f"probe-{point.slug}{'-' if lines else ''}{lines}"


def report(
    arguments: argparse.Namespace, output: Path, speeds: Mapping[str, list[float]], steps: Mapping[Point, int]
) -> str:
    """Returns the results as Markdown."""
    settings = " ".join(f"--{name} {value}" for name, value in SETTINGS.items() if "model" in name or "plan" in name)
    side = "" if arguments.test else f" The others of TRAIN are groups with {DEVELOPMENT_SHARE:.0%} of its lines."
    languages = "\n".join(
        f"## {name or arguments.name}\n\n{results_on(output, name, list(steps))}"
        for name in ("", *(name for name, _, _ in arguments.also))
    )
    made_on = f" A GPU made as many steps, with `{ON_A_GPU}`." if arguments.accelerator == "gpu" else ""
    return f"""# Settings of the demo preset

Made by `benchmarks/learning/demo_settings.py`{" --quick" if arguments.quick else ""} on {machine("CPU cores")}, \
{versions("torch", "jiwer")}.

Each encoder was pretrained for the steps that fit into a time of one core at the measured speed, with `{settings}` and
the flags below.{made_on} The warm-up of the learning rate is part of these steps. Then the content probe
(`nestmodel probe characters {arguments.probe_options}`) was trained on some lines of a language and scored on others.
Neither pretraining nor heads have seen the audio of those.{side} {PURPOSES[arguments.purpose]} Errors are in % of the
characters (CER), added up over the seeds of heads, and in comparisons also over those of pretraining. Intervals are at
95 % (bootstrap over groups of lines), differences in percentage points.

{languages}
## Steps

{table_of_steps(output, speeds, steps)}
"""


def results_on(output: Path, lines: str, points: Sequence[Point]) -> str:
    """Returns the errors on the test lines of one language, after each time."""
    errors = {point: read_errors(output / probe_name(point, lines)) for point in points}
    found = read_probe(output / probe_name(points[0], lines))
    times = times_of(points)
    by_run = {
        run: [f"{100 * error_rate(errors[Point(run, time)]).rate:.1f}" for time in times]
        for run in dict.fromkeys(point.run for point in points)
    }
    curves = table_text(["variant", "seed", *minutes_of(times)], ([*run, *rates] for run, rates in by_run.items()))
    comparisons = (
        f"After {time} minutes:\n\n"
        + variant_table(
            {(point.run.variant, point.run.seed): errors[point] for point in points if point.minutes == time}
        )
        + "\n"
        for time in times
    )
    heads = f"Heads learned from {found['num_training']} lines and were scored on {found['num_test']} others."
    return f"{heads}\n\n{curves}\n\n{''.join(comparisons)}"


def table_of_steps(output: Path, speeds: Mapping[str, list[float]], steps: Mapping[Point, int]) -> str:
    """Returns flags, speed, labels per frame and steps of each variant."""
    times = times_of(steps)
    rows = []
    for run in {point.run.variant: point.run for point in steps}.values():
        found = read_probe(output / probe_name(Point(run, times[0])))
        labels = f"{found['labels_per_frame']} of {1000 / found['frame_rate_hz']:.0f} ms"
        counts = [steps[Point(run, time)] for time in times]
        rows.append([run.variant, f"`{VARIANTS[run.variant] or 'none'}`", spread(speeds[run.variant]), labels, *counts])
    speed = f"steps per second, median of {len(next(iter(speeds.values())))} (range)"
    return table_text(["variant", "flags", speed, "labels per frame", *minutes_of(times)], rows)


def times_of(points: Iterable[Point]) -> list[int]:
    """Returns the times of pretraining, in rising order."""
    return sorted({point.minutes for point in points})


def minutes_of(times: Sequence[int]) -> list[str]:
    """Returns the heads of the columns of times."""
    return [f"{time} min" for time in times]


if __name__ == "__main__":
    sys.exit(main())
