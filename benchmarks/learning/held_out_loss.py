"""Trains on recorded speech, and compares the loss on held-out speakers with the entropy of their tokens.

    python -m benchmarks run held_out_loss REAL_SPEECH OUTPUT [--minutes 30] [--results benchmarks/results/NAME]

REAL_SPEECH contains speech.json and noise.json (NeMo lines with `speaker`). The lines of the held-out speakers become
the validation corpus, all other lines the training corpus. The script prepares both and the noise, previews a batch,
trains the demo preset, and writes the result as Markdown. The commands are as a user types them. If OUTPUT already
contains a run, only the report is written.
"""

import sys
from collections.abc import Iterator
from pathlib import Path
from statistics import median_high

from benchmarks.harness.arguments import benchmark_parser
from benchmarks.harness.children import run_command
from benchmarks.harness.report import machine, table_text, versions
from benchmarks.learning.pretraining import fit_command, read_manifest, write_lines
from nestdata import Corpus
from nestmodel.training.callbacks.curves import Series, draw_curves, read_metrics

QUICK = None
HELD_OUT = ("fr_CA_f_June", "it_IT_m_Carlo")
"""Speakers whose loss is measured."""

CORPORA = {"train": "--max-seconds 30", "held_out": "--max-seconds 30", "noise": ""}
"""Options of `nestdata prepare` for each corpus."""


def main() -> int:
    """Trains unless there is a run, and writes the report."""
    parser = benchmark_parser(__doc__)
    parser.set_defaults(results=Path("learning"))  # NAME.md and NAME.png
    parser.add_argument("real_speech", type=Path)
    parser.add_argument("output", type=Path)
    parser.add_argument("--minutes", type=int, default=30)
    arguments = parser.parse_args()
    output = arguments.output.absolute()
    output.mkdir(parents=True, exist_ok=True)
    if not (output / "run").exists():
        speech = read_manifest(arguments.real_speech / "speech.json")
        lines = {
            "train": [line for line in speech if line.get("speaker") not in HELD_OUT],
            "held_out": [line for line in speech if line.get("speaker") in HELD_OUT],
            "noise": read_manifest(arguments.real_speech / "noise.json"),
        }
        for name, options in CORPORA.items():
            write_lines(output / f"{name}.json", lines[name])
            run_command(f"nestdata prepare {name}.json -o {name}.corpus {options} --overwrite", output, echo=True)
        for command in commands(arguments.minutes):
            run_command(command, output, echo=True)
    arguments.results.with_suffix(".md").write_text(report(output, arguments.minutes))
    draw_curves(output / "run" / "version_0", arguments.results.with_suffix(".png"))
    return 0


def commands(minutes: int) -> list[str]:
    """Returns the commands that a user types after `nestdata prepare`."""
    return [
        "nestdata sample-batch preview train.corpus --noise noise.corpus --max-batch-seconds 45 --step 100 -o preview",
        fit_command("train.corpus", minutes, val_corpus="held_out.corpus"),
    ]


def report(output: Path, minutes: int) -> str:
    """Returns the result as Markdown."""
    series = read_metrics(output / "run" / "version_0")
    corpora = {name: Corpus.open(output / f"{name}.corpus") for name in CORPORA}
    packages = versions("torch", "lhotse", "pytorch-lightning", "numpy")
    typed = "\n".join(f"    {command}" for command in commands(minutes))
    columns = ["step", "validation loss", "entropy of its tokens", "difference", "masked accuracy", "training loss"]
    return f"""# Learning from recorded speech

Made by `benchmarks/learning/held_out_loss.py` on {machine("CPU cores")}, {packages}.
Held-out speakers: {", ".join(HELD_OUT)}, a woman and a man, with all their prompts. Speech above 30 s is excluded.

{table_text(["corpus", "cuts", "hours"], ([name, len(c), f"{c.hours:.2f}"] for name, c in corpora.items()))}

{typed}

{summary(series)}

{table_text(columns, validations(series))}

Medians: {median_high(series["audio_s_per_s"][1]):.0f} seconds of audio per second,
{100 * median_high(series["data_wait"][1]):.1f} % of the time waiting for data,
{100 * median_high(series["padding"][1]):.1f} % padding. The plot is next to this file.
"""


def summary(series: Series) -> str:
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


def validations(series: Series) -> Iterator[list[object]]:
    """Returns one row per validation."""
    for i, step in enumerate(series["val_loss"][0]):
        loss, entropy, accuracy = (series[f"val_{name}"][1][i] for name in ("loss", "token_entropy", "accuracy"))
        recent = [v for s, v in zip(*series["train_loss"], strict=True) if step - 200 < s <= step]
        train = f"{sum(recent) / len(recent):.3f}" if recent else ""
        cells = [f"{loss:.3f}", f"{entropy:.3f}", f"{entropy - loss:.3f}", f"{100 * accuracy:.1f} %", train]
        yield [step + 1, *cells]


if __name__ == "__main__":
    sys.exit(main())
