from dataclasses import replace
from pathlib import Path

import pytest

from nestdata import OutputError, write_preview
from nestdata.batch.preview import PreviewRow, _title
from tests.batches import messy_dataset
from tests.conftest import MessyCorpora


def test_a_preview_replaces_only_an_empty_folder_or_another_preview(
    messy_corpora: MessyCorpora, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dataset = messy_dataset(messy_corpora.speech, messy_corpora.noise)
    rate, output = dataset.corpus.sampling_rate, tmp_path / "preview"
    output.mkdir()
    write_preview(dataset[0], rate, output, max_cuts=2)
    write_preview(dataset[1], rate, output, max_cuts=1)
    assert not (output / "01.png").exists()  # nothing of the earlier preview is left
    before = {path.name: path.read_bytes() for path in output.iterdir()}
    assert set(before) == {"00_clean.wav", "00_noise.wav", "00_noisy.wav", "00.png", "batch.json", "index.html"}
    (output / "notes.txt").write_text("mine")
    foreign = tmp_path / "website"
    foreign.mkdir()
    (foreign / "index.html").write_text("my page")
    for folder in (output, foreign, tmp_path):
        with pytest.raises(OutputError, match=rf"{folder}: .*[Cc]hoose another path"):
            write_preview(dataset[0], rate, folder, max_cuts=1)
    assert {path.name: path.read_bytes() for path in output.iterdir()} == before | {"notes.txt": b"mine"}
    assert [path.read_text() for path in foreign.iterdir()] == ["my page"]
    assert {path.name for path in tmp_path.iterdir()} == {"preview", "website"}
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    assert write_preview(dataset[0], rate, ".", max_cuts=1) == Path("index.html")
    assert (tmp_path / "here" / "index.html").is_file()


def test_the_title_of_a_picture_fits_and_shows_no_secret() -> None:
    row = PreviewRow(cut="a" + 200 * "/folder" + "/z", seconds=1.0, mode="none", noise="", snr_db=None, padding=0.0)
    cut, mode = _title(row).splitlines()
    assert (len(cut) <= 100, cut[:8], cut[-9:], mode) == (True, "a/folder", "/folder/z", "none")
    assert "secret" not in _title(replace(row, cut="s3://bucket/a.wav?key=secret"))


def test_dollar_signs_in_ids_are_drawn_as_they_are(messy_corpora: MessyCorpora, tmp_path: Path) -> None:
    dataset = messy_dataset(messy_corpora.speech, messy_corpora.noise)
    batch = dataset[0]
    named = replace(batch, sample_id=[f"5$_{cut_id}_$\\foo" for cut_id in batch.sample_id])
    write_preview(named, dataset.corpus.sampling_rate, tmp_path / "preview", max_cuts=1)
    assert (tmp_path / "preview" / "00.png").stat().st_size > 0
