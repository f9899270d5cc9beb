import math
from dataclasses import replace
from pathlib import Path

import pytest
import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import LambdaCallback, ModelCheckpoint

from nestdata import PlanConfig, PrepareConfig
from nestmodel import ConfigError, DataConfig, MaskConfig, NestDataModule, NestModel
from nestmodel.nn.gpu import devices
from nestmodel.nn.loss import loss_stats
from nestmodel.training import module
from nestmodel.training.schedule import divide_and_clip
from tests.conftest import MessyCorpora
from tests.synthesis import chirp, folder_corpus, tone
from tests.training import ProportionalSteps, Recorder, fit, messy_data, tiny_config, trainer


class FirstGradients(pl.Callback):
    """Records the gradients that the optimizer receives in its first step."""

    def __init__(self) -> None:
        self.grads: dict[str, torch.Tensor] = {}

    def on_before_zero_grad(self, _trainer: pl.Trainer, module: pl.LightningModule, _optimizer: object) -> None:
        if not self.grads:
            self.grads = {name: p.grad.clone() for name, p in module.named_parameters() if p.grad is not None}


def audio_batch(*seconds: float) -> tuple[torch.Tensor, torch.Tensor]:
    signals = [torch.from_numpy(chirp(100, 3000, s)) for s in seconds]
    lens = torch.tensor([len(s) for s in signals])
    return torch.nn.utils.rnn.pad_sequence(signals, batch_first=True), lens


def test_weights_depend_on_the_seed_and_not_on_the_global_generator() -> None:
    torch.manual_seed(1)
    first = NestModel(tiny_config())
    torch.manual_seed(2)
    second = NestModel(tiny_config())
    other = NestModel(replace(tiny_config(), seed=1))
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))
    assert not torch.equal(first.quantizer.codebooks, other.quantizer.codebooks)


def post_conv_model(**masking: float) -> NestModel:
    config = tiny_config(dropout=0.0, dropout_pre_encoder=0.0, dropout_att=0.0)
    return NestModel(replace(config, masking=MaskConfig(position="post_conv", **masking)))


def test_encoder_frames_can_be_masked_in_place_of_feature_frames() -> None:
    model = post_conv_model().eval()
    audio, lens = audio_batch(2.0, 1.6)
    feats, feat_lens = model.features(audio, lens)
    is_masked = torch.zeros(2, feats.shape[-1] // 8, dtype=torch.bool)
    is_masked[0, 5:10] = is_masked[1, 3] = True
    stats = loss_stats(model.forward_features(feats, feats, feat_lens, is_masked))
    subsampled, enc_lens = model.encoder.pre_encode(feats, feat_lens)
    tokens = model.quantizer(subsampled.transpose(1, 2))
    masked = torch.where(is_masked.unsqueeze(-1), model.mask_processor.mask_embedding, subsampled)
    log_probs = model.decoder(model.encoder.encode(masked, enc_lens))
    expected = -log_probs[is_masked][:, :, 0].gather(1, tokens[is_masked]).sum()
    assert int(stats.num_tokens) == 6
    assert model.mask_processor.mask_embedding.shape == (16,)
    assert tokens.shape == (2, is_masked.shape[1], 1)
    torch.testing.assert_close(stats.nll_sum, expected)


def test_a_step_without_scored_tokens_has_zero_gradients(messy_corpora: MessyCorpora, tmp_path: Path) -> None:
    config = tiny_config()
    config = replace(
        config,
        masking=MaskConfig(prob=0.0, block_size=1),
        optimizer=replace(config.optimizer, weight_decay=0.0),
    )
    model = NestModel(config)
    before = {name: p.clone() for name, p in model.named_parameters()}
    recorder = Recorder()
    trainer(tmp_path, [recorder], max_steps=2).fit(model, datamodule=messy_data(messy_corpora))
    assert all(map(math.isnan, recorder.losses))
    assert len(recorder.losses) == 2
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())


def test_gradients_are_of_the_mean_over_the_scored_tokens_of_the_whole_step(
    messy_corpora: MessyCorpora, tmp_path: Path
) -> None:
    no_dropout = {"dropout": 0.0, "dropout_pre_encoder": 0.0, "dropout_att": 0.0}
    config = replace(tiny_config(**no_dropout), features=replace(tiny_config().features, dither=0.0))
    model, seen = NestModel(config), FirstGradients()
    reference = NestModel(config).train()
    data = messy_data(messy_corpora, microbatches_per_step=4)
    trainer(tmp_path, [seen], max_steps=2).fit(model, datamodule=data)
    tallies = [loss_stats(reference(data.train_dataset[0, m])) for m in range(4)]
    loss = torch.stack([t.nll_sum for t in tallies]).sum() / torch.stack([t.num_tokens for t in tallies]).sum()
    loss.backward()
    expected = {name: p.grad for name, p in reference.named_parameters() if p.grad is not None}
    assert len({int(t.num_tokens) for t in tallies}) > 1, "the test needs microbatches with different counts"
    assert seen.grads.keys() == expected.keys()
    for name, grad in expected.items():
        torch.testing.assert_close(seen.grads[name], grad, rtol=1e-4, atol=1e-6, msg=name)


@pytest.mark.parametrize("is_on_gpu", [False, True])
def test_clipped_steps_equal_those_that_lightning_clips(
    messy_corpora: MessyCorpora, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_on_gpu: bool
) -> None:
    def run() -> tuple[NestModel, list[float], dict[str, torch.Tensor]]:
        grads = FirstGradients()
        callbacks = [grads, ProportionalSteps()]
        model, recorder = fit(messy_corpora, tmp_path, max_steps=3, callbacks=callbacks, gradient_clip_val=0.1)
        assert float(model.trainer.callback_metrics["grad_norm"]) > 0.2, "the test needs norms above the limit"
        return model, recorder.losses, grads.grads

    with monkeypatch.context() as patch:
        patch.setattr(devices, "is_on_gpu", lambda x: is_on_gpu and x.ndim == 0)
        model, losses, clipped = run()
        assert hasattr(model.trainer.optimizers[0], "grad_scale") == is_on_gpu
    hook = "configure_gradient_clipping"
    monkeypatch.setattr(NestModel, hook, getattr(pl.LightningModule, hook))

    def only_divide(optimizer: torch.optim.Optimizer, num_tokens: torch.Tensor, *_: object, **__: object) -> object:
        return divide_and_clip(optimizer, num_tokens, None, is_last_change=False)

    monkeypatch.setattr(module, "divide_and_clip", only_divide)
    expected, expected_losses, expected_grads = run()
    # On a CPU, the same operations; on a GPU, one division instead of a division and a multiplication.
    tolerance = 1e-5 if is_on_gpu else 0.0
    assert losses == pytest.approx(expected_losses, rel=tolerance, abs=0.0)
    assert clipped.keys() == expected_grads.keys()
    for name, grad in expected_grads.items():
        torch.testing.assert_close(clipped[name], grad, rtol=tolerance, atol=0.0, msg=name)
    for value, other in zip(model.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(value, other, rtol=tolerance, atol=tolerance)


def test_lightning_clips_by_value(messy_corpora: MessyCorpora, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "is_on_gpu", lambda x: x.ndim == 0)
    found = []
    for limit in (None, 1e-3, -1.0):
        grads = FirstGradients()
        settings = {"gradient_clip_val": limit, "gradient_clip_algorithm": "value"}
        model, _ = fit(messy_corpora, tmp_path, max_steps=2, callbacks=[grads], **settings)
        assert hasattr(model.trainer.optimizers[0], "grad_scale") == (limit != 1e-3)
        found.append(grads.grads)
    free, clipped, other = found
    assert max(float(grad.abs().max()) for grad in free.values()) > 1e-3
    for name, grad in free.items():
        assert torch.equal(clipped[name], grad.clamp(-1e-3, 1e-3))
        assert torch.equal(other[name], grad)


@pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists and is not empty")
def test_a_resumed_run_continues_with_the_next_batch_and_ends_with_equal_weights(
    messy_corpora: MessyCorpora, tmp_path: Path
) -> None:
    saver = ModelCheckpoint(dirpath=tmp_path, every_n_train_steps=1, save_top_k=-1, filename="{step}")
    whole, expected = fit(messy_corpora, tmp_path, max_steps=9, callbacks=[saver], enable_checkpointing=True)
    steps_per_epoch = messy_data(messy_corpora).train_dataset.plan.steps_per_epoch
    assert 2 < steps_per_epoch < 8, "the test needs a run of nine steps that crosses an epoch"
    assert [(key.step, key.microbatch) for key in expected.keys] == [(s, m) for s in range(9) for m in range(2)]
    for stopped_at in (1, steps_per_epoch):
        ckpt = tmp_path / f"step={stopped_at}.ckpt"
        again = ModelCheckpoint(dirpath=tmp_path, every_n_train_steps=1, save_top_k=-1, filename="again-{step}")
        resumed, rest = fit(
            messy_corpora, tmp_path, max_steps=9, ckpt_path=ckpt, callbacks=[again], enable_checkpointing=True
        )
        assert expected.keys[: 2 * stopped_at] + rest.keys == expected.keys
        for name, value in resumed.state_dict().items():
            assert torch.equal(value, whole.state_dict()[name]), f"{name}, stopped at {stopped_at}"


def test_validation_reports_each_attention_context(messy_corpora: MessyCorpora, tmp_path: Path) -> None:
    contexts = ((4, 1), (2, 0), (-1, -1))
    config = tiny_config(att_context_size=contexts, att_context_style="chunked_limited")
    model, _ = fit(messy_corpora, tmp_path, max_steps=1, config=config, val_check_interval=1, limit_val_batches=2)
    reported = model.trainer.callback_metrics
    names = [f"val_{name}{end}" for end in ("", "_2_0", "_full") for name in ("loss", "accuracy")]
    found = {name: float(reported[name]) for name in names}
    assert len({found[name] for name in names if "loss" in name}) == 3
    for context, end in zip(contexts, ("", "_2_0", "_full"), strict=True):
        one = NestModel(config)
        one.load_state_dict(model.state_dict())
        one.use_context(context)
        alone = trainer(tmp_path, limit_val_batches=2)
        alone.validate(one, messy_data(messy_corpora), verbose=False)
        assert float(alone.callback_metrics["val_loss"]) == found[f"val_loss{end}"]


def test_validation_is_repeatable_and_does_not_affect_training(messy_corpora: MessyCorpora, tmp_path: Path) -> None:
    losses: list[float] = []
    seen = LambdaCallback(
        on_validation_end=lambda runner, *_: losses.append(float(runner.callback_metrics["val_loss"]))
    )
    with_validation = {"limit_val_batches": 2, "val_check_interval": 4, "check_val_every_n_epoch": None}
    validated, _ = fit(messy_corpora, tmp_path, max_steps=4, callbacks=[seen], **with_validation)
    plain, _ = fit(messy_corpora, tmp_path, max_steps=4)
    assert all(torch.equal(a, b) for a, b in zip(validated.parameters(), plain.parameters(), strict=True))
    runner = trainer(tmp_path, limit_val_batches=1)
    again = runner.validate(validated, datamodule=messy_data(messy_corpora), verbose=False)
    assert again[0]["val_loss"] == losses[-1]
    assert 0 < again[0]["val_token_entropy"] <= math.log(32)


def test_a_corpus_with_another_sampling_rate_is_rejected(tmp_path: Path) -> None:
    audio = {f"{i}.wav": tone(200, 1.0) for i in range(4)}
    corpus = folder_corpus(tmp_path / "speech", audio, PrepareConfig(sampling_rate=8000))
    data = NestDataModule(DataConfig(corpus.path, plan=PlanConfig(max_batch_seconds=10.0, microbatches_per_step=1)))
    with pytest.raises(ConfigError, match="8000 Hz"):
        trainer(tmp_path, max_steps=1).fit(NestModel(tiny_config()), datamodule=data)
