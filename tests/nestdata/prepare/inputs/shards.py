"""Writes the same speech as files, as NeMo's converter tars it, as Lhotse Shar and as WebDataset."""

import gzip
import io
import json
import tarfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from nestdata import Corpus, PrepareConfig, prepare_corpus
from tests.synthesis import hiss, write_audio, write_jsonl

RATE = 16000


class Span(NamedTuple):
    """A line of a NeMo manifest of files."""

    name: str
    offset: float | None = None
    duration: float | None = None


# Two files in folders, one with three spans, of which one repeats the offset of the file as a whole.
SPEECH = [
    Span("audio/a.flac"),
    Span("audio/b.flac", 0.0, 0.5),
    Span("audio/deep/c.wav"),
    Span("audio/b.flac", 0.5, 0.75),
    Span("audio/b.flac", 1.0, 0.5),
    Span("audio/d.flac"),
]
SHARD_OF = {"audio/a.flac": 0, "audio/b.flac": 0, "audio/d.flac": 1, "audio/deep/c.wav": 1}


def write_speech(folder: Path) -> Path:
    """Writes the audio and a NeMo manifest of files, whose lines are in the order of the shards."""
    for number, name in enumerate(SHARD_OF):
        write_audio(folder / name, hiss(24000 + 800 * number, number))
    return write_jsonl(folder / "speech.json", [row_of(span) for span in by_shard()])


def by_shard() -> list[Span]:
    return sorted(SPEECH, key=lambda span: SHARD_OF[span.name])


def row_of(span: Span, **more: Any) -> dict[str, Any]:
    values = {"audio_filepath": span.name, "offset": span.offset, "duration": span.duration, "speaker": "s1"}
    return {key: value for key, value in {**values, **more}.items() if value is not None}


def tar_of(*members: tuple[str | tarfile.TarInfo, bytes], form: int = tarfile.PAX_FORMAT, **options: Any) -> bytes:
    """Returns the bytes of a tar."""
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w", format=form, **options) as tar:
        for name, content in members:
            info = tarfile.TarInfo(name) if isinstance(name, str) else name
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    return file.getvalue()


def write_tar(path: Path, members: Iterable[tuple[str, bytes]], *, form: int = tarfile.PAX_FORMAT) -> Path:
    """Writes a tar; its members have the times of files, so that each has a PAX header in PAX format."""
    path.parent.mkdir(parents=True, exist_ok=True)
    infos = [(tarfile.TarInfo(name), content) for name, content in members]
    for info, _ in infos:
        info.mtime = 1700000000.25
    path.write_bytes(tar_of(*infos, form=form))
    return path


def tar_corpus(folder: Path, config: PrepareConfig | None = None) -> Corpus:
    """Packs a folder of audio into `FOLDER.tar` and prepares the corpus `FOLDER.tarred` of it."""
    names = sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
    tar = write_tar(folder.with_suffix(".tar"), [(name, (folder / name).read_bytes()) for name in names])
    return Corpus.open(prepare_corpus([tar], folder.with_suffix(".tarred"), config, overwrite=True).path)


def tarred_rows(spans: Sequence[Span]) -> list[dict[str, Any]]:
    """Returns the lines that NeMo's converter writes: the second line of a member is called `-sub1`, and so on."""
    rows = []
    seen: dict[str, int] = {}
    for span in spans:
        stem, _, suffix = span.name.rpartition(".")
        count = seen[span.name] = seen.get(span.name, -1) + 1
        name = f"{stem}-sub{count}.{suffix}" if count else span.name
        rows.append(row_of(span, audio_filepath=name, shard_id=SHARD_OF[span.name]))
    return rows


def write_nemo_tarred(source: Path, folder: Path, *, reverse: bool = False) -> Path:
    """Writes tars, a manifest of all shards, and one manifest for each; members may be in another order than lines."""
    rows = tarred_rows(by_shard())
    for shard in (0, 1):
        names = [name for name, number in SHARD_OF.items() if number == shard]
        members = [(name, (source / name).read_bytes()) for name in (reversed(names) if reverse else names)]
        write_tar(folder / f"audio_{shard}.tar", members)
        own = [row for row in rows if row["shard_id"] == shard]
        write_jsonl(folder / "sharded_manifests" / f"manifest_{shard}.json", own)
    return write_jsonl(folder / "tarred_audio_manifest.json", rows)


def write_webdataset(source: Path, folder: Path) -> Path:
    """Writes one sample for each file, with labels beside the audio."""
    for shard in (0, 1):
        members = []
        for name in [name for name, number in SHARD_OF.items() if number == shard]:
            stem = name.rpartition(".")[0]
            labels = json.dumps({"speaker": "s1", "duration": 1.5}).encode()
            members += [(f"{stem}.json", labels), (name, (source / name).read_bytes()), (f"{stem}.txt", b"words\n")]
        write_tar(folder / f"set-{shard:06d}.tar", members)
    return folder


def shar_cut(cut_id: str, num_samples: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns a cut and its recording, as Lhotse's writer has them."""
    recording = {
        "id": cut_id,
        "sources": [{"type": "shar", "channels": [0], "source": ""}],
        "sampling_rate": RATE,
        "num_samples": num_samples,
        "duration": num_samples / RATE,
        "channel_ids": [0],
    }
    cut = {"id": cut_id, "start": 0, "duration": num_samples / RATE, "channel": 0, "supervisions": []}
    return {**cut, "recording": recording, "type": "MonoCut"}, recording


def write_shar(folder: Path, shards: Sequence[Sequence[tuple[str, str, bytes, int]]]) -> Path:
    """Writes Shar from the id, suffix, bytes and length in samples of each cut."""
    folder.mkdir(parents=True)
    for number, shard in enumerate(shards):
        members, lines = [], b""
        for cut_id, suffix, content, num_samples in shard:
            cut, recording = shar_cut(cut_id, num_samples)
            lines += json.dumps(cut).encode() + b"\n"
            members += [(f"{cut_id}{suffix}", content), (f"{cut_id}.json", json.dumps(recording).encode() + b"\n")]
        (folder / f"cuts.{number:06d}.jsonl.gz").write_bytes(gzip.compress(lines))
        write_tar(folder / f"recording.{number:06d}.tar", members, form=tarfile.GNU_FORMAT)
    return folder
