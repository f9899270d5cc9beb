"""Prepares every example in `manifests/`, with the root of the repository as the current directory."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nestdata import Corpus, prepare_corpus
from tests.nestdata.prepare.inputs.reading import format_of
from tests.synthesis import read_audio, read_jsonl

REPOSITORY = Path(__file__).parent.parent
SPEECH = REPOSITORY / "manifests" / "demo" / "speech"
EXAMPLES = {
    "nemo/train.json": "nemo",
    "nemo_tarred/tarred_audio_manifest.json": "nemo",
    "shar": "shar",
    "webdataset": "folder",
    "lhotse/cuts.jsonl": "lhotse",
    "lhotse/recordings.jsonl": "lhotse",
    "fairseq/train.tsv": "fairseq",
    "kaldi": "kaldi",
    "huggingface/train": "huggingface",
    "csv/train.csv": "csv",
    "list/train.txt": "list",
    "demo/speech/en_m5_01.flac": "audio",
    "demo/noise": "folder",
}
# For each cut: the file of the demo corpus with its first sample and number of samples, the labels, the custom fields.
_MIND = ("en_m5_01", 0, 17056)
_TOMORROW = ("de_f2_01", 0, 18568)
_NIGHT = ("es_f4_01", 0, 18160)
_MIND_LABELS = {"text": "Mind the step.", "language": "en", "speaker": "en_m5"}
_TOMORROW_LABELS = {"text": "Bis morgen früh!", "language": "de", "speaker": "de_f2"}
_HE = {"language": "en", "speaker": "en_m5"}
EXPECTED: dict[str, dict[str, tuple[tuple[str, int, int], dict[str, str], dict[str, str] | None]]] = {
    "csv/train.csv": {
        "../demo/speech/en_m5_01": (_MIND, _MIND_LABELS, {"gender": "male"}),
        "../demo/speech/de_f2_01": (_TOMORROW, _TOMORROW_LABELS, {"gender": "female"}),
        "../demo/speech/en_m5_04@4.000+5.500": (("en_m5_04", 64000, 88000), _HE, {"gender": "male"}),
    },
    "list/train.txt": {"../demo/speech/en_m5_01": (_MIND, {}, None), "../demo/speech/es_f4_01": (_NIGHT, {}, None)},
    "demo/speech/en_m5_01.flac": {"en_m5_01": (_MIND, {}, None)},
    "nemo/train.json": {
        "../demo/speech/en_m5_01": (_MIND, _MIND_LABELS, None),
        "../demo/speech/de_f2_01": (_TOMORROW, _TOMORROW_LABELS, None),
        "../demo/speech/en_m5_04@0.000+4.000": (("en_m5_04", 0, 64000), _HE, {"source": "demo"}),
        "../demo/speech/en_m5_04@4.000+5.500": (("en_m5_04", 64000, 88000), _HE, {"source": "demo"}),
    },
    "nemo_tarred/tarred_audio_manifest.json": {
        "en_m5_01": (_MIND, _MIND_LABELS, None),
        "de_f2_01@0.000+0.600": (("de_f2_01", 0, 9600), {"language": "de", "speaker": "de_f2"}, None),
        "de_f2_01@0.600+0.500": (("de_f2_01", 9600, 8000), {"language": "de", "speaker": "de_f2"}, None),
    },
    "shar": {
        "es_f4_01": (_NIGHT, {}, None),
        "de_m3_01": (("de_m3_01", 0, 17232), {}, None),
    },
    "webdataset": {
        "en_m5_01": (_MIND, _MIND_LABELS, None),
        "de_f2_01": (_TOMORROW, {"language": "de", "speaker": "de_f2"}, None),
    },
    "lhotse/cuts.jsonl": {
        "en_m5_01": (_MIND, _MIND_LABELS, None),
        "de_f2_01": (_TOMORROW, _TOMORROW_LABELS, None),
        "en_m5_04-middle": (("en_m5_04", 40000, 96000), {}, {"source": "demo"}),
    },
    "lhotse/recordings.jsonl": {
        "en_m5_01": (_MIND, {}, None),
        "de_f2_01": (_TOMORROW, {}, None),
        "es_f4_01": (_NIGHT, {}, None),
    },
    "fairseq/train.tsv": {
        "en_m5_01": (_MIND, {}, None),
        "de_f2_01": (_TOMORROW, {}, None),
        "es_f4_01": (_NIGHT, {}, None),
    },
    "kaldi": {
        "de_f2-01": (_TOMORROW, _TOMORROW_LABELS, None),
        "en_m5-04-a": (
            ("en_m5_04", 0, 64000),
            {**_HE, "text": "when I was a boy my grandfather kept bees"},
            None,
        ),
        "en_m5-04-b": (("en_m5_04", 64000, 88000), _HE, None),
    },
    "huggingface/train": {
        "train/0": (_MIND, _MIND_LABELS, {"gender": "male"}),
        "train/1": (
            ("de_m3_01", 0, 17232),
            {"text": "Komm bitte herein.", "language": "de", "speaker": "de_m3"},
            {"gender": "male"},
        ),
    },
}


def labels_of(cut: dict[str, Any]) -> dict[str, str]:
    supervision: dict[str, str] = (cut["supervisions"] or [{}])[0]
    return {key: value for key, value in supervision.items() if key in ("text", "language", "speaker")}


@pytest.mark.parametrize("name", EXPECTED)
def test_an_example_gives_the_expected_cuts(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(REPOSITORY)
    report = prepare_corpus([f"manifests/{name}"], tmp_path / "example.corpus")
    corpus = Corpus.open(tmp_path / "example.corpus")
    assert (report.num_cuts, report.rejected) == (len(EXPECTED[name]), {})
    seen = set()
    for row in range(len(corpus)):
        cut = corpus.line(row)
        (recording, start, num_samples), labels, custom = EXPECTED[name][cut["id"]]
        assert (labels_of(cut), cut.get("custom")) == (labels, custom)
        cut_id, samples = corpus.load(row)
        np.testing.assert_array_equal(samples, read_audio(SPEECH / f"{recording}.flac")[start : start + num_samples])
        assert len(samples) == num_samples
        seen.add(cut_id)
    assert seen == set(EXPECTED[name])


def test_the_format_of_every_example_is_detected() -> None:
    assert {name: format_of(REPOSITORY / "manifests" / name) for name in EXAMPLES} == EXAMPLES


@pytest.mark.multiprocess
def test_one_corpus_of_all_formats_does_not_depend_on_the_number_of_processes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(REPOSITORY)
    inputs = [f"manifests/{name}" for name in EXAMPLES if name != "lhotse/recordings.jsonl"]
    names = ("cuts.jsonl", "index.npy", "addresses.npy", "shards.jsonl")
    contents = []
    for jobs in (1, 2):
        prepare_corpus(inputs, tmp_path / "all.corpus", jobs=jobs, overwrite=True)
        contents.append([(tmp_path / "all.corpus" / name).read_bytes() for name in names])
    assert contents[0] == contents[1]
    rows = read_jsonl(tmp_path / "all.corpus" / "cuts.jsonl")
    # Lhotse cuts keep their ids; ids of files are relative to the folder that holds all inputs, so that two cuts of the
    # fairseq manifest repeat ids of the NeMo manifest.
    assert [rows[row]["id"] for row in (0, 4, 7, 9, 11)] == [
        "demo/speech/en_m5_01", "nemo_tarred/en_m5_01", "es_f4_01", "webdataset/en_m5_01", "en_m5_01",
    ]  # fmt: skip
    assert len({row["id"] for row in rows}) == len(rows) == 4 + 3 + 2 + 2 + 3 + (3 - 2) + 3 + 2 + 8
