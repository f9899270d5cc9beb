"""Data sets of Hugging Face: folders of Arrow files, and Parquet files as the Hub stores them."""

import sys
import tarfile
from datetime import date
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow
import pytest
from pyarrow import parquet

from nestdata import ConfigError, Corpus, ManifestError, PrepareConfig, prepare_corpus
from nestdata.prepare.inputs.formats import huggingface
from tests.nestdata.prepare.inputs.reading import entries_of, format_of, prepared, some_audio, source_of
from tests.nestdata.prepare.parquet_files import embedded, write_parquet
from tests.synthesis import encoded, hiss, read_audio, read_jsonl

_AUDIO = encoded(hiss(8000, 1))


def audio_of(content: bytes = _AUDIO) -> dict[str, Any]:
    return {"bytes": content, "path": "a.wav"}


def data_set(columns: dict[str, list[Any]], *audio: str, **kinds: Any) -> Any:
    """Returns a data set in memory; the columns `audio` hold audio, and `kinds` gives the types of others by name."""
    rows = datasets.Dataset.from_dict(columns)
    for name, kind in {**{name: datasets.Audio() for name in audio}, **kinds}.items():
        rows = rows.cast_column(name, kind)
    return rows


def save(rows: Any, path: Path) -> Path:
    """Saves a data set without embedding its audio files, which recent versions of `save_to_disk` would do."""
    rows.select([0]).save_to_disk(path)
    (file,) = path.glob("*.arrow")
    file.unlink()  # the open data set keeps the removed file mapped
    table = rows.data.table
    with pyarrow.ipc.new_stream(str(file), table.schema) as writer:
        writer.write_table(table)
    return path


@pytest.fixture(autouse=True)
def _no_progress_bars() -> None:
    datasets.disable_progress_bars()


@pytest.mark.parametrize("probe", ["missing", "all", "decode"])
def test_embedded_audio_is_probed_before_the_corpus_is_in_place(tmp_path: Path, probe: Any) -> None:
    """Files of the corpus being replaced are not read, and unusable audio rejects only its own row."""
    audio = [audio_of(), audio_of(b"no audio"), audio_of(b""), audio_of(encoded(0 * hiss(8000, 1)))]
    rows = data_set({"audio": audio, "text": list("abcd")}, "audio")
    rows.save_to_disk(tmp_path / "train")
    for _ in range(2):
        prepare_corpus([tmp_path / "train"], tmp_path / "out.corpus", PrepareConfig(probe=probe), overwrite=True)
        corpus = Corpus.open(tmp_path / "out.corpus")
        expected = {"unreadable": 1, "empty": 1} | ({"silent": 1} if probe == "decode" else {})
        assert corpus.meta["rejected"] == expected
        assert [corpus[row].supervisions[0].text for row in range(len(corpus))] == ["a", "d"][: len(corpus)]
        assert len(corpus.load(0)[1]) == 8000


def test_audio_files_that_a_data_set_names_are_not_copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = some_audio(tmp_path / "files" / "a.wav")
    audio = [{"bytes": None, "path": name} for name in (str(path), "files/a.wav", "files/gone.wav")]
    save(data_set({"audio": audio}, "audio"), tmp_path / "train")
    monkeypatch.chdir(tmp_path)
    cuts, (reject,) = prepared(Path("train"))
    assert {cut["recording"]["sources"][0]["source"] for cut in cuts.values()} == {str(path)}
    assert (reject["cut_id"], reject["reason"]) == ("train/2", "missing")
    assert not (tmp_path / "train.corpus" / "shards").exists()


def test_all_columns_but_those_of_bytes_are_labels_and_classes_are_given_by_name(tmp_path: Path) -> None:
    columns: dict[str, list[Any]] = {
        "audio": [audio_of()] * 3,
        "sentence": ["grüße", None, ""],
        "locale": [1, -1, 0],
        "speaker_id": [17, 18, None],
        "mood": [0, 1, None],
        "score": [0.5, None, 1.5],
        "is_clean": [True, False, None],
        "day": [date(2024, 1, 1)] * 3,
        "tags": [["a"], [], None],
        "raw": [b"a", b"b", None],
    }
    kinds = {"locale": datasets.ClassLabel(names=["en", "de"]), "mood": datasets.ClassLabel(names=["happy", "sad"])}
    data_set(columns, "audio", **kinds).save_to_disk(tmp_path / "train")
    assert [entry.labels for entry in entries_of(tmp_path / "train", write_to=tmp_path / "out")] == [
        {"sentence": "grüße", "locale": "de", "speaker_id": 17, "mood": "happy", "score": 0.5, "is_clean": True}
        | {"day": "2024-01-01", "tags": ["a"]},
        {"speaker_id": 18, "mood": "sad", "is_clean": False, "day": "2024-01-01", "tags": []},
        {"sentence": "", "locale": "en", "score": 1.5, "day": "2024-01-01"},
    ]
    cut = prepared(tmp_path / "train")[0]["train/0"]
    (label,) = cut["supervisions"]
    assert (label["text"], label["language"], label["speaker"]) == ("grüße", "de", "17")
    assert cut["custom"] == {"mood": "happy", "score": 0.5, "is_clean": True, "day": "2024-01-01", "tags": ["a"]}


@pytest.mark.parametrize(("columns", "chosen"), [(["clip"], 0), (["clip", "audio"], 1), (["b", "a"], 0)])
def test_the_audio_column_may_have_any_name(tmp_path: Path, columns: list[str], chosen: int) -> None:
    audio = [audio_of(encoded(hiss(8000 + 100 * i, i))) for i in range(2)]
    rows = {name: [audio[i]] for i, name in enumerate(columns)}
    data_set(rows, *columns).save_to_disk(tmp_path / "train")
    ((_, cut),) = prepared(tmp_path / "train")[0].items()
    assert cut["recording"]["num_samples"] == 8000 + 100 * chosen
    assert "custom" not in cut


def test_a_folder_with_several_splits_is_an_error_that_names_them(tmp_path: Path) -> None:
    rows = data_set({"audio": [audio_of()]}, "audio")
    datasets.DatasetDict({"train": rows, "test": rows}).save_to_disk(tmp_path / "both")
    for form in (None, "huggingface"):
        with pytest.raises(ManifestError, match=r"both: several splits .* one or more: test, train\."):
            entries_of(tmp_path / "both", form)
    assert len(entries_of(tmp_path / "both" / "test", write_to=tmp_path / "out")) == 1


def test_a_data_set_without_audio_is_an_error_that_names_its_columns(tmp_path: Path) -> None:
    data_set({"name": ["a.wav"], "text": ["x"]}).save_to_disk(tmp_path / "train")
    with pytest.raises(
        ManifestError, match=r"no audio among the columns name \(string\), text .* --columns audio=NAME"
    ):
        prepared(tmp_path / "train")


def test_without_the_package_the_error_says_how_to_install_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data_set({"audio": [audio_of()]}, "audio").save_to_disk(tmp_path / "train")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(ConfigError, match=r"`pyarrow` is missing\. Install it with `pip install 'nest-pretrain\[hugg"):
        entries_of(tmp_path / "train")


def test_embedded_audio_becomes_members_of_tars_in_the_corpus(tmp_path: Path) -> None:
    noise = [hiss(8000 + 100 * i, i) for i in range(5)]
    for part in range(2):
        write_parquet(
            tmp_path / "data" / f"train-{part}.parquet",
            [embedded(samples, "WAV") for samples in noise[3 * part : 3 * part + 3]],
            text=[f"t{3 * part + i}" for i in range(len(noise[3 * part : 3 * part + 3]))],
        )
    seen: list[Any] = []
    report = prepare_corpus([tmp_path / "data"], tmp_path / "speech.corpus", on_progress=seen.append)
    assert (report.num_cuts, report.rejected) == (5, {})
    assert [found[:4] for found in seen] == [(0, None, 0, 2), (3, None, 1, 2), (5, None, 2, 2)]
    corpus = Corpus.open(tmp_path / "speech.corpus")
    assert [corpus[row].id for row in range(5)] == ["train-0/0", "train-0/1", "train-0/2", "train-1/0", "train-1/1"]
    assert [corpus[row].supervisions[0].text for row in range(5)] == [f"t{i}" for i in range(5)]
    names = sorted(str(path.relative_to(corpus.path)) for path in corpus.path.rglob("*.tar"))
    assert names == ["shards/0/0-000001.tar", "shards/0/0-000002.tar"]
    for row, samples in enumerate(noise):
        address = corpus.address(row)
        assert address is not None
        assert (address.location, address.crc32 is not None) == (str(corpus.path / names[row // 3]), True)
        np.testing.assert_allclose(corpus.load(row)[1], samples, atol=1e-4)
    with tarfile.open(corpus.path / names[0]) as tar:
        assert tar.getnames() == [f"{row:09d}.wav" for row in range(3)]


def test_a_corpus_that_holds_its_audio_may_be_moved(tmp_path: Path) -> None:
    noise = [hiss(8000 + 100 * i, i) for i in range(2)]
    write_parquet(tmp_path / "train.parquet", [embedded(samples) for samples in noise])
    prepare_corpus([tmp_path / "train.parquet"], tmp_path / "a.corpus")
    before = Corpus.open(tmp_path / "a.corpus").fingerprint
    (tmp_path / "moved").mkdir()
    (tmp_path / "a.corpus").rename(tmp_path / "moved" / "b.corpus")
    corpus = Corpus.open(tmp_path / "moved" / "b.corpus")
    assert (corpus.root, corpus.fingerprint) == (str(corpus.path / "shards/0"), before)
    for row, samples in enumerate(noise):
        np.testing.assert_allclose(corpus.load(row)[1], samples, atol=1e-4)
        assert corpus.line(row)["recording"]["sources"][0]["source"].startswith(f"{corpus.path}/shards/0/")


def test_the_sample_bank_is_made_of_embedded_audio(tmp_path: Path) -> None:
    write_parquet(tmp_path / "train.parquet", [embedded(hiss(8000, 1), "WAV")])
    prepare_corpus([tmp_path / "train.parquet"], tmp_path / "noise.corpus", PrepareConfig(pcm=True))
    corpus = Corpus.open(tmp_path / "noise.corpus")
    assert corpus.has_bank
    np.testing.assert_allclose(corpus.load(0)[1], hiss(8000, 1), atol=1e-4)


def test_rows_without_bytes_are_read_by_their_path_or_rejected(tmp_path: Path) -> None:
    some_audio(tmp_path / "outside.wav")
    rows = [{"bytes": None, "path": "outside.wav"}, embedded(hiss(9000, 1)), None, {"bytes": b"noise", "path": None}]
    write_parquet(tmp_path / "train.parquet", rows)
    report = prepare_corpus([tmp_path / "train.parquet"], tmp_path / "speech.corpus")
    assert report.rejected == {"missing": 1, "unreadable": 1}
    assert [reject["where"] for reject in read_jsonl(report.path / "rejected.jsonl")] == [
        f"{tmp_path}/train.parquet (row 2)",
        f"{tmp_path}/train.parquet (row 3)",
    ]
    corpus = Corpus.open(tmp_path / "speech.corpus")
    assert (corpus.address(0), corpus[0].id) == (None, "train/0")
    np.testing.assert_array_equal(corpus.load(0)[1], read_audio(tmp_path / "outside.wav"))
    np.testing.assert_allclose(corpus.load(1)[1], hiss(9000, 1), atol=1e-4)


def test_files_of_the_library_datasets_keep_the_names_of_classes(tmp_path: Path) -> None:
    rows = datasets.Dataset.from_dict({"audio": [embedded(hiss(8000, i)) for i in range(2)], "lang": ["de", "en"]})
    rows = rows.cast_column("audio", datasets.Audio(decode=False)).class_encode_column("lang")
    rows.to_parquet(tmp_path / "train.parquet")
    report = prepare_corpus([tmp_path / "train.parquet"], tmp_path / "speech.corpus")
    assert set(report.hours_by_language) == {"de", "en"}


def test_files_folders_and_patterns_are_detected(tmp_path: Path) -> None:
    for name in ("a/x-0.parquet", "a/x-1.parquet", "a/y.parquet"):
        write_parquet(tmp_path / name, [embedded(hiss(8000, 1))])
    some_audio(tmp_path / "both" / "a.wav")
    write_parquet(tmp_path / "both" / "b.parquet", [embedded(hiss(8000, 1))])
    assert format_of(tmp_path / "both") == "folder"
    for name, number in (("a", 3), ("a/x-*.parquet", 2), ("a/y.parquet", 1)):
        source = source_of(tmp_path / name)
        assert isinstance(source, huggingface.DataSetFiles)
        assert (source.count(), source.names.base) == (number, str(tmp_path / "a"))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("gone.parquet", r"gone\.parquet: no such Parquet file"),
        ("text.parquet", r"text\.parquet: not a file of a data set that can be read"),
        ("numbers.parquet", r"numbers\.parquet: no audio among the columns x \(int64\)"),
    ],
)
def test_files_that_cannot_be_read_are_errors(tmp_path: Path, name: str, message: str) -> None:
    (tmp_path / "text.parquet").write_text("not parquet")
    parquet.write_table(pyarrow.table({"x": [1]}), tmp_path / "numbers.parquet")
    with pytest.raises(ManifestError, match=message):
        prepare_corpus([tmp_path / name], tmp_path / "speech.corpus")
    assert not list(tmp_path.glob("speech.corpus*"))


def write_splits(folder: Path, *names: str) -> Path:
    for number, name in enumerate(names):
        write_parquet(folder / name, [embedded(hiss(8000, number))])
    return folder


@pytest.mark.parametrize(
    ("names", "counts", "pattern"),
    [
        (("data/train-0-of-2.parquet", "data/test-0-of-1.parquet"), "1 of test, 1 of train", "train-*-of-*.parquet"),
        (("en/train/0000.parquet", "en/validation/0000.parquet"), "1 of train, 1 of validation", "en/train/*.parquet"),
    ],
)
def test_a_folder_of_several_splits_is_an_error_that_names_the_pattern_of_one(
    tmp_path: Path, names: tuple[str, ...], counts: str, pattern: str
) -> None:
    folder = write_splits(tmp_path / "set", *names)
    with pytest.raises(ManifestError) as error:
        prepare_corpus(folder, tmp_path / "a.corpus")
    assert f"({counts})" in str(error.value)
    found = str(error.value).split("such as '")[1].split("'")[0]
    assert found.endswith(pattern)
    # The remedy works, and so does taking all of them.
    taken = [name for name in names if Path(folder, name).match(found)]
    assert prepare_corpus(found, tmp_path / "a.corpus").num_cuts == len(taken)
    every = [str(folder / name) for name in names]
    assert prepare_corpus(every, tmp_path / "b.corpus").num_cuts == len(names)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"bytes": None, "path": 7}, r"1 missing.*neither bytes nor a path of audio"),
        ({"bytes": "abc", "path": "a.wav"}, r"row 0\): the column 'audio' holds str where bytes were expected"),
        ({"bytes": [1, 2], "path": "a.wav"}, r"row 0\): the column 'audio' holds list where bytes were expected"),
    ],
)
def test_audio_that_is_neither_bytes_nor_a_path_is_not_taken(tmp_path: Path, row: dict[str, Any], message: str) -> None:
    rows = [row]
    parquet.write_table(pyarrow.table({"audio": rows}), tmp_path / "a.parquet")
    with pytest.raises(ManifestError, match=message):
        prepare_corpus([tmp_path / "a.parquet"], tmp_path / "speech.corpus")
    assert not list(tmp_path.glob("speech.corpus*"))


@pytest.mark.parametrize("audio", [[0.5] * 9, {"array": [0.5] * 9, "path": "a.wav"}, [embedded(hiss(800, 2))]])
def test_audio_in_a_form_that_is_not_read_is_an_error_that_names_its_column(tmp_path: Path, audio: Any) -> None:
    parquet.write_table(pyarrow.Table.from_pylist([{"audio": audio, "text": "x"}]), tmp_path / "a.parquet")
    with pytest.raises(ManifestError, match=r"no audio among the columns audio \((list|struct)<.*text \(string\)"):
        prepare_corpus(tmp_path / "a.parquet", tmp_path / "c.corpus")


def test_signals_and_bytes_in_other_columns_are_not_read_and_named(tmp_path: Path) -> None:
    row = {"audio": embedded(hiss(16000, 1)), "input_values": [0.5] * 16000, "tags": ["a", "b"], "picture": b"png"}
    parts = {"parts": [embedded(hiss(800, 2))], "features": [[0.25] * 80] * 3, "words": [{"word": "so", "start": 0.5}]}
    parquet.write_table(pyarrow.Table.from_pylist([row | parts]), tmp_path / "a.parquet")
    report = prepare_corpus(tmp_path / "a.parquet", tmp_path / "c.corpus")
    cut = Corpus.open(tmp_path / "c.corpus").line(0)
    assert cut["custom"] == {"tags": ["a", "b"], "words": [{"word": "so", "start": 0.5}]}
    assert report.notes[0].endswith("labels: tags, words, not read: input_values, picture, parts, features")


def test_rows_of_plain_bytes_in_a_folder_of_audio_are_read(tmp_path: Path) -> None:
    some_audio(tmp_path / "data" / "a.wav")
    table = pyarrow.Table.from_pylist([{"audio": encoded(hiss(16000, 1)), "text": "so"}])
    parquet.write_table(table, tmp_path / "data" / "b.parquet")
    assert prepare_corpus(tmp_path / "data", tmp_path / "c.corpus").num_cuts == 2


def test_a_class_column_that_gives_way_to_a_named_one_is_not_read(tmp_path: Path) -> None:
    classes = datasets.Features(
        audio=datasets.Audio(decode=False),
        language=datasets.ClassLabel(names=["en", "de"]),
        spoken=datasets.Value("string"),
    )
    rows = {"audio": [embedded(hiss(16000, 1))], "language": [1], "spoken": ["cs"]}
    datasets.Dataset.from_dict(rows, features=classes).to_parquet(str(tmp_path / "a.parquet"))
    prepare_corpus(tmp_path / "a.parquet", tmp_path / "c.corpus", PrepareConfig(columns="language=spoken"))
    (label,) = Corpus.open(tmp_path / "c.corpus").line(0)["supervisions"]
    assert label["language"] == "cs"
