import os
from pathlib import Path

import pytest
import torch

from nestmodel import CheckpointConfig, Checkpoints, ConfigError, prepare_deterministic
from nestmodel.training.saving.checkpoint_files import find_checkpoints
from tests.conftest import MessyCorpora
from tests.training import fit

pytestmark = pytest.mark.usefixtures("restored_determinism")


def test_the_environment_gets_what_cublas_and_nccl_need() -> None:
    prepare_deterministic()
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    assert os.environ["NCCL_ALGO"] == "Ring"
    assert not torch.utils.deterministic.fill_uninitialized_memory
    prepare_deterministic()  # the ranks that inherit the variables do the same


@pytest.mark.parametrize(("name", "value"), [("NCCL_ALGO", "Tree"), ("CUBLAS_WORKSPACE_CONFIG", ":0:0")])
def test_another_value_is_an_error_that_changes_nothing(name: str, value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, value)
    before = dict(os.environ)
    with pytest.raises(ConfigError, match=rf"needs {name}=.* sets it to '{value}'\. Unset {name}"):
        prepare_deterministic()
    assert dict(os.environ) == before


def test_a_run_is_resumed_in_its_own_mode_only(messy_corpora: MessyCorpora, tmp_path: Path) -> None:
    saver = Checkpoints(CheckpointConfig(every_n_steps=1, directory=tmp_path / "saved"))
    _, first = fit(
        messy_corpora, tmp_path, max_steps=2, callbacks=[saver], enable_checkpointing=True, deterministic=True
    )
    path = next(found.path for found in find_checkpoints(tmp_path / "saved") if found.step == 1)
    _, rest = fit(messy_corpora, tmp_path, max_steps=2, ckpt_path=path, deterministic=True)
    assert rest.losses == first.losses[1:]
    with pytest.raises(ConfigError, match=r"trainer\.deterministic: True -> False"):
        fit(messy_corpora, tmp_path, max_steps=2, ckpt_path=path, deterministic=False)
