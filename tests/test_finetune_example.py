"""Runs examples/finetune_ctc on the demo corpus: from pretraining to the text of a WAV."""

import json
import re
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import soundfile
import torch

from nestcli.nestmodel import main as nestmodel
from nestdata import Corpus, prepare_corpus
from nestdata.filters import make_resampler
from nestmodel import FeatureConfig, NestConfig, NestNetwork, WeightsError, export_model, normalise_text, save_network
from nestmodel.formats.huggingface import write_huggingface
from tests.extras import needs
from tests.scripts import load_example
from tests.training import tiny_config

pytestmark = [
    needs("finetune", "accelerate", "jiwer", "transformers"),
    pytest.mark.filterwarnings("ignore:::accelerate", "ignore:::huggingface_hub", "ignore:::transformers"),
]


DEMO = Path(__file__).parents[1] / "manifests" / "demo"
TEXTS = {"en_f3_01": "good morning everyone", "en_f3_02": "the kettle is on do you want tea"}


def write_transcribed(directory: Path) -> Path:
    """Writes a manifest of two utterances of the demo corpus, and each of them as a WAV in stereo at 48 kHz."""
    lines = [json.loads(line) for line in (DEMO / "speech.json").read_text().splitlines()]
    lines = [line for line in lines if Path(line["audio_filepath"]).stem in TEXTS]
    for line in lines:
        line["audio_filepath"] = str(DEMO / line["audio_filepath"])
        samples, rate = soundfile.read(line["audio_filepath"], dtype="float32")
        resampled = make_resampler(rate, 48000)(torch.from_numpy(samples))
        stereo = resampled[:, None].expand(-1, 2).numpy()
        soundfile.write(directory / f"{Path(line['audio_filepath']).stem}.wav", stereo, 48000)
    (directory / "two.json").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return directory / "two.json"


@pytest.fixture(scope="module")
def finetune() -> ModuleType:
    return load_example("finetune_ctc/finetune")


@pytest.fixture(scope="module")
def demo(demo_speech: Path) -> Corpus:
    return Corpus.open(demo_speech)


def pretrain_and_export(corpus: Path, directory: Path) -> Path:
    """Returns the directory of an encoder that a few steps of `nestmodel fit` trained."""
    prepare_corpus([DEMO / "noise.json"], directory / "noise.corpus")
    # With frames of 80 ms, two utterances are learned by heart in fewer steps than with those of the preset.
    small = {"d_model": 32, "num_heads": 2, "num_layers": 2, "subsampling_factor": 8, "subsampling_channels": 8}
    less_dropout = {"dropout": 0.0, "dropout_pre_encoder": 0.0}
    flags = {
        "noise": directory / "noise.corpus",
        "trainer.max_steps": 2,
        "trainer.accelerator": "cpu",
        "output": directory / "run",
        **{f"model.config.encoder.{name}": value for name, value in {**small, **less_dropout}.items()},
    }
    assert (
        nestmodel(["fit", str(corpus), "--config", "demo", *(f"--{name}={value}" for name, value in flags.items())])
        == 0
    )
    checkpoint = directory / "run" / "version_0" / "checkpoints" / "last.ckpt"
    assert nestmodel(["export", str(checkpoint), "--to", "huggingface", "-o", str(directory / "encoder")]) == 0
    return directory / "encoder"


def build_model(finetune: ModuleType, directory: Path, *, from_scratch: bool = False) -> tuple[Any, Any]:
    """Returns a tiny model, whose encoder is written to `directory`, and its processor."""
    from transformers import ParakeetFeatureExtractor, ParakeetProcessor

    config = tiny_config()
    write_huggingface(directory, config, NestNetwork(config).state_dict())
    extractor = ParakeetFeatureExtractor.from_pretrained(directory)
    processor = ParakeetProcessor(extractor, finetune.train_tokenizer(["a b"], 1), decoder_type="ctc")
    return finetune.build_model(directory, processor, from_scratch=from_scratch), processor


def weights(directory: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return load_file(directory / "model.safetensors")


@pytest.mark.slow
def test_the_way_from_pretraining_to_the_text_of_a_wav(
    finetune: ModuleType,
    demo: Corpus,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two utterances are learned by heart, so that every part has to work for the text to be right."""
    encoder, manifest, output = pretrain_and_export(demo.path, tmp_path), write_transcribed(tmp_path), tmp_path / "out"
    command = [*map(str, (encoder, manifest, manifest)), "-o", str(output), "--vocabulary", "48", "--lr", "0.01"]
    command += "--steps 150 --save-steps 120 --warmup-steps 5 --freeze-steps 5 --batch-seconds 10".split()
    results = finetune.main(command)
    assert results == json.loads((output / "results.json").read_text())
    assert (results["num_train"], results["num_left_out"], results["num_test"]) == (2, 0, 2)
    assert results["num_test_in_train"] == 2
    assert (results["characters"]["rate"], results["words"]["num_reference"]) == (0.0, 11)
    lines = [json.loads(line) for line in (output / "test.jsonl").read_text().splitlines()]
    assert {Path(line["id"]).stem: line["recognised"] for line in lines} == TEXTS

    found = load_example("finetune_ctc/transcribe").main(
        [str(output), *(str(tmp_path / f"{name}.wav") for name in TEXTS)]
    )
    assert found == list(TEXTS.values())

    tuned = weights(output)
    shutil.rmtree(output / "checkpoints" / "checkpoint-150")
    with pytest.raises(SystemExit):
        finetune.main(command)
    assert "holds a run: pass --resume to continue it" in capsys.readouterr().err
    (output / "model.safetensors").unlink()
    with pytest.raises(SystemExit, match=r"lr was 0.01 and is 0.02. Resume with the same options"):
        finetune.main([*command, "--lr", "0.02", "--resume"])
    loaded = []
    load_batch = finetune.TrainingBatches.__getitem__

    def record(batches: Any, step: int) -> Any:
        loaded.append(step)
        return load_batch(batches, step)

    monkeypatch.setattr(finetune.TrainingBatches, "__getitem__", record)
    finetune.main([*command, "--resume"])
    assert loaded == list(range(120, 150))
    assert all(torch.equal(value, tuned[name]) for name, value in weights(output).items())


def test_only_the_head_learns_in_the_first_steps(finetune: ModuleType, tmp_path: Path) -> None:
    model, _ = build_model(finetune, tmp_path)
    freeze = finetune.FreezeEncoder(3)
    for step, learns in ((2, {"ctc_head"}), (3, {"ctc_head", "encoder"})):
        freeze.on_step_begin(None, SimpleNamespace(global_step=step), None, model=model)
        assert {name.partition(".")[0] for name, p in model.named_parameters() if p.requires_grad} == learns


def test_the_lines_of_the_readme_train_with_the_trainer_alone(
    finetune: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    readme = Path(finetune.__file__).with_name("README.md").read_text()
    (code,) = re.findall(r"```python\n(.*?)```", readme, re.DOTALL)
    export_model(NestNetwork(tiny_config()), "huggingface", tmp_path / "demo" / "encoder")
    (tmp_path / "manifests").symlink_to(DEMO.parent)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "finetune", finetune)
    scope: dict[str, Any] = {}
    exec(code.replace("max_steps=300", "max_steps=3, logging_steps=1, use_cpu=True"), scope)
    losses = [line["loss"] for line in scope["trainer"].state.log_history if "loss" in line]
    assert len(losses) == 3
    assert losses[2] < losses[0]
    exported = weights(tmp_path / "demo" / "encoder")["encoder.subsampling.linear.weight"]
    assert not torch.equal(weights(tmp_path / "demo" / "recogniser")["encoder.subsampling.linear.weight"], exported)


def test_from_scratch_keeps_the_architecture_and_draws_new_weights(finetune: ModuleType, tmp_path: Path) -> None:
    trained = build_model(finetune, tmp_path)[0].state_dict()
    new = build_model(finetune, tmp_path, from_scratch=True)[0].state_dict()
    exported = weights(tmp_path)
    assert {*exported, "ctc_head.weight", "ctc_head.bias"} == trained.keys() == new.keys()
    assert all(torch.equal(value, trained[name]) for name, value in exported.items())
    weight = new["encoder.subsampling.linear.weight"]
    assert not torch.equal(weight, exported["encoder.subsampling.linear.weight"])
    assert 0.9 < weight.abs().max() * weight.shape[1] ** 0.5 <= 1.0  # uniform, as torch draws it


CONTEXTS = ((-1, -1), (6, 2), (2, 0))
SPEECH = [torch.from_numpy(soundfile.read(DEMO / "speech" / f"{name}.flac", dtype="float32")[0]) for name in TEXTS]


@pytest.fixture(scope="module")
def live() -> ModuleType:
    return load_example("finetune_ctc/live_model")


@pytest.fixture(scope="module")
def tokenizer(finetune: ModuleType) -> Any:
    return finetune.train_tokenizer(list(TEXTS.values()), 1)


def build_network(**encoder: Any) -> NestNetwork:
    torch.manual_seed(0)
    causal: dict[str, Any] = {"conv_context_size": "causal", "causal_downsampling": True, "conv_norm": "layer_norm"}
    causal |= {"att_context_style": "chunked_limited", "att_context_size": CONTEXTS}
    return NestNetwork(replace(tiny_config(**{**causal, **encoder}), features=FeatureConfig(normalize="NA"))).eval()


@pytest.fixture(scope="module")
def model(live: ModuleType, tokenizer: Any) -> Any:
    """A recogniser with random weights that writes different tokens: its head reads what differs between frames."""
    model = live.LiveRecogniser(build_network(), tokenizer.backend_tokenizer).eval()
    inputs = live.LiveFeatures(model.network)([audio.numpy() for audio in SPEECH[:1]])
    torch.manual_seed(6)  # with which no two tokens are about equally likely in a frame
    with torch.no_grad():
        frames, _ = model.encoder(inputs["input_features"].transpose(1, 2), inputs["attention_mask"].sum(1))
        scaled = torch.randn(model.ctc_head.weight.shape) / frames[0].std(0)
        model.ctc_head.weight.copy_(scaled)
        model.ctc_head.bias.copy_(-scaled @ frames[0].mean(0))
    return model


@pytest.mark.parametrize("context", CONTEXTS[1:])
@pytest.mark.parametrize("size", [1600, 777])
def test_the_text_of_all_parts_is_that_of_the_whole_file(
    live: ModuleType, model: Any, tokenizer: Any, context: tuple[int, int], size: int
) -> None:
    inputs = live.LiveFeatures(model.network)([audio.numpy() for audio in SPEECH])
    model.use_context(context)
    with torch.no_grad():
        logits, lens = model._logits(inputs["input_features"], inputs["attention_mask"], context)
    best = torch.cat([row[:length] for row, length in zip(logits, lens, strict=True)]).topk(2, dim=1).values
    assert (best[:, 0] - best[:, 1]).min() > 1e-3  # rounding, about 1e-5, changes no token
    expected = [
        normalise_text(text) for text in tokenizer.batch_decode(model.generate(**inputs), skip_special_tokens=True)
    ]
    for audio, text in zip(SPEECH, expected, strict=True):
        assert len(text) > 5
        transcriber = live.Transcriber(model, context)
        parts = [transcriber.feed(part.numpy(), 16000) for part in audio.split(size)]
        parts.append(transcriber.close())
        assert "".join(parts) == transcriber.text
        assert normalise_text(transcriber.text) == text


def test_batches_of_training_take_the_contexts_with_the_probabilities_of_pretraining(
    live: ModuleType, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    network = build_network(att_context_probs=(0.5, 0.0, 0.5))
    model = live.LiveRecogniser(network, tokenizer.backend_tokenizer)
    inputs = {**live.LiveFeatures(network)([SPEECH[0][:4000].numpy()]), "labels": torch.tensor([[5]])}
    used, encode = [], network.encoder.forward

    def record(*args: Any, context: tuple[int, int]) -> Any:
        used.append(context)
        return encode(*args, context=context)

    monkeypatch.setattr(network.encoder, "forward", record)
    torch.manual_seed(0)
    for _ in range(20):
        model.train()(**inputs)
    assert set(used) == {(-1, -1), (2, 0)}
    model.eval()(**inputs)
    assert used[20:] == [(6, 2)]  # the first one that can be streamed


def test_an_encoder_that_cannot_be_streamed_is_an_error_before_the_training(
    finetune: ModuleType, tmp_path: Path
) -> None:
    save_network(NestNetwork(tiny_config()), tmp_path / "last.ckpt")
    command = [str(tmp_path / "last.ckpt"), "train.json", "test.json", "-o", str(tmp_path / "out")]
    with pytest.raises(SystemExit, match=r"NA can be streamed\. Pass what `nestmodel export --to huggingface`"):
        finetune.main(command)
    with pytest.raises(WeightsError, match=r"no\.ckpt: does not exist"):
        finetune.main([str(tmp_path / "no.ckpt"), *command[1:]])


def test_an_export_of_an_encoder_for_live_speech_is_an_error_before_the_training(
    finetune: ModuleType, tmp_path: Path
) -> None:
    folder = export_model(build_network(att_context_size=((6, 2),)), "huggingface", tmp_path / "encoder")
    with pytest.raises(SystemExit, match=r"encoder: no ParakeetEncoder\. Pass the checkpoint"):
        finetune.main([str(folder), "train.json", "test.json", "-o", str(tmp_path / "out")])


@pytest.mark.slow
def test_the_way_from_a_checkpoint_to_text_that_appears_while_audio_arrives(
    finetune: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two utterances are learned by heart, so that every part has to work for the text to be right."""
    preset = NestConfig.preset("demo", "streaming")
    small = {"d_model": 32, "num_heads": 2, "num_layers": 2, "subsampling_factor": 8, "subsampling_channels": 8}
    encoder = replace(preset.encoder, **small, dropout=0.0, dropout_pre_encoder=0.0, dropout_att=0.1)
    save_network(NestNetwork(replace(preset, encoder=encoder)), tmp_path / "last.ckpt")
    manifest, output = write_transcribed(tmp_path), tmp_path / "out"
    command = [*map(str, (tmp_path / "last.ckpt", manifest, manifest)), "-o", str(output), "--vocabulary", "48"]
    command += "--lr 0.01 --steps 150 --save-steps 120 --warmup-steps 5 --freeze-steps 5 --batch-seconds 10".split()
    results = finetune.main(command)
    assert results == json.loads((output / "results.json").read_text())
    assert list(results["contexts"]) == ["70,13", "70,6", "70,1", "70,0"]
    assert results["contexts"]["70,13"]["characters"]["rate"] == 0.0
    lines = [json.loads(line) for line in (output / "test.jsonl").read_text().splitlines()]
    found = {(line["context"], Path(line["id"]).stem): line["recognised"] for line in lines}
    assert {name: found["70,13", name] for name in TEXTS} == TEXTS

    live_text = load_example("live_text")
    for context, name in found:
        audio = str(DEMO / "speech" / f"{name}.flac")
        text = live_text.main([str(output), audio, "--fast", "--context", context])
        assert normalise_text(text) == found[context, name]
        assert capsys.readouterr().out.endswith(f"{text}\n")

    scores = load_example("finetune_ctc/score").main(
        [str(output), str(manifest), "--context", "70,0", "--context", "70,13", "-o", str(tmp_path / "scores")]
    )
    assert scores == {"two": {"contexts": {name: results["contexts"][name] for name in ("70,0", "70,13")}}}

    tuned = (output / "ctc_head.safetensors").read_bytes()
    network = torch.load(output / "network.ckpt", weights_only=True)["state_dict"]
    shutil.rmtree(output / "checkpoints" / "checkpoint-150")
    (output / "ctc_head.safetensors").unlink()
    finetune.main([*command, "--resume"])
    assert (output / "ctc_head.safetensors").read_bytes() == tuned
    resumed = torch.load(output / "network.ckpt", weights_only=True)["state_dict"]
    assert all(torch.equal(value, network[name]) for name, value in resumed.items())
