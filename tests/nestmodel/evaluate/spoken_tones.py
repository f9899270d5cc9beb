"""Synthetic speech whose content is known: every letter is a tone of its own, and a space is a pause."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from nestdata.stateless_rng import StatelessRng
from tests.synthesis import Samples, hiss, tone, write_audio, write_jsonl

TONES = {"a": 300.0, "b": 700.0, "c": 1500.0, "d": 3100.0}
LETTER_SECONDS = 0.16
"""Two encoder frames; the last quarter is a pause."""


def spoken(text: str, seed: int) -> Samples:
    """Returns the tones of a text, with some noise."""
    letters = [np.zeros(round(0.16 * 16000), np.float32)]
    for letter in text:
        sound = tone(TONES.get(letter, 0.0), LETTER_SECONDS * 0.75)
        letters.append(np.concatenate([sound, np.zeros(round(LETTER_SECONDS * 4000), np.float32)]))
    audio = np.concatenate(letters)
    return audio + hiss(len(audio), seed, level=0.001)


def random_text(seed: int) -> str:
    """Returns four to seven letters, sometimes as two words."""
    rng = StatelessRng(seed, "tone text")
    letters = "".join("abcd"[rng.below(4)] for _ in range(rng.between(4, 7)))
    return f"{letters[:2]} {letters[2:]}" if rng.below(2) else letters


def write_manifest(folder: Path, name: str, seeds: range) -> list[dict[str, Any]]:
    """Writes the audio of random texts and returns the lines of their manifest, which is written as `NAME.json`."""
    rows = []
    for seed in seeds:
        text = random_text(seed)
        write_audio(folder / name / f"{seed:03d}.wav", spoken(text, seed))
        rows.append({"audio_filepath": f"{name}/{seed:03d}.wav", "text": text.upper() + "!", "take": seed % 7})
    write_jsonl(folder / f"{name}.json", rows)
    return rows


def changed(folder: Path, rows: list[dict[str, Any]], changes: Mapping[int, Mapping[str, Any]], name: str) -> Path:
    """Writes a manifest with some fields of some lines changed; a field that becomes None is left out."""
    merged = [{**row, **changes.get(i, {})} for i, row in enumerate(rows)]
    kept = [{key: value for key, value in row.items() if value is not None} for row in merged]
    return write_jsonl(folder / f"{name}.json", kept)
