"""The folder in which a newcomer tries the commands: speech, noise, lists of both, and everything that can be wrong.

What a user would have from earlier commands (corpora, a checkpoint, a model for NeMo) is made by these commands.
"""

import contextlib
import csv
import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import yaml

from tests.synthesis import Samples, chirp, hiss, tone, write_audio, write_jsonl

from .process import Commands

TINY = {
    "output": "runs",
    "trainer": {"max_steps": 4, "log_every_n_steps": 1, "val_check_interval": 2, "accelerator": "cpu"},
    "checkpoints": {"every_n_steps": 4},
    "model": {
        "config": {
            "quantizer": {"num_classes": 32},
            "masking": {"prob": 0.05},
            "encoder": {"d_model": 16, "num_heads": 2, "num_layers": 2, "subsampling_channels": 8},
        }
    },
    "data": {"plan": {"max_batch_seconds": 10.0, "microbatches_per_step": 2}, "num_workers": 0},
}
PROGRAMS = Path(__file__).parent / "programs"
_STEPS = (
    "nestdata prepare speech.json -o speech.corpus",
    "nestdata prepare noises -o noise.corpus --pcm",
    "nestmodel fit speech.corpus --config tiny.yaml --noise noise.corpus --output earlier",
    "nestmodel export last.ckpt --to nemo -o model.nemo",
)


def make_folder(folder: Path, commands: Commands) -> None:
    """Writes the folder, and runs the commands that a user has run before."""
    folder.mkdir()
    rows = []
    for i in range(40):  # a probe holds ten of them out
        seconds = 1.0 + 0.1 * (i % 8)
        name = f"talks/{i:02d}.flac"
        speech = _bursts(seconds) if i % 2 else chirp(200, 4000, seconds)
        write_audio(folder / name, speech + hiss(len(speech), i, level=0.02))
        rows.append(
            {"audio_filepath": name, "text": f"this is what was said {i}", "sound": "bursts" if i % 2 else "sweep"}
        )
    write_jsonl(folder / "speech.json", rows)
    write_jsonl(folder / "gone.json", [*rows, {"audio_filepath": "talks/gone.flac", "duration": 1.0}])
    write_audio(folder / "talk.wav", tone(300, 2.0) + hiss(32000, 90))
    for i in range(4):
        write_audio(folder / "noises" / f"{i}.wav", hiss(40000, 50 + i))
    _write_lists(folder, rows)
    _write_hostile(folder)
    (folder / "tiny.yaml").write_text(yaml.safe_dump(TINY))
    for program in PROGRAMS.glob("*.py"):
        shutil.copy(program, folder)
    for step in _STEPS:
        outcome = commands.run(step.split(), folder)
        if outcome.code:
            raise RuntimeError(f"{step}: exit code {outcome.code}\n{outcome.err}")
        if "fit" in step:
            max((folder / "earlier").rglob("*.ckpt")).rename(folder / "last.ckpt")
            shutil.rmtree(folder / "earlier")
    checkpoint = (folder / "last.ckpt").read_bytes()
    (folder / "damaged.ckpt").write_bytes(checkpoint[: len(checkpoint) // 2])


@contextlib.contextmanager
def copied(folder: Path, copy: Path) -> Iterator[Path]:
    """Yields a copy of the folder for one command line, with directories that cannot be read or written."""
    shutil.copytree(folder, copy)
    locked = {copy / "unreadable": 0o000, copy / "readonly": 0o555}
    for directory, mode in locked.items():
        directory.mkdir()
        directory.chmod(mode)
    yield copy
    for directory in locked:
        directory.chmod(0o755)
    shutil.rmtree(copy, ignore_errors=True)  # a process that ends may still write to it


def _bursts(seconds: float) -> Samples:
    """Returns a tone that is on six times a second. A linear probe separates it from a sweep without an error."""
    time = np.arange(round(16000 * seconds)) / 16000
    return tone(400, seconds) * (np.sin(2 * np.pi * 6 * time) > 0)


def _write_lists(folder: Path, rows: list[dict[str, str]]) -> None:
    with (folder / "speech.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, ["path", "text"])
        writer.writeheader()
        writer.writerows({"path": row["audio_filepath"], "text": row["text"]} for row in rows)
    (folder / "list.txt").write_text("".join(f"{row['audio_filepath']}\n" for row in rows))
    (folder / "empty.json").touch()
    (folder / "documents").mkdir()
    (folder / "documents" / "index.html").write_text("<p>My own page.</p>")
    saved = folder / "saved"  # recognised as a Hugging Face data set by the names of its files
    saved.mkdir()
    for name in ("dataset_info.json", "state.json"):
        (saved / name).write_text("{}")


def _write_hostile(folder: Path) -> None:
    for name in ("$(touch x).wav", "; rm -rf x.wav", "two\nlines.wav", "\x1b[2Jcleared.wav"):
        write_audio(folder / "hostile" / name, tone(300, 1.0))
    row = {"audio_filepath": str(folder / "hostile" / "\x1b[2Jcleared.wav"), "duration": -1}
    (folder / "escape.json").write_text(json.dumps(row) + "\n")
    broken = folder / "broken"
    broken.mkdir()
    for i in range(3):
        (broken / f"{i}.wav").write_text("This is no audio.")
