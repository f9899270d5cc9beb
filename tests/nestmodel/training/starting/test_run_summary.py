from pathlib import Path

import numpy as np
import soundfile
from pytorch_lightning.loggers import CSVLogger

from nestdata import PlanConfig, prepare_corpus
from nestmodel import CheckpointConfig, DataConfig, ModelConfig, NestDataModule, NestModel, RunConfig, TrainerConfig
from nestmodel.run import Run
from nestmodel.training.starting.run_summary import summarise_run
from tests.conftest import MessyCorpora
from tests.training import messy_data, tiny_config, trainer


def summary(
    data: NestDataModule, directory: Path, *, max_time: str | None = None, **settings: object
) -> dict[str, str]:
    runner = trainer(directory, logger=CSVLogger(directory, name=""), **settings)
    config = RunConfig(
        model=ModelConfig(config=tiny_config()),
        trainer=TrainerConfig(max_time=max_time),
        checkpoints=CheckpointConfig(every_n_steps=50),
        seed=3,
        log=("csv",),
    )
    return dict(summarise_run(Run(config, NestModel(tiny_config()), data, runner, None, 0)))


def test_a_summary_describes_data_model_and_steps(messy_corpora: MessyCorpora, tmp_path: Path) -> None:
    data = messy_data(messy_corpora)
    per_epoch = data.plan.steps_per_epoch
    rows = summary(data, tmp_path, max_steps=10 * per_epoch, max_time="2h")
    speech = f"{messy_corpora.speech} ({3600 * data.train_dataset.corpus.corpora[0].hours:.0f} s)"
    assert rows == {
        "corpus": speech,
        "noise": f"{messy_corpora.noise} ({3600 * data.noise.corpus.hours:.0f} s), and other speech",  # type: ignore[union-attr]
        "validation": speech,
        "model": f"16 x 2 layers, {rows['model'].split(', ')[1]}, frames of 80 ms",
        "steps": f"{10 * per_epoch}, 10 epochs of {per_epoch}, at most 2h",
        "batches": "2 x 10 s, so up to 20 s of audio per step, 15 s on average; loader workers per rank: 0",
        "padding": rows["padding"],  # a test below has figures
        "ranks": "1, cpu",
        "numbers": "precision 32-true, seed 3",
        "start": "from step 0",
        "saved": "a checkpoint every 50 steps",
        "log": "csv",
        "output": str(tmp_path / "version_0"),
    }


def tones(directory: Path, lengths: dict[str, float]) -> Path:
    """Prepares a corpus of tones of given lengths in seconds."""
    (directory / "speech").mkdir()
    for name, seconds in lengths.items():
        tone = 0.1 * np.sin(np.arange(round(16000 * seconds)) / 20)
        soundfile.write(directory / "speech" / f"{name}.wav", tone, 16000)
    prepare_corpus([directory / "speech"], directory / "speech.corpus")
    return directory / "speech.corpus"


def test_a_summary_counts_what_is_left_out(tmp_path: Path) -> None:
    corpus = tones(tmp_path, {**{f"short{number:02}": 1.0 for number in range(30)}, "too_long": 3.2, "too_short": 0.8})
    plan = PlanConfig(max_batch_seconds=3.0, microbatches_per_step=2, min_seconds=0.9)
    data = NestDataModule(DataConfig(corpus, None, corpus, plan))
    rows = summary(data, tmp_path, max_steps=1)
    for name in ("left out", "validation"):
        assert "1 cut, 3 s, longer than the 3 s that a microbatch holds" in rows[name]
        assert "--window-seconds 3, " in rows[name]
        assert "1 cut, 1 s, shorter than min_seconds (0.9 s)" in rows[name]
    assert "few steps" not in rows


def test_a_summary_names_the_cut_that_causes_most_padding(tmp_path: Path) -> None:
    corpus = tones(tmp_path, {**{f"short{number:02}": 1.0 for number in range(21)}, "long": 3.0})
    data = NestDataModule(DataConfig(corpus, plan=PlanConfig(max_batch_seconds=6.0, microbatches_per_step=1)))
    rows = summary(data, tmp_path, max_steps=1)
    # The long cut and a short one are padded to 3 s: 2 s of padding. The others have none.
    share = f"{100 * 2 / (6 + 20):.1f} %"
    assert rows["padding"] == f"{share}; 100 % of it where cuts are padded to the 3.0 s of 'long'"


def test_a_summary_names_a_corpus_of_less_than_two_steps(tmp_path: Path) -> None:
    corpus = tones(tmp_path, {f"{number:02}": 1.0 for number in range(40)})
    data = NestDataModule(DataConfig(corpus, plan=PlanConfig(max_batch_seconds=20.0, microbatches_per_step=4)))
    rows = summary(data, tmp_path, max_steps=1)
    assert rows["few steps"] == (
        "the corpus holds 0.5 steps of the 80 s that were asked for. For about 8 steps an epoch: "
        "--max-batch-seconds 5 --microbatches-per-step 1"
    )


def test_secrets_in_addresses_are_hidden(messy_corpora: MessyCorpora, tmp_path: Path) -> None:
    data = messy_data(messy_corpora)
    assert data.noise.corpus is not None
    data.noise.corpus.path = Path("s3://user:secret@bucket/noise.corpus")
    rows = summary(data, tmp_path, max_steps=1)
    assert "bucket/noise.corpus" in rows["noise"]
    assert "secret" not in rows["noise"]
