import gzip
import json
from pathlib import Path

import pytest
from lhotse import CutSet
from lhotse.shar import SharWriter

from nestdata import Corpus, ManifestError, prepare_corpus
from nestdata.prepare.inputs.entry import Entry, LhotseCut
from tests.nestdata.prepare.inputs.reading import content_or_reason, entries_of, lhotse_cut, some_audio
from tests.nestdata.prepare.inputs.shards import shar_cut, write_shar, write_tar


def shar(folder: Path, *ids: str) -> Path:
    return write_shar(folder / "shar", [[(cut_id, ".wav", cut_id.encode(), 8000) for cut_id in ids]])


def by_id(entries: list[Entry]) -> dict[str, str]:
    """Returns the content of the member of each cut, or the reason why it is rejected."""
    return {entry.cut_id: content_or_reason(entry) for entry in entries}


def metadata(cut_id: str) -> tuple[str, bytes]:
    return f"{cut_id}.json", json.dumps(shar_cut(cut_id, 8000)[1]).encode()


def test_shar_that_lhotse_wrote_is_read_with_its_ids_and_samples(tmp_path: Path) -> None:
    path = some_audio(tmp_path / "a.wav")
    cuts = CutSet.from_dicts([lhotse_cut(cut_id, str(path)) for cut_id in ("x/one", "two.b", "three")])
    (tmp_path / "shar").mkdir()
    with SharWriter(str(tmp_path / "shar"), {"recording": "flac"}, shard_size=2) as writer:
        for cut in cuts:
            writer.write(cut.truncate(offset=0.1, duration=0.3, preserve_id=True))
    report = prepare_corpus([tmp_path / "shar"], tmp_path / "shar.corpus")
    corpus = Corpus.open(tmp_path / "shar.corpus")
    assert not report.rejected
    assert [corpus.line(index)["id"] for index in range(len(corpus))] == ["x/one", "two.b", "three"]
    expected = next(iter(cuts)).truncate(offset=0.1, duration=0.3).load_audio()[0]
    assert all((corpus.load(index)[1] == expected).all() for index in range(len(corpus)))
    with pytest.raises(ManifestError, match=r"\.jsonl\.gz:1: a source of type 'shar', .* Give the folder"):
        prepare_corpus(min((tmp_path / "shar").glob("cuts.*")), tmp_path / "cuts.corpus")


def test_cuts_that_have_no_audio_in_the_tar_are_rejected(tmp_path: Path) -> None:
    folder = shar(tmp_path, "a", "b", "c", "d", "e")
    members = [
        ("a.wav", b"a"), metadata("a"), ("b.nodata", b""), ("b.nometa", b""), ("c.wav", b"c"), ("d.wav", b"d"),
        metadata("d"), ("unknown.wav", b""), metadata("unknown"),
    ]  # fmt: skip
    write_tar(folder / "recording.000000.tar", members)
    assert by_id(entries_of(folder)) == {
        "a": "a",
        "b": "no_such_member",
        "c": "no_such_member",  # without a recording behind it
        "d": "d",
        "e": "no_such_member",
    }


def test_features_and_fields_in_other_tars_are_left_out(tmp_path: Path) -> None:
    folder = shar(tmp_path, "a")
    cut, _ = shar_cut("a", 8000)
    array = {"storage_type": "shar", "storage_path": "", "storage_key": "", "shape": [2]}
    features = {"type": "fbank", "num_frames": 5, "storage_type": "shar", "storage_path": "", "storage_key": ""}
    custom = {"codes": array, "aligned": {"array": array, "start": 0}, "dataset": "x", "target": shar_cut("t", 8000)[1]}
    line = json.dumps({**cut, "features": features, "custom": custom}).encode()
    (folder / "cuts.000000.jsonl.gz").write_bytes(gzip.compress(line))
    (folder / "features.000000.tar").touch()
    (entry,) = entries_of(folder)
    assert isinstance(entry.audio, LhotseCut)
    assert entry.audio.row["custom"] == {"dataset": "x"}
    assert "features" not in entry.audio.row


def test_a_manifest_without_a_tar_is_an_error(tmp_path: Path) -> None:
    folder = shar(tmp_path, "a")
    (folder / "cuts.000001.jsonl").touch()
    with pytest.raises(ManifestError, match=r"cuts\.000001\.jsonl has no recording\.000001\.tar beside it"):
        entries_of(folder)
    with pytest.raises(ManifestError, match=r"no cuts\.000000\.jsonl\.gz or the like"):
        entries_of(tmp_path, "shar")
