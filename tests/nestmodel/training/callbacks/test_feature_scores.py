import importlib.util
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from pytorch_lightning.loggers import CSVLogger

import nestmodel.training.callbacks.feature_scores
from nestdata import Corpus
from nestmodel import (
    Checkpoints,
    ConfigError,
    FeatureScoreConfig,
    FeatureScores,
    NestNetwork,
    load_network,
    save_network,
    score_features,
)
from nestmodel.errors import TrainingError
from nestmodel.training import score_process
from nestmodel.training.callbacks.curves import read_metrics
from nestmodel.training.score_process import ScoreJob
from nestmodel.training.starting.run_checks import check_monitors
from tests.conftest import MessyCorpora
from tests.extras import needs
from tests.training import fit, messy_data, tiny_config, trainer

SMALL = FeatureScoreConfig(seconds=10.0, num_units=4, layers=[1])


class Values:
    """Takes the place of the process: the score of a checkpoint is chosen by its step, and comes when it is awaited."""

    def __init__(self, values: dict[int, float]) -> None:
        self.values = values
        self.started: list[str] = []
        self.num_killed = 0
        self.is_slow = False

    def __call__(self, job: ScoreJob) -> "Values.Process":
        path = Path(job.checkpoint)
        self.started.append(path.name)
        return self.Process(self, torch.load(path, weights_only=False)["global_step"])

    class Process:
        def __init__(self, values: "Values", step: int) -> None:
            self.of, self.step, self.is_awaited = values, step, False
            self.num_waits = 0

        def has_ended(self) -> bool:
            return self.is_awaited

        def wait(self, _seconds: float) -> bool:
            self.num_waits += 1
            self.is_awaited = self.num_waits > 1 or not self.of.is_slow
            return self.is_awaited

        def scores(self) -> dict[str, float]:
            if self.step not in self.of.values:
                raise TrainingError(f"no value of step {self.step}")
            return {"rankme_layer1": self.of.values[self.step]}

        def kill(self) -> None:
            self.of.num_killed += 1


@pytest.fixture
def scored(monkeypatch: pytest.MonkeyPatch) -> Values:
    values = Values({1: 3.0, 2: 5.0, 3: 4.0, 4: 2.0, 5: 1.0})
    monkeypatch.setattr(nestmodel.training.callbacks.feature_scores, "ScoreProcess", values)
    return values


class Stops(pl.Callback):
    """Raises before a step, as an error of the data does."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_step == self.step:
            raise ValueError("the run stops")


def run(
    corpora: MessyCorpora,
    directory: Path,
    max_steps: int,
    *others: pl.Callback,
    ckpt_path: Path | None = None,
    keep: int = 1,
    **settings: Any,
) -> Path:
    """Trains with scores by which the best checkpoint is kept, and returns the directory of the checkpoints."""
    saver = Checkpoints(
        every_n_steps=1, keep=keep, directory=directory / "saved", monitor="val_rankme_layer1", mode="max"
    )
    callbacks = [FeatureScores(SMALL, **settings), saver, *others]
    logger = CSVLogger(directory, name="", version="")
    fit(
        corpora,
        directory,
        max_steps=max_steps,
        callbacks=callbacks,
        enable_checkpointing=True,
        logger=logger,
        ckpt_path=ckpt_path,
    )
    return directory / "saved"


def step_of(path: Path) -> int:
    step: int = torch.load(path, weights_only=False)["global_step"]
    return step


@pytest.mark.slow
@needs("probe", "sklearn")
def test_scores_are_those_of_the_checkpoint_and_leave_training_as_it_is(
    messy_corpora: MessyCorpora, tmp_path: Path
) -> None:
    plain, without = fit(messy_corpora, tmp_path / "plain", max_steps=2, callbacks=[])
    generators = torch.random.get_rng_state()
    saver = Checkpoints(every_n_steps=2, directory=tmp_path / "saved", monitor="val_rankme_layer1", mode="max")
    callbacks = [FeatureScores(SMALL), saver]
    logger = CSVLogger(tmp_path, name="", version="")
    model, recorder = fit(
        messy_corpora, tmp_path, max_steps=2, callbacks=callbacks, enable_checkpointing=True, logger=logger
    )
    assert recorder.losses == without.losses
    assert torch.equal(torch.random.get_rng_state(), generators)
    for name, value in plain.state_dict().items():
        assert torch.equal(model.state_dict()[name], value), name
    network = load_network(tmp_path / "saved" / "best.ckpt")
    corpora = Corpus.open(messy_corpora.speech), Corpus.open(messy_corpora.noise)
    expected = score_features(network, *corpora, SMALL)
    logged = read_metrics(tmp_path)
    assert logged["val_rankme_layer1"] == ([1], [pytest.approx(expected["rankme_layer1"], rel=1e-4)])
    assert {f"val_{name}" for name in expected} <= logged.keys()


@needs("probe", "sklearn")
def test_a_checkpoint_is_loaded_once_and_scored_in_each_of_its_contexts(
    messy_corpora: MessyCorpora, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded: list[object] = []

    def load(*arguments: Any) -> NestNetwork:
        loaded.append(arguments)
        return load_network(*arguments)

    monkeypatch.setattr(score_process, "load_network", load)
    contexts = {"att_context_size": ((6, 2), (-1, -1), (0, 0)), "att_context_style": "chunked_limited"}
    config, path = tiny_config(**contexts), tmp_path / "model.ckpt"
    save_network(NestNetwork(config), path)
    corpus = messy_corpora.speech
    job = ScoreJob(checkpoint=str(path), corpus=str(corpus), noise=None, num_threads=1, config=SMALL)
    scores = score_process.score_checkpoint(job)
    assert loaded == [(str(path),)]
    for context, end in (((6, 2), ""), ((-1, -1), "_full"), ((0, 0), "_0_0")):
        expected = score_features(load_network(path, context), Corpus.open(corpus), None, SMALL)
        assert {name: scores[f"{name}{end}"] for name in expected} == expected
    assert len({scores[f"rankme_layer1{end}"] for end in ("", "_full", "_0_0")}) == 3
    runner = trainer(tmp_path, callbacks=[Checkpoints(every_n_steps=1)], enable_checkpointing=True)
    names = FeatureScores(SMALL).check(runner, config, messy_data(messy_corpora))
    assert names == [f"val_{name}" for name in scores]


def test_every_checkpoint_is_scored_under_its_step_and_the_best_one_is_kept(
    messy_corpora: MessyCorpora, tmp_path: Path, scored: Values
) -> None:
    scored.is_slow = True
    with pytest.warns(UserWarning, match="training waits for the scores of the checkpoint before") as warned:
        saved = run(messy_corpora, tmp_path, 5)
    assert len([warning for warning in warned if "waits for the scores" in str(warning.message)]) == 1
    assert scored.started == [f"step_{step:08d}.ckpt" for step in (1, 2, 3, 4, 5)]
    assert read_metrics(tmp_path)["val_rankme_layer1"] == ([0, 1, 2, 3, 4], [3.0, 5.0, 4.0, 2.0, 1.0])
    assert step_of(saved / "best.ckpt") == 2
    assert sorted(path.name for path in saved.iterdir()) == [
        "best.ckpt",
        "best.json",
        "last.ckpt",
        "step_00000005.ckpt",
    ]


def test_a_checkpoint_is_not_removed_before_it_is_scored(
    messy_corpora: MessyCorpora, tmp_path: Path, scored: Values
) -> None:
    saved = run(messy_corpora, tmp_path, 5, every_n_steps=4)
    assert scored.started == ["step_00000004.ckpt"]
    assert step_of(saved / "best.ckpt") == 4


@pytest.mark.usefixtures("scored")
@pytest.mark.parametrize("stop", [1, 2, 3, 4])
def test_a_run_that_is_interrupted_and_resumed_keeps_the_same_best_checkpoint(
    messy_corpora: MessyCorpora, tmp_path: Path, stop: int
) -> None:
    with pytest.raises(ValueError, match="the run stops"):
        run(messy_corpora, tmp_path / "before", 5, Stops(stop), every_n_steps=2)
    last = tmp_path / "before" / "saved" / "last.ckpt"
    assert step_of(last) == stop
    saved = run(messy_corpora, tmp_path / "now", 5, every_n_steps=2, ckpt_path=last)
    assert step_of(saved / "best.ckpt") == 2
    steps = {step for name in ("before", "now") for step in scored_steps(tmp_path / name)}
    assert steps == {2, 4}


def scored_steps(directory: Path) -> list[int]:
    rows = read_metrics(directory).get("val_rankme_layer1", ([], []))[0]
    return [row + 1 for row in rows]


def test_an_error_ends_the_process(messy_corpora: MessyCorpora, tmp_path: Path, scored: Values) -> None:
    with pytest.raises(ValueError, match="the run stops"):
        run(messy_corpora, tmp_path, 5, Stops(4), every_n_steps=3)
    assert scored.num_killed == 1


def test_a_checkpoint_that_cannot_be_scored_is_a_warning(
    messy_corpora: MessyCorpora, tmp_path: Path, scored: Values
) -> None:
    del scored.values[2]
    with pytest.warns(UserWarning, match="step 2 gets no scores without labels: no value of step 2"):
        saved = run(messy_corpora, tmp_path, 3)
    assert step_of(saved / "best.ckpt") == 3


def test_the_best_checkpoint_of_a_validation_is_kept(messy_corpora: MessyCorpora, tmp_path: Path) -> None:
    saver = Checkpoints(every_n_steps=1, keep=1, directory=tmp_path / "saved", monitor="val_loss")
    losses: list[float] = []

    class Losses(pl.Callback):
        def on_validation_end(self, trainer: pl.Trainer, _module: pl.LightningModule) -> None:
            losses.append(float(trainer.callback_metrics["val_loss"]))

    settings: dict[str, Any] = {
        "limit_val_batches": 1.0,
        "val_check_interval": 1,
        "check_val_every_n_epoch": None,
        "callbacks": [Losses(), saver],
    }
    fit(messy_corpora, tmp_path, max_steps=3, enable_checkpointing=True, **settings)
    assert step_of(tmp_path / "saved" / "best.ckpt") == 1 + losses.index(min(losses))


@pytest.mark.parametrize(
    ("scores", "savers", "message"),
    [
        (
            FeatureScores(FeatureScoreConfig(layers=[3])),
            [Checkpoints()],
            r"FeatureScores\.config\.layers is '3': .*to 2",
        ),
        (FeatureScores(), [], r"FeatureScores scores checkpoints: add nestmodel\.Checkpoints to trainer\.callbacks"),
        (FeatureScores(every_n_steps=150), [Checkpoints(every_n_steps=100)], "is 150, but .* every 100 steps"),
    ],
    ids=["layer", "no checkpoints", "interval"],
)
def test_settings_that_cannot_be_scored_are_refused(
    messy_corpora: MessyCorpora, tmp_path: Path, scores: FeatureScores, savers: list[Checkpoints], message: str
) -> None:
    runner = trainer(tmp_path, [scores, *savers], enable_checkpointing=bool(savers))
    with pytest.raises(ConfigError, match=message):
        scores.check(runner, tiny_config(), messy_data(messy_corpora))


def test_without_a_validation_corpus_or_scikit_learn_there_are_no_scores(
    messy_corpora: MessyCorpora, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner, data = trainer(tmp_path, [Checkpoints()], enable_checkpointing=True), messy_data(messy_corpora)
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    with pytest.raises(ConfigError, match=r"FeatureScores needs scikit-learn: pip install 'nest-pretrain\[probe\]'"):
        FeatureScores().check(runner, tiny_config(), data)
    data.val_dataset = None
    with pytest.raises(ConfigError, match=r"FeatureScores needs held-out audio: give data\.val_corpus"):
        FeatureScores().check(runner, tiny_config(), data)


@pytest.mark.parametrize(
    ("monitor", "settings", "message"),
    [
        (
            "val_rank",
            {},
            r"Checkpoints\.monitor is 'val_rank', which is not logged: take one of val_loss, val_accuracy",
        ),
        ("val_loss", {"validates": False}, "there is no validation: give data.val_corpus"),
        ("val_loss", {"limit_val_batches": 0}, "leave trainer.limit_val_batches as it is"),
        ("val_loss", {"every_n_steps": 7}, "validations come after steps without a checkpoint"),
        ("val_loss", {"check_val_every_n_epoch": 1}, "validations come after steps without a checkpoint"),
        ("val_rankme_layer1", {"scores": ["val_rankme_layer1"], "validates": False, "mode": "max"}, ""),
        ("val_rankme_layer1", {"scores": ["val_rankme_layer1"]}, r"but its mode is min: set Checkpoints\.mode to max"),
        (
            "val_rankme_layer1",
            {"scores": ["val_rankme_layer1"], "mode": "max", "others": [Checkpoints()]},
            r"the first Checkpoints in trainer\.callbacks only: name this one first",
        ),
        ("val_loss", {}, ""),
        ("val_loss_2_0", {}, ""),
        ("val_loss_4_1", {}, "Checkpoints.monitor is 'val_loss_4_1', which is not logged"),
        (None, {"every_n_steps": 7}, ""),
    ],
)
def test_the_metric_of_the_best_checkpoint_has_to_be_logged_at_steps_of_checkpoints(
    tmp_path: Path, monitor: str | None, settings: dict[str, Any], message: str
) -> None:
    every, mode = settings.get("every_n_steps", 10), settings.get("mode", "min")
    saver = Checkpoints(every_n_steps=every, monitor=monitor, mode=mode)
    limits = {"check_val_every_n_epoch": settings.get("check_val_every_n_epoch"), "val_check_interval": 20}
    limits["limit_val_batches"] = settings.get("limit_val_batches", 1)
    runner = trainer(tmp_path, [*settings.get("others", []), saver], enable_checkpointing=True, **limits)
    arguments: dict[str, Any] = {
        "steps_per_epoch": 45,
        "validates": settings.get("validates", True),
        "scores": settings.get("scores", []),
    }
    config = tiny_config(att_context_size=((4, 1), (2, 0)))
    if message:
        with pytest.raises(ConfigError, match=message):
            check_monitors(runner, config, **arguments)
    else:
        check_monitors(runner, config, **arguments)


@pytest.mark.parametrize("snr_db", [float("nan"), 1e4, -1e4])
def test_a_ratio_of_noise_out_of_range_is_refused(snr_db: float) -> None:
    with pytest.raises(ConfigError, match=r"FeatureScores\.config\.snr_db is .*: give a number from -100 to 100"):
        FeatureScoreConfig(snr_db=snr_db)
