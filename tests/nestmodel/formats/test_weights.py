import json
import sys
import tarfile
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from nestdata import OutputError
from nestmodel import ConfigError, NestConfig, NestModel, QuantizerConfig, WeightsError, load_weights
from nestmodel.formats.conversion import export_model, import_model, write_safetensors
from nestmodel.formats.weights import abbreviated, kind_of, read_config, read_state, unlike_settings
from tests.conftest import MessyCorpora
from tests.nestdata.full_disk import files_up_to
from tests.training import messy_data, tiny_config, trainer

CONFIG = replace(tiny_config(), seed=5)


def checkpoint(directory: Path, config: NestConfig = CONFIG) -> tuple[NestModel, Path]:
    """A model with statistics of its own, and a checkpoint of it as `fit` leaves one."""
    model = NestModel(config)
    for value in model.encoder.buffers():
        if value.is_floating_point():
            value += torch.rand(value.shape, generator=torch.Generator().manual_seed(1))
    path = directory / "model.ckpt"
    torch.save({"nest_config": asdict(config), "state_dict": model.state_dict(), "optimizer_states": [{}]}, path)
    return model, path


def assert_equal_states(first: NestModel, second: NestModel, prefix: str = "") -> None:
    theirs = second.state_dict()
    assert first.state_dict().keys() == theirs.keys()
    for name, value in first.state_dict().items():
        if name.startswith(prefix):
            assert torch.equal(value, theirs[name]), name


def test_a_whole_model_survives_safetensors_bit_for_bit(tmp_path: Path) -> None:
    model, path = checkpoint(tmp_path)
    exported = export_model(path, "safetensors", tmp_path / "whole.safetensors", parts="all")
    back = NestModel.from_checkpoint(exported)
    assert back.config == model.config
    assert_equal_states(back, model)


def test_an_import_is_a_checkpoint_that_lightning_takes(messy_corpora: MessyCorpora, tmp_path: Path) -> None:
    model, path = checkpoint(tmp_path)
    nemo = export_model(path, "nemo", tmp_path / "model.nemo")
    imported = import_model(nemo, tmp_path / "imported.ckpt")
    assert set(torch.load(imported, weights_only=True)) >= {"nest_config", "state_dict"}
    assert_equal_states(NestModel.from_checkpoint(imported), model)
    validated = NestModel(CONFIG)
    runner = trainer(tmp_path, limit_val_batches=1)
    runner.validate(validated, datamodule=messy_data(messy_corpora), ckpt_path=imported, verbose=False)
    assert_equal_states(validated, model)


def test_the_encoder_alone_starts_a_model_of_other_targets(tmp_path: Path) -> None:
    model, path = checkpoint(tmp_path)
    encoder = export_model(path, "safetensors", tmp_path / "encoder.safetensors")
    assert all(name.startswith("encoder.") for name in read_state(encoder))
    config = replace(read_config(encoder), quantizer=QuantizerConfig(num_classes=64), seed=6)
    fresh, started = NestModel(config), NestModel(config, encoder, "encoder")
    assert_equal_states(replace_classes(started, model), model, "encoder.")
    assert torch.equal(started.quantizer.codebooks, fresh.quantizer.codebooks)
    assert torch.equal(started.mask_processor.mask_embedding, fresh.mask_processor.mask_embedding)


def replace_classes(started: NestModel, model: NestModel) -> NestModel:
    """A model of the other's sizes with the encoder of the first."""
    other = NestModel(model.config)
    other.encoder.load_state_dict(started.encoder.state_dict())
    return other


@pytest.mark.parametrize("to", ["nemo", "safetensors"])
@pytest.mark.parametrize("parts", ["all", "encoder"])
def test_a_model_starts_from_every_kind_of_file(to: str, parts: str, tmp_path: Path) -> None:
    model, path = checkpoint(tmp_path)
    whole = export_model(path, to, tmp_path / "whole", parts="all")
    other_seed = replace(CONFIG, seed=6)
    fresh = NestModel(other_seed)
    for source in (path, whole):
        started = NestModel(other_seed, source, parts)
        assert_equal_states(started, model, "" if parts == "all" else "encoder.")
        is_drawn = torch.equal(started.quantizer.codebooks, fresh.quantizer.codebooks)
        assert is_drawn == (parts == "encoder")


def test_the_report_names_what_was_taken_left_missed_and_of_another_shape(tmp_path: Path) -> None:
    _, path = checkpoint(tmp_path)
    deeper = replace(CONFIG, encoder=replace(CONFIG.encoder, num_layers=3), quantizer=QuantizerConfig(num_classes=64))
    model = NestModel(deeper)
    content = torch.load(path, weights_only=True)
    content["state_dict"]["decoder_ssl.bias"] = torch.zeros(1)
    torch.save(content, path)
    report = load_weights(model, path)
    assert report.left == ("decoder_ssl.bias",)
    assert {name.split(".")[2] for name in report.missed} == {"2"}
    assert sorted(name.split(":")[0] for name in report.mismatched) == [
        "decoder.decoder_layers.0.bias",
        "decoder.decoder_layers.0.weight",
        "quantizer.codebooks",
    ]
    assert "quantizer.codebooks: 1 x 32 x 16 for 1 x 64 x 16" in report.mismatched
    assert len(report.taken) + len(report.missed) + len(report.mismatched) == len(model.state_dict())
    summary = report.summary()
    assert "\n" not in summary
    assert "1 left (decoder_ssl.bias)" in summary
    assert f"{len(report.missed)} missed (encoder.layers.2.* {len(report.missed)})" in summary
    assert "3 of another shape" in summary


def test_a_model_says_in_one_line_what_it_starts_from(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    _, path = checkpoint(tmp_path)
    with caplog.at_level("INFO", logger="pytorch_lightning.utilities.rank_zero"):
        NestModel(CONFIG, path, "encoder")
    (record,) = caplog.records
    assert f"{path}: " in record.message
    assert "weights taken, " in record.message
    assert "0 missed" in record.message


def test_settings_that_no_shape_shows_are_warned_of(tmp_path: Path) -> None:
    _, path = checkpoint(tmp_path)
    encoder = replace(CONFIG.encoder, xscaling=False, dropout=0.0, num_layers=1, checkpoint_activations=True)
    other = replace(CONFIG, encoder=encoder, features=replace(CONFIG.features, hop_length=80), seed=1)
    assert unlike_settings(other, path) == (
        "features.hop_length is 80 here and 160 there",
        "encoder.xscaling is False here and True there",
    )
    with pytest.warns(UserWarning, match=r"encoder\.xscaling is False here and True there") as caught:
        NestModel(replace(CONFIG, encoder=encoder), path)
    assert len(caught) == 1
    assert unlike_settings(CONFIG, path) == ()


def test_a_file_of_which_nothing_fits_is_an_error(tmp_path: Path) -> None:
    wider = replace(CONFIG, encoder=replace(CONFIG.encoder, d_model=32, subsampling_channels=4, num_layers=1))
    model = NestModel(wider)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    strangers = tmp_path / "strangers.safetensors"
    save_file({"bert.embeddings": torch.zeros(3)}, strangers)
    with pytest.raises(WeightsError, match=r"strangers.*0 weights taken, 1 left .*Nothing of it fits"):
        load_weights(model, strangers)
    front_end = tmp_path / "front_end.safetensors"
    save_file({n: v for n, v in model.state_dict().items() if n.startswith("preprocessor.")}, front_end)
    with pytest.raises(WeightsError, match=r"front_end.*Nothing of it fits"):
        load_weights(model, front_end)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_an_encoder_is_not_taken_for_a_whole_model(tmp_path: Path) -> None:
    _, path = checkpoint(tmp_path)
    encoder = export_model(path, "safetensors", tmp_path / "encoder.safetensors")
    with pytest.raises(WeightsError, match=r"encoder\.safetensors: holds the encoder .*--model\.init_parts encoder"):
        NestModel.from_checkpoint(encoder)


@pytest.mark.parametrize(
    ("change", "message"), [("shape", "1 of another shape"), ("gone", "1 missed"), ("more", "1 left")]
)
def test_a_whole_model_must_have_the_weights_of_its_configuration(change: str, message: str, tmp_path: Path) -> None:
    _, path = checkpoint(tmp_path)
    content = torch.load(path, weights_only=True)
    state = content["state_dict"]
    if change == "gone":
        del state["encoder.pre_encode.out.bias"]
    else:
        state["encoder.pre_encode.out.bias" if change == "shape" else "encoder.more"] = torch.zeros(3)
    torch.save(content, path)
    with pytest.raises(WeightsError, match=f"model.ckpt: .*{message}.*not those of the configuration"):
        NestModel.from_checkpoint(path)


def test_broken_and_foreign_files_are_one_line_that_names_them(tmp_path: Path) -> None:
    model, path = checkpoint(tmp_path)
    whole = path.read_bytes()
    write_safetensors(tmp_path / "whole.safetensors", model.config, model.state_dict(), "all")
    tensors = (tmp_path / "whole.safetensors").read_bytes()
    save_file({"a": torch.zeros(1)}, tmp_path / "bare.safetensors")
    torch.save({"state_dict": {"a": 1}, "nest_config": asdict(CONFIG)}, tmp_path / "numbers.ckpt")
    torch.save({"state_dict": model.state_dict()}, tmp_path / "foreign.ckpt")
    torch.save({"state_dict": {}, "nest_config": {"encoder": {"width": 3}}}, tmp_path / "newer.ckpt")
    torch.save([1, 2], tmp_path / "list.ckpt")
    torch.save({"state_dict": {}, "path": tmp_path}, tmp_path / "code.ckpt")
    for name, content in {
        "text.ckpt": b"no checkpoint",
        "empty.ckpt": b"",
        "cut.ckpt": whole[: len(whole) // 2],
        "cut.safetensors": tensors[: len(tensors) // 2],
    }.items():
        (tmp_path / name).write_bytes(content)
    expected = {
        "text.ckpt": "neither a .nemo file",
        "empty.ckpt": "neither a .nemo file",
        "cut.ckpt": "neither a .nemo file",
        "cut.safetensors": "cannot be read",
        "bare.safetensors": "holds no nest_config",
        "numbers.ckpt": "something else than named weights",
        "foreign.ckpt": "holds no nest_config",
        "newer.ckpt": "width is unknown",
        "list.ckpt": "not a checkpoint of nestmodel",
        "code.ckpt": "cannot be read",
        "gone.ckpt": "cannot be read",
        ".": "cannot be read",
    }
    for name, message in expected.items():
        with pytest.raises(WeightsError, match=message) as caught:
            NestModel.from_checkpoint(tmp_path / name)
        assert str(tmp_path / name) in str(caught.value)
        assert "\n" not in str(caught.value)


def test_without_the_extra_safetensors_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, path = checkpoint(tmp_path)
    encoder = export_model(path, "safetensors", tmp_path / "encoder.safetensors")
    monkeypatch.setitem(sys.modules, "safetensors", None)
    with pytest.raises(WeightsError, match=r"encoder\.safetensors: .*pip install 'nest-pretrain\[safetensors\]'"):
        NestModel(CONFIG, encoder, "encoder")
    with pytest.raises(ConfigError, match="safetensors is not installed"):
        export_model(path, "safetensors", tmp_path / "more.safetensors")
    assert not (tmp_path / "more.safetensors").exists()


def test_files_are_told_apart_by_what_they_hold(tmp_path: Path) -> None:
    _, path = checkpoint(tmp_path)
    renamed = tmp_path / "what.bin"
    for to, kind in (("nemo", "nemo"), ("safetensors", "safetensors")):
        export_model(path, to, renamed, overwrite=True)  # type: ignore[arg-type]  # a literal
        assert kind_of(renamed) == kind
    assert kind_of(path) == "checkpoint"
    # A tar whose last member is a zip has a zip's end.
    with tarfile.open(renamed, "w") as tar:
        tar.add(path, "model_weights.ckpt")
    assert kind_of(renamed) == "nemo"


def test_nothing_is_replaced_or_left_half_written(tmp_path: Path) -> None:
    _, path = checkpoint(tmp_path)
    target = tmp_path / "there.nemo"
    target.write_text("mine")
    with pytest.raises(OutputError, match=r"there\.nemo: exists already"):
        export_model(path, "nemo", target)
    with pytest.raises(ConfigError, match="nemo holds all of a model"):
        export_model(path, "nemo", target, parts="encoder", overwrite=True)
    assert target.read_text() == "mine"
    export_model(path, "nemo", target, overwrite=True)
    assert NestModel.from_checkpoint(target).config.encoder == CONFIG.encoder
    with pytest.raises(OutputError, match="is a directory"):
        export_model(path, "nemo", tmp_path, overwrite=True)
    assert sorted(child.name for child in tmp_path.iterdir()) == ["model.ckpt", "there.nemo"]


@pytest.mark.parametrize("to", ["nemo", "huggingface", "safetensors", "checkpoint"])
def test_a_full_disk_is_an_error_that_names_the_target_and_leaves_nothing(to: str, tmp_path: Path) -> None:
    _, path = checkpoint(tmp_path)
    target = tmp_path / "target"
    write = partial(import_model, path) if to == "checkpoint" else partial(export_model, path, to)
    with files_up_to(20000), pytest.raises((OutputError, WeightsError), match="target: cannot be written"):
        write(target)
    assert [child.name for child in tmp_path.iterdir()] == ["model.ckpt"]


@pytest.mark.parametrize("to", ["nemo", "safetensors"])
def test_others_may_read_what_is_written(to: str, tmp_path: Path) -> None:
    _, path = checkpoint(tmp_path)
    (tmp_path / "plain").touch()
    exported = export_model(path, to, tmp_path / "target")  # type: ignore[arg-type]  # a literal
    assert exported.stat().st_mode == (tmp_path / "plain").stat().st_mode


def test_safetensors_hold_the_configuration_as_json(tmp_path: Path) -> None:
    _, path = checkpoint(tmp_path)
    exported = export_model(path, "safetensors", tmp_path / "encoder.safetensors")
    raw = exported.read_bytes()
    header = json.loads(raw[8 : 8 + int.from_bytes(raw[:8], "little")])
    assert NestConfig.from_dict(json.loads(header["__metadata__"]["nest_config"])) == CONFIG


def test_many_names_stand_as_their_modules() -> None:
    assert abbreviated(["a.b", "c.d"]) == "a.b, c.d"
    many = [f"encoder.layers.{layer}.norm.{kind}" for layer in (0, 1) for kind in ("bias", "weight")]
    assert abbreviated([*many, "decoder.bias"]) == "encoder.layers.0.* 2, encoder.layers.1.* 2, decoder.* 1"
    assert abbreviated([f"m{number}.x" for number in range(6)]) == "m0.* 1, m1.* 1, m2.* 1, m3.* 1 and 2 more"
