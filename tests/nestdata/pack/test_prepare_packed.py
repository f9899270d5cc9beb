"""Corpora that are prepared from packed sets."""

import shutil
from pathlib import Path

import numpy as np
import pytest

from nestdata import (
    AudioNoiseDataset,
    BatchIndex,
    BatchPlan,
    Corpora,
    Corpus,
    ManifestError,
    PlanConfig,
    PrepareConfig,
    batch_digest,
    prepare_corpus,
)
from tests.conftest import MessyCorpora
from tests.nestdata.pack.packing import pack, samples_by_id
from tests.synthesis import chirp, write_audio, write_jsonl


def batch_digests(path: Path) -> list[dict[str, str]]:
    """Returns the digests of some batches of a corpus."""
    corpora = Corpora.open([path])
    plan = BatchPlan.of(corpora, PlanConfig(max_batch_seconds=20.0, microbatches_per_step=2))
    dataset = AudioNoiseDataset(corpora, plan)
    return [batch_digest(dataset[BatchIndex(step, microbatch)]) for step in range(2) for microbatch in range(2)]


def test_a_packed_corpus_gives_the_same_fingerprint_and_batches(speech: Path, packed: Path, tmp_path: Path) -> None:
    # Only the records are read: the tar files may hold anything of the same size until the audio is loaded.
    blank = Path(shutil.copytree(packed, tmp_path / "packed"))
    for path in blank.glob("*.tar"):
        path.write_bytes(bytes(path.stat().st_size))
    prepare_corpus([blank], tmp_path / "packed.corpus")
    for path in blank.glob("*.tar"):
        shutil.copyfile(packed / path.name, path)
    corpus, original = Corpus.open(tmp_path / "packed.corpus"), Corpus.open(speech)
    assert corpus.fingerprint == original.fingerprint
    assert [corpus.line(i)["id"] for i in range(len(corpus))] == [original.line(i)["id"] for i in range(len(original))]
    assert all(corpus.address(i).crc32 is not None for i in range(len(corpus)))  # type: ignore[union-attr]
    assert batch_digests(corpus.path) == batch_digests(speech)


def test_the_tars_alone_give_the_same_cuts_in_packed_order(speech: Path, packed: Path, tmp_path: Path) -> None:
    alone = Path(shutil.copytree(packed, tmp_path / "packed", ignore=shutil.ignore_patterns("cuts.pack")))
    prepare_corpus([alone], tmp_path / "alone.corpus")
    corpus = Corpus.open(tmp_path / "alone.corpus")
    assert corpus.fingerprint != Corpus.open(speech).fingerprint
    expected = samples_by_id(speech)
    found = samples_by_id(corpus.path)
    assert found.keys() == expected.keys()
    assert all(np.array_equal(found[name], expected[name]) for name in expected)


def test_windows_keep_their_ids_and_samples(
    messy_corpora: MessyCorpora, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nestdata.prepare.writing.records.BLOCK", 3)  # records are sorted in several blocks
    pack(messy_corpora.windows, tmp_path / "packed", bits=24)
    prepare_corpus([tmp_path / "packed"], tmp_path / "packed.corpus", PrepareConfig(probe="decode"))
    source, corpus = Corpus.open(messy_corpora.windows), Corpus.open(tmp_path / "packed.corpus")
    usable = [i for i in range(len(source)) if source.line(i)["recording"]["id"] != "2"]
    expected = dict(source.load(i) for i in usable)
    found = samples_by_id(corpus.path)
    assert [corpus.line(i)["id"] for i in range(len(corpus))] == [source.line(i)["id"] for i in usable]
    for cut_id, samples in expected.items():
        # 16-bit sources are exact, and the others are rounded to 24 bits.
        assert np.abs(found[cut_id].astype(np.float64) - samples).max() <= 2.0**-24


def test_absolute_ids_get_their_slash_back(tmp_path: Path) -> None:
    path = write_audio(tmp_path / "elsewhere/a.wav", chirp(100, 900, 1.0))
    manifest = write_jsonl(tmp_path / "manifests/a.json", [{"audio_filepath": str(path)}])
    prepare_corpus([manifest], tmp_path / "a.corpus")
    pack(tmp_path / "a.corpus", tmp_path / "packed")
    prepare_corpus([tmp_path / "packed"], tmp_path / "packed.corpus")
    first, second = Corpus.open(tmp_path / "a.corpus"), Corpus.open(tmp_path / "packed.corpus")
    assert second.line(0)["id"] == first.line(0)["id"] == str(path.with_suffix(""))
    assert second.fingerprint == first.fingerprint


def test_prepare_decodes_members_and_rejects_those_with_another_checksum(packed: Path, tmp_path: Path) -> None:
    damaged = Path(shutil.copytree(packed, tmp_path / "packed"))
    with (damaged / "recording.000000.tar").open("r+b") as file:
        file.seek(5000)  # in the audio of the first cut
        byte = file.read(1)[0]
        file.seek(5000)
        file.write(bytes([byte ^ 1]))
    report = prepare_corpus([damaged], tmp_path / "packed.corpus", PrepareConfig(probe="decode"))
    assert report.rejected == {"corrupt": 1}
    assert report.num_cuts == 39


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("cuts.pack/pack.json", r"packed: not a complete packed set: it has no cuts.pack/pack.json. If it was"),
        ("recording.000001.tar", r"recording.000001.tar: no such file, but the packed set has it. Restore it"),
        ("cuts.pack/000001.json", r"000001.json: is missing"),
    ],
)
def test_a_set_with_a_missing_file_is_refused(packed: Path, tmp_path: Path, name: str, message: str) -> None:
    broken = Path(shutil.copytree(packed, tmp_path / "packed"))
    (broken / name).unlink()
    with pytest.raises(ManifestError, match=message):
        prepare_corpus([broken], tmp_path / "packed.corpus")


def test_a_set_whose_files_have_changed_is_refused(packed: Path, tmp_path: Path) -> None:
    broken = Path(shutil.copytree(packed, tmp_path / "packed"))
    with (broken / "recording.000000.tar").open("ab") as file:
        file.write(b"more")
    with pytest.raises(ManifestError, match=r"recording.000000.tar: has changed since it was packed: it has \d+ bytes"):
        prepare_corpus([broken], tmp_path / "packed.corpus")
    cuts = broken / "cuts.000000.jsonl"
    shutil.copyfile(packed / "recording.000000.tar", broken / "recording.000000.tar")
    cuts.write_bytes(cuts.read_bytes().replace(b'"start":0.0', b'"start":0.1', 1))
    with pytest.raises(ManifestError, match=r"cuts.000000.jsonl: has changed since it was packed: its checksum"):
        prepare_corpus([broken], tmp_path / "packed.corpus")
