from pathlib import Path

import pytest

from nestdata import RemoteConfig
from nestmodel import NestModel, StallGuard, Throughput
from nestmodel.training.callbacks import throughput
from nestmodel.training.callbacks.throughput import encoder_operations
from tests.addressed import WebServer, addressed_copy
from tests.conftest import MessyCorpora
from tests.training import fit, messy_data, tiny_config, trainer


def test_reading_from_object_stores_is_counted_and_is_no_setting_of_the_run(
    messy_corpora: MessyCorpora, tmp_path: Path
) -> None:
    pytest.importorskip("obstore")
    folder = messy_corpora.speech.parent
    with WebServer(folder).running() as web:
        speech = addressed_copy(messy_corpora.speech, tmp_path / "speech.corpus", folder=folder, root=web.url)
        remote = MessyCorpora(speech, messy_corpora.noise, Path(), Path())
        data = messy_data(remote, remote=RemoteConfig(patience_s=280.0))
        runner = trainer(tmp_path, [Throughput(), StallGuard()], max_steps=1, log_every_n_steps=1)
        runner.fit(NestModel(tiny_config()), datamodule=data)
    logged = runner.callback_metrics
    assert logged["bytes_fetched"] > 10_000
    assert logged["cache_hits"] == 0
    assert logged["remote_wait"] >= 0
    assert data.settings == messy_data(messy_corpora).settings


def test_padding_and_utilisation_follow_from_the_shapes_where_the_peak_is_known(
    messy_corpora: MessyCorpora, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(throughput, "peak_of_run", lambda _gpu, precision: 1e12 if precision == "32-true" else None)
    config = tiny_config()
    model, _ = fit(messy_corpora, tmp_path, max_steps=1, callbacks=[Throughput()], log_every_n_steps=1)
    logged = {name: float(value) for name, value in model.trainer.callback_metrics.items()}
    data = messy_data(messy_corpora)
    batches = [data.train_dataset[0, microbatch] for microbatch in range(2)]
    samples = sum(int(batch.audio_len.sum()) for batch in batches)
    assert logged["padding"] == pytest.approx(1 - samples / sum(batch.audio.numel() for batch in batches), abs=1e-6)
    shapes = [(len(batch.audio), config.features.num_padded_frames(batch.audio.shape[1])) for batch in batches]
    operations = sum(encoder_operations(config.encoder, config.features.num_mels, *shape) for shape in shapes)
    seconds = samples / 16000 / logged["audio_s_per_s"]
    assert logged["mfu"] == pytest.approx(operations / seconds / 1e12, rel=1e-5)
