import re
from pathlib import Path

import pytest
from lhotse import CutSet

from nestdata import BatchPlan, ConfigError, Corpora, Corpus, CorpusError, PlanConfig, PlanError, PrepareConfig
from tests.synthesis import folder_corpus, hiss


@pytest.fixture
def parts(tmp_path: Path) -> list[Corpus]:
    """Corpora of 3, 1 and 2 cuts."""
    lengths = [[9000, 4000, 12000], [8000], [7000, 3000]]
    return [
        folder_corpus(tmp_path / f"part{i}", {f"{n}.wav": hiss(n, n) for n in numbers})
        for i, numbers in enumerate(lengths)
    ]


def test_indices_continue_from_corpus_to_corpus(parts: list[Corpus]) -> None:
    corpora = Corpora(parts)
    assert len(corpora) == 6
    expected = [(corpus, index) for corpus in parts for index in range(len(corpus))]
    for index, (corpus, own) in enumerate(expected):
        assert corpora.locate(index) == (corpus, own)
        assert corpora.line(index) == corpus.line(own)


@pytest.mark.parametrize("index", [-1, 6])
def test_indices_outside_the_corpora_are_rejected(parts: list[Corpus], index: int) -> None:
    corpora = Corpora(parts)
    for ask in (corpora.line, corpora.locate):
        with pytest.raises(IndexError, match=f"index {index} of 6 cuts"):
            ask(index)


def test_fingerprint_of_one_corpus_is_its_own_and_of_several_depends_on_their_order(parts: list[Corpus]) -> None:
    assert Corpora(parts[:1]).fingerprint == parts[0].fingerprint
    orders = [parts, parts[::-1], parts[:2], [*parts, parts[0]]]
    assert len({Corpora(order).fingerprint for order in orders}) == len(orders)
    assert Corpora(parts).fingerprint == Corpora(parts).fingerprint


def test_no_corpus_is_an_error() -> None:
    with pytest.raises(ConfigError, match="no corpus was given"):
        Corpora([])


def test_corpora_of_different_rates_are_an_error_that_names_them(tmp_path: Path, parts: list[Corpus]) -> None:
    other = folder_corpus(tmp_path / "other", {"a.wav": hiss(9000, 1)}, PrepareConfig(sampling_rate=8000))
    with pytest.raises(ConfigError, match=rf"{re.escape(str(other.path))} is at 8000 Hz .* --sampling-rate 16000"):
        Corpora([*parts, other])


def test_corpora_that_do_not_fit_a_plan_are_named(parts: list[Corpus]) -> None:
    config = PlanConfig(max_batch_seconds=0.6, min_audio_seconds=0.1, microbatches_per_step=1)
    with pytest.raises(PlanError, match=rf"^{re.escape(str(parts[0].path))}: 1 of 3 cuts, .*, are longer than plan"):
        BatchPlan.of(parts[0], config)
    several = ", ".join(re.escape(str(part.path)) for part in parts)
    with pytest.raises(PlanError, match=rf"^{several}: 1 of 6 cuts, .*, are longer than plan"):
        BatchPlan.of(Corpora(parts), config)


def test_corpora_are_given_by_path_or_as_objects_one_or_several(parts: list[Corpus]) -> None:
    one, small = parts[0], PlanConfig(microbatches_per_step=1)
    expected = BatchPlan.of(one, small).fingerprint
    for given in (one, one.path, str(one.path), [one], (str(one.path),), Corpora([one])):
        assert Corpora.of(given).fingerprint == one.fingerprint
    for given in (str(one.path), (one.path,)):
        assert BatchPlan.of(given, small).fingerprint == expected
    for several in ([part.path for part in parts], [parts[0], str(parts[1].path), parts[2]]):
        assert Corpora.of(several).fingerprint == Corpora(parts).fingerprint


@pytest.mark.parametrize("given", [CutSet(), [CutSet()], None])
def test_anything_else_is_an_error_that_says_how_it_becomes_a_corpus(given: object) -> None:
    with pytest.raises(CorpusError, match=r"where a corpus was expected .* prepare_corpus\(cuts, 'NAME\.corpus'\)"):
        BatchPlan.of(given)
