from pathlib import Path

import pytest

from nestdata import AudioError, ConfigError, Corpora, PrepareConfig, time_decoding
from tests.synthesis import folder_corpus, hiss


def test_decoding_and_reading_are_timed_on_the_cuts_that_are_given(tmp_path: Path) -> None:
    corpus = folder_corpus(tmp_path / "speech", {f"{i}.flac": hiss(16000 * (i + 1), i) for i in range(3)})
    timed = time_decoding(Corpora([corpus]), [0, 2], max_seconds=60.0)
    assert timed.audio_s == 4.0
    assert timed.bank_bytes == 2 * 4 * 16000
    sizes = [(tmp_path / "speech" / f"{i}.flac").stat().st_size for i in (0, 2)]
    assert timed.stored_bytes == pytest.approx(sum(sizes))
    assert timed.load_s > 0
    assert timed.bank_s > 0


def test_a_window_counts_as_its_part_of_the_file_and_a_bank_as_16_bit_samples(tmp_path: Path) -> None:
    audio = {"0.wav": hiss(4 * 16000, 0)}
    windows = folder_corpus(tmp_path / "windows", audio, PrepareConfig(window_seconds=1.0))
    size = (tmp_path / "windows" / "0.wav").stat().st_size
    assert time_decoding(Corpora([windows]), [0]).stored_bytes == pytest.approx(size / 4)
    banked = folder_corpus(tmp_path / "banked", audio, PrepareConfig(pcm=True))
    assert banked.has_bank
    assert not windows.has_bank
    assert time_decoding(Corpora([banked]), [0]).stored_bytes == 2 * 4 * 16000


def test_no_further_cut_is_loaded_after_the_time_is_up(tmp_path: Path) -> None:
    corpus = folder_corpus(tmp_path / "speech", {f"{i}.wav": hiss(16000, i) for i in range(3)})
    assert time_decoding(Corpora([corpus]), [0, 1, 2], max_seconds=0.0).audio_s == 1.0


def test_cuts_that_cannot_be_loaded_are_left_out_unless_none_can_be(tmp_path: Path) -> None:
    corpus = folder_corpus(tmp_path / "speech", {f"{i}.wav": hiss(16000, i) for i in range(2)})
    corpora = Corpora([corpus])
    Path(corpora.line(0)["recording"]["sources"][0]["source"]).unlink()
    assert time_decoding(corpora, [0, 1]).audio_s == 1.0
    with pytest.raises(AudioError, match="cannot read"):
        time_decoding(corpora, [0])
    with pytest.raises(ConfigError, match="there are no cuts to decode"):
        time_decoding(corpora, [])
