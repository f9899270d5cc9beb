"""Decides whether a local file that has changed since a corpus was prepared may be used as it is."""

from typing import Any

from nestdata.corpus.file_version import path_of
from nestdata.errors import AudioError
from nestdata.prepare.header import read_header
from nestdata.prepare.inputs.audio import File, Unusable
from nestdata.prepare.read import source_rate
from nestdata.storage import FileVersion

# Tolerance for the length of a file, as in loading.
_TOLERANCE_S = 0.01


def accepted_version(line: dict[str, Any]) -> FileVersion:
    """Returns the version of the file of a cut as it is now, if its header says what the corpus says.

    Raises:
        AudioError: "changed": it has another length, sampling rate or number of channels, or no audio.
    """
    recording, path = line["recording"], path_of(line)
    found = read_header(File(path))
    if isinstance(found, Unusable):
        raise _unacceptable(line, f"{found.reason}, {found.detail}")
    num_channels = next(len(source["channels"]) for source in recording["sources"] if source["source"] == path)
    seconds = found.num_frames / found.rate
    if found.rate != source_rate(recording):
        raise _unacceptable(line, f"{path} is at {found.rate} Hz, and was at {source_rate(recording)} Hz")
    if found.num_channels != num_channels:
        raise _unacceptable(line, f"{path} has {found.num_channels} channels, and had {num_channels}")
    if abs(seconds - recording["duration"]) > _TOLERANCE_S:
        raise _unacceptable(line, f"{path} lasts {seconds:.3f} s, and lasted {recording['duration']:.3f} s")
    assert found.version is not None
    return found.version


def _unacceptable(line: dict[str, Any], difference: str) -> AudioError:
    return AudioError.because(
        "changed",
        f"cut {line['id']!r}: {difference}, so it cannot be accepted. Restore it, or prepare the corpus again.",
    )
