"""The cuts and rejects of consecutive items of a source, as a worker sends them to the corpus writer."""

import json
import zlib
from collections import Counter
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nestdata.prepare.speech.config import FRAME_SECONDS
from nestdata.prepare.speech.measures import SpeechTotals
from nestdata.prepare.writing.draw import KeyedDraw
from nestdata.prepare.writing.found import AudioSpan, Reject
from nestdata.prepare.writing.records import RECORD
from nestdata.storage import ObjectInfo

_LAYOUT = str(RECORD.descr)


@dataclass(frozen=True, slots=True)
class ProbedItems:
    """The cuts and rejects of consecutive items of one source."""

    num_entries: int
    """Number of entries among the items; blank lines do not count."""

    lines: bytes
    """The cuts as lines of `cuts.jsonl`."""

    records: NDArray[Any]
    """One record per cut, shape (num_cuts,), dtype `RECORD`; offsets count from the start of `lines`."""

    rejects: list[Reject]
    num_resampled: int
    """Number of cuts that are resampled when they are loaded."""

    samples_by: dict[str, Counter[str]]
    """Number of samples by name, under the keys `language` and `speaker`."""

    shards: list[ObjectInfo] = field(default_factory=list)
    """The shards of the cuts, in the order of first use; the shard of a record counts from the start of this list."""

    speech: SpeechTotals = field(default_factory=SpeechTotals)
    """Speech in the recordings, if it was looked for."""

    drawn_cuts: KeyedDraw[int] = field(default_factory=KeyedDraw)
    """Digests of the ids of some cuts of each language."""

    drawn_rejects: KeyedDraw[Reject] = field(default_factory=KeyedDraw)
    """Some rejects of each reason, with their audio. Those in `rejects` have none."""

    def hours(self, sampling_rate: int) -> float:
        """Returns the hours of the cuts or, if speech was looked for, of the recordings that were searched."""
        if self.speech.frames:
            return self.speech.frames * FRAME_SECONDS / 3600
        return int(self.records["num_samples"].sum()) / sampling_rate / 3600

    def to_bytes(self) -> bytes:
        """Returns a compressed form that `from_bytes` reads."""
        values = {
            "num_entries": self.num_entries,
            "rejects": self.rejects,
            "num_resampled": self.num_resampled,
            "samples_by": self.samples_by,
            "shards": self.shards,
            "speech": asdict(self.speech),
            "drawn_cuts": self.drawn_cuts.as_json(),
            "drawn_rejects": self.drawn_rejects.as_json(),
            "num_records": len(self.records),
            "layout": _LAYOUT,
        }
        # json, because orjson does not write file names that are not Unicode.
        return zlib.compress(json.dumps(values).encode() + b"\n" + self.records.tobytes() + self.lines, 1)

    @classmethod
    def from_bytes(cls, content: bytes) -> "ProbedItems":
        """Returns what `to_bytes` of this version of the package wrote.

        Raises:
            ValueError, KeyError, zlib.error: It is damaged.
        """
        header, _, content = zlib.decompress(content).partition(b"\n")
        values = json.loads(header)
        if values.pop("layout") != _LAYOUT:
            raise ValueError("written by another version of the package")
        num_bytes = values.pop("num_records") * RECORD.itemsize
        return cls(
            lines=content[num_bytes:],
            records=np.frombuffer(content[:num_bytes], RECORD),
            rejects=[Reject(*reject) for reject in values.pop("rejects")],
            samples_by={kind: Counter(counts) for kind, counts in values.pop("samples_by").items()},
            shards=[ObjectInfo(*shard) for shard in values.pop("shards")],
            speech=SpeechTotals(**values.pop("speech")),
            drawn_cuts=KeyedDraw.from_json(values.pop("drawn_cuts"), int),
            drawn_rejects=KeyedDraw.from_json(values.pop("drawn_rejects"), _reject_from_json),
            **values,
        )


def _reject_from_json(values: list[Any]) -> Reject:
    *fields, audio = values
    return Reject(*fields)._replace(audio=audio and AudioSpan.from_json(audio))
