"""Manifests of speech: transcribed lines of languages, and recorded speech with speakers that are held out."""

import argparse
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

Line = dict[str, Any]
HELD_OUT = ("fr_CA_f_June", "it_IT_m_Carlo")
"""Speakers of the recorded speech whose loss is measured."""

QUICK_LINES = {"train": 60, "test": 20}
"""Lines of each side of a language with `--quick`."""


def read_lines(path: Path) -> list[Line]:
    """Returns the JSON lines of a file."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def write_lines(path: Path, lines: Iterable[Line]) -> None:
    """Writes JSON lines."""
    path.write_text("".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines), encoding="utf-8")


def read_manifest(path: Path, limit: int = 0) -> list[Line]:
    """Returns the lines of a NeMo manifest with absolute paths; `limit` of them if it is not 0, evenly spread."""
    lines = read_lines(path)
    for line in lines:
        line["audio_filepath"] = str((path.parent / line["audio_filepath"]).absolute())
    return [lines[number * len(lines) // limit] for number in range(limit)] if 0 < limit < len(lines) else lines


def by_speaker(real_speech: Path) -> dict[str, list[Line]]:
    """Returns the lines of a folder's `speech.json`, with speakers of `HELD_OUT` apart, and of its `noise.json`."""
    lines = read_manifest(real_speech / "speech.json")
    return {
        "train": [line for line in lines if line.get("speaker") not in HELD_OUT],
        "held_out": [line for line in lines if line.get("speaker") in HELD_OUT],
        "noise": read_manifest(real_speech / "noise.json"),
    }


def language(text: str) -> tuple[str, str, str]:
    """Returns the name and both absolute paths of `NAME=TRAIN,TEST`."""
    name, _, paths = text.partition("=")
    train, _, test = paths.partition(",")
    if not (name.isidentifier() and train and test) or "," in test:
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=TRAIN,TEST, with a name of letters and digits")
    return name, str(Path(train).absolute()), str(Path(test).absolute())


def write_languages(output: Path, languages: Sequence[tuple[str, str, str]], *, is_quick: bool) -> None:
    """Writes the lines of languages to NAME-train.json and NAME-test.json in a folder."""
    for name, *paths in languages:
        for (side, limit), path in zip(QUICK_LINES.items(), paths, strict=True):
            write_lines(output / f"{name}-{side}.json", read_manifest(Path(path), limit if is_quick else 0))
