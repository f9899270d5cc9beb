"""Compares what a small corpus teaches in full steps and in the small steps of an earlier batch plan, at equal audio.

    python -m benchmarks run full_steps CZECH REAL_SPEECH OUTPUT --before CHECKOUT [--epochs 1] [--results FILE.md]

CZECH contains train.json and test.json (NeMo lines with `text` and `scene`), REAL_SPEECH speech.json and noise.json
(NeMo lines with `speaker`). CHECKOUT is a checkout of commit 3e2176c9, whose plan gave most microbatches of a small
corpus a single cut. Both codes get the same settings, and train on whole epochs, so they hear the same audio.

Learning rates are chosen by the loss on Czech scenes that are used for nothing else, with one seed. The chosen rates
are then reported with three seeds: in Czech on the test scenes, by loss and by a character probe; and on the prompts of
two voices, of a model that was trained on the prompts of three others. A call that was interrupted goes on after the
runs that are complete; `--limit` ends a call without starting further runs. All networks are scored by this code, on
the same batches and masks.
"""

import argparse
import hashlib
import json
import math
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial, reduce
from operator import add
from pathlib import Path
from statistics import mean, median, stdev
from typing import Any, NamedTuple

import torch

from benchmarks.harness.arguments import benchmark_parser
from benchmarks.harness.children import command_environment, run_peer
from benchmarks.harness.kept_settings import keep_settings
from benchmarks.harness.report import Report, machine, versions
from benchmarks.harness.repository import REPOSITORY
from benchmarks.learning.parts.errors import read_errors
from benchmarks.learning.parts.held_out import held_out_batches, held_out_metrics
from benchmarks.learning.parts.manifests import by_speaker, read_manifest, write_lines
from nestdata import AudioNoiseBatch, Corpus
from nestmodel import NestConfig, NestNetwork, error_difference, error_rate, save_network
from nestmodel.evaluate.error_rates import percent

QUICK = None
SEEDS = (0, 1, 2)
STUDENT_T = 4.303
"""95 % quantile of the t distribution for three seeds."""

SIDES = {"small": "small steps (before)", "full": "full steps"}
OPTIONS = {"small": "", "full": " --data.plan.min-seconds 0"}
"""The earlier code cannot leave out short cuts."""

SCORED = {"czech": ("development", "test"), "prompts": ("test",)}
SCORED_BATCHES = 40
"""Batches of up to 32 s that a loss is measured on."""

ONE_PART_IN = 8
"""Share of the Czech training scenes that chooses the learning rates."""

_COMMAND = """
import sys, time
sys.path.insert(0, sys.argv.pop(1))
from nestcli.{name} import main
code = main()
print(time.process_time())
sys.exit(code)
"""
_PLAN = """
import json, sys
import nestdata as nd
corpus = nd.Corpus.open(sys.argv[1])
config = nd.PlanConfig(max_batch_seconds=float(sys.argv[2]), microbatches_per_step=int(sys.argv[3]))
epoch = nd.summarise_plan(nd.BatchPlan.of(corpus, config), corpus.num_samples)
print(json.dumps([epoch.steps_per_epoch, epoch.hours, epoch.padding]))
"""


class Run(NamedTuple):
    """One training."""

    corpus: str
    side: str
    lr: float
    """Factor of the Noam schedule."""

    seed: int

    @property
    def name(self) -> str:
        """Folder of the run."""
        return f"{self.corpus}-{self.side}-{self.lr:g}-{self.seed}"


class Plan(NamedTuple):
    """Steps of an epoch."""

    steps_per_epoch: int
    hours: float
    padding: float

    @property
    def seconds_per_step(self) -> float:
        """Audio of a step, without padding."""
        return 3600 * self.hours / self.steps_per_epoch


@dataclass(frozen=True)
class Bench:
    """Settings, code and data of the runs, and their results."""

    arguments: argparse.Namespace
    plans: Mapping[tuple[str, str], Plan]
    batches: Mapping[tuple[str, str], Sequence[AudioNoiseBatch]]

    @property
    def output(self) -> Path:
        """Folder of the runs."""
        output: Path = self.arguments.output
        return output

    def steps(self, run: Run) -> tuple[int, int]:
        """Returns the steps of a run, and those of its warm-up."""
        steps = self.plans[run.corpus, run.side].steps_per_epoch * self.arguments.epochs
        return steps, max(1, round(self.arguments.warmup_share * steps))

    def is_complete(self, run: Run) -> bool:
        """Returns whether a run has a result."""
        return (self.output / run.name / "result.json").exists()

    def result(self, run: Run) -> dict[str, Any]:
        """Returns the result of a complete run."""
        found: dict[str, Any] = json.loads((self.output / run.name / "result.json").read_text(encoding="utf-8"))
        return found

    def below(self, run: Run, part: str, epoch: int = -1) -> float:
        """Returns the loss after an epoch minus the entropy of its tokens, in nats."""
        metrics = self.result(run)["epochs"][epoch][part]
        return float(metrics["loss"] - metrics["token_entropy"])

    def train(self, run: Run) -> None:
        """Trains, and scores the checkpoint of each epoch; nothing is done for a complete run."""
        if self.is_complete(run) or time.monotonic() > self.arguments.deadline:
            return
        arguments, folder, (steps, warmup) = self.arguments, self.output / run.name, self.steps(run)
        subprocess.run(["rm", "-rf", folder], check=True)
        began = time.monotonic()
        printed = run_code(
            self.output,
            run.side,
            "nestmodel",
            f"fit {run.corpus}-train.corpus --config demo --noise noise.corpus --seed {run.seed} --lr {run.lr} "
            f"--warmup-steps {warmup} --max-steps {steps} --accelerator cpu --devices 1 --quiet --log csv "
            f"-o {run.name} --data.plan.max-batch-seconds {arguments.max_batch_seconds} "
            f"--data.plan.microbatches-per-step {arguments.microbatches_per_step} "
            f"--checkpoints.every-n-steps {steps // arguments.epochs} --checkpoints.keep {arguments.epochs}"
            f"{OPTIONS[run.side]}",
        )
        wall_s = time.monotonic() - began
        epochs = []
        for path in sorted(folder.glob("version_0/checkpoints/step_*.ckpt")):
            # An earlier commit writes settings that this code may not read.
            network = NestNetwork(NestConfig.preset("demo")).eval()
            network.load_state_dict(torch.load(path, weights_only=False, map_location="cpu")["state_dict"])
            epochs.append(
                {part: held_out_metrics(network, self.batches[run.corpus, part]) for part in SCORED[run.corpus]}
            )
            save_network(network, folder / "network.ckpt", overwrite=True)  # of the last epoch in the end
        result = {"steps": steps, "wall_s": wall_s, "cpu_s": float(printed.split()[-1]), "epochs": epochs}
        (folder / "result.json").write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
        print(f"{run.name}: {wall_s:.0f} s, loss {[parts['test']['loss'] for parts in epochs]}", flush=True)

    def probe(self, run: Run) -> None:
        """Trains a head on the characters of the Czech training lines, and scores the test lines."""
        done = (self.output / f"probe-{run.name}").exists() or time.monotonic() > self.arguments.deadline
        if done or not self.is_complete(run):
            return
        baselines = "--baselines untrained" if (run.side, run.seed) == ("full", 0) else "--baselines"
        run_code(
            self.output,
            "full",
            "nestmodel",
            f"probe characters {run.name}/network.ckpt czech-train.json --test czech-test.json --group-by scene "
            f"{self.arguments.probe_options} -o probe-{run.name} {baselines}",
        )
        print(f"probe of {run.name}", flush=True)


def main() -> int:
    """Makes the runs that are missing, and writes the results."""
    arguments = _arguments()
    output = arguments.output
    output.mkdir(parents=True, exist_ok=True)
    free = ("output", "results", "lr_small", "lr_full", "jobs", "limit", "deadline", "before", "after")
    keep_settings(output, {name: str(value) for name, value in vars(arguments).items() if name not in free})
    torch.set_num_threads(1)
    for side, checkout in {"small": arguments.before, "full": arguments.after}.items():
        (output / side).mkdir(exist_ok=True)
        for name, target in {"checkout": checkout, "nestcli": checkout / "cli"}.items():
            (output / side / name).unlink(missing_ok=True)
            (output / side / name).symlink_to(target)
    _prepare(arguments)
    noise = Corpus.open(output / "noise.corpus")
    bench = Bench(
        arguments,
        {(corpus, side): _plan(arguments, corpus, side) for corpus in SCORED for side in SIDES},
        {
            (corpus, part): held_out_batches(Corpus.open(output / f"{corpus}-{part}.corpus"), noise, SCORED_BATCHES)
            for corpus, parts in SCORED.items()
            for part in parts
        },
    )
    rates = {"small": arguments.lr_small, "full": arguments.lr_full}
    grid = [Run("czech", side, lr, 0) for side, lrs in rates.items() for lr in lrs]
    _run_all(arguments.jobs, [partial(bench.train, run) for run in grid])
    complete = [run for run in grid if bench.is_complete(run)]
    if {run.side for run in complete} != set(SIDES):
        raise SystemExit("no learning rate has been tried on one of the sides yet. Call again.")
    chosen = {
        side: min((run for run in complete if run.side == side), key=lambda run: bench.below(run, "development")).lr
        for side in SIDES
    }
    print(f"chosen: {chosen}", flush=True)
    reported = {
        corpus: {side: [Run(corpus, side, chosen[side], seed) for seed in SEEDS] for side in SIDES} for corpus in SCORED
    }
    for by_side in reported.values():
        runs = [run for pair in zip(*by_side.values(), strict=True) for run in pair]
        _run_all(arguments.jobs, [partial(_train_and_probe, bench, run) for run in runs])
    _print(bench, complete, chosen, reported)
    return 0


def _arguments() -> argparse.Namespace:
    """Returns the arguments of the command line, with absolute paths."""
    parser = benchmark_parser(__doc__)
    option = parser.add_argument
    option("czech", type=Path)
    option("real_speech", type=Path)
    option("output", type=Path)
    option("--before", type=Path, required=True, help="checkout with the earlier plan")
    option("--after", type=Path, default=REPOSITORY, help="checkout with the plan of today [this one]")
    option("--epochs", type=int, default=1, help="passes over the corpus [%(default)s]")
    option("--lr-small", type=float, nargs="+", default=[0.05, 0.12, 0.3], help="rates of small steps [%(default)s]")
    option("--lr-full", type=float, nargs="+", default=[0.05, 0.12, 0.3], help="rates of full steps [%(default)s]")
    option("--warmup-share", type=float, default=1 / 6, help="share of the steps")
    option("--max-batch-seconds", type=float, default=40)
    option("--microbatches-per-step", type=int, default=8)
    option("--probe-options", default="--learning-rates 0.08 --max-epochs 15 --probe-seeds 0")
    option("--jobs", type=int, default=2, help="processes at a time, with one thread each [%(default)s]")
    option("--limit", type=float, default=math.inf, help="minutes after which no run is started")
    arguments = parser.parse_args()
    for name in ("czech", "real_speech", "output", "before", "after"):
        setattr(arguments, name, getattr(arguments, name).absolute())
    arguments.deadline = time.monotonic() + 60 * arguments.limit
    return arguments


def run_code(output: Path, side: str, program: str, arguments: str) -> str:
    """Runs a command with the code of a side in the folder of the benchmark, and returns what it prints."""
    print("$", side, program, arguments, flush=True)
    command = [sys.executable, "-c", _COMMAND.format(name=program), str(output / side), *shlex.split(arguments)]
    environment = {**command_environment(), "PYTHONPATH": str(output / side / "checkout")}
    return run_peer(command, cwd=output, env=environment)


def _prepare(arguments: argparse.Namespace) -> None:
    """Writes the lines of each part, and prepares their corpora with the code of today."""
    output = arguments.output
    voices = by_speaker(arguments.real_speech)
    czech = read_manifest(arguments.czech / "train.json")
    manifests = {
        "czech-train": [line for line in czech if not _is_development(line["scene"])],
        "czech-development": [line for line in czech if _is_development(line["scene"])],
        "czech-test": read_manifest(arguments.czech / "test.json"),
        "prompts-train": [line for line in voices["train"] if line.get("speaker")],
        "prompts-test": voices["held_out"],
        "noise": voices["noise"],
    }
    for name, lines in manifests.items():
        if not (output / f"{name}.corpus").exists():
            write_lines(output / f"{name}.json", lines)
            options = "--pcm" if name == "noise" else "--max-seconds 30"
            run_code(output, "full", "nestdata", f"prepare {name}.json -o {name}.corpus {options}")


def _is_development(scene: str) -> bool:
    return hashlib.blake2b(scene.encode(), digest_size=1).digest()[0] % ONE_PART_IN == 0


def _plan(arguments: argparse.Namespace, corpus: str, side: str) -> Plan:
    settings = [str(arguments.max_batch_seconds), str(arguments.microbatches_per_step)]
    command = [sys.executable, "-c", _PLAN, f"{corpus}-train.corpus", *settings]
    environment = {**command_environment(), "PYTHONPATH": str(arguments.output / side / "checkout")}
    return Plan(*json.loads(run_peer(command, cwd=arguments.output, env=environment)))


def _run_all(jobs: int, tasks: Sequence[Callable[[], None]]) -> None:
    with ThreadPoolExecutor(jobs) as pool:
        for done in [pool.submit(task) for task in tasks]:
            done.result()


def _train_and_probe(bench: Bench, run: Run) -> None:
    bench.train(run)
    if run.corpus == "czech":
        bench.probe(run)


def _print(
    bench: Bench, grid: Sequence[Run], chosen: Mapping[str, float], reported: Mapping[str, Mapping[str, list[Run]]]
) -> None:
    arguments = bench.arguments
    report = Report(
        "Full steps on a small corpus",
        __file__,
        f"{machine('CPU cores')} with other work, {arguments.jobs} processes of one thread at a time, "
        f"{versions('torch', 'jiwer')}.",
        results=arguments.results,
    )
    asked = f"{arguments.microbatches_per_step} x {arguments.max_batch_seconds:g} s"
    report.text(f"""Both sides ask for {asked} a step. "{SIDES["small"]}" is the code of an earlier commit, whose plan
        gave most microbatches a single cut; "{SIDES["full"]}" is the code of today. Passes over the corpus:
        {arguments.epochs}, with the preset `demo` on one thread. The warm-up takes {arguments.warmup_share:.2f} of
        the steps. Losses are those of held-out lines minus the entropy of their tokens, in nats: lower is better. All
        networks are scored by this code on the same batches and masks. Both sides start from the same weights in each
        seed.""")
    report.section("Steps")
    columns = [
        "corpus",
        "",
        "steps of an epoch",
        "audio of a step, s",
        "padding, %",
        "steps",
        "warm-up",
        "CPU time, s",
        "wall time, s",
    ]
    runs = {*grid, *(run for sides in reported.values() for one in sides.values() for run in one)}
    complete = [run for run in runs if bench.is_complete(run)]
    report.table(columns, (_plan_row(bench, corpus, side, complete) for corpus, side in bench.plans))
    report.text("""Times are medians over runs, with the start of the process and without scoring. Wall times say
        little, because other work ran on the same cores.""")
    report.section("Learning rates, one seed")
    report.text(f"""Chosen by the loss on the Czech development scenes ({_lines(bench, "czech-development")}) after the
        last epoch, with seed 0. They are neither in the training scenes ({_lines(bench, "czech-train")}) nor in the
        test scenes. The rate is the factor of the Noam schedule, the peak the largest rate of the optimizer.""")
    columns = ["", "rate", "peak", *(f"development, epoch {epoch + 1}" for epoch in range(arguments.epochs)), "chosen"]
    report.table(columns, (_rate_row(bench, run, chosen) for run in sorted(grid, key=lambda run: (run.side, run.lr))))
    report.section("Loss, three seeds")
    columns = ["corpus", "", "rate", "epoch", "loss minus entropy", "by seed"]
    for corpus, sides in reported.items():
        if all(bench.is_complete(run) for one in sides.values() for run in one):
            report.text(f"Test lines of {corpus}: {_lines(bench, f'{corpus}-test')}. Intervals cover seeds (t, 95 %).")
            report.table(columns, _loss_rows(bench, corpus, sides))
    report.section("Characters, Czech, three seeds")
    report.text(f"""Errors in characters of a linear head (`{arguments.probe_options}`) that reads the frozen encoder,
        in %, differences in percentage points, with 95 % bootstrap intervals over scenes of the test lines, which do
        not cover seeds; those over seeds are t intervals, as above. The head learned from the training lines.""")
    report.table(["", "CER", "by seed"], _error_rows(bench, reported["czech"]))


def _lines(bench: Bench, name: str) -> str:
    corpus = Corpus.open(bench.output / f"{name}.corpus")
    return f"{len(corpus)} lines, {corpus.hours:.2f} h"


def _plan_row(bench: Bench, corpus: str, side: str, runs: Sequence[Run]) -> list[object]:
    plan, (steps, warmup) = bench.plans[corpus, side], bench.steps(Run(corpus, side, 0, 0))
    results = [bench.result(run) for run in runs if (run.corpus, run.side) == (corpus, side)]
    times = [f"{median(result[name] for result in results):.0f}" if results else "-" for name in ("cpu_s", "wall_s")]
    cells = [plan.steps_per_epoch, f"{plan.seconds_per_step:.0f}", f"{100 * plan.padding:.1f}", steps, warmup]
    return [corpus, SIDES[side], *cells, *times]


def _rate_row(bench: Bench, run: Run, chosen: Mapping[str, float]) -> list[object]:
    peak = run.lr * (NestConfig.preset("demo").conformer.d_model * bench.steps(run)[1]) ** -0.5
    losses = (f"{bench.below(run, 'development', epoch):.3f}" for epoch in range(bench.arguments.epochs))
    return [SIDES[run.side], f"{run.lr:g}", f"{peak:.4f}", *losses, "yes" if chosen[run.side] == run.lr else ""]


def _loss_rows(bench: Bench, corpus: str, sides: Mapping[str, list[Run]]) -> Iterator[list[object]]:
    for epoch in range(bench.arguments.epochs):
        losses = {side: [bench.below(run, "test", epoch) for run in runs] for side, runs in sides.items()}
        for side, values in losses.items():
            yield [corpus, SIDES[side], f"{sides[side][0].lr:g}", epoch + 1, *_over_seeds(values)]
        paired = [full - small for full, small in zip(losses["full"], losses["small"], strict=True)]
        yield [corpus, "full minus small", "", epoch + 1, *_over_seeds(paired)]


def _over_seeds(values: Sequence[float], digits: int = 3) -> list[str]:
    """Returns the mean with its interval, and the value of each seed."""
    middle, half = mean(values), STUDENT_T * stdev(values) / math.sqrt(len(values))
    low, high = (f"{value:.{digits}f}" for value in (middle - half, middle + half))
    return [f"{middle:.{digits}f} ({low} to {high})", ", ".join(f"{value:.{digits}f}" for value in values)]


def _error_rows(bench: Bench, sides: Mapping[str, list[Run]]) -> Iterator[list[str]]:
    files = {
        side: [bench.output / f"probe-{run.name}" / "hypotheses.jsonl" for run in runs] for side, runs in sides.items()
    }
    if not all(path.exists() for paths in files.values() for path in paths):
        return
    errors = {side: [read_errors(path) for path in paths] for side, paths in files.items()}
    for side, counts in errors.items():
        by_seed = ", ".join(f"{100 * error_rate(one).rate:.1f}" for one in counts)
        yield [SIDES[side], percent(error_rate(reduce(add, counts))), by_seed]
    pairs = list(zip(errors["full"], errors["small"], strict=True))
    over_seeds, by_seed = _over_seeds([100 * error_difference(full, small).value for full, small in pairs], 1)
    together = error_difference(reduce(add, errors["full"]), reduce(add, errors["small"]))
    yield ["full minus small", percent(together), f"{by_seed}; over seeds {over_seeds}"]
    yield ["untrained, calibrated, seed 0", percent(error_rate(read_errors(files["full"][0], "untrained"))), ""]


if __name__ == "__main__":
    sys.exit(main())
