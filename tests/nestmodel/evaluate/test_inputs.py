from pathlib import Path

from nestdata import Corpus, PrepareConfig, prepare_corpus
from nestmodel.evaluate.inputs import as_corpus, cut_labels
from tests.synthesis import hiss, write_audio


def test_labels_are_custom_fields_and_fields_with_one_value_in_all_supervisions() -> None:
    span = {"id": "a", "recording_id": "a", "start": 0.0, "duration": 1.0, "channel": 0}
    cut = {
        "custom": {"lang_family": "romance", "age": 7},
        "supervisions": [
            {**span, "speaker": "kim", "text": "one", "custom": {"mood": "glad"}},
            {**span, "speaker": "kim", "text": "two"},
        ],
    }
    assert cut_labels(cut) == {"lang_family": "romance", "age": 7, "speaker": "kim"}
    assert cut_labels({"supervisions": []}) == {}


def test_only_the_path_of_one_corpus_at_the_rate_of_the_model_is_opened(tmp_path: Path) -> None:
    write_audio(tmp_path / "in" / "a.wav", hiss(16000, 1))
    path = tmp_path / "in.corpus"
    prepare_corpus([tmp_path / "in"], path, PrepareConfig(min_seconds=0.0))
    for inputs in (path, str(path), [path], (str(path),)):
        found = as_corpus(inputs, 16000)
        assert isinstance(found, Corpus)
        assert found.path == path
    assert as_corpus([path], 8000) == [path]
    assert as_corpus([path, path], 16000) == [path, path]
    (tmp_path / "in" / "meta.json").write_text("{}")
    assert as_corpus(tmp_path / "in", 16000) == tmp_path / "in"
