"""The HTML report of a corpus: lengths, hours by rate and language, rejects, and samples to listen to.

The charts are bars drawn with HTML and CSS, so that the page is written in milliseconds and needs no other file but
the audio of the samples. Samples are drawn by a key that depends only on the number of cuts.
"""

import json
import logging
from collections.abc import Iterable, Mapping, Sequence
from io import BytesIO
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nestdata.errors import AudioError, StorageError, in_one_line, shortened
from nestdata.output import is_full_disk
from nestdata.pages import write_page
from nestdata.prepare.inputs.entry import ADVICE
from nestdata.prepare.inputs.remote import in_parallel
from nestdata.prepare.written_cuts import WrittenCuts
from nestdata.stateless_rng import StatelessRng

_log = logging.getLogger(__name__)
_FOLDER = "report"
_MAX_SECONDS = 10.0
_NUM_BINS = 48
_NUM_TICKS = 7
_MAX_NAMES = 200
# Characters of a text or a name that are shown.
_MAX_TEXT = 300


def write_report(
    cuts: WrittenCuts,
    directory: Path,
    name: str,
    meta: Mapping[str, Any],
    hours_by: Mapping[str, Mapping[str, float]],
    notes: Sequence[str],
) -> None:
    """Writes `report.html` and the audio of its samples into a corpus directory.

    If anything goes wrong, a warning says so: the corpus does not need the page.

    Args:
        cuts: The cuts of the corpus.
        directory: The directory, which holds `rejected.jsonl`.
        name: Name of the corpus.
        meta: The content of `meta.json`, which may be written later.
        hours_by: Hours by name for each kind of label, descending, such as `{"language": {"en": 3.5}}`.
        notes: Lines about the corpus.

    Raises:
        OSError: The disk is full.
    """
    try:
        rate = meta["sampling_rate"]
        seconds = (int(cuts.lengths[0]) / rate, int(cuts.lengths[-1]) / rate)
        write_page(
            directory / "report.html",
            "report.html",
            name=name,
            meta=meta,
            seconds=seconds,
            durations=_durations(cuts.lengths, rate),
            ticks=[f"{tick:.2g} s" for tick in np.geomspace(*seconds, _NUM_TICKS)],
            labels={kind: _bars(list(hours.items())[:_MAX_NAMES]) for kind, hours in hours_by.items() if hours},
            num_more={kind: max(0, len(hours) - _MAX_NAMES) for kind, hours in hours_by.items()},
            rejects=_bars((reason, float(number)) for reason, number in meta["rejected"].items()),
            examples=_examples(directory / "rejected.jsonl", set(meta["rejected"])),
            advice=ADVICE,
            samples=_samples(cuts, directory, meta),
            notes=notes,
            max_seconds=_MAX_SECONDS,
        )
    except Exception as error:
        if isinstance(error, OSError) and is_full_disk(error):
            raise
        _log.warning("%s: the report cannot be written (%s). The corpus is complete.", name, in_one_line(error))


def _bars(values: Iterable[tuple[str, float]]) -> list[dict[str, Any]]:
    """Returns names, values, and their shares of the longest bar."""
    values = list(values)
    longest = max((value for _, value in values), default=0.0) or 1.0
    return [{"name": shortened(name, _MAX_TEXT), "value": value, "share": value / longest} for name, value in values]


def _durations(lengths: NDArray[np.int64], rate: int) -> list[dict[str, Any]]:
    """Returns hours of audio by length of the cut, in bins of equal width on a logarithmic scale."""
    shortest, longest = int(lengths[0]), int(lengths[-1])
    edges = np.geomspace(shortest, longest + 1, _NUM_BINS + 1)
    edges = np.unique(np.ceil(edges - 1e-6).astype(np.int64))
    # The lengths are sorted, so a bin is a slice.
    bounds = np.searchsorted(lengths, edges, "left").tolist()
    hours = [float(lengths[first:stop].sum()) / rate / 3600 for first, stop in pairwise(bounds)]
    names = [f"{low / rate:.3g} to {high / rate:.3g} s" for low, high in pairwise(edges.tolist())]
    return _bars(zip(names, hours, strict=True))


def _examples(path: Path, reasons: set[str]) -> dict[str, dict[str, Any]]:
    """Returns the first reject for each reason."""
    examples: dict[str, dict[str, Any]] = {}
    with path.open(encoding="utf-8") as file:
        for line in file:
            row = json.loads(line)
            examples.setdefault(row["reason"], row)
            if len(examples) == len(reasons):
                break
    return examples


def _samples(cuts: WrittenCuts, directory: Path, meta: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Draws cuts, writes the beginning of their audio, and returns their labels and files, or why there is no audio."""
    num_cuts, settings = len(cuts.lengths), meta["settings"]
    indices = StatelessRng(0, "report", num_cuts).distinct(min(settings["report_samples"], num_cuts), num_cuts)
    if not indices:
        return []
    (directory / _FOLDER).mkdir()

    def audio(index: int) -> bytes | str:
        if settings["probe"] == "missing" and cuts.is_remote(index):
            return "no audio in the object store was read (--probe missing)"
        try:
            num_samples = min(int(cuts.lengths[index]), round(_MAX_SECONDS * meta["sampling_rate"]))
            return _as_flac(cuts.load(index, num_samples), meta["sampling_rate"])
        except (AudioError, StorageError) as error:
            return str(error)[:_MAX_TEXT]

    found = []
    for number, (index, content) in enumerate(
        zip(indices, in_parallel(audio, indices, is_slow=cuts.is_remote), strict=True)
    ):
        row = cuts.row(index)
        label = (row["supervisions"] or [{}])[0]
        file = f"{_FOLDER}/{number + 1:03d}.flac" if isinstance(content, bytes) else ""
        if isinstance(content, bytes):
            (directory / file).write_bytes(content)
        found.append(
            {
                "name": shortened(row["id"], _MAX_TEXT),
                "text": str(label.get("text") or "")[:_MAX_TEXT],
                "language": str(label.get("language") or ""),
                "speaker": shortened(str(label.get("speaker") or ""), _MAX_TEXT),
                "seconds": row["duration"],
                "file": file,
                "error": content if isinstance(content, str) else "",
            }
        )
    return found


def _as_flac(samples: NDArray[np.float32], rate: int) -> bytes:
    """Returns a FLAC file of 16 bits, with amplitudes outside of [-1, 1] clipped.

    Raises:
        AudioError: There is no FLAC of this sampling rate.
    """
    import soundfile

    # To memory, because libsndfile waits until a file is on disk (fsync), which takes longer than everything else.
    encoded = BytesIO()
    try:
        soundfile.write(encoded, np.clip(samples, -1, 1), rate, format="FLAC", subtype="PCM_16", compression_level=0.0)
    except soundfile.LibsndfileError as error:  # above 65535 Hz, some rates cannot be written
        raise AudioError(f"FLAC cannot be written at {rate} Hz") from error
    return encoded.getvalue()
