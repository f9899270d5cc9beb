import tarfile
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from nestmodel import WeightsError, export_model, load_network
from nestmodel.formats.conversion import write_safetensors
from nestmodel.formats.model_file import open_model_file
from tests.nestmodel.formats.models import CONFIG, checkpoint


def kind_of(path: Path) -> str:
    with open_model_file(path) as file:
        return file.kind


def test_kind_of_a_file_is_detected_from_its_content(tmp_path: Path) -> None:
    _, path = checkpoint(tmp_path)
    renamed = tmp_path / "what.bin"
    for to, kind in (("nemo", "nemo"), ("safetensors", "safetensors")):
        export_model(path, to, renamed, overwrite=True)  # type: ignore[arg-type]  # a literal
        assert kind_of(renamed) == kind
    assert kind_of(path) == "checkpoint"
    # A tar file whose last member is a zip file ends like a zip file.
    with tarfile.open(renamed, "w") as tar:
        tar.add(path, "model_weights.ckpt")
    assert kind_of(renamed) == "nemo"


def test_broken_and_foreign_files_raise_one_line_that_names_the_file(tmp_path: Path) -> None:
    network, path = checkpoint(tmp_path)
    whole = path.read_bytes()
    write_safetensors(tmp_path / "whole.safetensors", network.config, network.state_dict(), "all")
    tensors = (tmp_path / "whole.safetensors").read_bytes()
    save_file({"a": torch.zeros(1)}, tmp_path / "bare.safetensors")
    torch.save({"state_dict": {"a": 1}, "nest_config": asdict(CONFIG)}, tmp_path / "numbers.ckpt")
    torch.save({"state_dict": network.state_dict()}, tmp_path / "foreign.ckpt")
    torch.save({"state_dict": {}, "nest_config": {"encoder": {"width": 3}}}, tmp_path / "newer.ckpt")
    torch.save([1, 2], tmp_path / "list.ckpt")
    torch.save({"state_dict": {}, "path": tmp_path}, tmp_path / "code.ckpt")
    expected = {}
    for name, content, message in (
        ("text.ckpt", b"no checkpoint", "neither a .nemo file"),
        ("empty.ckpt", b"", "neither a .nemo file"),
        ("cut.ckpt", whole[: len(whole) // 2], "neither a .nemo file"),
        ("cut.safetensors", tensors[: len(tensors) // 2], "cannot be read"),
        ("graph.onnx", b"\x08\x0a\x12\x07pytorch", "ONNX files are not read back"),
    ):
        (tmp_path / name).write_bytes(content)
        expected[name] = message
    expected |= {
        "bare.safetensors": "holds no nest_config",
        "numbers.ckpt": "its weights are not a mapping of names to tensors",
        "foreign.ckpt": "holds no nest_config",
        "newer.ckpt": "width is unknown",
        "list.ckpt": "cannot be read",
        "code.ckpt": "could run code",
        "gone.ckpt": "does not exist",
        ".": "newest checkpoint",
    }
    for name, message in expected.items():
        with pytest.raises(WeightsError, match=message) as caught:
            load_network(tmp_path / name)
        assert str(tmp_path / name) in str(caught.value)
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize("path", ["https://HOST/model.nemo", Path("s3://bucket/model.ckpt")])
def test_a_model_at_a_url_is_refused_with_the_form_that_works(path: str | Path) -> None:
    with pytest.raises(WeightsError, match=r"is a URL.* download it.* hf://OWNER/NAME"):
        load_network(path)
