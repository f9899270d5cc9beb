"""Audio files that are unusable for every reason, and two that can be used."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from nestdata import PrepareConfig
from nestdata.prepare.inputs.entry import RejectReason
from tests.synthesis import Samples, chirp, hiss, write_audio, write_jsonl

BAD_FILES_CONFIG = PrepareConfig(probe="decode", channel=1, min_rate=8000, max_seconds=5.0)
"""Settings with which every bad file is rejected. All files but one have the two channels that it needs."""


def bad_files(directory: Path) -> dict[str, RejectReason]:
    """Writes a folder of audio and `speech.json`, a NeMo manifest of it.

    The usable files are `good-1` and `good-2`. Every other file is named after the reason for its rejection.
    `good-1` is listed twice.

    Returns:
        The reason by cut id of each rejected entry, in the order of the manifest.
    """
    speech = chirp(100, 3000, 1.5) + hiss(24000, 1)
    contents: dict[str, Samples | tuple[Samples, int]] = {
        "good-1.wav": speech,
        "good-2.flac": speech[:16000],
        "no_such_channel.wav": speech,
        "empty-samples.wav": speech[:0],
        "wrong_duration.wav": speech,
        "silent.flac": 0 * speech,
        "too_short.wav": speech[:800],
        "too_long.flac": np.tile(speech, 4),
        "rate_too_low.wav": (speech[:4000], 4000),
    }
    for name, content in contents.items():
        samples, rate = content if isinstance(content, tuple) else (content, 16000)
        stereo = np.stack([samples, samples], axis=1)
        write_audio(directory / name, samples if name.startswith("no_such_channel") else stereo, rate)
    stereo = np.stack([speech, speech], axis=1)
    for value in (np.nan, np.inf):
        broken = stereo.copy()
        broken[12345, 1] = value
        write_audio(directory / f"not_finite-{value}.wav", broken, subtype="FLOAT")
    for suffix in ("wav", "flac", "mp3"):
        _rewrite(
            write_audio(directory / f"truncated-{suffix}.{suffix}", stereo), lambda whole: whole[: len(whole) // 2]
        )
    (directory / "empty.wav").touch()
    (directory / "not_a_file.wav").mkdir()
    (directory / "not_audio.wav").write_bytes(b"<!DOCTYPE html><title>403</title>")
    (directory / "unreadable.wav").write_bytes(b"\0not audio" * 1000)
    names = [*sorted(path.name for path in directory.iterdir()), "missing.wav", "good-1.wav"]
    rows: list[dict[str, Any]] = [{"audio_filepath": name} for name in names]
    rows[names.index("wrong_duration.wav")]["duration"] = 2.0
    for row in rows:
        if row["audio_filepath"].startswith("truncated"):
            row["text"] = "of all of the file"
    write_jsonl(directory / "speech.json", rows)
    reasons: dict[str, Any] = {Path(name).stem: name.split("-")[0].split(".")[0] for name in names}
    reasons["good-1"] = "duplicate_id"
    del reasons["good-2"]
    return reasons


def without_length(flac: bytes) -> bytes:
    """Returns a FLAC file whose header does not give the number of samples, as encoders write it to a pipe."""
    header = bytearray(flac)
    # The number of samples is the last 36 bits of STREAMINFO before its checksum.
    header[21] &= 0xF0
    header[22:26] = bytes(4)
    return bytes(header)


def _rewrite(path: Path, change: Callable[[bytes], bytes]) -> None:
    path.write_bytes(change(path.read_bytes()))
