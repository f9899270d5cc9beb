import sys
from datetime import date
from pathlib import Path
from typing import Any

import datasets
import pyarrow
import pytest

from nestdata import ConfigError, Corpus, ManifestError, PrepareConfig, prepare_corpus
from tests.nestdata.prepare.inputs.reading import entries_of, prepared, some_audio
from tests.synthesis import encoded, hiss

_AUDIO = encoded(hiss(8000, 1))


def embedded(content: bytes = _AUDIO, path: str | None = "a.wav") -> dict[str, Any]:
    return {"bytes": content, "path": path}


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
    audio = [embedded(), embedded(b"no audio"), embedded(b""), embedded(encoded(0 * hiss(8000, 1)))]
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
        "audio": [embedded()] * 3,
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
    audio = [embedded(encoded(hiss(8000 + 100 * i, i))) for i in range(2)]
    rows = {name: [audio[i]] for i, name in enumerate(columns)}
    data_set(rows, *columns).save_to_disk(tmp_path / "train")
    ((_, cut),) = prepared(tmp_path / "train")[0].items()
    assert cut["recording"]["num_samples"] == 8000 + 100 * chosen
    assert "custom" not in cut


def test_a_folder_with_several_splits_is_an_error_that_names_them(tmp_path: Path) -> None:
    rows = data_set({"audio": [embedded()]}, "audio")
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
    data_set({"audio": [embedded()]}, "audio").save_to_disk(tmp_path / "train")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(ConfigError, match=r"`pyarrow` is missing\. Install it with `pip install 'nest-pretrain\[hugg"):
        entries_of(tmp_path / "train")
