from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch

from nestdata import OutputError
from nestmodel import (
    ConfigError,
    NestModel,
    NestNetwork,
    WeightsError,
    export_model,
    import_model,
    load_network,
    save_network,
)
from tests.conftest import MessyCorpora
from tests.nestdata.full_disk import files_up_to
from tests.nestmodel.formats.models import CONFIG, assert_equal_states, checkpoint
from tests.training import messy_data, trainer


def test_a_saved_network_is_loaded_bit_for_bit_in_eval_mode(tmp_path: Path) -> None:
    network, _ = checkpoint(tmp_path)
    path = save_network(network.train(), tmp_path / "mine.ckpt")
    loaded = load_network(path)
    assert not loaded.training
    assert not any(module.training for module in loaded.modules())
    assert loaded.config == network.config
    assert_equal_states(loaded, network)
    assert network.training
    started = NestModel(CONFIG, path)
    assert_equal_states(started, network)
    with pytest.raises(OutputError, match=r"mine\.ckpt: exists already"):
        save_network(network, path)
    save_network(started, str(path), overwrite=True)
    assert_equal_states(load_network(path), network)


def test_exporting_a_network_needs_an_output(tmp_path: Path) -> None:
    network, _ = checkpoint(tmp_path)
    with pytest.raises(ConfigError, match="output is missing: a network has no name"):
        export_model(network, "nemo")


def test_an_export_of_nest_v2_to_nemo_warns_that_releases_reject_it(tmp_path: Path) -> None:
    network = NestNetwork(replace(CONFIG, quantizer=replace(CONFIG.quantizer, input_norm="frames")))
    expected = r"NeMo 3\.0\.0 has no model\.config\.quantizer\.input_norm .* its own norm, which may not be 'frames'"
    with pytest.warns(UserWarning, match=expected):
        path = export_model(network, "nemo", tmp_path / "v2.nemo")
    assert load_network(path).config.quantizer == network.config.quantizer


def test_lightning_accepts_an_imported_checkpoint(messy_corpora: MessyCorpora, tmp_path: Path) -> None:
    network, path = checkpoint(tmp_path)
    nemo = export_model(path, "nemo", tmp_path / "model.nemo")
    imported = import_model(nemo, tmp_path / "imported.ckpt")
    assert set(torch.load(imported, weights_only=True)) >= {"nest_config", "state_dict"}
    assert_equal_states(load_network(imported), network)
    validated = NestModel(CONFIG)
    runner = trainer(tmp_path, limit_val_batches=1)
    runner.validate(validated, datamodule=messy_data(messy_corpora), ckpt_path=imported, verbose=False)
    assert_equal_states(validated, network)


def test_existing_files_are_kept_and_no_partial_file_remains(tmp_path: Path) -> None:
    _, path = checkpoint(tmp_path)
    target = tmp_path / "there.nemo"
    target.write_text("mine")
    with pytest.raises(OutputError, match=r"there\.nemo: exists already"):
        export_model(path, "nemo", target)
    (tmp_path / "other.nemo.md").write_text("mine")
    with pytest.raises(OutputError, match=r"other\.nemo\.md: exists already"):
        export_model(path, "nemo", tmp_path / "other.nemo")
    assert (tmp_path / "other.nemo.md").read_text() == "mine"
    (tmp_path / "other.nemo.md").unlink()
    with pytest.raises(ConfigError, match="the format nemo can hold only 'all'"):
        export_model(path, "nemo", target, parts="encoder", overwrite=True)
    assert target.read_text() == "mine"
    export_model(path, "nemo", target, overwrite=True)
    assert load_network(target).config.encoder == CONFIG.encoder
    with pytest.raises(OutputError, match="is a directory"):
        export_model(path, "nemo", tmp_path, overwrite=True)
    assert sorted(child.name for child in tmp_path.iterdir()) == ["model.ckpt", "there.nemo", "there.nemo.md"]


@pytest.mark.parametrize("to", ["huggingface", "checkpoint"])
def test_a_full_disk_raises_an_error_that_names_the_target_and_leaves_nothing(to: str, tmp_path: Path) -> None:
    _, path = checkpoint(tmp_path)
    target = tmp_path / "target"
    write = partial(import_model, path) if to == "checkpoint" else partial(export_model, path, to)
    with files_up_to(20000), pytest.raises((OutputError, WeightsError), match="target: cannot be written"):
        write(target)
    assert [child.name for child in tmp_path.iterdir()] == ["model.ckpt"]
