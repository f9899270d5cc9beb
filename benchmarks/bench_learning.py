"""Trains on recorded speech, and compares the loss on held-out speakers with the entropy of their tokens.

    python benchmarks/bench_learning.py REAL_SPEECH OUTPUT [--minutes 30] [--results benchmarks/results/NAME]

REAL_SPEECH contains speech.json and noise.json (NeMo lines with `speaker`). The lines of the held-out speakers become
the validation corpus, all other lines the training corpus. The script prepares both and the noise, previews a batch,
trains the demo preset, and writes the result as Markdown. The commands are those that a user types. If OUTPUT already
contains a run, only the report is written.
"""

import argparse
import json
import os
import platform
import shlex
import sys
from importlib.metadata import version
from pathlib import Path

from peer import run_peer

from nestdata import Corpus
from nestmodel.training.callbacks.curves import Series, draw_curves, read_metrics

BIN = Path(sys.executable).parent
HELD_OUT = ("fr_CA_f_June", "it_IT_m_Carlo")
SETTINGS = {
    # The operations are small: two ranks of one thread each process twice as much audio as one rank of two threads.
    "trainer.accelerator": "cpu",
    "trainer.strategy": "ddp",
    "trainer.devices": 2,
    "data.plan.microbatches_per_step": 2,
    "data.plan.max_batch_seconds": 45,
    "trainer.max_steps": 100000,
    "trainer.val_check_interval": 250,
    "trainer.log_every_n_steps": 20,
    "model.config.optimizer.lr": 0.3,
    "model.config.optimizer.warmup_steps": 400,
}


def main() -> int:
    """Trains unless there is a run, and writes the report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("real_speech", type=Path)
    parser.add_argument("output", type=Path)
    parser.add_argument("--minutes", type=int, default=30)
    parser.add_argument(
        "--results", type=Path, default=Path("learning"), help="path of the results: NAME.md and NAME.png"
    )
    arguments = parser.parse_args()
    real, output = arguments.real_speech.absolute(), arguments.output.absolute()
    output.mkdir(parents=True, exist_ok=True)
    if not (output / "run").exists():
        prepare(real, output)
        for command in commands(arguments.minutes):
            print("$", command, flush=True)
            run_peer(shlex.split(command), cwd=output, env=environment(), echo=True)
    arguments.results.with_suffix(".md").write_text(report(output, arguments.minutes))
    draw_curves(output / "run" / "version_0", arguments.results.with_suffix(".png"))
    return 0


def prepare(real: Path, output: Path) -> None:
    """Writes the manifests of both sides of the split next to the audio, and prepares all corpora."""
    lines = [json.loads(line) for line in (real / "speech.json").read_text().splitlines()]
    sides = {"train": [], "held_out": []}
    for line in lines:
        sides["held_out" if line.get("speaker") in HELD_OUT else "train"].append(line)
    for name, rows in sides.items():
        (real / f"{name}.json").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for name in (*sides, "noise"):
        limit = [] if name == "noise" else ["--max-seconds", "30"]
        command = ["nestdata", "prepare", str(real / f"{name}.json"), "-o", f"{name}.corpus", "--overwrite", *limit]
        run_peer(command, cwd=output, env=environment(), echo=True)


def commands(minutes: int) -> list[str]:
    """Returns the commands that a user types after `nestdata prepare`."""
    overrides = " ".join(f"--{name} {value}" for name, value in SETTINGS.items())
    return [
        "nestdata sample-batch preview train.corpus --noise noise.corpus --max-batch-seconds 45 --step 100 -o preview",
        "nestmodel fit --config demo --data.corpus train.corpus --data.noise noise.corpus "
        "--data.val_corpus held_out.corpus "
        f"--trainer.default_root_dir run --trainer.max_time 00:{minutes // 60:02d}:{minutes % 60:02d}:00 {overrides}",
    ]


def report(output: Path, minutes: int) -> str:
    """Returns the result as Markdown."""
    series = read_metrics(output / "run" / "version_0")
    corpora = {name: Corpus.open(output / f"{name}.corpus") for name in ("train", "held_out", "noise")}
    sizes = "\n".join(f"| {name} | {len(c)} | {c.hours:.2f} |" for name, c in corpora.items())
    packages = ", ".join(f"{name} {version(name)}" for name in ("torch", "lhotse", "pytorch-lightning", "numpy"))
    typed = "\n".join(f"    {command}" for command in commands(minutes))
    return f"""# Learning from recorded speech

Made by `benchmarks/bench_learning.py` on {os.cpu_count()} CPU cores ({platform.machine()}), {packages}.
Held-out speakers: {", ".join(HELD_OUT)}, a woman and a man, with all their prompts. Speech above 30 s is excluded.

| corpus | cuts | hours |
|---|---|---|
{sizes}

{typed}

{verdict(series)}

| step | validation loss | entropy of its tokens | difference | masked accuracy | training loss |
|---|---|---|---|---|---|
{table(series)}

Medians: {median(series["audio_s_per_s"][1]):.0f} seconds of audio per second,
{100 * median(series["data_wait"][1]):.1f} % of the time waiting for data,
{100 * median(series["padding"][1]):.1f} % padding. The plot is next to this file.
"""


def verdict(series: Series) -> str:
    """Returns one sentence: whether the validation loss fell below the entropy, and its best value."""
    rows = list(zip(series["val_loss"][0], series["val_loss"][1], series["val_token_entropy"][1], strict=True))
    best = min(rows, key=lambda row: row[1] - row[2])
    first = next((step for step, loss, entropy in rows if loss < entropy), None)
    if first is None:
        return f"**Not below the entropy**: closest at step {best[0]}, {best[1]:.3f} against {best[2]:.3f} nats."
    return (
        f"**Below the entropy of its tokens from step {first} on**; best at step {best[0]}: {best[1]:.3f} against "
        f"{best[2]:.3f} nats."
    )


def table(series: Series) -> str:
    """Returns one row per validation."""
    lines = []
    for i, step in enumerate(series["val_loss"][0]):
        loss, entropy, accuracy = (series[f"val_{name}"][1][i] for name in ("loss", "token_entropy", "accuracy"))
        recent = [v for s, v in zip(*series["train_loss"], strict=True) if step - 200 < s <= step]
        train = f"{sum(recent) / len(recent):.3f}" if recent else ""
        lines.append(
            f"| {step + 1} | {loss:.3f} | {entropy:.3f} | {entropy - loss:.3f} | {100 * accuracy:.1f} % | {train} |"
        )
    return "\n".join(lines)


def median(values: list[float]) -> float:
    """Returns the upper median."""
    return sorted(values)[len(values) // 2]


def environment() -> dict[str, str]:
    """Returns an environment in which the commands of this Python are first on the path, with one thread per rank."""
    return {**os.environ, "OMP_NUM_THREADS": "1", "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}"}


if __name__ == "__main__":
    sys.exit(main())
