"""Runs examples/finetune_ctc with an encoder for live speech, and examples/live_text.py on the result."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import soundfile
import torch

from nestmodel import FeatureConfig, NestConfig, NestNetwork, WeightsError, export_model, save_network
from nestmodel import normalise_text as normalised
from tests.extras import needs
from tests.scripts import load_example
from tests.training import tiny_config
from tests.transcribed import DEMO, TEXTS, write_transcribed

pytestmark = [
    needs("finetune", "accelerate", "jiwer", "transformers"),
    pytest.mark.filterwarnings("ignore:::accelerate", "ignore:::huggingface_hub", "ignore:::transformers"),
]
CONTEXTS = ((-1, -1), (6, 2), (2, 0))
SPEECH = [torch.from_numpy(soundfile.read(DEMO / "speech" / f"{name}.flac", dtype="float32")[0]) for name in TEXTS]


@pytest.fixture(scope="module")
def finetune() -> ModuleType:
    return load_example("finetune_ctc/finetune")


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
    expected = [normalised(text) for text in tokenizer.batch_decode(model.generate(**inputs), skip_special_tokens=True)]
    for audio, text in zip(SPEECH, expected, strict=True):
        assert len(text) > 5
        transcriber = live.Transcriber(model, context)
        parts = [transcriber.feed(part.numpy(), 16000) for part in audio.split(size)]
        parts.append(transcriber.close())
        assert "".join(parts) == transcriber.text
        assert normalised(transcriber.text) == text


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
        assert normalised(text) == found[context, name]
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
