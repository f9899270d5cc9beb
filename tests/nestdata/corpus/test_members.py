import json
import pickle
import shutil
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import quote
from zlib import crc32

import numpy as np
import pytest
import soundfile
from lhotse import AudioSource, CutSet, MonoCut, Recording

import nestdata.corpus.members
from nestdata import Address, AudioError, Corpus, CorpusError, PrepareConfig, prepare_corpus
from nestdata.audio.decode import load_samples
from nestdata.errors import ManifestError, StorageError
from nestdata.storage import ObjectInfo, Storage
from tests.addressed import WebServer
from tests.extras import needs
from tests.nestdata.bad_files import bad_files
from tests.nestdata.prepare.inputs.shards import tar_corpus, write_tar
from tests.synthesis import chirp, folder_corpus, hiss, read_jsonl, write_audio, write_jsonl

DECODED = PrepareConfig(probe="decode")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Files in which lengths and names have different orders; one is longer than a head, one stereo, one resampled."""
    write_audio(tmp_path / "speech" / "a.flac", hiss(12000, 1))
    write_audio(tmp_path / "speech" / "b.wav", np.stack([hiss(4000, 2), hiss(4000, 3)], axis=1))
    write_audio(tmp_path / "speech" / "sub" / "c.ogg", hiss(48000, 4), 48000)
    return tmp_path / "speech"


@pytest.fixture
def forget_files(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Returns a function after which shards are opened anew, as in another process."""

    def forget() -> None:
        fresh = Storage()
        monkeypatch.setattr(nestdata.corpus.members, "storage", lambda: fresh)

    return forget


def result_of(cut: dict[str, Any], content: bytes | None = None) -> bytes | str:
    """Returns the samples or the reason of the error."""
    try:
        return load_samples(cut, content=content).tobytes()
    except AudioError as error:
        return error.reason


@pytest.mark.parametrize(
    ("suffix", "kind", "subtype"),
    [
        ("wav", "WAV", "PCM_16"),
        ("wav", "WAV", "FLOAT"),
        ("flac", "FLAC", "PCM_16"),
        ("ogg", "OGG", "VORBIS"),
        ("opus", "OGG", "OPUS"),
        ("mp3", "MP3", "MPEG_LAYER_III"),
        ("sph", "NIST", "PCM_16"),
    ],
)
def test_bytes_in_memory_are_decoded_as_a_file_of_the_same_bytes(
    tmp_path: Path, suffix: str, kind: str, subtype: str
) -> None:
    path = tmp_path / f"a.{suffix}"
    samples = np.stack([chirp(100, 2000, 1.5, 48000), chirp(200, 900, 1.5, 48000)], axis=1)
    soundfile.write(path, samples, 48000, format=kind, subtype=subtype)
    num_samples = soundfile.info(path).frames
    sources = [AudioSource("file", [0, 1], str(path))]
    recording = Recording("a", sources, 48000, num_samples, num_samples / 48000, channel_ids=[0, 1])
    whole = MonoCut("a", 0.0, recording.duration, channel=1, recording=recording)
    for cut in (whole, whole.truncate(offset=0.25, duration=1.0), whole.resample(8000)):
        for span in ({}, {"start": 3000, "num_samples": 5000}):
            expected = load_samples(cut, **span)
            np.testing.assert_array_equal(load_samples(cut, content=path.read_bytes(), **span), expected)


def test_bad_bytes_have_the_reason_of_a_bad_file(tmp_path: Path) -> None:
    bad_files(tmp_path)
    found = []
    for path in sorted(path for path in tmp_path.iterdir() if path.is_file() and path.suffix != ".json"):
        recording = {
            "sources": [{"type": "file", "channels": [0, 1], "source": str(path)}],
            "sampling_rate": 16000, "num_samples": 24000, "duration": 1.5,
        }  # fmt: skip
        for start in (0.0, 0.5):
            cut = {"id": "a", "start": start, "duration": 1.0, "channel": 1, "recording": recording}
            expected = result_of(cut)
            content = path.read_bytes()
            assert result_of(cut, content) == expected, path.name
            found.append(expected if isinstance(expected, str) else "good")
    assert {*found} == {"good", "empty", "unreadable", "truncated", "not_finite"}


@pytest.mark.parametrize("config", [PrepareConfig(), DECODED, PrepareConfig(window_seconds=0.3)])
def test_corpus_of_members_equals_that_of_the_files(folder: Path, config: PrepareConfig) -> None:
    prepare_corpus([folder], folder.with_suffix(".corpus"), config)
    files, members = Corpus.open(folder.with_suffix(".corpus")), tar_corpus(folder, config)
    assert members.fingerprint == files.fingerprint
    assert (members.num_shards, members.root, members.is_remote) == (1, str(folder.parent), False)
    tar = folder.with_suffix(".tar").read_bytes()
    for index in range(len(files)):
        (cut_id, samples), (expected_id, expected) = members.load(index), files.load(index)
        assert cut_id == expected_id
        np.testing.assert_array_equal(samples, expected)
        part, expected_part = (each.load(index, start=99, num_samples=2000)[1] for each in (members, files))
        np.testing.assert_array_equal(part, expected_part)
        address = members.address(index)
        assert address is not None
        content = tar[address.offset : address.offset + address.length]
        assert content == Path(files.line(index)["recording"]["sources"][0]["source"]).read_bytes()
        assert address == Address(
            str(folder) + ".tar", address.offset, len(content), len(tar), None,
            crc32(content) if config.probe == "decode" else None,
        )  # fmt: skip
        assert files.address(index) is None
    (shard,) = members.shards()
    assert shard == (ObjectInfo(str(folder) + ".tar", len(tar), None), len(members))


def test_cuts_point_to_their_members_as_lhotse_2_expects(folder: Path) -> None:
    corpus = tar_corpus(folder)
    tar = folder.with_suffix(".tar").read_bytes()
    for cut in CutSet.from_file(corpus.path / "cuts.jsonl"):
        source = cut.recording.sources[0]
        path, _, place = source.source.partition("?")
        begin, end = (int(value.partition("=")[2]) for value in place.split("&"))
        # Lhotse 2 parses the header at the first byte, whose field of 12 bytes at 124 is the length in octal digits.
        assert (source.type, path, tar[begin + 257 : begin + 262]) == ("shar_ptr", str(folder) + ".tar", b"ustar")
        length = int(tar[begin + 124 : begin + 135], 8)
        assert 0 <= end - begin - 512 - length < 512
        name = next(path for path in folder.rglob("*.*") if str(path.with_suffix("")).endswith(cut.id))
        assert tar[begin + 512 : begin + 512 + length] == name.read_bytes()


def test_lines_with_pointers_can_be_prepared_again(folder: Path, tmp_path: Path) -> None:
    corpus = tar_corpus(folder)
    prepare_corpus([corpus.path / "cuts.jsonl"], tmp_path / "again.corpus")
    again = Corpus.open(tmp_path / "again.corpus")
    assert again.fingerprint == corpus.fingerprint
    assert [again.address(index) for index in range(3)] == [corpus.address(index) for index in range(3)]
    assert [again.line(index) for index in range(3)] == [corpus.line(index) for index in range(3)]


def test_pointers_that_lead_nowhere_are_rejected(folder: Path, tmp_path: Path) -> None:
    corpus = tar_corpus(folder)
    rows = [corpus.line(0) | {"id": str(i)} for i in range(5)]
    pointer = rows[0]["recording"]["sources"][0]["source"]
    tar, _, place = pointer.partition("?")
    size = Path(tar).stat().st_size
    places = (f"gone?{place}", f"{tar}?o=700&e=9000", f"{tar}?o={size}&e={size}", f"{tar}?o={size - 512}&e=0")
    for row, changed in zip(rows[1:], places, strict=True):
        row["recording"]["sources"][0]["source"] = changed
    manifest = write_jsonl(tmp_path / "cuts.jsonl", rows)
    report = prepare_corpus([manifest], tmp_path / "again.corpus")
    assert report.rejected == {"shard_unreadable": 2, "missing": 1, "no_such_member": 1}


def test_pointers_with_the_name_of_the_member_are_checked_and_other_keys_are_rejected(
    folder: Path, tmp_path: Path
) -> None:
    corpus = tar_corpus(folder)
    rows = [corpus.line(0) | {"id": str(i)} for i in range(7)]
    pointer, address = rows[0]["recording"]["sources"][0]["source"], corpus.address(0)
    with tarfile.open(pointer.partition("?")[0]) as tar:
        name = next(quote(one.name, safe="") for one in tar if address and one.offset_data == address.offset)
    endings = ("", f"&n={name}", f"&n={name}&s=1", "&n=other.flac", "&n=", f"&n={name}&s=2", "&x=1")
    for row, ending in zip(rows, endings, strict=True):
        row["recording"]["sources"][0]["source"] = pointer + ending
    manifest = write_jsonl(tmp_path / "cuts.jsonl", rows)
    report = prepare_corpus([manifest], tmp_path / "again.corpus")
    assert report.rejected == {"no_such_member": 2, "unknown_pointer": 2}
    again = Corpus.open(tmp_path / "again.corpus")
    assert [again.address(index) for index in range(3)] == [address] * 3
    assert pointer + "&x=1" in read_jsonl(again.path / "rejected.jsonl")[-1]["detail"]
    write_jsonl(manifest, rows[-1:])
    with pytest.raises(ManifestError, match=r"no usable cut among 1 entries .*unknown_pointer"):
        prepare_corpus([manifest], tmp_path / "none.corpus")


def test_shard_with_another_byte_is_corrupt(folder: Path) -> None:
    corpus, tar = tar_corpus(folder, DECODED), folder.with_suffix(".tar")
    address = corpus.address(0)
    assert address is not None
    content = bytearray(tar.read_bytes())
    content[address.offset + 1000] ^= 1
    tar.write_bytes(content)
    with pytest.raises(
        AudioError, match=r"cut 'b': bytes \d+ to \d+ of .*speech\.tar do not have the checksum"
    ) as error:
        corpus.load(0)
    assert error.value.reason == "corrupt"
    corpus.load(1)


class DamagingStorage(Storage):
    """Stands in for a network that damages the first answers, each in another way."""

    def __init__(self, num_damaged: int) -> None:
        super().__init__()
        self.num_damaged = num_damaged
        self.num_reads = 0

    def read_range(self, location: str, offset: int, length: int, **options: Any) -> bytes:
        """Reads a range of a file."""
        content = bytearray(super().read_range(location, offset, length, **options))
        self.num_reads += 1
        if self.num_reads <= self.num_damaged:
            # In the first four bytes, so that decoders notice it as well.
            content[self.num_reads % 4] ^= self.num_reads
        return bytes(content)


@pytest.mark.parametrize(("config", "num_damaged"), [(PrepareConfig(), 4), (DECODED, 1)])
def test_bytes_damaged_differently_on_their_way_do_not_replace_the_cut(
    folder: Path, monkeypatch: pytest.MonkeyPatch, config: PrepareConfig, num_damaged: int
) -> None:
    corpus = tar_corpus(folder, config)
    expected = corpus.load(0)[1].copy()
    store = DamagingStorage(num_damaged)
    monkeypatch.setattr(nestdata.corpus.members, "storage", lambda: store)
    np.testing.assert_array_equal(corpus.load(0)[1], expected)
    assert store.num_reads == num_damaged + 1


def test_bytes_that_never_arrive_the_same_end_the_run(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    corpus = tar_corpus(folder, DECODED)
    store = DamagingStorage(100)
    monkeypatch.setattr(nestdata.corpus.members, "storage", lambda: store)
    with pytest.raises(StorageError, match=r"cut 'b': bytes .*speech\.tar arrive damaged, and differently each time"):
        corpus.load(0)


@pytest.mark.parametrize("reason", ["missing", "changed"])
def test_shard_that_is_gone_or_has_another_size_is_a_reason(
    folder: Path, forget_files: Callable[[], None], reason: str
) -> None:
    corpus, tar = tar_corpus(folder), folder.with_suffix(".tar")
    content = tar.read_bytes()
    tar.unlink()
    if reason == "changed":
        tar.write_bytes(content + bytes(512))
    forget_files()
    with pytest.raises(AudioError, match=r"cut 'b': bytes \d+ to \d+ of .* cannot be read: ") as error:
        corpus.load(0)
    assert error.value.reason == reason


class RefusingStorage(Storage):
    """Stands in for a store that cannot be read for reasons that say nothing about a cut."""

    def __init__(self, kind: Any) -> None:
        super().__init__()
        self.kind = kind

    def read_range(self, location: str, *_: int, **__: Any) -> bytes:  # type: ignore[override]  # reads none of them
        """Raises."""
        raise StorageError.because(self.kind, f"{location}: refused.")


@pytest.mark.parametrize("kind", ["denied", "unavailable"])
def test_store_that_refuses_or_does_not_answer_ends_the_run(
    folder: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    corpus = tar_corpus(folder)
    monkeypatch.setattr(nestdata.corpus.members, "storage", lambda: RefusingStorage(kind))
    with pytest.raises(StorageError, match="refused"):
        corpus.load(0)


def test_moved_shards_are_found_under_another_root(
    folder: Path, tmp_path: Path, forget_files: Callable[[], None]
) -> None:
    corpus = tar_corpus(folder)
    expected = [corpus.load(index)[1].copy() for index in range(3)]
    root = tmp_path / "elsewhere"
    root.mkdir()
    shutil.move(folder.with_suffix(".tar"), root / "speech.tar")
    forget_files()
    with pytest.raises(AudioError):
        corpus.load(0)
    opened = Corpus.open(corpus.path, root=str(root))
    meta = json.loads((corpus.path / "meta.json").read_text())
    (corpus.path / "meta.json").write_text(json.dumps(meta | {"root": str(root)}))
    for moved in (opened, pickle.loads(pickle.dumps(opened)), Corpus.open(corpus.path)):
        assert (moved.root, moved.fingerprint) == (str(root), corpus.fingerprint)
        for index in range(3):
            np.testing.assert_array_equal(moved.load(index)[1], expected[index])
            assert moved.line(index)["recording"]["sources"][0]["source"].startswith(f"{root}/speech.tar?o=")
            assert moved[index].id == corpus[index].id


@needs("remote", "obstore")
def test_address_of_a_remote_object_names_its_url(folder: Path, tmp_path: Path) -> None:
    with WebServer(folder).running() as web:
        rows = [{"audio_filepath": f"{web.url}/{path.relative_to(folder)}"} for path in sorted(folder.rglob("*.*"))]
        prepare_corpus([write_jsonl(tmp_path / "m.json", rows)], tmp_path / "remote.corpus", DECODED)
    corpus, content = Corpus.open(tmp_path / "remote.corpus"), (folder / "b.wav").read_bytes()
    assert (corpus.is_remote, corpus.root, corpus.num_shards) == (True, web.url, 3)
    assert [shard.num_addresses for shard in corpus.shards()] == [1, 1, 1]
    address = corpus.address(0)
    assert address is not None
    assert address == (f"{web.url}/b.wav", 0, len(content), len(content), "tag of b.wav", crc32(content))
    (source,) = corpus.line(0)["recording"]["sources"]
    assert source == {"type": "url", "channels": [0, 1], "source": f"{web.url}/b.wav"}
    moved = Corpus.open(corpus.path, root="gs://other").address(0)
    assert moved is not None
    assert moved == address._replace(location="gs://other/b.wav", etag=None)  # a copy has an ETag of its own
    assert not Corpus.open(corpus.path, root=str(folder)).is_remote


def test_corpus_may_mix_members_and_files(folder: Path, tmp_path: Path) -> None:
    tar = write_tar(tmp_path / "speech.tar", [(name, (folder / name).read_bytes()) for name in ("a.flac", "sub/c.ogg")])
    prepare_corpus([tar, folder / "b.wav"], tmp_path / "mixed.corpus", DECODED)
    corpus, files = Corpus.open(tmp_path / "mixed.corpus"), folder_corpus(folder, {})
    assert [corpus.address(index) is None for index in range(3)] == [True, False, False]
    for index in range(3):
        np.testing.assert_array_equal(corpus.load(index)[1], files.load(index)[1])
    assert all(address.crc32 for index in (1, 2) if (address := corpus.address(index)))


@pytest.mark.parametrize("name", ["addresses.npy", "checksums.npy", "shards.npy", "shards.jsonl"])
@pytest.mark.parametrize("damage", ["missing", "truncated"])
def test_damaged_address_file_is_one_error(folder: Path, name: str, damage: str) -> None:
    path = tar_corpus(folder, DECODED).path
    content = (path / name).read_bytes()
    (path / name).unlink()
    if damage == "truncated":
        (path / name).write_bytes(content[:-9])
    with pytest.raises(CorpusError, match=r"speech\.tarred: the corpus is damaged .*\. Prepare it again"):
        Corpus.open(path)


def test_address_outside_of_its_shard_is_an_error(folder: Path) -> None:
    path = tar_corpus(folder).path
    addresses = np.load(path / "addresses.npy")
    for column, value in (("offset", 10**9), ("offset", -1), ("shard", 1)):
        changed = addresses.copy()
        changed[column][0] = value
        np.save(path / "addresses.npy", changed)
        with pytest.raises(CorpusError, match=r"damaged \(addresses\.npy"):
            Corpus.open(path).address(0)
