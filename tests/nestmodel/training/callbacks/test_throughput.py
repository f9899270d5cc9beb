from pathlib import Path

import pytest

from nestmodel import Throughput
from tests.conftest import MessyCorpora
from tests.training import Recorder, fit, messy_data


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
