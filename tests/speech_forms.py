"""The same speech in each form that sets of audio come in: files, NeMo tars, Lhotse Shar and WebDataset tars."""

import io
import json
import tarfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tests.synthesis import chirp, hiss, write_audio, write_jsonl

FORMS = ("files", "nemo", "shar", "webdataset")
MEMBERS_PER_SHARD = 9

Span = tuple[float, float]


class Utterance(NamedTuple):
    """An audio file of the set, and the spans of it that manifests name besides the whole file."""

    name: str
    duration: float
    spans: tuple[Span, ...]
    """Offset and duration in seconds."""


def write_forms(folder: Path, num_utterances: int = 30) -> list[Utterance]:
    """Writes all forms of the same speech to subfolders that are named as in `FORMS`.

    Lengths and rates differ, so that cuts are resampled and no two of them are equal. `files` and `nemo` have a second
    manifest, `spans.json`, with spans of some files: NeMo writes a further line of a file as `NAME-subN.flac`, of which
    the tar has no member.
    """
    utterances = []
    for i in range(num_utterances):
        rate = (16000, 8000, 16000, 22050)[i % 4]
        seconds = 0.3 + 0.05 * i
        samples = chirp(100 + 20 * i, 900 + 50 * i, seconds, rate)
        samples = samples + hiss(len(samples), i)
        name = f"audio/u{i:03d}.flac"
        write_audio(folder / "files" / name, samples, rate)
        spans = ((0.125, 0.25 + 0.001 * i), (0.0625, 0.2 + 0.002 * i)) if i % 5 == 4 else ()
        utterances.append(Utterance(name, len(samples) / rate, spans))
    _write_manifests(folder / "files", utterances)
    _write_nemo(folder, utterances)
    _write_shar(folder, utterances)
    _write_webdataset(folder, utterances)
    return utterances


def _write_manifests(folder: Path, utterances: Sequence[Utterance]) -> None:
    whole = [{"audio_filepath": each.name, "duration": each.duration} for each in utterances]
    spans = []
    for each, row in zip(utterances, whole, strict=True):
        spans.append(row)
        spans += [{**row, "offset": offset, "duration": duration} for offset, duration in each.spans]
    write_jsonl(folder / "speech.json", whole)
    write_jsonl(folder / "spans.json", spans)


def _write_nemo(folder: Path, utterances: Sequence[Utterance]) -> None:
    """Writes tars with the headers of `tar.add`: the time of a file is a fraction, for which each member gets a PAX
    header."""
    output = folder / "nemo"
    output.mkdir()
    whole: list[dict[str, Any]] = []
    spans: list[dict[str, Any]] = []
    for number, part in enumerate(_shards(utterances)):
        with tarfile.open(output / f"audio_{number}.tar", "w", format=tarfile.PAX_FORMAT) as tar:
            for each in part:
                tar.add(folder / "files" / each.name, arcname=each.name)
                row = {"audio_filepath": each.name, "duration": each.duration, "shard_id": number}
                whole.append(row)
                spans.append(row)
                for count, (offset, duration) in enumerate(each.spans, start=1):
                    name = each.name.replace(".flac", f"-sub{count}.flac")
                    spans.append({**row, "audio_filepath": name, "offset": offset, "duration": duration})
    write_jsonl(output / "speech.json", whole)
    write_jsonl(output / "spans.json", spans)


def _write_shar(folder: Path, utterances: Sequence[Utterance]) -> None:
    """Writes Shar with Lhotse's own writer, whose FLAC has the same samples."""
    from lhotse import CutSet, Recording

    cuts = []
    for each in utterances:
        recording = Recording.from_file(folder / "files" / each.name, recording_id=each.name.removesuffix(".flac"))
        cut = recording.to_cut()
        cut.id = recording.id
        cuts.append(cut)
    (folder / "shar").mkdir()
    CutSet.from_cuts(cuts).to_shar(folder / "shar", fields={"recording": "flac"}, shard_size=MEMBERS_PER_SHARD)


def _write_webdataset(folder: Path, utterances: Sequence[Utterance]) -> None:
    output = folder / "webdataset"
    output.mkdir()
    for number, part in enumerate(_shards(utterances)):
        with tarfile.open(output / f"shard-{number:06d}.tar", "w", format=tarfile.USTAR_FORMAT) as tar:
            for each in part:
                _add(tar, each.name.replace(".flac", ".json"), json.dumps({"text": each.name}).encode())
                _add(tar, each.name, (folder / "files" / each.name).read_bytes())


def _add(tar: tarfile.TarFile, name: str, content: bytes) -> None:
    info = tarfile.TarInfo(name)
    info.size = len(content)
    tar.addfile(info, io.BytesIO(content))


def _shards(utterances: Sequence[Utterance]) -> list[Sequence[Utterance]]:
    return [utterances[i : i + MEMBERS_PER_SHARD] for i in range(0, len(utterances), MEMBERS_PER_SHARD)]
