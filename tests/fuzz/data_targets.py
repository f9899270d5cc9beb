"""Targets of nestdata: audio, tars, manifests and corpora."""

import gzip
import io
import json
import tarfile
import tempfile
from contextlib import suppress
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
from hypothesis import strategies as st

from nestdata import BatchPlan, Corpus, NestError, PlanConfig, PrepareConfig, prepare_corpus
from nestdata.audio import mpeg
from nestdata.prepare.inputs.entry import File
from nestdata.prepare.inputs.tar import TarError, walk
from nestdata.prepare.read import AudioInfo, read_header
from tests.fuzz.inputs import NUMBERS, TEXTS, VALUES, altered, mutated
from tests.fuzz.target import Target
from tests.nestdata.audio.ogg_pages import flac_in_ogg
from tests.nestdata.bad_files import without_length
from tests.nestdata.prepare.inputs.shards import tar_of
from tests.synthesis import chirp, encoded
from tests.test_manifests import EXAMPLES, REPOSITORY

MANIFESTS = REPOSITORY / "manifests"


@cache
def audio_seeds() -> dict[str, bytes]:
    """Returns small audio files by name."""
    mono, rng = chirp(100, 3000, 0.3), np.random.default_rng(0)
    stereo = np.stack([mono, 0.1 * rng.standard_normal(len(mono))], axis=1).astype(np.float32)
    kinds = {
        "mono.flac": (mono, "FLAC", "PCM_16"), "stereo.flac": (stereo, "FLAC", "PCM_24"),
        "plain.wav": (mono, "WAV", "PCM_16"), "float.wav": (stereo, "WAV", "FLOAT"),
        "wide.wav": (stereo, "WAVEX", "PCM_24"),
        "law.wav": (mono, "WAV", "ULAW"), "a.aiff": (mono, "AIFF", "PCM_16"), "a.ogg": (mono, "OGG", "VORBIS"),
        "a.mp3": (mono, "MP3", "MPEG_LAYER_III"), "a.w64": (mono, "W64", "PCM_16"),
    }  # fmt: skip
    found = {name: encoded(samples, kind, subtype=subtype) for name, (samples, kind, subtype) in kinds.items()}
    # Files whose header does not give the length of all audio in them.
    for name in ("mono.flac", "a.ogg", "a.mp3", "plain.wav"):
        found[f"joined-{name}"] = 2 * found[name]
    found["untagged.mp3"] = found["a.mp3"][mpeg.parse_frame(found["a.mp3"]).num_bytes :]  # type: ignore[union-attr]
    found["unknown.flac"] = without_length(found["mono.flac"])
    found["flac.ogg"] = flac_in_ogg(found["mono.flac"])
    return found


def audio_inputs(*suffixes: str) -> st.SearchStrategy[tuple[str, bytes]]:
    """Returns pairs of suffix and content; the suffix need not fit."""
    seeds = [content for name, content in audio_seeds().items() if name.endswith(suffixes)]
    return st.tuples(st.sampled_from(suffixes), mutated(*seeds))


def read_audio_header(audio: tuple[str, bytes], folder: Path) -> bool:
    """Reads the header of a file."""
    path = folder / f"a{audio[0]}"
    path.write_bytes(audio[1])
    return isinstance(read_header(File(str(path))), AudioInfo)


def prepare_audio(audio: tuple[str, bytes], folder: Path) -> int:
    """Prepares a folder with one odd and one valid file, decodes both, and loads what was accepted."""
    (folder / "in").mkdir()
    (folder / "in" / f"odd{audio[0]}").write_bytes(audio[1])
    (folder / "in" / "valid.wav").write_bytes(audio_seeds()["plain.wav"])
    report = prepare_corpus(
        [folder / "in"], folder / "out", PrepareConfig(probe="decode", min_seconds=0.01, max_seconds=60.0)
    )
    corpus = Corpus.open(folder / "out")
    assert corpus.line(len(corpus) - 1)
    for index in range(len(corpus)):
        corpus.load(index)
    return report.num_cuts - 1


@cache
def tar_seeds() -> list[bytes]:
    """Returns small tars in three formats."""
    found = []
    for kind in (tarfile.USTAR_FORMAT, tarfile.PAX_FORMAT, tarfile.GNU_FORMAT):
        file = io.BytesIO()
        with tarfile.open(fileobj=file, mode="w", format=kind) as tar:
            for name in ("a.wav", "a.json", "folder/" + ("é" if kind != tarfile.USTAR_FORMAT else "e") * 80 + ".flac"):
                content = audio_seeds()["mono.flac" if name.endswith("flac") else "plain.wav"][:3000]
                info = tarfile.TarInfo(name)
                info.size = len(content)
                if kind == tarfile.PAX_FORMAT:
                    info.pax_headers = {"comment": "a" * 600, "size": str(len(content))}
                tar.addfile(info, io.BytesIO(content))
        found.append(file.getvalue())
    return found


def read_tar(content: bytes, _: Path) -> bool:
    """Lists the members of a tar."""
    for member in walk(io.BytesIO(content), len(content)):
        assert 0 <= member.offset <= member.offset + member.size <= len(content)
    return True


@cache
def _webdataset(stem: str = "a") -> bytes:
    return tar_of((f"{stem}.wav", audio_seeds()["plain.wav"]), (f"{stem}.json", b'{"text": "a"}'))


NEMO = [{"audio_filepath": "a.wav", "offset": 0.0, "duration": 0.3, "text": "a", "lang": "en"}]
LHOTSE = [
    {
        "id": "a", "start": 0.0, "duration": 0.3, "channel": 0, "type": "MonoCut", "custom": {"note": "x"},
        "supervisions": [{"id": "a", "recording_id": "a", "start": 0.0, "duration": 0.3, "channel": 0, "text": "a"}],
        "recording": {
            "id": "a", "sampling_rate": 16000, "num_samples": 4800, "duration": 0.3, "channel_ids": [0],
            "sources": [{"type": "file", "channels": [0], "source": "a.wav"}],
            "transforms": [{
                "name": "Resample", "kwargs": {"source_sampling_rate": 16000, "target_sampling_rate": 16000}
            }],
        },
    },
    {
        "id": "a", "sampling_rate": 16000, "num_samples": 4800, "duration": 0.3, "channel_ids": [0],
        "sources": [{"type": "file", "channels": [0], "source": "a.wav"}],
    },
]  # fmt: skip


def line_inputs(*rows: dict[str, Any]) -> st.SearchStrategy[tuple[str, bytes]]:
    """Returns pairs of file name and content: a valid line, then one with other values or bytes; also compressed."""

    def manifest(row: dict[str, Any]) -> st.SearchStrategy[tuple[str, bytes]]:
        valid = json.dumps(row).encode() + b"\n"
        changed = st.one_of(altered([row]), st.dictionaries(TEXTS, VALUES, max_size=4)).map(_line)
        # The changed lines have other ids, so that they are not rejected as duplicates of the first.
        other = st.one_of(changed, mutated(valid)).map(lambda line: valid + line.replace(b'"a"', b'"b"'))
        return st.one_of(
            st.tuples(st.just("speech.jsonl"), other),
            st.tuples(st.just("speech.json"), other.map(lambda lines: b"[" + b",".join(lines.splitlines()) + b"]")),
            st.tuples(st.just("speech.jsonl.gz"), other.map(gzip.compress)),
            st.tuples(st.just("speech.jsonl.gz"), mutated(gzip.compress(valid))),
        )

    return st.sampled_from(rows).flatmap(manifest)


def _line(row: dict[str, Any]) -> bytes:
    return json.dumps(row).encode(errors="surrogatepass") + b"\n"


def prepare_lines(manifest: tuple[str, bytes], folder: Path) -> int:
    """Prepares a manifest beside a valid audio file, and opens every cut; `ROOT` stands for the folder."""
    (folder / "a.wav").write_bytes(audio_seeds()["plain.wav"])
    (folder / manifest[0]).write_bytes(manifest[1].replace(b"ROOT", str(folder).encode()))
    report = _prepare(folder / manifest[0], folder)
    corpus = Corpus.open(folder / "out")
    for index in range(len(corpus)):
        assert corpus.line(index)["id"] is not None
        with suppress(NestError):
            corpus.load(index)
    return report.num_cuts


def named(name: str, contents: st.SearchStrategy[bytes]) -> st.SearchStrategy[tuple[str, bytes]]:
    """Returns pairs of file name and content."""
    return st.tuples(st.just(name), contents)


def table_inputs() -> st.SearchStrategy[bytes]:
    """Returns tables in which bytes, or values of a row, are changed."""
    rows = st.lists(st.one_of(TEXTS, NUMBERS.map(str)), max_size=6).map(
        lambda row: ",".join('"' + field.replace('"', '""') + '"' for field in row).encode(errors="surrogatepass")
    )
    return st.one_of(mutated(*_TABLES), st.builds(lambda row: _TABLES[0] + row + b"\n", rows))


def example_inputs(name: str) -> st.SearchStrategy[dict[str, bytes]]:
    """Returns the files of an example in `manifests/` by name, one of which is changed."""
    folder = MANIFESTS / Path(name).parts[0]
    files = {str(path.relative_to(MANIFESTS)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    return st.sampled_from(sorted(files)).flatmap(
        lambda changed: mutated(files[changed]).map(lambda content: {**files, changed: content})
    )


def prepare_example(name: str, files: dict[str, bytes], folder: Path) -> int:
    """Prepares an example beside the audio of the demo corpus, to which its files refer."""
    (folder / "demo").symlink_to(MANIFESTS / "demo")
    for file, content in files.items():
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        (folder / file).write_bytes(content)
    return int(_prepare(folder / name, folder).num_cuts)


@cache
def parquet_seeds() -> list[bytes]:
    """Returns small Parquet files with the columns of Hugging Face, valid and with odd types."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    wav = audio_seeds()["plain.wav"]
    audios: list[Any] = [
        [{"bytes": wav, "path": "a.wav"}], [{"bytes": 7, "path": "a.wav"}], [{"bytes": "text", "path": "a.wav"}],
        [{"bytes": [1, 2], "path": 3}], [{"bytes": None, "path": None}], [wav], ["a.wav"], [[wav]], [{"array": [0.0]}],
    ]  # fmt: skip
    found = []
    for audio in audios:
        for compression in ("none", "snappy"):
            file = io.BytesIO()
            pq.write_table(pa.table({"audio": audio, "text": ["a"], "id": [1]}), file, compression=compression)
            found.append(file.getvalue())
    return found


def prepare_parquet(content: bytes, folder: Path) -> int:
    """Prepares a folder of two Parquet files, the second of which is valid."""
    (folder / "in").mkdir()
    (folder / "in" / "0.parquet").write_bytes(content)
    (folder / "in" / "1.parquet").write_bytes(parquet_seeds()[0])
    return _prepare(folder / "in", folder).num_cuts


@cache
def corpus_seed() -> dict[str, bytes]:
    """Returns the files of a corpus with addresses."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "in").mkdir()
        for number in range(3):
            (folder / "in" / f"{number}.tar").write_bytes(_webdataset(f"cut-{number}"))
        _prepare(folder / "in", folder)
        return {path.name: path.read_bytes() for path in (folder / "out").iterdir() if path.is_file()}


def corpus_inputs() -> st.SearchStrategy[dict[str, bytes]]:
    """Returns the files of a corpus, one or two of which are changed."""
    seed = {name: content for name, content in corpus_seed().items() if name not in ("report.html", "rejected.jsonl")}
    meta = altered([json.loads(seed["meta.json"])]).map(lambda row: ("meta.json", json.dumps(row).encode()))
    files = st.one_of(
        meta, *(mutated(content).map(lambda new, name=name: (name, new)) for name, content in seed.items())
    )
    return st.lists(files, min_size=1, max_size=2).map(lambda changed: {**seed, **dict(changed)})


def open_corpus(files: dict[str, bytes], folder: Path) -> bool:
    """Opens a corpus that somebody else wrote, plans it, and reads all of it."""
    for name, content in files.items():
        (folder / name).write_bytes(content)
    corpus = Corpus.open(folder)
    list(corpus.shards())
    with suppress(NestError):
        plan = BatchPlan.of(corpus, PlanConfig(max_batch_seconds=10.0, microbatches_per_step=1))
        plan.indices(0, 0)
    for index in range(min(len(corpus), 5)):
        with suppress(NestError):
            corpus.load(index)
        with suppress(NestError):
            corpus[index]
    return True


def _prepare(source: Path, folder: Path) -> Any:
    return prepare_corpus([source], folder / "out", PrepareConfig(report_samples=1, min_seconds=0.01))


_TABLES = (
    b'path,start,end,text\na.wav,0.0,0.2,"one\ntwo"\na.wav,0.1,,\n',
    b'client_id\tpath\tsentence\n1\ta.wav\t"quoted\n2\tb.wav\tx\n',
    b"audio_filepath;duration;speaker\na.wav;0.3;tom\n",
)
DATA_TARGETS: dict[str, Target] = {
    "FLAC header": Target(lambda: audio_inputs(".flac"), read_audio_header, num_tested=100),
    "WAV header": Target(lambda: audio_inputs(".wav"), read_audio_header, num_tested=100),
    "other audio header": Target(lambda: audio_inputs(".aiff", ".ogg", ".mp3", ".w64"), read_audio_header),
    "FLAC file": Target(lambda: audio_inputs(".flac"), prepare_audio, num_tested=10),
    "WAV file": Target(lambda: audio_inputs(".wav"), prepare_audio, num_tested=10),
    "tar": Target(lambda: mutated(*tar_seeds()), read_tar, (TarError,), num_tested=100),
    "NeMo manifest": Target(lambda: line_inputs(*NEMO), prepare_lines),
    "Lhotse manifest": Target(lambda: line_inputs(*LHOTSE), prepare_lines),
    "table": Target(lambda: named("speech.csv", table_inputs()), prepare_lines),
    **{
        f"example {name}": Target(partial(example_inputs, name), partial(prepare_example, name), num_tested=10)
        for name in EXAMPLES
        if not name.startswith("demo/")
    },
    "Parquet": Target(lambda: mutated(*parquet_seeds()), prepare_parquet, num_tested=15, packages=("pyarrow",)),
    "corpus": Target(corpus_inputs, open_corpus),
}
