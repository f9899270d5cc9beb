import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from nestdata import AudioNoiseBatch, MicrobatchKey
from nestmodel import (
    ClassConfig,
    ConfigError,
    Encoder,
    ExtractError,
    MaskConfig,
    NestConfig,
    NestModel,
    NestNetwork,
    NestOutput,
    RunConfig,
    StreamingEncoder,
    encode,
    export_model,
    load_network,
    loss_stats,
    save_network,
)
from nestmodel.preflight.trial import noise_batch
from tests.own_encoders import Convolutions, FromElsewhere
from tests.training import tiny_config

NAMES = ["Convolutions", "Waveform", "OwnMels"]


def config_of(name: str, **init_args: Any) -> NestConfig:
    """Returns the tiny model without dither, with an encoder of `tests.own_encoders`."""
    config = tiny_config()
    features = replace(config.features, dither=0.0)
    encoder = ClassConfig(class_path=f"tests.own_encoders.{name}", init_args=init_args)
    return replace(config, encoder=encoder, features=features)


def plain_config(factor: int) -> NestConfig:
    """Returns the tiny model without dither, with FastConformer of this factor."""
    config = tiny_config(subsampling_factor=factor)
    return replace(config, features=replace(config.features, dither=0.0))


def batch_of(*lens: int, step: int = 0) -> AudioNoiseBatch:
    """Returns a batch of noise with these lengths in samples."""
    batch, lengths = noise_batch((len(lens), max(lens))), torch.tensor(lens)
    generator = torch.Generator().manual_seed(step)
    audio = 0.1 * torch.randn(batch.audio.shape, generator=generator) * (torch.arange(max(lens)) < lengths[:, None])
    return replace(
        batch, audio=audio, audio_len=lengths, noisy_audio=audio, noisy_audio_len=lengths, key=MicrobatchKey(step, 0)
    )


def scored_frames(output: NestOutput) -> set[tuple[int, int]]:
    return {(row, frame) for row, frame in output.is_scored.nonzero().tolist()}


@pytest.mark.parametrize("name", NAMES)
def test_the_settings_of_an_encoder_describe_it_in_every_form(name: str, tmp_path: Path) -> None:
    config = config_of(name)
    assert NestConfig.from_dict(json.loads(json.dumps(asdict(config)))) == config
    network = NestNetwork(config)
    state = network.state_dict()
    assert all(torch.equal(value, state[key]) for key, value in NestNetwork(config).state_dict().items())
    audio = batch_of(20000).audio[0]
    features = encode(network.eval(), audio, sampling_rate=16000).values
    for path in (
        save_network(network, tmp_path / "model.ckpt"),
        export_model(network, "safetensors", tmp_path / "model.safetensors", parts="all"),
    ):
        assert torch.equal(encode(path, audio, sampling_rate=16000).values, features)


@pytest.mark.parametrize("name", NAMES)
def test_every_parameter_of_another_encoder_gets_gradients_and_the_loss_falls(name: str) -> None:
    network = NestNetwork(config_of(name))
    network.train()
    optimizer = torch.optim.AdamW(network.parameters(), lr=3e-2)
    batch, losses = batch_of(16000, 24000), []
    for _ in range(25):
        loss = loss_stats(network(batch)).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert all(p.grad is not None for p in network.parameters() if p.requires_grad)
    assert losses[-1] < losses[0] - 0.4  # it learns how frequent the tokens are: it cannot see further than a mask


@pytest.mark.parametrize(("name", "factor"), [("Convolutions", 4), ("Convolutions", 8), ("OwnMels", 8)])
def test_masks_and_tokens_are_those_of_fastconformer(name: str, factor: int) -> None:
    ours, theirs = NestNetwork(config_of(name, factor=factor)), NestNetwork(plain_config(factor))
    ours.quantizer.load_state_dict(theirs.quantizer.state_dict())
    for step, lens in enumerate([(16000, 30000), (16123, 47001, 8000), (3000,)]):
        batch = batch_of(*lens, step=step)
        expected, found = theirs(batch), ours(batch)
        assert scored_frames(found) == scored_frames(expected) or name == "OwnMels"  # whose batch has other padding
        every = ours.tokens(*ours.features(batch.audio, batch.audio_len))
        assert found.targets.tolist() == [every[row].tolist() for row in sorted(scored_frames(found))]
        if name == "Convolutions":
            assert torch.equal(found.targets, expected.targets)


def test_tokens_of_frames_of_another_length_are_those_of_the_log_mels_at_their_time() -> None:
    network = NestNetwork(config_of("Waveform"))
    for step, lens in enumerate([(16000, 30000), (16123, 47001, 8000), (900, 48000)]):
        batch = batch_of(*lens, step=step)
        output = network(batch)
        every = network.tokens(*network.features(batch.audio, batch.audio_len))  # one for 40 ms, four log-mel frames
        assert output.targets.tolist() == [every[row].tolist() for row in sorted(scored_frames(output))]
        assert output.encoded.shape[:2] == output.is_scored.shape
        assert (output.enc_lens <= batch.audio_len // 640).all()


def test_tokens_may_be_computed_from_the_features_of_the_encoder() -> None:
    config = config_of("Waveform")
    network = NestNetwork(replace(config, quantizer=replace(config.quantizer, source="encoder")))
    batch = batch_of(16000, 30000)
    output = network(batch)
    with torch.no_grad():
        feats, _ = network.read_features(batch.audio, batch.audio_len)
        every = network.quantizer(feats[:, :, : feats.shape[2] // 2 * 2])
    known = [(row, frame) for row, frame in sorted(scored_frames(output)) if frame < every.shape[1]]
    assert output.targets[: len(known)].tolist()[:5] == [every[each].tolist() for each in known][:5]


@pytest.mark.parametrize(
    ("class_path", "init_args", "named"),
    [
        ("subprocess.Popen", {"args": ["touch", "called"]}, "nestmodel.Encoder"),
        ("torch.nn.Linear", {"in_features": 1, "out_features": 1}, "nestmodel.Encoder"),
        ("nestmodel.Encoder.forward", {}, "class_path"),
        ("tests.own_encoders.Missing", {}, "Missing"),
        ("no_such_module.Encoder", {}, "PYTHONPATH"),
        ("Encoder", {}, "class_path"),
        ("tests.own_encoders.Convolutions", {"width": 3}, "width"),
        ("tests.own_encoders.Convolutions", {"factor": 3}, "features.pad_to"),
        ("tests.own_encoders.WithoutWidth", {}, "dim"),
        ("tests.own_encoders.ImageNorm", {}, "norm"),
        ("tests.own_encoders.WrongHop", {}, "hop_length"),
        ("tests.own_encoders.Declared", {"num_layers": 3}, "hidden_states"),
        ("tests.own_encoders.Halves", {}, "float32"),
        ("tests.own_encoders.Convolutions", {"dim": Path("16")}, "init_args"),
        ("tests.own_encoders.Convolutions", None, "load_network"),
    ],
)
def test_what_is_no_encoder_is_refused_by_its_name_and_not_called(
    class_path: str, init_args: dict[str, Any] | None, named: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    encoder = ClassConfig(class_path=class_path, init_args=init_args)
    with pytest.raises(ConfigError, match=named) as caught:
        NestNetwork(replace(config_of("Convolutions"), encoder=encoder))
    assert class_path.split(".")[-1] in str(caught.value) or named == "init_args"
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("name", "sizes", "named"),
    [
        ("Declared", {"dim": 32}, "dim"),
        ("Declared", {"subsampling_factor": 2}, "subsampling_factor"),
        ("WrongLens", {}, "lengths"),
        ("OneTensor", {}, "lens"),
        ("WithoutForward", {}, "forward.*NotImplementedError"),
        ("OtherMels", {}, "forward.*own_encoders.py, line|forward.*shape"),
    ],
)
def test_an_encoder_that_does_not_keep_to_its_sizes_is_named_at_the_first_batch(
    name: str, sizes: dict[str, int], named: str
) -> None:
    with pytest.raises(ConfigError, match=f"{name}.*{named}"):
        NestNetwork(config_of(name, **sizes))(batch_of(48000))


def test_tokens_of_an_encoders_own_features_are_the_same_in_every_pass() -> None:
    config = config_of("Waveform")
    network = NestNetwork(replace(config, quantizer=replace(config.quantizer, source="encoder")))
    network.encoder.frames = torch.nn.Sequential(network.encoder.frames, torch.nn.Dropout(0.5))
    batch = batch_of(16000, 30000)
    first, second = (network(batch).targets for _ in range(2))
    assert torch.equal(first, second)
    assert all(module.training for module in network.encoder.modules())


def test_audio_that_is_shorter_than_a_frame_is_too_short() -> None:
    network = NestNetwork(config_of("Waveform")).eval()
    with pytest.raises(ExtractError, match="too_short"):
        encode(network, torch.zeros(300), sampling_rate=16000)


def test_outputs_of_layers_have_to_be_as_many_as_the_encoder_says() -> None:
    network = NestNetwork(config_of("ThreeStates")).eval()
    with pytest.raises(ConfigError, match="num_layers"):
        encode(network, torch.zeros(16000), sampling_rate=16000)


def test_fastconformer_may_be_given_as_an_object() -> None:
    given = NestNetwork(tiny_config()).encoder
    network = NestNetwork(replace(tiny_config(), seed=1), encoder=given)
    assert network.encoder is given
    assert network.config.encoder == tiny_config().encoder


def test_what_only_fastconformer_can_do_is_refused_in_one_line(tmp_path: Path) -> None:
    network, audio = NestNetwork(config_of("Convolutions")).eval(), torch.zeros(16000)
    for call in (
        *(lambda to=to: export_model(network, to, tmp_path / to) for to in ("nemo", "huggingface", "onnx")),
        lambda: export_model(network, "onnx-streaming", tmp_path / "a.onnx"),
        lambda: StreamingEncoder(network),
        lambda: encode(network, audio, sampling_rate=16000, window_seconds=90.0),
        lambda: network.use_context((70, 1)),
    ):
        with pytest.raises(ConfigError, match=r"Convolutions.*FastConformer"):
            call()
    with pytest.raises(ConfigError, match="pre_conv"):
        replace(config_of("Convolutions"), masking=MaskConfig(position="post_conv"))
    with pytest.raises(ConfigError, match="log_mels"):
        NestNetwork(replace(network.config, quantizer=replace(network.config.quantizer, source="encoder")))
    assert not list(tmp_path.iterdir())


def test_an_object_is_trained_and_is_needed_again_to_load_the_model(tmp_path: Path) -> None:
    given = Convolutions(dim=24)
    network = NestNetwork(tiny_config(), encoder=given)
    assert network.encoder is given
    path = save_network(network.eval(), tmp_path / "model.ckpt")
    with pytest.raises(ConfigError, match="encoder="):
        load_network(path)
    audio = batch_of(20000).audio[0]
    loaded = load_network(path, encoder=Convolutions(dim=24))
    assert torch.equal(
        encode(loaded, audio, sampling_rate=16000).values, encode(network, audio, sampling_rate=16000).values
    )
    with pytest.raises(ConfigError, match=r"Convolutions.*FromElsewhere"):
        load_network(path, encoder=FromElsewhere())
    model = NestModel.load_from_checkpoint(path, encoder=Convolutions(dim=24))
    assert all(torch.equal(value, model.state_dict()[name]) for name, value in network.state_dict().items())


def test_a_pretrained_encoder_keeps_its_weights_and_trains_with_its_dropout() -> None:
    given = FromElsewhere()
    before = {name: value.clone() for name, value in given.state_dict().items()}
    encoder = NestNetwork(tiny_config(), encoder=given).encoder
    assert all(module.training for module in encoder.modules())
    assert {name: value.tolist() for name, value in encoder.state_dict().items()} == {
        name: value.tolist() for name, value in before.items()
    }


def test_a_file_replaces_the_encoder_of_a_preset_and_keeps_the_rest(tmp_path: Path) -> None:
    (tmp_path / "own.yaml").write_text(
        "model: {config: {encoder: {class_path: tests.own_encoders.Convolutions, init_args: {dim: 24}}}}"
    )
    (tmp_path / "wider.yaml").write_text("model: {config: {encoder: {init_args: {dim: 32}}}}")
    names = ["demo", tmp_path / "own.yaml"]
    config, preset = RunConfig.read(names).model.config, RunConfig.read(["demo"]).model.config
    assert config == replace(
        preset, encoder=ClassConfig(class_path="tests.own_encoders.Convolutions", init_args={"dim": 24})
    )
    wider = RunConfig.read([*names, tmp_path / "wider.yaml"]).model.config
    assert isinstance(wider.encoder, ClassConfig)
    assert wider.encoder.init_args == {"dim": 32}
    assert isinstance(NestNetwork(wider).encoder, Encoder)
