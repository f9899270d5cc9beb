"""Checkpoints of Lightning that NeMo has trained with: read to the weights of the `.nemo` file of the same model."""

import gzip
import io
import sys
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from nestcli.nestmodel import main
from nestmodel import ConfigError, NestConfig, NestModel, WeightsError, load_network, read_config
from nestmodel.formats.nemo_archive import write_nemo
from nestmodel.formats.nemo_config import config_from_nemo, config_to_nemo
from nestmodel.training.saving.resume import find_resumed
from tests.nestmodel.formats.models import CONFIG, assert_equal_states, checkpoint, members_of
from tests.training import tiny_config

# Written by OmegaConf 2.3.0 and torch: `hyper_parameters` are OmegaConf.create({"cfg": config_to_nemo(tiny_config())}),
# as in the checkpoints of NeMo, and `hparams_type` is their type.
_REAL = Path(__file__).parent / "nemo_hyperparameters.ckpt.gz"
POST_CONV = replace(CONFIG, masking=replace(CONFIG.masking, position="post_conv"))


@pytest.fixture
def omegaconf(monkeypatch: pytest.MonkeyPatch) -> dict[str, type]:
    """Classes that are pickled like those of OmegaConf, by name: DictConfig, ListConfig and AnyNode."""
    found = {}
    monkeypatch.setitem(sys.modules, "omegaconf", ModuleType("omegaconf"))
    for module, name in (("dictconfig", "DictConfig"), ("listconfig", "ListConfig"), ("nodes", "AnyNode")):
        holder = ModuleType(f"omegaconf.{module}")
        kind = type(name, (), {"__module__": holder.__name__})
        setattr(holder, name, kind)
        monkeypatch.setitem(sys.modules, holder.__name__, holder)
        found[name] = kind
    return found


def as_objects(value: Any, kinds: dict[str, type], parent: object = None) -> Any:
    """Returns a value as OmegaConf holds it, with references to the parents."""
    name = "DictConfig" if isinstance(value, dict) else "ListConfig" if isinstance(value, list) else "AnyNode"
    node = kinds[name]()
    items: Any = value
    if isinstance(value, dict):
        items = {name: as_objects(item, kinds, node) for name, item in value.items()}
    elif isinstance(value, list):
        items = [as_objects(item, kinds, node) for item in value]
    vars(node).update(
        {"_metadata": defaultdict(dict), "_parent": parent, "_val" if name == "AnyNode" else "_content": items}
    )
    return node


def write(path: Path, parameters: Any, state: dict[str, Tensor], **others: Any) -> Path:
    torch.save({"epoch": 1, "state_dict": state, "hparams_name": "cfg", "hyper_parameters": parameters, **others}, path)
    return path


def test_the_configuration_that_omegaconf_has_pickled_is_read(tmp_path: Path) -> None:
    path = tmp_path / "nest--val_loss=3.1-epoch=1.ckpt"
    path.write_bytes(gzip.decompress(_REAL.read_bytes()))
    assert read_config(path) == config_from_nemo(config_to_nemo(tiny_config()))


@pytest.mark.parametrize("config", [CONFIG, POST_CONV], ids=["pre_conv", "post_conv"])
def test_a_checkpoint_of_nemo_equals_the_nemo_file(
    tmp_path: Path, config: NestConfig, omegaconf: dict[str, type]
) -> None:
    network, _ = checkpoint(tmp_path, config)
    write_nemo(tmp_path / "model.nemo", config, network.state_dict())
    section = config_to_nemo(config)
    parameters = as_objects({"cfg": section}, omegaconf)
    weights = members_of(tmp_path / "model.nemo")["./model_weights.ckpt"]
    state = torch.load(io.BytesIO(weights), weights_only=True)
    path = write(tmp_path / "last.ckpt", parameters, state, hparams_type=omegaconf["DictConfig"])
    assert read_config(path) == read_config(tmp_path / "model.nemo")
    assert_equal_states(load_network(path), network)
    assert_equal_states(NestModel(config, path), network)
    assert main(["import", str(path), "-o", str(tmp_path / "imported.ckpt")]) == 0
    assert_equal_states(load_network(tmp_path / "imported.ckpt"), network)
    with pytest.raises(ConfigError, match=r"last\.ckpt: not a checkpoint of nestmodel but one of NeMo, .*--init-from"):
        find_resumed(str(path), tmp_path, must_exist=True)
    # Older releases of Lightning and NeMo: a plain dict around the configuration, or no object at all.
    for number, other in enumerate(({"cfg": as_objects(section, omegaconf)}, {"cfg": section})):
        assert_equal_states(load_network(write(tmp_path / f"{number}.ckpt", other, state)), network)


class _RunsCommand:
    def __init__(self, created: Path) -> None:
        self.created = created

    def __reduce__(self) -> tuple[Any, ...]:
        return exec, (f"open({str(self.created)!r}, 'w')",)


def test_hostile_and_foreign_hyperparameters_raise_one_line(tmp_path: Path, omegaconf: dict[str, type]) -> None:
    circular = as_objects({"cfg": {}}, omegaconf)
    vars(circular)["_content"]["cfg"] = circular
    doubled: dict[str, Any] = {}
    for _ in range(60):
        doubled = {"a": doubled, "b": doubled}
    runs = as_objects({"cfg": {}}, omegaconf)
    vars(runs)["_content"]["cfg"] = _RunsCommand(tmp_path / "created")
    for name, parameters, message in (
        ("circular", circular, "cannot be read"),
        ("doubled", {"cfg": doubled}, "cannot be read"),
        ("runs", runs, r"could run code\..*load_from_checkpoint\(FILE\)\.save_to"),
        ("other", as_objects({"lr": 0.1}, omegaconf), "holds no nest_config"),
        ("section", as_objects({"cfg": {"encoder": {}}}, omegaconf), "d_model is missing"),
    ):
        path = write(tmp_path / f"{name}.ckpt", parameters, {})
        with pytest.raises(WeightsError, match=message) as caught:
            load_network(path)
        assert str(path) in str(caught.value)
        assert "\n" not in str(caught.value)
    assert not (tmp_path / "created").exists()
