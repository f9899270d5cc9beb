from pathlib import Path

import numpy as np
import pytest

from nestmodel import Throughput
from nestmodel.monitor import draw_curves, read_metrics, smooth
from tests.conftest import MessyCorpora
from tests.training import Recorder, fit, messy_data


def test_smoothing_takes_the_mean_over_neighbours_and_keeps_constants() -> None:
    values = np.zeros(80)
    values[40] = 5.0
    assert smooth(values)[37:44].tolist() == [0.0, *[pytest.approx(1.0)] * 5, 0.0]
    assert smooth(np.ones(7)) == pytest.approx(np.ones(7))


def test_metrics_are_read_by_name_with_their_steps(tmp_path: Path) -> None:
    path = tmp_path / "metrics.csv"
    path.write_text("epoch,step,train_loss,val_loss\n0,4,2.5,\n0,9,2.25,\n0,9,,3.5\n")
    assert read_metrics(path) == {"train_loss": ([4, 9], [2.5, 2.25]), "val_loss": ([9], [3.5])}


def test_curves_are_drawn_from_whatever_metrics_there_are(tmp_path: Path) -> None:
    path = tmp_path / "metrics.csv"
    path.write_text("step,train_loss,lr\n4,2.5,0.1\n9,2.25,0.2\n")
    draw_curves(path, tmp_path / "curves.png")
    assert (tmp_path / "curves.png").read_bytes()[:4] == b"\x89PNG"


def test_throughput_counts_the_audio_of_every_microbatch(messy_corpora: MessyCorpora, tmp_path: Path) -> None:
    class Seen(Recorder):
        def on_train_batch_end(self, trainer, module, outputs, batch, index):  # type: ignore[no-untyped-def]
            super().on_train_batch_end(trainer, module, outputs, batch, index)
            self.padding = trainer.callback_metrics.get("padding")

    seen = Seen()
    fit(messy_corpora, tmp_path, max_steps=1, callbacks=[Throughput(), seen], log_every_n_steps=1)
    data = messy_data(messy_corpora)
    batches = [data.train_dataset[0, microbatch] for microbatch in range(2)]
    samples = sum(int(batch.audio_len.sum()) for batch in batches)
    assert float(seen.padding) == pytest.approx(1 - samples / sum(batch.audio.numel() for batch in batches), abs=1e-6)
