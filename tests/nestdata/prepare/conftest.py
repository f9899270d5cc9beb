from pathlib import Path

import pytest

from tests.synthesis import hiss, write_audio, write_jsonl


@pytest.fixture
def manifest(tmp_path: Path) -> Path:
    """A NeMo manifest of three lines, in a folder with its audio."""
    rows = []
    for i in range(3):
        write_audio(tmp_path / "data" / "wavs" / f"{i}.flac", hiss(8000 + 1000 * i, i))
        rows.append({"audio_filepath": f"wavs/{i}.flac", "duration": (8000 + 1000 * i) / 16000, "text": f"wort ü{i}"})
    return write_jsonl(tmp_path / "data" / "speech.json", rows)


@pytest.fixture
def long_manifest(manifest: Path) -> Path:
    """A NeMo manifest of 1200 spans of the same files, which takes several tasks."""
    rows = [{"audio_filepath": f"wavs/{i % 3}.flac", "offset": i // 3 / 1000, "duration": 0.1} for i in range(1200)]
    return write_jsonl(manifest.parent / "long.json", rows)
