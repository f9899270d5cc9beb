"""Helpers that read inputs as `prepare` does, and write small inputs."""

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import soundfile
from numpy.typing import NDArray

from nestdata import Corpus, InputFormat, PrepareConfig, prepare_corpus
from nestdata.prepare.inputs.entry import Entry, Source, Unusable
from nestdata.prepare.inputs.format import GivenInput, InputOptions, open_input, open_sources
from nestdata.prepare.inputs.formats.folder import AudioFolder
from tests.synthesis import hiss, read_jsonl, write_audio


def format_of(path: Path | str, form: InputFormat | None = None) -> InputFormat:
    """Returns the format of an input, after opening it."""
    open_sources([path], InputOptions(format=form))
    return open_input(GivenInput(path, InputOptions(format=form)))[0]


def source_of(path: Path, form: InputFormat | None = None, **options: Any) -> Source:
    """Returns the source of an input; of a folder of tars or Parquet files, not that which counts other files."""
    found = open_sources([path], InputOptions(format=form, **options))
    (source,) = [one for one in found if not isinstance(one, AudioFolder) or one.num_files or len(found) == 1]
    return source


def entries_of(path: Path, form: InputFormat | None = None, **options: Any) -> list[Entry]:
    """Returns all entries of an input, parsed by a pickled copy of its source as in another process."""
    source = source_of(path, form, **options)
    copy: Source = pickle.loads(pickle.dumps(source))
    items = pickle.loads(pickle.dumps(list(source.items())))
    return [entry for number, item in enumerate(items, start=1) for entry in copy.entries(number, item)]


def latest(entries: list[Entry]) -> dict[int, Entry]:
    """Returns the entries by number, in their order, as a corpus has them: a later one replaces an earlier one."""
    return dict(sorted({entry.number or 0: entry for entry in entries}.items()))


def content_or_reason(entry: Entry) -> str:
    """Returns the bytes of the audio of an entry as text, or the reason why it is rejected."""
    return entry.audio.reason if isinstance(entry.audio, Unusable) else (entry.audio.read() or b"").decode()


def detail_of(entry: Entry) -> str:
    """Returns why an entry is rejected, with the values found."""
    assert isinstance(entry.audio, Unusable)
    return entry.audio.detail


def prepared(path: Path, **config: Any) -> tuple[dict[str, dict[str, Any]], list[dict[str, str]]]:
    """Prepares a corpus from one input.

    Returns:
        The cuts by id, as they are stored, and the rejects.
    """
    output = path.with_name(path.name + ".corpus")
    prepare_corpus([path], output, PrepareConfig(**config))
    corpus = Corpus.open(output)
    cuts = {line["id"]: line for line in map(corpus.line, range(len(corpus)))}
    return cuts, read_jsonl(output / "rejected.jsonl")


def some_audio(path: Path) -> Path:
    """Writes half a second of noise in the format that the suffix names."""
    return write_audio(path, hiss(8000, 1))


def decoded(path: Path) -> NDArray[np.float32]:
    """Returns all samples of a file as libsndfile decodes them from its start, shape (samples, channels)."""
    # `soundfile.read` seeks first, after which samples of MP3 files are rounded differently.
    with soundfile.SoundFile(path) as file:
        samples: NDArray[np.float32] = file.read(dtype="float32", always_2d=True)
    return samples


def lhotse_recording(path: str, recording_id: str = "r1", *, seconds: float = 0.5, channels: int = 1) -> dict[str, Any]:
    return {
        "id": recording_id,
        "sources": [{"type": "file", "channels": list(range(channels)), "source": path}],
        "sampling_rate": 16000,
        "num_samples": round(16000 * seconds),
        "duration": seconds,
        "channel_ids": list(range(channels)),
    }


def lhotse_cut(cut_id: str = "c1", path: str = "a.wav") -> dict[str, Any]:
    return {
        "id": cut_id,
        "start": 0.0,
        "duration": 0.5,
        "channel": 0,
        "supervisions": [],
        "recording": lhotse_recording(path),
        "type": "MonoCut",
    }
