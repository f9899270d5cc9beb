"""Reads the manifests that people have, as a stream of entries with the place each came from.

Accepted here: NeMo JSONL (`audio_filepath` or `audio_filename`, with `offset`, `duration` and labels), Lhotse cuts
(`.jsonl`, `.jsonl.gz`), and a folder of audio. A manifest that cannot be read is an error that stops the work; whether
the audio behind an entry is usable is decided later, in `probe`.
"""

import gzip
import io
import json
import os
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from lhotse import MonoCut

from nestdata.errors import ManifestError

ManifestFormat = Literal["nemo", "lhotse", "folder"]
_AUDIO_KEYS = ("audio_filepath", "audio_filename")
_AUDIO_SUFFIXES = frozenset({".wav", ".flac", ".ogg", ".opus", ".mp3", ".aiff", ".aif", ".m4a", ".sph", ".w64", ".wma"})


@dataclass(frozen=True, kw_only=True, slots=True)
class Entry:
    """A span of audio that a manifest names, not yet looked at."""

    where: str
    """Place in the input, such as `speech.json:12`."""

    cut_id: str
    path: Path | None = None
    """The audio file, or None where `cut` already holds its recording."""

    offset: float = 0.0
    """Seconds into the file."""

    duration: float | None = None
    """Seconds, or None for all that is left of the file."""

    labels: dict[str, Any] = field(default_factory=dict)
    """What else the manifest says, such as text, lang and speaker."""

    cut: MonoCut | None = None
    """The cut itself, where the manifest is one of Lhotse's."""


def detect_format(path: Path) -> ManifestFormat:
    """Tells what a manifest is by looking into it.

    Raises:
        ManifestError: It does not exist, is empty, or its first line is of no known kind.
    """
    if path.is_dir():
        return "folder"
    for line_no, row in _json_lines(path):
        if any(key in row for key in _AUDIO_KEYS):
            return "nemo"
        if row.get("type") in ("MonoCut", "Cut") or "recording" in row:
            return "lhotse"
        keys = ", ".join(list(row)[:6])
        raise ManifestError(
            f"{path}:{line_no}: neither a NeMo line (no audio_filepath) nor a Lhotse cut (no recording); its keys are: "
            f"{keys}. Give one of the two, or a folder of audio."
        )
    raise ManifestError(f"{path}: the manifest is empty. Check the command that wrote it.")


def common_root(manifests: Sequence[Path]) -> Path:
    """Returns the folder that ids are relative to: the deepest one that holds all manifests and folders."""
    folders = [os.path.abspath(path if path.is_dir() else path.parent) for path in manifests]
    return Path(os.path.commonpath(folders))


def read_manifest(path: Path, root: Path | None = None) -> Iterator[Entry]:
    """Yields the entries of one manifest, in its order.

    Args:
        path: The manifest, or a folder of audio.
        root: The folder that ids are relative to, by default that of the manifest. A file outside of it has its
            absolute path for an id.

    Raises:
        ManifestError: The manifest cannot be read; the message names the line.
    """
    readers = {"nemo": _read_nemo, "lhotse": _read_lhotse, "folder": _read_folder}
    yield from readers[detect_format(path)](path, root or common_root([path]))


def count_entries(path: Path) -> int:
    """Counts lines of a manifest or audio files of a folder: how much work a progress bar stands for."""
    if path.is_dir():
        return len(_audio_files(path))
    with _open(path) as file:
        return sum(block.count(b"\n") for block in iter(lambda: file.read(1 << 20), b""))


def _read_nemo(path: Path, root: Path) -> Iterator[Entry]:
    for line_no, row in _json_lines(path):
        where = f"{path}:{line_no}"
        name = next((row[key] for key in _AUDIO_KEYS if key in row), None)
        if name is None:
            raise ManifestError(f"{where}: the key audio_filepath is missing. Add it, or drop this line.")
        if not isinstance(name, str) or not Path(name).name:
            raise ManifestError(f"{where}: audio_filepath is {name!r}. Give the path of one file as a string.")
        offset, duration = (_seconds(row, key, where) for key in ("offset", "duration"))
        labels = {k: v for k, v in row.items() if k not in (*_AUDIO_KEYS, "offset", "duration")}
        suffix = "" if offset is None else f"@{offset:.3f}" + ("" if duration is None else f"+{duration:.3f}")
        yield Entry(
            where=where,
            cut_id=_id_of(path.parent / name, root) + suffix,
            path=path.parent / name,
            offset=offset or 0.0,
            duration=duration,
            labels=labels,
        )


def _read_lhotse(path: Path, _root: Path) -> Iterator[Entry]:
    for line_no, row in _json_lines(path):
        where = f"{path}:{line_no}"
        kind = row.pop("type", "MonoCut")
        if kind not in ("MonoCut", "Cut"):
            raise ManifestError(
                f"{where}: a {kind} where a MonoCut was expected. Reduce it to cuts of one channel in Lhotse first."
            )
        if not row.get("recording"):
            raise ManifestError(f"{where}: the cut has no recording. Add it, or drop this line.")
        for key in ("start", "duration"):
            if _seconds(row, key, where) is None:
                raise ManifestError(f"{where}: the cut has no {key}. Add it, or drop this line.")
        try:
            cut = MonoCut.from_dict(row)
        except Exception as error:  # Lhotse raises whatever its constructors meet
            raise ManifestError(
                f"{where}: not a Lhotse cut ({type(error).__name__}: {error}). Fix this line."
            ) from error
        yield Entry(where=where, cut_id=cut.id, cut=cut)


def _read_folder(path: Path, root: Path) -> Iterator[Entry]:
    files = _audio_files(path)
    if not files:
        kinds = " ".join(sorted(_AUDIO_SUFFIXES))
        raise ManifestError(f"{path}: no audio in this folder or below it. Looked for {kinds}.")
    for file in files:
        yield Entry(where=str(file), cut_id=_id_of(file, root), path=file)


def _id_of(file: Path, root: Path) -> str:
    """Returns the path below the root without its ending: the same wherever the root lies."""
    absolute = Path(os.path.abspath(file)).with_suffix("")
    return absolute.relative_to(root).as_posix() if absolute.is_relative_to(root) else absolute.as_posix()


def _audio_files(path: Path) -> list[Path]:
    return sorted(file for file in path.rglob("*") if file.suffix.lower() in _AUDIO_SUFFIXES and file.is_file())


def _json_lines(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    with _open(path) as file:
        for line_no, line in enumerate(file, start=1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except ValueError as error:
                raise ManifestError(
                    f"{path}:{line_no}: not JSON ({error}). Every line must be one JSON object; fix or drop it."
                ) from error
            if not isinstance(row, dict):
                raise ManifestError(
                    f"{path}:{line_no}: {type(row).__name__} where a JSON object was expected. Fix or drop it."
                )
            yield line_no, row


@contextmanager
def _open(path: Path) -> Iterator[io.BufferedIOBase]:
    if not path.is_file():
        raise ManifestError(f"{path}: no such manifest. Give a NeMo JSONL file, Lhotse cuts, or a folder of audio.")
    try:
        with gzip.GzipFile(path, "rb") if path.suffix == ".gz" else path.open("rb") as file:
            yield file
    except (OSError, EOFError, zlib.error) as error:
        raise ManifestError(f"{path}: cannot be read ({error}). Check the file and copy it again.") from error


def _seconds(row: dict[str, Any], key: str, where: str) -> float | None:
    value = row.get(key)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < float("inf"):
        raise ManifestError(f"{where}: {key} is {value!r}. Give seconds as a number that is not negative.")
    return float(value)
