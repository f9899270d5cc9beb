"""What benchmarks of learning share: lines of manifests, and how they pretrain the preset `demo` on two cores."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

Line = dict[str, Any]

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


def read_lines(path: Path) -> list[Line]:
    """Returns the JSON lines of a file."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def write_lines(path: Path, lines: Iterable[Line]) -> None:
    """Writes JSON lines."""
    path.write_text("".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines), encoding="utf-8")


def read_manifest(path: Path) -> list[Line]:
    """Returns the lines of a NeMo manifest with absolute paths."""
    lines = read_lines(path)
    for line in lines:
        line["audio_filepath"] = str((path.parent / line["audio_filepath"]).absolute())
    return lines


def fit_command(corpus: str, minutes: int, *, val_corpus: str | None = None) -> str:
    """Returns the command that trains for some minutes on a corpus, as a user types it, and writes to `run`.

    Args:
        corpus: Speech to learn from.
        minutes: Time limit.
        val_corpus: Corpus on which the loss is measured; None for no validation.
    """
    settings = {name: value for name, value in SETTINGS.items() if val_corpus or "val_check" not in name}
    overrides = " ".join(f"--{name} {value}" for name, value in settings.items())
    validation = f"--val-corpus {val_corpus} " if val_corpus else ""
    return (
        f"nestmodel fit {corpus} --config demo --noise noise.corpus {validation}"
        f"--output run --max-time {minutes}m {overrides}"
    )
