import json
import pickle
import shutil
from pathlib import Path

import numpy as np
import pytest
from lhotse import CutSet

from nestdata import Corpus, CorpusError, PrepareConfig
from tests.conftest import MessyCorpora
from tests.synthesis import folder_corpus, hiss, read_audio


@pytest.fixture
def corpus(tmp_path: Path) -> Corpus:
    """Three cuts whose order by length differs from their order by name."""
    return folder_corpus(
        tmp_path / "speech", {"a.wav": hiss(9000, 1), "b.wav": hiss(4000, 2), "c.wav": (hiss(48000, 3), 48000)}
    )


def test_cuts_are_ordered_by_length(corpus: Corpus) -> None:
    assert len(corpus) == 3
    assert [corpus[index].id for index in range(3)] == ["b", "a", "c"]
    assert [corpus[index].id for index in (-1, -2, -3)] == ["c", "a", "b"]
    assert [cut.id for cut in corpus] == ["b", "a", "c"]  # type: ignore[attr-defined]
    np.testing.assert_array_equal(corpus.num_samples, [4000, 9000, 16000])
    assert corpus.num_samples.dtype == np.int64
    assert corpus.sampling_rate == 16000
    assert corpus.hours == 29000 / 16000 / 3600


@pytest.mark.parametrize("index", [3, -4])
def test_indices_outside_the_corpus_are_rejected(corpus: Corpus, index: int) -> None:
    for ask in (corpus.__getitem__, corpus.line, corpus.load):
        with pytest.raises(IndexError, match=f"index {index} of a corpus of 3 cuts"):
            ask(index)


def test_every_cut_opens_in_lhotse_with_the_same_samples(messy_corpora: MessyCorpora) -> None:
    corpus = Corpus.open(messy_corpora.speech)
    cuts = {cut.id: cut for cut in CutSet.from_file(corpus.path / "cuts.jsonl")}
    assert len(cuts) == len(corpus)
    assert (np.diff(corpus.num_samples) >= 0).all()
    for index, num_samples in enumerate(corpus.num_samples):
        cut_id, samples = corpus.load(index)
        cut = cuts[cut_id]
        assert corpus[index] == cut
        assert corpus.line(index) == cut.to_dict()
        assert cut.num_samples == num_samples == len(samples) == corpus.num_samples_of(index)
        assert cut.sampling_rate == corpus.sampling_rate
        np.testing.assert_allclose(samples, cut.load_audio()[0], rtol=0, atol=1e-6)


def test_span_of_a_cut_is_loaded_into_the_given_array(corpus: Corpus) -> None:
    out = np.zeros(500, np.float32)
    cut_id, samples = corpus.load(1, start=100, num_samples=500, out=out)
    assert cut_id == "a"
    assert samples is out
    np.testing.assert_array_equal(out, read_audio(corpus.path.parent / "speech" / "a.wav")[100:600])
    np.testing.assert_array_equal(corpus.load(1, start=100)[1][:500], out)


def test_length_index_is_read_only(corpus: Corpus) -> None:
    with pytest.raises(ValueError, match="read-only"):
        corpus.num_samples[0] = 1


def test_fingerprint_identifies_the_content(tmp_path: Path) -> None:
    stereo = np.stack([hiss(9000, 1), hiss(9000, 3)], axis=1)
    audio = {"a.wav": stereo, "b.wav": np.stack([hiss(4000, 2)] * 2, axis=1)}
    corpora = [
        folder_corpus(tmp_path / "first", audio),
        folder_corpus(tmp_path / "longer", {**audio, "b.wav": stereo[:4001]}),
        folder_corpus(tmp_path / "renamed", {"a.wav": audio["a.wav"], "c.wav": audio["b.wav"]}),
        folder_corpus(tmp_path / "more", {**audio, "c.wav": stereo}),
        folder_corpus(tmp_path / "slower", audio, PrepareConfig(sampling_rate=8000)),
        folder_corpus(tmp_path / "right", audio, PrepareConfig(channel=1)),
    ]
    assert len({corpus.fingerprint for corpus in corpora}) == len(corpora)
    assert folder_corpus(tmp_path / "elsewhere", audio).fingerprint == corpora[0].fingerprint


def test_corpus_of_another_format_is_an_error_that_names_both(corpus: Corpus) -> None:
    meta = json.loads((corpus.path / "meta.json").read_text())
    (corpus.path / "meta.json").write_text(json.dumps({**meta, "format_version": 99}))
    with pytest.raises(CorpusError, match=r"written in format 99, but this version reads format 4\."):
        Corpus.open(corpus.path)


@pytest.mark.parametrize("name", ["index.npy", "cuts.jsonl"])
@pytest.mark.parametrize("damage", ["missing", "empty", "truncated"])
def test_damaged_corpus_is_an_error(corpus: Corpus, name: str, damage: str) -> None:
    path = corpus.path / name
    content = path.read_bytes()
    path.unlink()
    if damage != "missing":
        path.write_bytes(b"" if damage == "empty" else content[:-9])
    with pytest.raises(CorpusError, match=r"speech\.corpus: the corpus is damaged .*\. Prepare it again"):
        Corpus.open(corpus.path)


@pytest.mark.parametrize("content", ["{", "[]", '{"format_version": 4}'])
def test_damaged_meta_json_is_an_error(corpus: Corpus, content: str) -> None:
    (corpus.path / "meta.json").write_text(content)
    with pytest.raises(CorpusError, match="the corpus is damaged"):
        Corpus.open(corpus.path)


def test_damaged_line_is_an_error_that_names_its_byte(corpus: Corpus, tmp_path: Path) -> None:
    copy = tmp_path / "copy.corpus"
    shutil.copytree(corpus.path, copy)
    lines = (copy / "cuts.jsonl").read_bytes()
    (copy / "cuts.jsonl").write_bytes(b"#" + lines[1:])
    damaged = Corpus.open(copy)
    for ask in (damaged.__getitem__, damaged.line, damaged.load):
        with pytest.raises(CorpusError, match=r"cuts\.jsonl at byte 0 is damaged"):
            ask(1)


@pytest.mark.parametrize(
    ("files", "given", "message"),
    [
        (["speech.json"], "speech.json", r"is a manifest, not a corpus\. Run `nestdata prepare \S+/speech\.json -o "),
        (["a/x.wav"], "a", r"is a folder, not a corpus\. Run `nestdata prepare \S+/a -o a\.c"),
        (["a.corpus/index.npy"], "a.corpus", r"is a corpus without meta\.json, which is not complete"),
        (["a.corpus.partial/x"], "a.corpus.partial", r"is a corpus that is not complete\. Run the same"),
        (["a.corpus.partial/x"], "a.corpus", r"does not exist, but a\.corpus\.partial does"),
        ([], "a.corpus", r"does not exist: .* Check the path\. .*`nestdata prepare`"),
    ],
)  # fmt: skip
def test_what_is_no_corpus_is_named_with_its_remedy(tmp_path: Path, files: list[str], given: str, message: str) -> None:
    for name in files:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    with pytest.raises(CorpusError, match=message):
        Corpus.open(tmp_path / given)


def test_another_process_does_not_open_a_corpus_that_was_prepared_again(
    messy_corpora: MessyCorpora, tmp_path: Path
) -> None:
    copy = shutil.copytree(messy_corpora.speech, tmp_path / "speech.corpus")
    pickled = pickle.dumps(Corpus.open(copy))
    assert pickle.loads(pickled).fingerprint == Corpus.open(messy_corpora.speech).fingerprint
    shutil.rmtree(copy)
    shutil.copytree(messy_corpora.windows, copy)
    with pytest.raises(CorpusError, match=r"speech\.corpus: was prepared again"):
        pickle.loads(pickled)
