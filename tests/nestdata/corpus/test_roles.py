import logging
from pathlib import Path

import pytest

from nestdata import AudioNoiseDataset, BatchPlan, Corpora, Corpus, NoiseSampler, PlanConfig, prepare_corpus
from nestdata.corpus.roles import warn_of_validation
from tests.synthesis import hiss, write_audio, write_jsonl


def corpus_of(directory: Path, text: str, seed: int) -> Corpus:
    """Prepares four files of two seconds with the same text; an empty text is none."""
    lines = []
    for number in range(4):
        audio = write_audio(directory / f"{number}.wav", hiss(32000, seed + number), 16000)
        lines.append({"audio_filepath": str(audio), "duration": 2.0, **({"text": text} if text else {})})
    prepare_corpus([write_jsonl(directory / "manifest.json", lines)], directory.with_suffix(".corpus"))
    return Corpus.open(directory.with_suffix(".corpus"))


def warnings_for(speech: Corpus, noise: Corpus, caplog: pytest.LogCaptureFixture) -> list[str]:
    caplog.clear()
    with caplog.at_level(logging.WARNING, "nestdata"):
        for _ in range(2):  # training and validation data have the same noise
            plan = BatchPlan.of(speech, PlanConfig(max_batch_seconds=10.0, microbatches_per_step=1))
            AudioNoiseDataset(speech, plan, NoiseSampler(noise))
    return [record.getMessage() for record in caplog.records]


TRANSCRIPT = "the quick brown fox jumps over the lazy dog"


@pytest.mark.parametrize(
    ("speech_text", "noise_text", "warns"),
    [
        ("", TRANSCRIPT, True),
        ("", "", False),
        ("", "a dog barks", False),  # a caption
        ("yes", TRANSCRIPT, False),
    ],
)
def test_corpora_may_be_swapped_if_only_the_noise_has_transcripts(
    speech_text: str, noise_text: str, warns: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    speech, noise = corpus_of(tmp_path / "speech", speech_text, 0), corpus_of(tmp_path / "noise", noise_text, 9)
    messages = warnings_for(speech, noise, caplog)
    expected = (
        f"{speech.path} and {noise.path} may be swapped: the noise corpus has transcripts, and the speech corpus has "
        "none."
    )
    assert messages == ([expected] if warns else [])


def test_a_corpus_that_is_given_twice_is_named_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    corpus = corpus_of(tmp_path / "same", "", 0)
    assert warnings_for(corpus, corpus, caplog) == [
        f"{corpus.path} is given as speech and as noise: the noise is then speech."
    ]
    caplog.clear()
    warn_of_validation(Corpora([corpus]), Corpora([corpus]))
    (record,) = caplog.records
    assert record.getMessage() == f"{corpus.path} is given for training and for validation: it shows no overfitting."
