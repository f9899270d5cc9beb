from pathlib import Path

import pytest

from nestdata import OutputError, write_preview
from tests.batches import messy_dataset
from tests.conftest import MessyCorpora
from tests.nestdata.full_disk import files_up_to


def test_a_full_disk_leaves_nothing_behind_and_an_earlier_preview_as_it_was(
    messy_corpora: MessyCorpora, tmp_path: Path
) -> None:
    dataset = messy_dataset(messy_corpora.speech, messy_corpora.noise)
    batch, rate, output = dataset[0, 0], dataset.corpus.sampling_rate, tmp_path / "preview"
    with files_up_to(2000), pytest.raises(OutputError, match=r"preview/index\.html: cannot be written"):
        write_preview(batch, rate, output, max_cuts=1)
    assert list(tmp_path.iterdir()) == []
    write_preview(batch, rate, output, max_cuts=1)
    before = {path.name: path.read_bytes() for path in output.iterdir()}
    assert set(before) == {"00_clean.wav", "00_noise.wav", "00_noisy.wav", "00.png", "batch.json", "index.html"}
    with files_up_to(2000), pytest.raises(OutputError):
        write_preview(dataset[1, 0], rate, output, max_cuts=1)
    assert {path.name: path.read_bytes() for path in output.iterdir()} == before
