"""The same speech as files, NeMo tars, Lhotse Shar and WebDataset tars gives the same cuts and the same batches.

`tests/remote/test_same_batches.py` compares them in an object store, with workers, ranks, cache and faults.
"""

from pathlib import Path
from typing import Any

import pytest

from nestdata import (
    AudioNoiseDataset,
    BatchPlan,
    Corpus,
    MixConfig,
    PlanConfig,
    PrepareConfig,
    SpeakerNoiseMixer,
    prepare_corpus,
)
from tests.batches import digest
from tests.speech_forms import write_forms


@pytest.fixture(scope="module")
def speech(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("speech")
    write_forms(folder, num_utterances=12)
    return folder


def prepare(folder: Path, form: str) -> Corpus:
    kind, _, spans = form.partition(" ")
    output = folder / f"{form}.corpus"
    manifest = folder / kind / ("spans.json" if spans else "speech.json")
    if kind == "files":
        prepare_corpus([manifest], output)
    elif kind == "nemo":
        prepare_corpus([manifest], output, PrepareConfig(tars=(str(folder / "nemo" / "audio_{0..1}.tar"),)))
    else:
        prepare_corpus([folder / kind], output)
    return Corpus.open(output)


def digests(corpus: Corpus) -> list[dict[str, str]]:
    plan = BatchPlan.of(corpus, PlanConfig(max_batch_seconds=3.0, microbatches_per_step=2, seed=3))
    dataset = AudioNoiseDataset(corpus, plan, mixer=SpeakerNoiseMixer(MixConfig(prob=0.8)))
    return [digest(dataset[step, microbatch]) for step in range(8) for microbatch in range(2)]


@pytest.mark.parametrize(
    ("files", "forms"), [("files", ("nemo", "shar", "webdataset")), ("files spans", ("nemo spans",))]
)
def test_all_forms_give_the_same_cuts_and_the_same_batches(speech: Path, files: str, forms: tuple[str, ...]) -> None:
    first = prepare(speech, files)
    ids = [first.line(index)["id"] for index in range(len(first))]
    expected: list[Any] = digests(first)
    assert all(first.address(index) is None for index in range(len(first)))
    for form in forms:
        corpus = prepare(speech, form)
        assert [corpus.line(index)["id"] for index in range(len(corpus))] == ids
        assert corpus.fingerprint == first.fingerprint
        assert all(corpus.address(index) is not None for index in range(len(corpus)))
        assert digests(corpus) == expected
