import re
from pathlib import Path

import numpy as np
import pytest

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


def test_rows_are_counted_on_from_corpus_to_corpus(parts: list[Corpus]) -> None:
    corpora = Corpora(parts)
    assert len(corpora) == 6
    expected = [(corpus, row) for corpus in parts for row in range(len(corpus))]
    for row, (corpus, own) in enumerate(expected):
        assert corpora.line(row) == corpus.line(own)
        assert corpora.num_samples_of(row) == corpus.num_samples_of(own)
        cut_id, samples = corpora.load(row)
        assert cut_id == corpus[own].id
        np.testing.assert_array_equal(samples, corpus.load(own)[1])


def test_a_span_of_a_cut_is_loaded_into_the_array_that_is_given(parts: list[Corpus]) -> None:
    out = np.zeros(100, np.float32)
    cut_id, samples = Corpora(parts).load(3, start=50, num_samples=100, out=out)
    assert cut_id == "8000"
    assert samples is out
    np.testing.assert_array_equal(out, parts[1].load(0)[1][50:150])


@pytest.mark.parametrize("row", [-1, 6, 10**9])
def test_rows_outside_are_refused(parts: list[Corpus], row: int) -> None:
    corpora = Corpora(parts)
    for ask in (corpora.line, corpora.load, corpora.num_samples_of):
        with pytest.raises(IndexError, match=f"row {row} of 6 cuts"):
            ask(row)


def test_lengths_and_rate_are_those_of_the_corpora(parts: list[Corpus]) -> None:
    corpora = Corpora.open([corpus.path for corpus in parts])
    assert [lengths.tolist() for lengths in corpora.num_samples] == [[4000, 9000, 12000], [8000], [3000, 7000]]
    assert corpora.sampling_rate == 16000
    assert [corpus.path for corpus in corpora.corpora] == [corpus.path for corpus in parts]


def test_the_fingerprint_of_one_corpus_is_its_own_and_of_several_tells_their_order(parts: list[Corpus]) -> None:
    assert Corpora(parts[:1]).fingerprint == parts[0].fingerprint
    orders = [parts, parts[::-1], parts[:2], [*parts, parts[0]]]
    assert len({Corpora(order).fingerprint for order in orders}) == len(orders)
    assert Corpora(parts).fingerprint == Corpora(parts).fingerprint


def test_no_corpus_is_an_error() -> None:
    with pytest.raises(ConfigError, match="no corpus was given"):
        Corpora([])


def test_corpora_of_several_rates_are_an_error_that_names_them(tmp_path: Path, parts: list[Corpus]) -> None:
    other = folder_corpus(tmp_path / "other", {"a.wav": hiss(9000, 1)}, PrepareConfig(sampling_rate=8000))
    with pytest.raises(ConfigError, match=rf"{re.escape(str(other.path))} is at 8000 Hz .* --sampling-rate 16000"):
        Corpora([*parts, other])


def test_a_path_without_a_corpus_is_an_error(parts: list[Corpus], tmp_path: Path) -> None:
    with pytest.raises(CorpusError, match=r"gone\.corpus: does not exist"):
        Corpora.open([parts[0].path, tmp_path / "gone.corpus"])


def test_corpora_that_do_not_fit_a_plan_are_named(parts: list[Corpus]) -> None:
    config = PlanConfig(max_batch_seconds=0.6, min_audio_seconds=0.1, microbatches_per_step=1)
    with pytest.raises(PlanError, match=rf"^{re.escape(str(parts[0].path))}: 1 of 3 cuts are longer than plan"):
        BatchPlan.of(parts[0], config)
    several = ", ".join(re.escape(str(part.path)) for part in parts)
    with pytest.raises(PlanError, match=rf"^{several}: 1 of 6 cuts are longer than plan"):
        BatchPlan.of(Corpora(parts), config)
