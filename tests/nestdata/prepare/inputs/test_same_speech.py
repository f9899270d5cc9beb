"""The same speech as files, NeMo tars, Shar and WebDataset gives the same corpus."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile

from nestdata import Corpus, PrepareConfig, prepare_corpus
from tests.nestdata.prepare.inputs.shards import (
    write_nemo_tarred,
    write_shar,
    write_speech,
    write_webdataset,
)


def corpus_of(path: Path, output: Path, jobs: int = 1, **config: Any) -> Corpus:
    report = prepare_corpus([path], output, PrepareConfig(**config), jobs=jobs)
    assert not report.rejected
    return Corpus.open(output)


def assert_same(corpus: Corpus, expected: Corpus) -> None:
    assert corpus.fingerprint == expected.fingerprint
    np.testing.assert_array_equal(corpus.num_samples, expected.num_samples)
    for index in range(len(expected)):
        cut_id, samples = expected.load(index)
        assert corpus.load(index)[0] == cut_id
        np.testing.assert_array_equal(corpus.load(index)[1], samples)


@pytest.fixture(scope="module")
def speech(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("speech")
    write_speech(folder)
    return folder


@pytest.mark.parametrize("probe", ["missing", "decode"])
def test_nemo_tars_give_the_corpus_of_the_files(speech: Path, tmp_path: Path, probe: str) -> None:
    expected = corpus_of(speech / "speech.json", tmp_path / "files.corpus", probe=probe)
    manifest = write_nemo_tarred(speech, tmp_path / "tarred", reverse=True)
    sharded = manifest.parent / "sharded_manifests" / "manifest__OP_0..1_CL_.json"
    for number, path in enumerate((manifest, sharded)):
        corpus = corpus_of(path, tmp_path / f"{number}.corpus", probe=probe)
        assert_same(corpus, expected)
        assert (corpus.path / "cuts.jsonl").read_bytes().count(b"-sub") == 0
    assert [expected[index].id for index in range(len(expected))].count("audio/b@0.500+0.750") == 1


def test_webdataset_and_shar_give_the_corpus_of_a_folder(speech: Path, tmp_path: Path) -> None:
    """A folder lists files by name, the files of a folder before those of its subfolders."""
    names = ["audio/a.flac", "audio/b.flac", "audio/d.flac", "audio/deep/c.wav"]
    folder = tmp_path / "folder"
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).symlink_to(speech / name)
    # Of a folder, the root of the ids is the folder itself.
    expected = corpus_of(folder, tmp_path / "folder.corpus")
    cuts = [
        (
            Path(name).with_suffix("").as_posix(),
            Path(name).suffix,
            (speech / name).read_bytes(),
            soundfile.info(speech / name).frames,
        )
        for name in names
    ]
    shar = write_shar(tmp_path / "shar", [cuts[:3], cuts[3:]])
    assert_same(corpus_of(shar, tmp_path / "shar.corpus"), expected)
    assert_same(corpus_of(write_webdataset(speech, tmp_path / "wds"), tmp_path / "wds.corpus"), expected)
